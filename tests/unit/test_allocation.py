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
from foretoken.control.adaptive.chosen import planned_trees
from foretoken.control.adaptive.tree_nodes import TreeNodes
from foretoken.control.learned.acceptance import LearnedAcceptance
from foretoken.control.learned.candidates import OtherCandidates
from foretoken.control.plan import DraftPrice, PlannedTree
from foretoken.proposers.tree_shapes import DynamicTree, StaticTree
from foretoken.runtime.candidates import Candidates, OpenNode, choose_candidates
from foretoken.runtime.draft_sampler import DraftSampler
from foretoken.runtime.draft_tree import tree_of
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
    lengths: list[int] = found.drafts_N.tolist()
    return lengths


def test_rows_that_cost_nothing_are_all_taken() -> None:
    one = option("one", np.full((3, 4), 0.5), depth_s=0.0)
    assert lengths_of(allocate(step_of(np.ones(13), 3), [one])) == [4, 4, 4]


def test_dear_rows_are_not_taken_and_the_sure_sequence_goes_first() -> None:
    chances = np.array([[0.95] * 4, [0.2] * 4])
    one = option("one", chances, depth_s=0.02)
    rows_s = 1.0 + 0.3 * np.arange(9)
    found = allocate(step_of(rows_s, 2), [one])
    assert found.drafts_N[0] > 0
    assert found.drafts_N[1] == 0
    dear = 1.0 + 1.5 * np.arange(9)
    assert lengths_of(allocate(step_of(dear, 2), [one])) == [0, 0]


def test_nobody_is_made_slower_beyond_the_bound() -> None:
    """A sequence that accepts nothing caps the step of all others."""
    chances = np.array([[0.95] * 4, [0.0] * 4])
    one = option("one", chances, depth_s=0.05)
    rows_s = 1.0 + 0.03 * np.arange(9)
    free = allocate(step_of(rows_s, 2), [one])
    assert free.drafts_N[0] >= 2
    strict = allocate(step_of(rows_s, 2, slack=0.02), [one])
    assert lengths_of(strict) == [0, 0]
    assert strict.unguarded == pytest.approx(free.rate)
    some = allocate(step_of(rows_s, 2, slack=0.1), [one])
    assert 0 < some.drafts_N[0] < free.drafts_N[0]
    assert some.seconds <= 1.1 + 1e-9


def test_each_sequence_has_the_drafter_that_is_best_for_it() -> None:
    first = option("first", np.array([[0.9] * 3, [0.1] * 3]), depth_s=0.02)
    second = option("second", np.array([[0.1] * 3, [0.9] * 3]), depth_s=0.02)
    rows_s = 1.0 + 0.02 * np.arange(7)
    found = allocate(step_of(rows_s, 2), [first, second])
    assert found.drafter_N.tolist() == [0, 1]
    assert found.drafts_N.tolist() == [3, 3]


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
        assert other.drafts_N.tolist() == found.drafts_N[order].tolist()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 5))
def test_lengths_stay_within_what_is_allowed(seed: int, count: int, most: int) -> None:
    step, one = drawn(seed, count, most)
    caps = np.random.default_rng(seed).integers(0, most + 1, count)
    one.survival_NK[np.arange(most) >= caps[:, None]] = 0.0
    found = allocate(step, [one])
    assert (found.drafts_N <= caps).all()
    assert ((found.drafter_N >= 0) == (found.drafts_N > 0)).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.floats(1.05, 3.0))
def test_dearer_rows_never_mean_more_of_them(seed: int, count: int, factor: float) -> None:
    random = np.random.default_rng(seed)
    one = option("one", random.uniform(0.05, 0.95, (count, 4)), depth_s=0.03)
    row_s = random.uniform(0.001, 0.3)
    rows = np.arange(4 * count + 1)
    cheap = allocate(step_of(1.0 + row_s * rows, count), [one])
    dear = allocate(step_of(1.0 + factor * row_s * rows, count), [one])
    assert dear.drafts_N.sum() <= cheap.drafts_N.sum()


PATHS = ((0,), (0, 0), (0, 0, 0), (0, 1), (1,), (1, 0), (2,))
PARENTS = (-1, 0, 1, 0, -1, 4, -1)
OTHERS = [0.0, 0.4, 0.2, 0.2]


def worth(chances: Any, paths: Any = PATHS, others: Any = None) -> Any:
    """[N, K]"""
    return TreeNodes.of(paths).survival(np.array(chances), others or OTHERS)


def tree_option(chances: Any, *, pass_s: float, call_s: float = 0.05) -> DraftOption:
    nodes = TreeNodes.of(PATHS)
    depth_s: Any = call_s + pass_s * np.arange(len(PATHS) + 1)
    depth_s[0] = 0.0
    return DraftOption(
        name="one", survival_NK=worth(chances), depth_s=depth_s, slot_s=0.01,
        start_s=np.zeros(len(chances)), levels_K=nodes.levels_K,
    )  # fmt: skip


def tree_step(row_s: float, count: int) -> StepOptions:
    rows_s: Any = 1.0 + row_s * np.arange(count * len(PATHS) + 1)
    return StepOptions(
        rows_s=rows_s, plain_s=1.0,
        bound_s=np.full(count, np.inf), token_s=np.ones(count), margin=0.0,
    )  # fmt: skip


def closed(nodes: Any) -> bool:
    """Whether no node is there without its parent."""
    return all(PARENTS[node] < 0 or PARENTS[node] in nodes for node in nodes)


def test_a_node_is_worth_the_chance_of_its_branch() -> None:
    [found] = worth([[0.6, 0.5, 0.9]])
    second, third = 0.4 * 0.4, 0.4 * 0.6 * 0.2
    expected = [0.6, 0.3, 0.27, 0.6 * 0.5 * 0.4, second, second * 0.5, third]
    assert found == pytest.approx(expected)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.floats(0.01, 0.99), min_size=3, max_size=3),
    st.lists(st.floats(0.01, 0.9), min_size=3, max_size=3),
)
def test_no_node_is_worth_more_than_its_parent_or_a_better_candidate(
    chances: list[float], others: list[float]
) -> None:
    [found] = worth([chances], others=[0.0, *others])
    parents = np.array([1.0, *found])[np.array(PARENTS) + 1]
    assert (found <= parents + 1e-12).all()
    assert found[0] >= found[4] >= found[6] and found[1] >= found[3]
    assert found[[0, 4, 6]].sum() <= 1.0 + 1e-12, "one candidate of a place is accepted at most"


@pytest.mark.parametrize("seed", range(30))
def test_no_tree_is_better(seed: int) -> None:
    """Every tree of one sequence, or every pair of trees."""
    random = np.random.default_rng(seed)
    one = tree_option(random.uniform(0.1, 0.95, (1, 3)), pass_s=random.uniform(0.0, 0.2))
    row_s = random.uniform(0.01, 0.2)
    found = allocate(tree_step(row_s, 1), [one])
    best = 1.0
    for chosen in product((False, True), repeat=len(PATHS)):
        nodes = [node for node, there in enumerate(chosen) if there]
        if nodes and closed(nodes):
            depth = max(len(PATHS[node]) for node in nodes)
            seconds = 1.0 + (row_s + one.slot_s) * len(nodes) + one.depth_s[depth]
            best = max(best, (1.0 + one.survival_NK[0, nodes].sum()) / seconds)
    assert found.rate == pytest.approx(best)
    for tree in planned_trees(found, [one]):
        if tree is not None:
            assert closed(tree.nodes) and len(tree.nodes) == found.drafts_N[0]
            assert all(closed(tree.nodes[:n]) for n in range(len(tree.nodes)))
            assert max(len(PATHS[node]) for node in tree.nodes) <= tree.depth


def test_dear_passes_make_trees_shallow_and_dear_rows_make_them_small() -> None:
    chances = [[0.8, 0.7, 0.7], [0.5, 0.4, 0.4]]
    cheap, dear = tree_option(chances, pass_s=0.0), tree_option(chances, pass_s=0.5)
    deep, shallow = allocate(tree_step(0.02, 2), [cheap]), allocate(tree_step(0.02, 2), [dear])
    assert deep.depth == 3 and shallow.depth < 3
    sizes = [
        allocate(tree_step(row_s, 2), [cheap]).drafts_N.sum() for row_s in (0.01, 0.05, 0.2, 0.8)
    ]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[2] > sizes[-1] == 0
    sure, unsure = allocate(tree_step(0.1, 2), [cheap]).drafts_N
    assert sure >= unsure


def test_a_better_chance_never_means_a_smaller_tree_of_that_sequence() -> None:
    for seed in range(30):
        random = np.random.default_rng(seed)
        chances = random.uniform(0.1, 0.9, (1, 3))
        better = np.minimum(chances * random.uniform(1.0, 1.3), 0.98)
        row_s = random.uniform(0.01, 0.3)
        first, second = (
            allocate(tree_step(row_s, 1), [tree_option(each, pass_s=0.05)])
            for each in (chances, better)
        )
        assert second.rate >= first.rate - 1e-12


def test_trees_beside_chains() -> None:
    """Both are passes of one step: a pass deep costs both drafters' time."""
    tree = tree_option([[0.9, 0.9, 0.9], [0.1, 0.1, 0.1]], pass_s=0.02)
    survival = np.zeros((2, len(PATHS)))
    survival[:, :3] = np.cumprod([[0.1] * 3, [0.9] * 3], axis=1)
    chain = DraftOption(
        name="chain", survival_NK=survival, depth_s=tree.depth_s, slot_s=0.01,
        start_s=np.zeros(2),
    )  # fmt: skip
    found = allocate(tree_step(0.02, 2), [tree, chain])
    assert found.drafter_N.tolist() == [0, 1] and found.drafts_N[1] == 3
    first, second = planned_trees(found, [tree, chain])
    assert first is not None and second is None and set(first.nodes) >= {0, 1, 2}


def test_what_was_tried_is_told_by_depth() -> None:
    tree = tree_of(PARENTS)
    assert tree.depth == 3
    assert tree.tried(()) == ((3, -1),)
    assert tree.tried((0, 1)) == ((3, 0), (2, 0), (1, -1))
    assert tree.tried((4, 5)) == ((3, 1), (1, 0)), "behind a leaf nothing was tried"
    assert tree.tried((6,)) == ((3, 2),)


def test_behind_a_leaf_nothing_is_refused() -> None:
    """Wide trees that are always accepted to their leaves say nothing of deeper drafts."""
    learnt = LearnedAcceptance({"one": 0.6})
    learnt.begin("r", "class")
    for _ in range(40):
        learnt.observe_tree("r", "one", ((3, 0), (2, 0)))
    chances = learnt.chances(["r"], "one", 5)[0]
    assert chances[0] > 0.9 and chances[1] > 0.9 and chances[3] >= 0.6


def test_another_candidate_does_not_count_for_the_first() -> None:
    learnt = LearnedAcceptance({"one": 0.6})
    learnt.begin("r", "class")
    for _ in range(60):
        learnt.observe_tree("r", "one", ((3, 1), (2, 0), (1, -1)))
    first, second, third = learnt.chances(["r"], "one", 3)[0]
    assert first < 0.2 and second > 0.8 and third < 0.4
    assert learnt.others("one")[1] > 0.8
    assert learnt.others("one")[2] == pytest.approx(learnt.others("another")[2])


def test_candidates_are_tried_in_turn() -> None:
    others = OtherCandidates()
    for _ in range(300):
        others.observe([(4, 0), (4, 2), (2, -1)])
    chances = others.chances()
    assert chances[1] < 0.05, "tried twice a step, never right"
    assert chances[2] > 0.9 and chances[3] == chances[4], "the fourth never had its turn"


def test_shapes_say_what_they_are_planned_from() -> None:
    static = StaticTree.of([list(path) for path in PATHS])
    assert static.paths == PATHS
    dynamic = DynamicTree(3, 4).paths
    assert dynamic[:4] == ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)) and len(dynamic) == 24
    for paths in (static.paths, dynamic):
        for place, path in enumerate(paths):
            assert path[:-1] == () or path[:-1] in paths[:place]
            assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in paths[:place]


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


def priced(row_s: float, pass_s: float) -> tuple[int, int]:
    """Nodes of the tree that is checked where a token saves a second, and its levels."""
    price = DraftPrice(1.0, row_s, 0.7, pass_s)
    growth, levels = DynamicTree(2, 3).start(12), 0
    while True:
        levels += 1
        growth.grow([Candidates((0, 1), None, (-0.5, -2.0)) for _ in growth.frontier])
        if not growth.frontier or growth.saves(price) <= pass_s:
            tree = growth.finish(price)
            assert tree.promise is not None and 0.0 < tree.promise < 3.0
            return len(tree.ids), levels


def test_nodes_and_levels_end_where_they_cost_more_than_they_bring() -> None:
    assert priced(0.0, 0.0) == (10, 3)
    sizes = [priced(row_s, 0.0)[0] for row_s in (0.01, 0.1, 0.3, 0.5, 5.0)]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] == 1, "a pass that ran is used"
    assert priced(0.01, 0.45)[1] == 2 and priced(0.01, 2.0)[1] == 1


def test_a_plan_makes_trees_shallow() -> None:
    growth = DynamicTree(2, 3).start(6, PlannedTree((0, 1, 2, 3, 4, 5), 1))
    growth.grow([Candidates((0, 1), None, (-0.5, -2.0))])
    assert not growth.frontier and len(growth.finish().ids) == 2


def test_a_planned_static_tree_has_those_nodes() -> None:
    shape = StaticTree.of([[0], [0, 0], [0, 1], [1], [1, 0]])
    growth = shape.start(2, PlannedTree((0, 3, 1), 2))
    growth.grow([Candidates((7, 8), None)])
    assert not growth.frontier and growth.finish().ids == (7, 8)
    growth = shape.start(5, PlannedTree((0, 3, 4), 2))
    growth.grow([Candidates((7, 8), None)])
    growth.grow([Candidates((9,), None)])
    assert growth.finish().ids == (7, 8, 9) and growth.finish().parents == (-1, -1, 1)


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
