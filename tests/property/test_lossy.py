"""Typical and synthetic acceptance do exactly what their settings say, and say that they do it."""

from collections import Counter
from collections.abc import Sequence as Seq

import pytest
import torch

from foretoken.config.speculative import RuleConfig
from foretoken.models.tensors import Draft, ModelOutput
from foretoken.ops.noise import KeyedNoise, Stream, pack_keys, request_key, row_key
from foretoken.ops.sampling import draw
from foretoken.runtime.batch import Batch, SpanVerification
from foretoken.runtime.draft_tree import tree_of
from foretoken.runtime.rules import RuleSettings
from foretoken.runtime.verifier import Verifier
from foretoken.types import Request, SamplingParams
from tests.marks import slow_but
from tests.property.exact import assert_fits
from tests.property.verifying import TableModel, sequence_of, span_of, verify

VOCAB, K = 6, 3


def results(
    rule: str, settings: RuleSettings, params: SamplingParams, drafts: tuple[int, ...], count: int
) -> list[SpanVerification]:
    verifier = Verifier(VOCAB, rule=rule, settings=settings)
    spans = [
        span_of(
            sequence_of(
                Request(
                    request_id=str(i), prompt_token_ids=(0, 1), params=params, seed=i, max_tokens=9
                )
            ),
            drafts,
        )
        for i in range(count)
    ]
    return verify(verifier, TableModel(1, VOCAB), spans)


@pytest.mark.parametrize(
    ("rates", "length"), [((0.9, 0.5, 0.2), None), (None, 2.4), (None, 1.0), (None, 4.0)]
)
@pytest.mark.parametrize("temperature", slow_but([0.0, 1.0], 1.0))
def test_synthetic_rates(
    rates: tuple[float, ...] | None, length: float | None, temperature: float
) -> None:
    rule = RuleConfig(
        rejection_sample_method="synthetic",
        synthetic_acceptance_rates=rates,
        synthetic_acceptance_length=length,
    )
    expected_rates = rule.synthetic_rates(K)
    settings = RuleSettings(synthetic_rates=expected_rates)
    params = SamplingParams(temperature=temperature)
    found = results("synthetic", settings, params, (5, 5, 5), 3000)
    assert not any(result.valid for result in found)
    counts: Counter[tuple[int, ...]] = Counter((result.num_accepted,) for result in found)
    survival = (1.0, *expected_rates, 0.0)
    expected: dict[tuple[int, ...], float] = {
        (i,): survival[i] - survival[i + 1] for i in range(K + 1)
    }
    if max(expected.values()) == 1:
        assert counts == {max(expected, key=lambda key: expected[key]): 3000}
    else:
        assert_fits(counts, expected)
    if length is not None:
        mean = sum(result.num_accepted for result in found) / 3000 + 1
        assert mean == pytest.approx(length, abs=0.06)
        kept = {result.num_accepted for result in found}
        assert len(kept) <= 2, "least variance: the two whole numbers around the length"
    assert found == results("synthetic", settings, params, (5, 5, 5), 3000), "not reproducible"


def test_synthetic_keeps_no_placeholder() -> None:
    settings = RuleSettings(synthetic_rates=(1.0, 1.0, 1.0))
    (result,) = results("synthetic", settings, SamplingParams(), (5, -1, 5), 1)
    assert result.num_accepted == 1


@pytest.mark.parametrize("drafts", [(0, 1, 2), (3, 3, 3), (5, 4, 3), (-1, 1, 1)])
def test_typical_keeps_what_is_probable_and_then_draws(drafts: tuple[int, ...]) -> None:
    """The number kept is a function of the rows; the token after it is the target's own draw."""
    settings = RuleSettings(posterior_threshold=0.2, posterior_alpha=0.5)
    rows = TableModel(1, VOCAB).rows([0, 1], drafts)
    probs = (rows.double() / 1.5).softmax(dim=-1)
    kept = 0
    for i, token in enumerate(drafts):
        entropy = -(probs[i] * (probs[i] + 1e-5).log()).sum()
        if token < 0 or probs[i, token] <= min(0.2, 0.5 * float((-entropy).exp())):
            break
        kept += 1
    noise = KeyedNoise(VOCAB, torch.device("cpu"))
    found = results("typical", settings, SamplingParams(temperature=1.5), drafts, 50)
    for seed, result in enumerate(found):
        assert result.valid and result.new_ids[:-1] == drafts[:kept]
        keys = pack_keys(
            [row_key(request_key(seed, 0), 2 + kept, Stream.TARGET)], torch.device("cpu")
        )
        own = draw((rows[kept] / 1.5).unsqueeze(0), keys, noise)
        assert result.new_ids[-1] == int(own)


def test_typical_is_exact_for_greedy_requests() -> None:
    rows = TableModel(1, VOCAB).rows([0, 1], ())
    best = int(rows[0].argmax())
    second = int(rows[0].topk(2).indices[1])
    settings = RuleSettings(posterior_threshold=0.01, posterior_alpha=0.01)
    (result,) = results("typical", settings, SamplingParams(temperature=0), (second,), 1)
    assert result.new_ids == (best,)


# Typical and synthetic acceptance on trees do exactly what their settings say. The guarded bugs:
# a node judged by its sibling's row, a shorter or less likely branch kept, a token that continues
# another branch, rates that are not those of depths.
Ids = tuple[int, ...]
TREE_VOCAB, START = 6, [0, 1]
BUSHY = (-1, -1, 0, 0, 1, 4)
MODEL = TableModel(1, TREE_VOCAB)


def contexts(ids: Ids, parents: Ids) -> list[list[int]]:
    """The tokens before the row of the root, then before those of the nodes."""
    paths = ((), *tree_of(parents).paths)
    return [[*START, *(ids[node] for node in path)] for path in paths]


def verified(
    rule: str, settings: RuleSettings, params: SamplingParams, trees: Seq[Ids], parents: Ids = BUSHY
) -> list[SpanVerification]:
    """What stays of each tree; the seed of a request is the tree's place."""
    verifier = Verifier(TREE_VOCAB, rule=rule, settings=settings)
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
    drawn = torch.randint(0, TREE_VOCAB, (count, len(BUSHY)), generator=generator)
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
    noise, lengths = KeyedNoise(TREE_VOCAB, torch.device("cpu")), Counter[int]()
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


def test_typical_trees_are_exact_for_greedy_requests() -> None:
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
