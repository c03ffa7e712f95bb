"""Rules for trees: exact by enumeration of every draw and every decision, and better than chains.

The steppers of `foretoken.ops.tree_rejection` are explored as they are, decision by decision; the
last test simulates several verifications in a row through the verifier.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from foretoken.models.tensors import Draft, ModelOutput
from foretoken.ops.tree_rejection import BranchTest, Nodes, RecursiveWalk, Traversal
from foretoken.runtime.batch import Batch
from foretoken.runtime.draft_tree import tree_of
from foretoken.runtime.verifier import Verifier
from foretoken.types import Request, SamplingParams
from tests.marks import slow
from tests.property.exact import Rows, assert_fits, chain_probs, plain_probs, rows_of
from tests.property.test_block import emitted
from tests.property.verifying import TableModel, sequence_of, span_of

Ids = tuple[int, ...]
RULES: dict[str, Callable[[Nodes], BranchTest]] = {
    "standard": RecursiveWalk,
    "traversal": Traversal,
}
SHAPES: dict[str, Ids] = {
    "chain": (-1, 0),
    "two leaves": (-1, -1),
    "bushy": (-1, 0, 0, -1, 3),
    "comb": (-1, 0, -1, 2),
    "breadth first": (-1, -1, 0, 1),
}


def draws(
    parents: Ids, drafter: Rows, fixed: bool, ids: Ids = (), rows: tuple[Tensor, ...] = ()
) -> Iterator[tuple[Ids, Tensor, float]]:
    """Every way to draw a tree's tokens: ids, what each was drawn from, probability."""
    if len(ids) == len(parents):
        yield ids, torch.stack(rows), 1.0
        return
    node = len(ids)
    path = tree_of(parents).paths[node][:-1]
    elder = [ids[i] for i in range(node) if parents[i] == parents[node]]
    q_V = drafter(tuple(ids[i] for i in path)).clone()
    q_V[elder] = 0
    if fixed:
        q_V = torch.nn.functional.one_hot(q_V.argmax(), len(q_V)).float()
    q_V = q_V / q_V.sum()
    for token in range(len(q_V)):
        if q_V[token] > 0:
            for rest in draws(parents, drafter, fixed, (*ids, token), (*rows, q_V)):
                yield rest[0], rest[1], rest[2] * float(q_V.double()[token])


def outcomes(make: Callable[[], BranchTest]) -> Iterator[tuple[BranchTest, float]]:
    """Every course the tests can take, with its probability."""
    waiting: list[tuple[tuple[bool, ...], float]] = [((), 1.0)]
    while waiting:
        decisions, weight = waiting.pop()
        test = make()
        for passed in decisions:
            test.step(passed)
        if test.finished:
            yield test, weight
            continue
        chance = test.chance
        assert 0 <= chance <= 1
        for passed, share in ((True, chance), (False, 1 - chance)):
            if share > 0:
                waiting.append(((*decisions, passed), weight * share))


def written(
    rule: str, parents: Ids, target: Rows, drafter: Rows, fixed: bool
) -> tuple[dict[Ids, float], float]:
    """Exact probabilities of the next depth + 1 tokens, the rest decoded plainly; mean kept."""
    tree, result, mean = tree_of(parents), Counter[Ids](), 0.0
    length = max(len(path) for path in tree.paths) + 1
    after: dict[Ids, dict[Ids, float]] = {}
    for ids, rows_KV, drawn in draws(parents, drafter, fixed):
        paths = [(), *tree.paths]
        logits = torch.stack([target(tuple(ids[i] for i in path)) for path in paths]).log()
        nodes = Nodes(ids, tree.children, logits, None if fixed else rows_KV)
        for test, weight in outcomes(lambda nodes=nodes: RULES[rule](nodes)):  # type: ignore[misc]
            kept = tuple(ids[node] for node in test.path)
            mean += drawn * weight * len(kept)
            last = test.last_logits().double().softmax(dim=-1)
            for token, probability in enumerate(last.tolist()):
                start = (*kept, token)
                if start not in after:
                    after[start] = plain_probs(target, start, length - len(start))
                for rest, share in after[start].items():
                    result[(*start, *rest)] += drawn * weight * probability * share
    return dict(result), mean


def from_prefix(rows: Rows) -> Rows:
    return lambda history: rows((0, 1, *history))


def pair(kind: str, vocab: int) -> tuple[Rows, Rows]:
    target, drafter = rows_of(kind, vocab, seed=vocab)
    return from_prefix(target), from_prefix(drafter)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_exact_by_enumeration(rule: str, shape: str, fixed: bool) -> None:
    target, drafter = pair("sometimes", 3)
    found, mean = written(rule, SHAPES[shape], target, drafter, fixed)
    length = max(len(path) for path in tree_of(SHAPES[shape]).paths) + 1
    for outcome, expected in plain_probs(target, (), length).items():
        assert found.get(outcome, 0.0) == pytest.approx(expected, abs=3e-6)
    assert 0 < mean < length - 1


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["always", "never"])
def test_drafters_at_the_extremes(rule: str, kind: str) -> None:
    target, drafter = pair(kind, 4)
    found, mean = written(rule, SHAPES["comb"], target, drafter, fixed=False)
    for outcome, expected in plain_probs(target, (), 3).items():
        assert found.get(outcome, 0.0) == pytest.approx(expected, abs=3e-6)
    assert mean == pytest.approx(2.0 if kind == "always" else 0.0, abs=1e-6)


@pytest.mark.parametrize("fixed", [False, True])
def test_more_branches_and_whole_paths_keep_more(fixed: bool) -> None:
    """A tree keeps more than its first chain, and testing whole paths more than one by one."""
    target, drafter = pair("sometimes", 3)
    kept = {
        (rule, shape): written(rule, SHAPES[shape], target, drafter, fixed)[1]
        for rule in RULES
        for shape in ("chain", "comb")
    }
    for rule in RULES:
        assert kept[rule, "comb"] > kept[rule, "chain"] + 0.01
    for shape in ("chain", "comb"):
        assert kept["traversal", shape] >= kept["standard", shape] - 1e-6


def test_traversal_of_a_chain_is_block_verification() -> None:
    target, drafter = rows_of("sometimes", 3, seed=3)
    block = emitted(target, drafter, 2, False)[1]
    chain = written("traversal", (-1, 0), from_prefix(target), from_prefix(drafter), fixed=False)
    assert chain[1] == pytest.approx(block, abs=1e-6)


def test_shapes() -> None:
    tree = tree_of((-1, 0, 0, -1, 3))
    assert tree.paths == ((0,), (0, 1), (0, 2), (3,), (3, 4))
    assert tree.children == ((0, 3), (1, 2), (), (), (4,), ())
    assert tree.runs == (range(2), range(2, 3), range(3, 5))
    assert sum(not children for children in tree.children[1:]) == 3
    assert tree.window_paths(2)[:3] == ((0,), (0, 1), (0, 1, 2))
    assert tree.window_paths(2)[6] == (0, 1, 5, 6)
    with pytest.raises(AssertionError):
        tree_of((-1, 1))


VOCAB, LENGTH = 4, 2


def draw_tree(
    parents: Ids, history: list[int], drafter: TableModel, generator: torch.Generator, fixed: bool
) -> tuple[Ids, Tensor]:
    ids: list[int] = []
    rows = []
    for node, path in enumerate(tree_of(parents).paths):
        before = [*history, *(ids[i] for i in path[:-1])]
        q_V = (drafter.row(before) / 1.3).softmax(dim=-1)
        q_V[[ids[i] for i in range(node) if parents[i] == parents[node]]] = 0
        q_V = q_V / q_V.sum()
        token = int(q_V.argmax() if fixed else torch.multinomial(q_V, 1, generator=generator))
        ids.append(token)
        rows.append(q_V)
    return tuple(ids), torch.stack(rows)


@pytest.mark.parametrize("fixed", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rule", ["matching", slow("standard"), "traversal"])
def test_simulated_trees_have_the_targets_distribution(rule: str, fixed: bool) -> None:
    """LENGTH tokens in one or two verifications, with a penalty that looks at the branch."""
    samples, parents = 1200, SHAPES["comb"]
    model, drafter = TableModel(1, VOCAB), TableModel(2, VOCAB)
    verifier, generator = Verifier(VOCAB, rule=rule), torch.Generator().manual_seed(1)
    params = SamplingParams(temperature=1.3, presence_penalty=0.8)
    sequences = [
        sequence_of(
            Request(request_id=str(i), prompt_token_ids=(0, 1), params=params, seed=i, max_tokens=9)
        )
        for i in range(samples)
    ]
    accepted = 0
    tree = tree_of(parents)
    while active := [s for s in sequences if s.num_output < LENGTH]:
        trees = [draw_tree(parents, s.token_ids, drafter, generator, fixed) for s in active]
        draft = Draft(
            ids=tuple(ids for ids, _ in trees),
            parents=(parents,) * len(active),
            probs_KV=None if fixed else torch.cat([rows for _, rows in trees]),
        )
        logits = [
            model.row([*s.token_ids, *(ids[i] for i in path)])
            for s, (ids, _) in zip(active, trees, strict=True)
            for path in ((), *tree.paths)
        ]
        spans = tuple(span_of(s, (0,) * len(parents)) for s in active)
        output = ModelOutput(logits_RV=torch.stack(logits), hidden_RD=torch.empty(0))
        found = verifier.verify(Batch(spans=spans).with_draft(draft), output).spans
        for s, (ids, _), result in zip(active, trees, found, strict=True):
            assert result is not None and result.path is not None
            assert result.new_ids[:-1] == tuple(ids[node] for node in result.path)
            s.token_ids.extend(result.new_ids)
            accepted += result.num_accepted
    counts = Counter(tuple(s.output_ids[:LENGTH]) for s in sequences)
    assert_fits(counts, chain_probs(model, params))
    assert accepted > samples / 4


def test_all_trees_of_a_batch_are_seen_apart() -> None:
    """Trees and chains of one batch under greedy matching, against plain decoding of each."""
    verifier = Verifier(VOCAB)
    params = SamplingParams(temperature=0.0)
    for seed, shapes in enumerate(itertools.permutations(["chain", "bushy", "comb"])):
        model = TableModel(seed, VOCAB)
        sequences, spans, logits, ids = [], [], [], []
        for number, shape in enumerate(shapes):
            request = Request(
                request_id=str(number), prompt_token_ids=(number, 1), params=params, seed=0,
                max_tokens=9,
            )  # fmt: skip
            sequence, parents = sequence_of(request), SHAPES[shape]
            tokens = tuple((node * 3 + seed) % VOCAB for node in range(len(parents)))
            sequences.append(sequence)
            ids.append(tokens)
            spans.append(span_of(sequence, tokens))
            for path in ((), *tree_of(parents).paths):
                logits.append(model.row([*sequence.token_ids, *(tokens[i] for i in path)]))
        draft = Draft(ids=tuple(ids), parents=tuple(SHAPES[shape] for shape in shapes))
        output = ModelOutput(logits_RV=torch.stack(logits), hidden_RD=torch.empty(0))
        found = verifier.verify(Batch(spans=tuple(spans)).with_draft(draft), output).spans
        for sequence, result in zip(sequences, found, strict=True):
            assert result is not None
            history = list(sequence.token_ids)
            for token in result.new_ids:
                assert token == int(model.row(history).argmax())
                history.append(token)
