"""What int8 keys and values cost the packaged model: hardly anything, but something.

The guarded bugs: a scale of the wrong token or head, values read with the keys' scale, a setting
that is accepted and does nothing.
"""

import inspect
import json.decoder
import math

import torch
from torch import Tensor

from foretoken.checkpoint import packaged_model
from foretoken.text.tokenizer import Tokenizer
from tests.golden.scenario import forward, open_runner

LENGTH = 480


def logits(ids: list[int], kv_dtype: torch.dtype | None) -> Tensor:
    """Of every token, read in two chunks and then one by one."""
    runner = open_runner(packaged_model("demo"), dtype=torch.float32, kv_dtype=kv_dtype)
    pages = list(range(len(ids)))
    cuts = [0, 200, 450, *range(451, len(ids) + 1)]
    spans = [(ids, start, stop, pages) for start, stop in zip(cuts, cuts[1:], strict=False)]
    return torch.cat([forward(runner, [span]) for span in spans])


def bits_per_token(logits_TV: Tensor, ids: list[int]) -> float:
    """Mean surprise at the next token."""
    next_T = torch.tensor(ids[1:])
    return torch.nn.functional.cross_entropy(logits_TV[:-1], next_T).item() / math.log(2)


def test_hardly_another_model() -> None:
    tokenizer = Tokenizer.of_folder(packaged_model("demo"))
    assert tokenizer is not None
    ids = list(tokenizer.encode(inspect.getsource(json.decoder)))[:LENGTH]
    wide, rounded = (logits(ids, dtype) for dtype in (None, torch.int8))
    error = (wide - rounded).pow(2).mean().sqrt() / wide.std()
    assert 1e-5 < error < 0.02, error
    assert (wide.argmax(-1) == rounded.argmax(-1)).float().mean() > 0.98
    before, after = bits_per_token(wide, ids), bits_per_token(rounded, ids)
    assert before < 5 and abs(after / before - 1) < 0.001, (before, after)
