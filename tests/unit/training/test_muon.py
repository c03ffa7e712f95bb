"""Muon's step: an orthogonal update, the same as PyTorch's own but for its rounding to bfloat16."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from foretoken.training import muon
from foretoken.training.muon import Muon, orthogonal

SHAPES = ((48, 16), (16, 48), (24, 24), (48, 16), (24, 24))


def _matrices() -> list[nn.Parameter]:
    torch.manual_seed(3)
    return [nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def _take_three_steps(step: Callable[[], object], matrices: list[nn.Parameter]) -> None:
    """Gradients that change, and a step in which the last matrix has none."""
    source = torch.Generator().manual_seed(5)
    for turn in range(3):
        for matrix in matrices:
            matrix.grad = torch.randn(matrix.shape, generator=source)
        if turn == 1:
            matrices[-1].grad = None
        step()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_update_keeps_directions_and_evens_out_lengths(shape: tuple[int, int]) -> None:
    """The singular vectors of the matrix, with singular values near one whatever they were."""
    left, _, right = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    uneven = torch.logspace(0, -1.5, min(shape))
    (found,) = orthogonal((left @ torch.diag(uneven) @ right)[None], torch.float32)
    values = left.T @ found @ right.T
    assert torch.allclose(values, torch.diag(values.diagonal()), atol=1e-4)
    assert 0.6 < values.diagonal().min() and values.diagonal().max() < 1.3


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="PyTorch before 2.9 has no Muon")
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_three_steps_are_those_of_pytorch(
    kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Apart by what bfloat16 rounds off, in either type."""
    monkeypatch.setattr(muon, "product_type", lambda device: kind)
    begun = _matrices()
    ours, theirs = copy.deepcopy(begun), copy.deepcopy(begun)
    own, other = Muon(ours, 0.05), torch.optim.Muon(theirs, lr=0.1, weight_decay=0.05)
    _take_three_steps(lambda: own.step(0.1), ours)
    _take_three_steps(other.step, theirs)
    for start, here, there in zip(begun, ours, theirs, strict=True):
        assert (here - there).norm() <= 0.03 * (there - start).norm()


def test_it_goes_on_from_a_checkpoint() -> None:
    """One step, saved and loaded, then another: as two steps."""
    begun = _matrices()
    whole, halves = copy.deepcopy(begun), copy.deepcopy(begun)
    first, second, both = (Muon(matrices, 0.05) for matrices in (halves, halves, whole))
    _take_three_steps(lambda: both.step(0.1), whole)
    _take_three_steps(lambda: both.step(0.1), whole)
    _take_three_steps(lambda: first.step(0.1), halves)
    second.load_state_dict(first.state_dict())
    _take_three_steps(lambda: second.step(0.1), halves)
    assert all(torch.equal(*pair) for pair in zip(whole, halves, strict=True))
