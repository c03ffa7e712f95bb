"""Trees that grow by confidence: which nodes go on, which stay, and in which order."""

import math

from foretoken.control.plan import DraftPrice, PlannedTree
from foretoken.proposers.tree_shapes import DynamicTree, StaticTree
from foretoken.runtime.candidates import Candidates

BY_PATH: dict[tuple[int, ...], tuple[float, ...]] = {
    (): (0.6, 0.3),
    (0,): (0.5, 0.4),
    (1,): (0.9, 0.05),
    (0, 0): (0.9, 0.1),
    (1, 0): (0.8, 0.1),
    (0, 1): (0.9, 0.1),
}


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
