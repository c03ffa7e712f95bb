"""Trees as control plans them: what nodes are worth, which are chosen, and what it learns."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.control.adaptive.allocation import DraftOption, StepOptions, allocate
from foretoken.control.adaptive.chosen import planned_trees
from foretoken.control.adaptive.tree_nodes import TreeNodes
from foretoken.control.learned.acceptance import LearnedAcceptance
from foretoken.control.learned.candidates import OtherCandidates
from foretoken.proposers.tree_shapes import DynamicTree, StaticTree
from foretoken.runtime.draft_tree import tree_of

PATHS = ((0,), (0, 0), (0, 0, 0), (0, 1), (1,), (1, 0), (2,))
PARENTS = (-1, 0, 1, 0, -1, 4, -1)
OTHERS = [0.0, 0.4, 0.2, 0.2]


def worth(chances: Any, paths: Any = PATHS, others: Any = None) -> Any:
    """[N, K]"""
    return TreeNodes.of(paths).survival(np.array(chances), others or OTHERS)


def option(chances: Any, *, pass_s: float, call_s: float = 0.05) -> DraftOption:
    nodes = TreeNodes.of(PATHS)
    depth_s: Any = call_s + pass_s * np.arange(len(PATHS) + 1)
    depth_s[0] = 0.0
    return DraftOption(
        name="one", survival_NK=worth(chances), depth_s=depth_s, slot_s=0.01,
        start_s=np.zeros(len(chances)), levels_K=nodes.levels_K,
    )  # fmt: skip


def step(row_s: float, count: int) -> StepOptions:
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
    one = option(random.uniform(0.1, 0.95, (1, 3)), pass_s=random.uniform(0.0, 0.2))
    row_s = random.uniform(0.01, 0.2)
    found = allocate(step(row_s, 1), [one])
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
    cheap, dear = option(chances, pass_s=0.0), option(chances, pass_s=0.5)
    deep, shallow = allocate(step(0.02, 2), [cheap]), allocate(step(0.02, 2), [dear])
    assert deep.depth == 3 and shallow.depth < 3
    sizes = [allocate(step(row_s, 2), [cheap]).drafts_N.sum() for row_s in (0.01, 0.05, 0.2, 0.8)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[2] > sizes[-1] == 0
    sure, unsure = allocate(step(0.1, 2), [cheap]).drafts_N
    assert sure >= unsure


def test_a_better_chance_never_means_a_smaller_tree_of_that_sequence() -> None:
    for seed in range(30):
        random = np.random.default_rng(seed)
        chances = random.uniform(0.1, 0.9, (1, 3))
        better = np.minimum(chances * random.uniform(1.0, 1.3), 0.98)
        row_s = random.uniform(0.01, 0.3)
        first, second = (
            allocate(step(row_s, 1), [option(each, pass_s=0.05)]) for each in (chances, better)
        )
        assert second.rate >= first.rate - 1e-12


def test_trees_beside_chains() -> None:
    """Both are passes of one step: a pass deep costs both drafters' time."""
    tree = option([[0.9, 0.9, 0.9], [0.1, 0.1, 0.1]], pass_s=0.02)
    survival = np.zeros((2, len(PATHS)))
    survival[:, :3] = np.cumprod([[0.1] * 3, [0.9] * 3], axis=1)
    chain = DraftOption(
        name="chain", survival_NK=survival, depth_s=tree.depth_s, slot_s=0.01,
        start_s=np.zeros(2),
    )  # fmt: skip
    found = allocate(step(0.02, 2), [tree, chain])
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
