"""What a verification reports: tokens, sources and logprobs of mixed batches."""

import math

import pytest
import torch
from torch import Tensor

from foretoken.config.speculative import RULES
from foretoken.models.tensors import Draft, ModelOutput
from foretoken.ops.rejection import acceptable, agreeing, leading, residual, typical
from foretoken.runtime.batch import Batch, Span, SpanVerification
from foretoken.runtime.rules.base import rule_of, wants_distribution
from foretoken.runtime.sequence import Sequence
from foretoken.runtime.verifier import Verifier
from foretoken.types import Request, SamplingParams, TokenSource

VOCAB = 10
ACCEPTED, BONUS = TokenSource.ACCEPTED, TokenSource.BONUS
RECOVERED, TARGET = TokenSource.RECOVERED, TokenSource.TARGET


def span(
    params: SamplingParams,
    tokens: tuple[int, ...],
    drafts: tuple[int, ...] = (),
    **fields: int | bool,
) -> Span:
    request = Request(
        request_id=str((tokens, drafts)), prompt_token_ids=tokens, params=params, seed=1,
        max_tokens=9,
    )  # fmt: skip
    sequence = Sequence(request=request, token_ids=list(tokens), num_prompt=len(tokens))
    values = {"start": len(tokens) - 1, "length": 1, "samples": True, **fields}
    return Span(sequence=sequence, draft_budget=9, draft_ids=drafts, **values)  # type: ignore


def favouring(*tokens: int) -> Tensor:
    """One row per token that the target likes best; a little noise keeps ranks apart."""
    noise = torch.rand(len(tokens), VOCAB, generator=torch.Generator().manual_seed(len(tokens)))
    noise[range(len(tokens)), list(tokens)] += 3.0
    return noise


def verify(
    spans: list[Span], logits_RV: Tensor, probs_KV: Tensor | None = None, rule: str = "auto"
) -> list[SpanVerification | None]:
    draft = Draft(ids=tuple(s.draft_ids for s in spans), probs_KV=probs_KV)
    output = ModelOutput(logits_RV=logits_RV, hidden_RD=logits_RV)
    verifier = Verifier(VOCAB, rule=rule)
    return list(verifier.verify(Batch(spans=tuple(spans), draft=draft), output).spans)


GREEDY = SamplingParams(temperature=0)


def test_sources_and_tokens_of_ragged_spans() -> None:
    spans = [
        span(GREEDY, (1, 2)),
        span(GREEDY, (1, 3), (4, 5)),
        span(GREEDY, (1, 2, 3, 4), start=0, length=3, samples=False),
        span(GREEDY, (1, 4), (4, 9, 6)),
        span(GREEDY, (1, 5), (-1,)),
    ]
    found = verify(spans, favouring(7, 4, 5, 6, 4, 5, 6, 7, 8, 9))
    assert found[2] is None
    results = [v for v in found if v is not None]
    assert [v.new_ids for v in results] == [(7,), (4, 5, 6), (4, 5), (8,)]
    assert [(v.num_accepted, v.num_drafted) for v in results] == [(0, 0), (2, 2), (1, 3), (0, 1)]
    assert [v.sources for v in results] == [
        (TARGET,), (ACCEPTED, ACCEPTED, BONUS), (ACCEPTED, RECOVERED), (RECOVERED,),
    ]  # fmt: skip
    assert all(v.logprobs is None and v.prompt_logprobs is None for v in results)


def test_no_rows_at_all() -> None:
    chunk = span(GREEDY, (1, 2, 3, 4), start=0, length=2, samples=False)
    assert verify([chunk], torch.empty(0, VOCAB)) == [None]


def test_logprobs_are_of_raw_logits_and_ranked() -> None:
    params = SamplingParams(temperature=0, logprobs=3, logit_bias={6: 50.0})
    logits_RV = favouring(4, 5, 6)
    (result,) = verify([span(params, (1, 2), (6, 5))], logits_RV)
    assert result is not None and result.new_ids == (6, 6)
    assert result.logprobs is not None and len(result.logprobs) == 2
    for row, entry in enumerate(result.logprobs):
        raw = logits_RV[row].log_softmax(dim=-1)
        order = raw.argsort(descending=True).tolist()
        assert next(iter(entry)) == 6, "the chosen id comes first"
        assert set(entry) == {6, *order[:3]}
        for token, value in entry.items():
            assert value.rank == order.index(token) + 1
            assert abs(value.logprob - float(raw[token])) < 1e-6


def test_logprobs_of_the_chosen_id_alone() -> None:
    params = SamplingParams(temperature=0, logprobs=0)
    (result,) = verify([span(params, (1, 2))], favouring(4))
    assert result is not None and result.logprobs is not None
    assert [list(entry) for entry in result.logprobs] == [[4]]
    assert result.logprobs[0][4].rank == 1


def test_prompt_logprobs_are_of_the_next_prompt_token() -> None:
    params = SamplingParams(temperature=0, prompt_logprobs=1, logprobs=2)
    chunk = span(params, (1, 2, 3, 4), start=0, length=2, samples=False, wants_prompt_logprobs=True)
    last = span(params, (1, 2, 3, 4), start=2, length=2, samples=True, wants_prompt_logprobs=True)
    logits_RV = favouring(2, 8, 4, 7)
    first, second = verify([chunk, last], logits_RV)
    assert first is not None and second is not None
    assert (first.new_ids, first.sources, first.logprobs) == ((), (), None)
    assert first.prompt_logprobs is not None
    assert [next(iter(entry)) for entry in first.prompt_logprobs] == [2, 3]
    assert set(first.prompt_logprobs[1]) == {3, 8}
    assert second.new_ids == (7,)
    assert second.prompt_logprobs is not None and second.logprobs is not None
    assert [next(iter(entry)) for entry in second.prompt_logprobs] == [4]
    assert len(second.logprobs) == 1


def test_equal_logits_rank_alike() -> None:
    logits_RV = torch.zeros(1, VOCAB)
    (result,) = verify([span(SamplingParams(temperature=0, logprobs=2), (1, 2))], logits_RV)
    assert result is not None and result.logprobs is not None
    assert result.new_ids == (0,) and result.logprobs[0][0].rank == 1


def test_rejection_beside_matching_in_one_batch() -> None:
    """Spans with certain outcomes: always kept, never kept, -1, and a greedy neighbour."""
    free = SamplingParams()
    certain_RV = torch.full((8, VOCAB), -1e9)
    for row, token in enumerate((4, 5, 6, 3, 7, 8, 2, 9)):
        certain_RV[row, token] = 0.0
    spans = [
        span(free, (1, 2), (4, 5)),
        span(GREEDY, (1, 3), (1,)),
        span(free, (1, 4), (-1,)),
        span(free, (1, 5)),
    ]
    probs_KV = torch.full((4, VOCAB), 0.1)
    found = verify(spans, certain_RV, probs_KV)
    results = [v for v in found if v is not None]
    assert [v.new_ids for v in results] == [(4, 5, 6), (3,), (8,), (9,)]
    assert [v.num_accepted for v in results] == [2, 0, 0, 0]


def test_explicit_rejection_of_one_hot_drafts() -> None:
    certain_RV = torch.full((3, VOCAB), -1e9)
    certain_RV[0, 4] = certain_RV[1, 5] = certain_RV[2, 6] = 0.0
    (result,) = verify([span(SamplingParams(), (1, 2), (4, 9))], certain_RV, rule="standard")
    assert result is not None and result.new_ids == (4, 5)


def test_prompt_rows_before_rejected_drafts() -> None:
    params = SamplingParams(prompt_logprobs=0)
    certain_RV = torch.full((3, VOCAB), -1e9)
    certain_RV[1, 4] = certain_RV[2, 6] = 0.0
    one = span(params, (1, 2), (4,), start=0, length=2, wants_prompt_logprobs=True)
    (result,) = verify([one], certain_RV, torch.full((1, VOCAB), 0.1))
    assert result is not None and result.new_ids == (4, 6)


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
