"""The pieces of acceptance, at their edges."""

import math

import pytest
import torch

from foretoken.ops.reject import (
    RULES,
    acceptable,
    agreeing,
    leading,
    residual,
    rule_of,
    typical,
    wants_distribution,
)
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
    for params in (greedy, seeded):
        assert rule_of(params, "auto", one_hot) == "matching"
    assert rule_of(free, "auto", one_hot) == ("matching" if one_hot else "standard")
    for rule in ("matching", "standard", "block", "typical"):
        assert rule_of(greedy, rule, one_hot) == "matching"
        assert rule_of(seeded, rule, one_hot) == rule_of(free, rule, one_hot) == rule
    assert rule_of(greedy, "synthetic", one_hot) == "synthetic"


def test_which_rules_weigh_distributions() -> None:
    free = SamplingParams()
    weigh = [rule for rule in RULES if wants_distribution(free, rule)]
    assert weigh == ["auto", "standard", "block", "traversal"]
    assert not any(wants_distribution(SamplingParams(temperature=0), rule) for rule in RULES)


def test_typical_bar_falls_with_entropy() -> None:
    """Sure rows: the threshold; spread ones: alpha exp(-entropy), here 0.3 / 8 for 8 equals."""
    sure = torch.tensor([[0.92, 0.08] + [0.0] * 6])
    flat = torch.full((1, 8), 1 / 8)
    spread = torch.tensor([[0.91, 0.02, 0.07] + [0.0] * 5])
    bars = {"threshold": 0.09, "alpha": 0.3}
    assert typical(sure.expand(3, 8), [0, 1, -1], **bars) == [True, False, False]
    assert typical(flat, [3], **bars) == [True]
    assert typical(flat, [3], threshold=0.2, alpha=1.1) == [False]
    assert typical(flat, [3], threshold=0.1, alpha=1.1) == [True]
    assert typical(spread, [2], threshold=0.09, alpha=0.05) == [True]


def test_weighted_residual() -> None:
    p = torch.tensor([[0.5, 0.4, 0.1]])
    q = torch.tensor([[0.1, 0.1, 0.8]])
    left = residual(p.log(), p, q, [2], weights_S=[0.5])
    assert left.softmax(dim=-1).tolist()[0] == pytest.approx([0.6, 0.4, 0.0])
    empty = residual(p.log(), p, q, [2], weights_S=[0.1])
    assert torch.equal(empty, p.log()), "nothing is left: the row's own logits"
