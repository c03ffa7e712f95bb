"""The pieces of acceptance, at their edges."""

import math

import pytest
import torch

from foretoken.ops.reject import acceptable, agreeing, leading, residual, uses_matching
from foretoken.types import SamplingParams


@pytest.mark.parametrize(
    ("drafts", "targets", "count"),
    [((), (4,), 0), ((4,), (4, 5), 1), ((4, 9), (4, 5, 6), 1), ((-1, 5), (4, 5, 6), 0)],
)
def test_agreeing(drafts: tuple[int, ...], targets: tuple[int, ...], count: int) -> None:
    assert agreeing(drafts, targets) == count


def test_leading() -> None:
    assert leading([True, True]) == 2
    assert leading([True, False, True]) == 1
    assert leading([]) == 0


def test_a_draft_is_kept_below_its_ratio() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0]]).expand(5, 3)
    q = torch.tensor([[0.8, 0.1, 0.1]]).expand(5, 3)
    ids = [0, 0, 1, 2, -1]
    assert acceptable(p, q, ids, [0.62, 0.63, 0.999, 1e-9, 1e-9]) == [
        True, False, True, False, False,
    ]  # fmt: skip
    assert acceptable(p, None, ids, [0.49, 0.51, 0.49, 1e-9, 1e-9]) == [
        True, False, True, False, False,
    ]  # fmt: skip


def test_residual_is_what_the_draft_left_over() -> None:
    p = torch.tensor([[0.5, 0.4, 0.1]])
    q = torch.tensor([[0.8, 0.1, 0.1]])
    left = residual(p.log(), p, q, [0])
    assert left.softmax(dim=-1).tolist()[0] == pytest.approx([0.0, 1.0, 0.0])
    one_hot = residual(p.log(), p, None, [0])
    assert one_hot.softmax(dim=-1).tolist()[0] == pytest.approx([0.0, 0.8, 0.2])


def test_residual_of_nothing_is_the_target() -> None:
    p = torch.tensor([[0.5, 0.4, 0.1]])
    assert torch.equal(residual(p.log(), p, p.clone(), [0]), p.log())
    assert torch.equal(residual(p.log(), p, p / 2, [-1]), p.log())
    certain = torch.tensor([[0.0, -math.inf, -math.inf]])
    assert torch.equal(residual(certain, certain.exp(), None, [0]), certain)


@pytest.mark.parametrize("one_hot", [True, False])
def test_which_rule(one_hot: bool) -> None:
    greedy, seeded = SamplingParams(temperature=0), SamplingParams(seed=1)
    free = SamplingParams()
    assert uses_matching(greedy, "auto", one_hot) and uses_matching(seeded, "auto", one_hot)
    assert uses_matching(free, "auto", one_hot) is one_hot
    assert uses_matching(free, "matching", one_hot)
    assert uses_matching(greedy, "standard", one_hot)
    assert not uses_matching(free, "standard", one_hot)
    assert not uses_matching(seeded, "standard", one_hot)
