"""The compiled draw decides what PyTorch's operations decide, or says that it does not."""

import random

import pytest
import torch
from torch import Tensor

from foretoken.backend import backend_for
from foretoken.kernels.library import find_library
from foretoken.ops.drawing import BEST, UNDECIDED, Drawing, DrawKernel, pack_rows
from foretoken.ops.logits import Filters, scale
from foretoken.ops.noise import KeyedNoise, Stream, pack_keys, request_key, row_key
from foretoken.ops.sampling import draw, draw_filtered
from foretoken.runtime.rows import Rows
from foretoken.runtime.sampler import Sampler
from foretoken.runtime.sequence import Sequence
from foretoken.types import Request, SamplingParams
from tests.unit.filters import FILTERS

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(find_library() is None, reason="no compiled kernels")


def draw_kernel() -> DrawKernel:
    found = backend_for(CPU).draw
    assert found is not None
    return found


def twin(
    logits_RV: Tensor, keys: list[int], temperature: float, how: tuple[float, int, float] | None
) -> list[int]:
    rows, vocab = logits_RV.shape
    noise, scaled_RV = KeyedNoise(vocab, CPU), scale(logits_RV, [temperature] * rows)
    if how is None:
        found: list[int] = draw(scaled_RV, pack_keys(keys, CPU), noise).tolist()
    else:
        filters = Filters.of([how] * rows, vocab, CPU)
        found = draw_filtered(scaled_RV, filters, pack_keys(keys, CPU), noise).tolist()
    return found


@pytest.mark.parametrize("how", FILTERS)
def test_what_is_decided_is_what_the_twin_decides(how: tuple[float, int, float] | None) -> None:
    rng = random.Random(7)
    generator = torch.Generator().manual_seed(7)
    undecided = rows = 0
    for trial in range(60):
        vocab = rng.choice([1, 3, 17, 613, 3000])
        logits_RV = torch.randn(5, vocab, generator=generator) * rng.choice([0.1, 1, 3, 10])
        if trial % 4 == 1:
            logits_RV[:, torch.rand(vocab, generator=generator) < 0.5] = float("-inf")
        if trial % 4 == 2:
            logits_RV = (2 * logits_RV).round() / 2
        keys = [rng.getrandbits(64) for _ in range(5)]
        temperature = rng.choice([0.05, 0.7, 0.8, 1.0, 1.7, 1e-300, 1e300])
        found = draw_kernel()(logits_RV, pack_rows(keys, Drawing.of(temperature, how)))
        expected = twin(logits_RV, keys, temperature, how)
        left = [i for i, token in enumerate(found) if token == UNDECIDED]
        undecided, rows = undecided + len(left) * (how is None or how[1] < 1024), rows + 5
        assert [e for i, e in enumerate(expected) if i not in left] == [
            token for token in found if token != UNDECIDED
        ]
        assert draw_kernel()(logits_RV, pack_rows(keys, BEST)) == logits_RV.argmax(dim=-1).tolist()
    assert undecided < rows / 10, (undecided, rows)


def test_what_cannot_be_told_is_left_to_the_twin() -> None:
    """Nothing allowed, an infinite logit, a vocabulary of equal scores, a top_k beyond the room."""
    keys = [row_key(request_key(1, 0), at, Stream.TARGET) for at in range(1)]
    rows = pack_rows(keys, Drawing.of(1.0, None))
    assert draw_kernel()(torch.full((1, 40), float("-inf")), rows) == [UNDECIDED]
    assert draw_kernel()(torch.tensor([[0.0, float("inf"), 1.0]]), rows) == [UNDECIDED]
    wide = pack_rows(keys, Drawing.of(1.0, (0.0, 1025, 1.0)))
    assert draw_kernel()(torch.zeros(1, 3000), wide) == [UNDECIDED]


def sequence(params: SamplingParams, name: str) -> Sequence:
    request = Request(
        request_id=name, prompt_token_ids=(1, 2), params=params, seed=len(name), max_tokens=9
    )
    return Sequence(request=request, token_ids=[1, 2], num_prompt=2)


def test_a_sampler_without_the_kernel_chooses_the_same() -> None:
    """Every kind of request in one call, undecided rows among them."""
    several: list[SamplingParams] = [
        SamplingParams(temperature=0.8, seed=3),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, top_p=0.9, top_k=7),
        SamplingParams(temperature=1e-9, seed=4),
    ]
    one, other = Sampler(97), Sampler(97)
    other._kernel = None
    generator = torch.Generator().manual_seed(3)
    for trial in range(20):
        rows = [
            Rows(sequence=sequence(params, f"{trial} {i}"), drafts=(4, 5), first=i % 2)
            for i, params in enumerate(several)
        ]
        count = sum(group.num_rows for group in rows)
        logits_RV = torch.randn(count, 97, generator=generator)
        logits_RV[0, :] = float("-inf") if trial % 2 else 0.0
        assert one.choose(logits_RV, rows).tolist() == other.choose(logits_RV, rows).tolist()
