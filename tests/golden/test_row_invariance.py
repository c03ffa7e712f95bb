"""With batch_invariant a token's logits are the same bits whatever is computed beside it.

The guarded bug: a kernel that adds in another order for another number of rows, place in the
batch, length of keys or page table. One-token decoding is the reference; no tolerance.
"""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.kernels.library import find_library
from foretoken.runtime.runner import Runner
from foretoken.testing import write_tiny_llama
from tests.golden.families import BY_TRANSFORMERS, OWN, write_checkpoint
from tests.golden.scenario import cut, forward, in_pieces, leave_garbage, open_runner, tables

VOCAB, LENGTH = 61, 150
NARROW = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
WIDE = {
    "vocab_size": VOCAB, "hidden_size": 768, "intermediate_size": 1040, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64,
}  # fmt: skip
KINDS: dict[str, tuple[dict[str, Any] | str, torch.dtype]] = {
    "narrow bfloat16": (NARROW, torch.bfloat16),
    "narrow float32": (NARROW, torch.float32),
    "wide bfloat16": (WIDE, torch.bfloat16),
    "wide float32": (WIDE, torch.float32),
    "gemma2": ("gemma2", torch.bfloat16),
    "gemma3": ("gemma3 two kinds of positions", torch.bfloat16),
    "phi3": ("phi3 partial rotary", torch.bfloat16),
    "ministral3": ("ministral3", torch.bfloat16),
    "smollm3": ("smollm3 some layers with a window", torch.bfloat16),
    "olmo3": ("olmo3", torch.bfloat16),
    "gpt2": ("gpt2", torch.bfloat16),
    "starcoder2": ("starcoder2", torch.bfloat16),
    "cohere2": ("cohere2", torch.bfloat16),
}
"""Sizes of a tiny Llama, or the name of a family's case."""
INT8_KV = ("narrow bfloat16", "wide float32", "gemma2", "gpt2")
"""Kinds that are run with keys and values in int8 too."""


def _params() -> list[Any]:
    """Each kind with one thread and with two; families with two in the long suite."""
    found = []
    for kind, (what, _) in KINDS.items():
        marks = [pytest.mark.slow] if isinstance(what, str) else []
        found += [pytest.param((kind, None, 1)), pytest.param((kind, None, 2), marks=marks)]
        if kind in INT8_KV:
            found.append(pytest.param((kind, torch.int8, 1)))
    return found


@pytest.fixture(scope="module", params=_params(), ids=str)
def opened(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Runner]:
    kind, kv_store_dtype, num_threads = request.param
    what, dtype = KINDS[kind]
    folder = tmp_path_factory.mktemp("model")
    if isinstance(what, str):
        family, changes = {**OWN, **BY_TRANSFORMERS}[what]
        sizes = {"vocab_size": VOCAB, "max_position_embeddings": 200}
        write_checkpoint(folder, family, {**changes, **sizes})
    else:
        write_tiny_llama(folder, **what)
    before, library = torch.get_num_threads(), find_library()
    torch.set_num_threads(num_threads)
    runner = open_runner(folder, dtype=dtype, batch_invariant=True, kv_store_dtype=kv_store_dtype)
    if library is not None:
        library.handle.ft_set_threads(num_threads)
    yield runner
    torch.set_num_threads(before)
    if library is not None:
        library.use_threads(library.cores)


@pytest.fixture(scope="module")
def sequence() -> list[int]:
    draw = random.Random(11)
    return [draw.randrange(VOCAB) for _ in range(LENGTH)]


@pytest.fixture(scope="module")
def decoded(opened: Runner, sequence: list[int]) -> Tensor:
    """Logits of one-token decoding in neighbouring pages."""
    pages = tables(random.Random(0), [LENGTH], together=True)[0]
    return in_pieces(opened, sequence, pages, [1] * LENGTH)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("choices", [[LENGTH], [100, 33, 17], [2, 5, 6, 7], [1, 8, 9, 64]])
def test_cuts(
    choices: list[int], together: bool, opened: Runner, sequence: list[int], decoded: Tensor
) -> None:
    draw = random.Random(str(choices))
    leave_garbage(opened)
    pages = tables(draw, [LENGTH], together=together)[0]
    found = in_pieces(opened, sequence, pages, cut(draw, LENGTH, choices))
    assert torch.equal(found, decoded)


def test_rejected_drafts(opened: Runner, sequence: list[int], decoded: Tensor) -> None:
    """Spans that end in junk drafts: the rows before the junk, and all later ones."""
    draw = random.Random(5)
    leave_garbage(opened)
    pages = tables(draw, [LENGTH + 12], together=False)[0]
    at = 0
    while at < LENGTH:
        good, junk = draw.randint(1, 6), draw.randint(0, 5)
        good = min(good, LENGTH - at)
        ids = sequence[: at + good] + [draw.randrange(VOCAB) for _ in range(junk)]
        found = forward(opened, [(ids, at, at + good + junk, pages)])
        assert torch.equal(found[:good], decoded[at : at + good]), (at, good, junk)
        at += good


def test_mixed_batches(opened: Runner, sequence: list[int], decoded: Tensor) -> None:
    """2 to 9 sequences at different places, each advancing by its own number of tokens."""
    draw = random.Random(6)
    for _ in range(4):
        leave_garbage(opened)
        count = draw.randint(2, 9)
        # Prefixes of one sequence, so that one reference serves all.
        lengths = [draw.randint(4, 50) for _ in range(count)]
        lengths[0] = LENGTH
        all_pages = tables(draw, lengths, together=draw.random() < 0.5)
        done = [0] * count
        while any(at < end for at, end in zip(done, lengths, strict=True)):
            spans, expected = [], []
            for i, (at, end) in enumerate(zip(done, lengths, strict=True)):
                if at == end or (draw.random() < 0.2 and count > 2):
                    continue
                stop = min(end, at + draw.choice([1, 1, 2, 6, 9, 30]))
                spans.append((sequence, at, stop, all_pages[i]))
                expected.append(decoded[at:stop])
                done[i] = stop
            if spans:
                assert torch.equal(forward(opened, spans), torch.cat(expected))


def test_the_promise_is_not_empty(opened: Runner, sequence: list[int], decoded: Tensor) -> None:
    """The logits differ from token to token and are finite."""
    assert torch.isfinite(decoded).all()
    assert decoded.std(0).min() > 0
