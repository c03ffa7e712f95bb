"""Typical and synthetic acceptance on trees do exactly what their settings say.

The guarded bugs: a node judged by its sibling's row, a shorter or less likely branch kept, a token
that continues another branch, rates that are not those of depths.
"""

from collections import Counter
from collections.abc import Sequence as Seq

import pytest
import torch

from foretoken.models.tensors import Draft, ModelOutput
from foretoken.ops.noise import KeyedNoise, Stream, pack_keys, request_key, row_key
from foretoken.ops.sampling import draw
from foretoken.runtime.batch import Batch
from foretoken.runtime.draft_tree import tree_of
from foretoken.runtime.rules import RuleSettings
from foretoken.runtime.verifier import SpanVerification, Verifier
from foretoken.types import Request, SamplingParams
from tests.property.exact import assert_fits
from tests.property.verifying import TableModel, sequence_of, span_of

Ids = tuple[int, ...]
VOCAB, START = 6, [0, 1]
BUSHY = (-1, -1, 0, 0, 1, 4)
MODEL = TableModel(1, VOCAB)


def contexts(ids: Ids, parents: Ids) -> list[list[int]]:
    """The tokens before the row of the root, then before those of the nodes."""
    paths = ((), *tree_of(parents).paths)
    return [[*START, *(ids[node] for node in path)] for path in paths]


def verified(
    rule: str, settings: RuleSettings, params: SamplingParams, trees: Seq[Ids], parents: Ids = BUSHY
) -> list[SpanVerification]:
    """What stays of each tree; the seed of a request is the tree's place."""
    verifier = Verifier(VOCAB, rule=rule, settings=settings)
    spans = tuple(
        span_of(
            sequence_of(
                Request(
                    request_id=str(i),
                    prompt_token_ids=tuple(START),
                    params=params,
                    seed=i,
                    max_tokens=9,
                )
            ),
            ids,
        )
        for i, ids in enumerate(trees)
    )
    rows = [MODEL.row(context) for ids in trees for context in contexts(ids, parents)]
    draft = Draft(ids=tuple(trees), parents=(parents,) * len(trees))
    output = ModelOutput(logits_RV=torch.stack(rows), hidden_RD=torch.empty(0))
    found = verifier.verify(Batch(spans=spans).with_draft(draft), output).spans
    return [one for one in found if one is not None]


def random_trees(count: int) -> list[Ids]:
    generator = torch.Generator().manual_seed(5)
    drawn = torch.randint(0, VOCAB, (count, len(BUSHY)), generator=generator)
    return [tuple(ids) for ids in drawn.tolist()]


def chances(ids: Ids, temperature: float) -> tuple[list[float], list[float]]:
    """Of each node its probability after its branch, and the bar that it must pass."""
    before = contexts(ids, BUSHY)
    found, bars = [], []
    for node, parent in enumerate(BUSHY):
        probs = (MODEL.row(before[parent + 1]).double() / temperature).softmax(dim=-1)
        entropy = -(probs * (probs + 1e-5).log()).sum()
        found.append(float(probs[ids[node]]))
        bars.append(min(0.3, 0.5 * float((-entropy).exp())))
    return found, bars


def test_typical_keeps_the_longest_probable_branch_and_then_draws() -> None:
    settings = RuleSettings(posterior_threshold=0.3, posterior_alpha=0.5)
    trees = random_trees(300)
    found = verified("typical", settings, SamplingParams(temperature=1.5), trees)
    noise, lengths = KeyedNoise(VOCAB, torch.device("cpu")), Counter[int]()
    for seed, (ids, result) in enumerate(zip(trees, found, strict=True)):
        probs, bars = chances(ids, 1.5)
        whole: list[Ids] = [()]
        for path in tree_of(BUSHY).paths:
            if all(probs[node] > bars[node] for node in path):
                whole.append(path)

        def likely(path: Ids, probs: list[float] = probs) -> float:
            return float(torch.tensor([probs[node] for node in path]).log().sum())

        longest = max(map(len, whole))
        best = max(likely(path) for path in whole if len(path) == longest)
        assert result.path is not None and result.path in whole
        assert len(result.path) == longest
        assert likely(result.path) == pytest.approx(best, abs=1e-5)
        assert result.valid and result.new_ids[:-1] == tuple(ids[node] for node in result.path)
        row = MODEL.row([*START, *result.new_ids[:-1]]) / 1.5
        keys = [row_key(request_key(seed, 0), len(START) + longest, Stream.TARGET)]
        own = draw(row.unsqueeze(0), pack_keys(keys, torch.device("cpu")), noise)
        assert result.new_ids[-1] == int(own)
        lengths[longest] += 1
    assert set(lengths) == {0, 1, 2, 3}, "some trees of every length"


def test_typical_is_exact_for_greedy_requests() -> None:
    settings = RuleSettings(posterior_threshold=0.01, posterior_alpha=0.01)
    trees = random_trees(200)
    found = verified("typical", settings, SamplingParams(temperature=0), trees)
    for result in found:
        history = list(START)
        for token in result.new_ids:
            assert token == int(MODEL.row(history).argmax())
            history.append(token)
    assert any(result.num_accepted for result in found)


@pytest.mark.slow
def test_synthetic_goes_down_first_children_at_the_rates_of_depths() -> None:
    """What was drafted does not matter; the token after what stays is the target's own."""
    rates, trees = (0.9, 0.4), random_trees(2000)
    params = SamplingParams(temperature=0)
    found = verified("synthetic", RuleSettings(synthetic_rates=rates), params, trees)
    for ids, result in zip(trees, found, strict=True):
        assert not result.valid
        assert result.path == (0, 2)[: result.num_accepted]
        assert result.new_ids[:-1] == tuple(ids[node] for node in result.path)
        assert result.new_ids[-1] == int(MODEL.row([*START, *result.new_ids[:-1]]).argmax())
    counts: Counter[Ids] = Counter((result.num_accepted,) for result in found)
    assert_fits(counts, {(0,): 0.1, (1,): 0.5, (2,): 0.4})
    again = verified("synthetic", RuleSettings(synthetic_rates=rates), params, trees)
    assert [one.path for one in again] == [one.path for one in found], "not reproducible"
