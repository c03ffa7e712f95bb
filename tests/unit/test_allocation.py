"""Who drafts how far: against every plan there is, and what must hold of any plan."""

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.control.adaptive.allocation import Allocation, DraftOption, StepOptions, allocate
from foretoken.proposers.tree_shapes import DynamicTree
from foretoken.runtime.candidates import Candidates, OpenNode, choose_candidates
from foretoken.runtime.draft_sampler import DraftSampler
from foretoken.runtime.rows import Rows
from foretoken.runtime.sampler import Sampler
from tests.unit.proposing import make_sequence


def option(
    name: str, chances: Any, *, depth_s: float, slot_s: float = 0.0, call_s: float = 0.0
) -> DraftOption:
    """A drafter whose sequences have these chances, draft by draft."""
    count, most = chances.shape
    passes = call_s + depth_s * np.arange(most + 1)
    passes[0] = 0.0
    return DraftOption(
        name=name,
        survival_NK=np.cumprod(chances, axis=1, dtype=np.float64),
        depth_s=passes,
        slot_s=slot_s,
        start_s=np.zeros(count),
    )


def step_of(rows_s: Any, count: int, *, slack: float = np.inf) -> StepOptions:
    """A step that may take `slack` longer than a plain one."""
    plain = float(rows_s[0])
    return StepOptions(
        rows_s=rows_s,
        plain_s=plain,
        bound_s=np.full(count, plain + slack),
        token_s=np.full(count, plain),
        margin=0.0,
    )


def brute_force(step: StepOptions, one: DraftOption) -> float:
    count, most = one.survival_NK.shape
    best = count / step.plain_s
    for lengths in product(range(most + 1), repeat=count):
        rows = sum(lengths)
        if not rows:
            continue
        tokens = [1 + one.survival_NK[i, :k].sum() for i, k in enumerate(lengths)]
        seconds = step.rows_s[rows] + one.depth_s[max(lengths)] + one.slot_s * rows
        bounds = step.bound_s + step.token_s * (np.array(tokens) - 1)
        if (bounds >= seconds).all():
            best = max(best, sum(tokens) / seconds)
    return float(best)


def drawn(seed: int, count: int, most: int) -> tuple[StepOptions, DraftOption]:
    """A step with rows that cost less, the same, or suddenly more, and a drafter."""
    random = np.random.default_rng(seed)
    rows = np.arange(count * most + 1)
    kind = seed % 3
    rows_s = 1.0 + 0.05 * rows if kind == 0 else 1.0 + 0.3 * (rows // 3)
    if kind == 2:
        rows_s = 1.0 + 0.01 * rows + 0.4 * np.maximum(rows - 4, 0)
    chances = random.uniform(0.05, 0.98, (count, most))
    one = option("one", chances, depth_s=random.uniform(0.0, 0.2), call_s=0.05, slot_s=0.01)
    return step_of(rows_s, count), one


@pytest.mark.parametrize("seed", range(60))
def test_no_plan_is_better(seed: int) -> None:
    count, most = 1 + seed % 4, 1 + seed % 3
    step, one = drawn(seed, count, most)
    assert allocate(step, [one]).rate == pytest.approx(brute_force(step, one))


def lengths_of(found: Allocation) -> list[int]:
    lengths: list[int] = found.lengths_N.tolist()
    return lengths


def test_rows_that_cost_nothing_are_all_taken() -> None:
    one = option("one", np.full((3, 4), 0.5), depth_s=0.0)
    assert lengths_of(allocate(step_of(np.ones(13), 3), [one])) == [4, 4, 4]


def test_dear_rows_are_not_taken_and_the_sure_sequence_goes_first() -> None:
    chances = np.array([[0.95] * 4, [0.2] * 4])
    one = option("one", chances, depth_s=0.02)
    rows_s = 1.0 + 0.3 * np.arange(9)
    found = allocate(step_of(rows_s, 2), [one])
    assert found.lengths_N[0] > 0
    assert found.lengths_N[1] == 0
    dear = 1.0 + 1.5 * np.arange(9)
    assert lengths_of(allocate(step_of(dear, 2), [one])) == [0, 0]


def test_nobody_is_made_slower_beyond_the_bound() -> None:
    """A sequence that accepts nothing caps the step of all others."""
    chances = np.array([[0.95] * 4, [0.0] * 4])
    one = option("one", chances, depth_s=0.05)
    rows_s = 1.0 + 0.03 * np.arange(9)
    free = allocate(step_of(rows_s, 2), [one])
    assert free.lengths_N[0] >= 2
    strict = allocate(step_of(rows_s, 2, slack=0.02), [one])
    assert lengths_of(strict) == [0, 0]
    assert strict.unguarded == pytest.approx(free.rate)
    some = allocate(step_of(rows_s, 2, slack=0.1), [one])
    assert 0 < some.lengths_N[0] < free.lengths_N[0]
    assert some.seconds <= 1.1 + 1e-9


def test_each_sequence_has_the_drafter_that_is_best_for_it() -> None:
    first = option("first", np.array([[0.9] * 3, [0.1] * 3]), depth_s=0.02)
    second = option("second", np.array([[0.1] * 3, [0.9] * 3]), depth_s=0.02)
    rows_s = 1.0 + 0.02 * np.arange(7)
    found = allocate(step_of(rows_s, 2), [first, second])
    assert found.drafter_N.tolist() == [0, 1]
    assert found.lengths_N.tolist() == [3, 3]


def test_catching_up_has_to_pay() -> None:
    one = option("one", np.full((1, 3), 0.8), depth_s=0.05)
    rows_s = 1.0 + 0.02 * np.arange(4)
    late = DraftOption(
        name="one", survival_NK=one.survival_NK, depth_s=one.depth_s, slot_s=0.0,
        start_s=np.array([3.0]),
    )  # fmt: skip
    assert lengths_of(allocate(step_of(rows_s, 1), [one])) == [3]
    assert lengths_of(allocate(step_of(rows_s, 1), [late])) == [0]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 5), st.floats(0.01, 100.0))
def test_scale_and_order_change_nothing(seed: int, count: int, most: int, scale: float) -> None:
    step, one = drawn(seed, count, most)
    found = allocate(step, [one])
    scaled = StepOptions(
        rows_s=scale * step.rows_s, plain_s=scale * step.plain_s, bound_s=scale * step.bound_s,
        token_s=scale * step.token_s, margin=0.0,
    )  # fmt: skip
    slower = DraftOption(
        name="one", survival_NK=one.survival_NK, depth_s=scale * one.depth_s,
        slot_s=scale * one.slot_s, start_s=scale * one.start_s,
    )  # fmt: skip
    assert allocate(scaled, [slower]).rate * scale == pytest.approx(found.rate)
    order = np.random.default_rng(seed).permutation(count)
    turned = DraftOption(
        name="one", survival_NK=one.survival_NK[order], depth_s=one.depth_s,
        slot_s=one.slot_s, start_s=one.start_s,
    )  # fmt: skip
    other = allocate(step, [turned])
    assert other.rate == pytest.approx(found.rate)
    if np.unique(one.survival_NK).size == one.survival_NK.size:
        assert other.lengths_N.tolist() == found.lengths_N[order].tolist()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 5))
def test_lengths_stay_within_what_is_allowed(seed: int, count: int, most: int) -> None:
    step, one = drawn(seed, count, most)
    caps = np.random.default_rng(seed).integers(0, most + 1, count)
    one.survival_NK[np.arange(most) >= caps[:, None]] = 0.0
    found = allocate(step, [one])
    assert (found.lengths_N <= caps).all()
    assert ((found.drafter_N >= 0) == (found.lengths_N > 0)).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.floats(1.05, 3.0))
def test_dearer_rows_never_mean_more_of_them(seed: int, count: int, factor: float) -> None:
    random = np.random.default_rng(seed)
    one = option("one", random.uniform(0.05, 0.95, (count, 4)), depth_s=0.03)
    row_s = random.uniform(0.001, 0.3)
    rows = np.arange(4 * count + 1)
    cheap = allocate(step_of(1.0 + row_s * rows, count), [one])
    dear = allocate(step_of(1.0 + factor * row_s * rows, count), [one])
    assert dear.lengths_N.sum() <= cheap.lengths_N.sum()


BY_PATH: dict[tuple[int, ...], tuple[float, ...]] = {
    (): (0.6, 0.3), (0,): (0.5, 0.4), (1,): (0.9, 0.05), (0, 0): (0.9, 0.1), (1, 0): (0.8, 0.1),
    (0, 1): (0.9, 0.1),
}  # fmt: skip


def grown(top_k: int, depth: int, budget: int) -> dict[tuple[int, ...], float]:
    """The finished tree: ranks (which are the tokens) -> what the branch promises."""
    growth = DynamicTree(top_k, depth).start(budget)
    expanded = 0
    while growth.frontier:
        chosen = []
        for node in growth.frontier:
            path = tuple(growth.tokens[n] for n in growth.path(node))
            logs = tuple(math.log(p) for p in BY_PATH[path])
            chosen.append(Candidates((0, 1), None, logs))
        expanded += sum(node >= 0 for node in growth.frontier)
        growth.grow(chosen)
    assert expanded <= budget
    tree = growth.finish()
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.ids, tree.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert paths == sorted(paths) and len(set(paths)) == len(paths)
    return {
        path: math.prod(BY_PATH[path[:i]][token] for i, token in enumerate(path)) for path in paths
    }


def test_the_most_promising_nodes_stay() -> None:
    """0.6, 0.3, 0.3, 0.27, 0.27 (0 0 0), 0.24 (0 1), 0.216: a deep node beats a shallow one."""
    found = grown(2, 3, 5)
    assert set(found) == {(0,), (1,), (0, 0), (1, 0), (0, 0, 0)}
    assert min(found.values()) >= 0.27 - 1e-9


def test_only_the_best_of_a_level_go_on() -> None:
    """With one place a level the second best branch is never looked into."""
    growth = DynamicTree(1, 3).start(3)
    growth.grow([Candidates((7,), None, (-0.1,))])
    growth.grow([Candidates((8,), None, (-0.2,))])
    assert growth.path(growth.frontier[0]) == (0, 1) and growth.inner == [0, 1]
    growth.grow([Candidates((9,), None, (-0.3,))])
    assert growth.finish().ids == (7, 8, 9) and growth.finish().parents == (-1, 0, 1)
    assert (1, 0, 0) not in grown(2, 3, 3)


def test_small_budgets_and_few_candidates() -> None:
    assert set(grown(2, 3, 1)) == {(0,)}
    growth = DynamicTree(4, 2).start(8)
    growth.grow([Candidates((3,), None, (0.0,))])
    growth.grow([Candidates((), None, ())])
    assert growth.finish().ids == (3,)


VOCAB = 40


@pytest.mark.parametrize("seed", range(20))
def test_trees_that_grow_by_confidence_couple_with_the_target_where_matching_checks(
    seed: int,
) -> None:
    """Of a drafter that is right about the target the first candidate is the target's token, with
    a seed of the user's or without."""
    sequence = make_sequence([1, 2, 3], seed=seed, params={"temperature": 1.0})
    row = Rows(sequence=sequence)
    logits_NV = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed))
    sampler = Sampler(VOCAB)
    (target,) = sampler.choose(logits_NV, [row]).tolist()
    node = OpenNode(row, 3, 0, fixed=True)
    drafts = DraftSampler(sampler)
    (found,) = choose_candidates(drafts, logits_NV, [node], with_probs=False)
    assert found.ids[0] == target
    assert found.probs_CV is None
    by_rule = DraftSampler(sampler, "standard")
    (best,) = choose_candidates(by_rule, logits_NV, [node], with_probs=False)
    assert best.ids == tuple(logits_NV[0].topk(3).indices.tolist())
