"""What narrow types cost: float16 through PyTorch, keys and values in int8."""

import inspect
import json.decoder
import math
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foretoken import LLM, SamplingParams
from foretoken.checkpoint import packaged_model
from foretoken.text.tokenizer import Tokenizer
from tests.golden.families import OWN, VOCAB, write_checkpoint
from tests.golden.scenario import forward, in_pieces, open_runner
from tests.marks import slow

CASES = (
    "llama biases",
    "qwen3 wide heads",
    "gemma2",
    "gemma3 usual layers",
    slow("ministral3"),
    slow("olmo3"),
)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_float32(case: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, *OWN[case])
    draw = random.Random(case)
    ids = [draw.randrange(VOCAB) for _ in range(40)]
    pages = list(range(20))
    expected = forward(open_runner(tmp_path), [(ids, 0, 40, pages)])
    runner = open_runner(tmp_path, dtype=torch.float16, batch_invariant=True)
    found = forward(runner, [(ids, 0, 40, pages)])
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 0.06 * expected.std()
    assert torch.equal(in_pieces(runner, ids, pages, [1] * 20 + [7, 13]), found)


def test_speculation_changes_nothing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, *OWN["qwen3 wide heads"])
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=30, detokenize=False)
    prompts = [{"prompt_token_ids": [1, 2, 3, 1, 2]}, {"prompt_token_ids": [9, 8]}]
    written = []
    for speculative in (None, {"method": "ngram", "prompt_lookup_min": 1}):
        with LLM(str(tmp_path), dtype="float16", speculative_config=speculative) as llm:
            found = llm.generate(prompts, params, use_tqdm=False)
        written.append([one.outputs[0].token_ids for one in found])
    assert written[0] == written[1]


# What int8 keys and values cost the packaged model: hardly anything, but something. The guarded
# bugs: a scale of the wrong token or head, values read with the keys' scale, a setting that is
# accepted and does nothing.
LENGTH = 480


def logits(ids: list[int], kv_store_dtype: torch.dtype | None) -> Tensor:
    """Of every token, read in two chunks and then one by one."""
    runner = open_runner(packaged_model("demo"), dtype=torch.float32, kv_store_dtype=kv_store_dtype)
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
