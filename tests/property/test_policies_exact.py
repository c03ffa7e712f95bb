"""Whatever decides who drafts and how far, unseeded requests keep the target's distribution.

The real drafters, policies and verifier over a table for a target and another for a draft model.
What is guarded against is anticipation: a length or a drafter chosen for what was drawn.
"""

from collections import Counter
from collections.abc import Sequence as Seq

import pytest
import torch
from torch import Tensor

from foretoken.control.plan import DraftPlan, StepForecast, StepLoad
from foretoken.models.tensors import Draft, ModelOutput, SpanLayout
from foretoken.proposers.base import Context, Proposer
from foretoken.proposers.chain import Confidence
from foretoken.proposers.choose import policy as policies
from foretoken.proposers.choose.drafters import Drafters, draft_outcomes
from foretoken.proposers.choose.offers import Member
from foretoken.proposers.choose.policy import FirstPolicy, PlannedPolicy, Policy
from foretoken.proposers.kv_progress import DraftLimits
from foretoken.runtime.batch import Batch, Span
from foretoken.runtime.draft_sampler import DraftSampler
from foretoken.runtime.sampler import Sampler
from foretoken.runtime.verifier import Verifier
from foretoken.types import Request, SamplingParams
from tests.marks import slow
from tests.property.exact import LENGTH, VOCAB, assert_fits, chain_probs
from tests.property.verifying import TableModel, sequence_of
from tests.unit.proposing import draft_model

SAMPLES, AT_ONCE, BUDGET = 3000, 40, 3


class TableRunner:
    """A draft model that looks its logits up; its KV is the tokens themselves."""

    page_size = 16

    def __init__(self, model: TableModel) -> None:
        self._model = model
        self._tokens: dict[tuple[int, int], int] = {}

    def forward_last(self, layouts: Seq[SpanLayout], token_ids: Seq[Seq[int]]) -> Tensor:
        rows = []
        for layout, ids in zip(layouts, token_ids, strict=True):
            [page] = layout.page_table
            for offset, token in enumerate(ids):
                self._tokens[page, layout.start + offset] = token
            end = layout.start + len(ids)
            rows.append(self._model.row([self._tokens[page, at] for at in range(end)]))
        return torch.stack(rows)

    def logits_at(self, *_: object, **__: object) -> Tensor:
        raise AssertionError("no trees are drafted here")

    def roll_out(self, *_: object, **__: object) -> None:
        """Token by token."""


class Successor(Proposer):
    """Looks up: after an even token its successor, twice, and a promise that is too good."""

    name = "successor"
    looks_up = True

    def propose(self, context: Context) -> Draft:
        newest = [span.sequence.token_ids[-1] for span in context.spans]
        ids = [
            ((token + 1) % VOCAB,) * min(2, span.draft_budget) if token % 2 == 0 else ()
            for token, span in zip(newest, context.spans, strict=True)
        ]
        promises = tuple(float(len(one)) for one in ids)
        return Draft(ids=tuple(ids), drafter=self.name, promises=promises)

    def release(self, request_id: str) -> None:
        """Nothing is kept."""


def make_drafters(policy: Policy, confidence: Confidence) -> Drafters:
    model = draft_model(
        TableRunner(TableModel(2, VOCAB)),
        DraftSampler(Sampler(VOCAB)),
        [0] * SAMPLES,
        DraftLimits(max_model_len=64, max_num_batched_tokens=10 * SAMPLES),
        confidence,
    )
    return Drafters(
        {
            "successor": Member(proposer=Successor(), max_drafts=2),
            "model": Member(proposer=model, max_drafts=BUDGET, least=confidence.least),
        },
        policy,
    )


def step(drafters: Drafters, verifier: Verifier, target: TableModel, spans: list[Span]) -> Batch:
    count = len(spans)
    plan = DraftPlan(
        load=StepLoad(num_decoding=count, num_prefilling=0),
        budgets=(BUDGET,) * count,
        lengths=(BUDGET,) * count,
        drafters=("model",) * count,
        surplus=(0.5,) * count,
        forecast=StepForecast(
            seconds=1.2, plain_s=1.0, tokens=2.0 * count, row_s=0.1 / count, free_rows=count
        ),
    )
    batch = Batch(spans=tuple(spans))
    batch = batch.with_draft(drafters.propose(Context(batch.spans, plan)))
    rows = [target.rows(span.sequence.token_ids, span.draft_ids) for span in batch.spans]
    logits_RV = torch.cat(rows)
    found = verifier.verify(batch, ModelOutput(logits_RV=logits_RV, hidden_RD=logits_RV[:, :1]))
    for span, result in zip(batch.spans, found.spans, strict=True):
        assert result is not None
        span.sequence.token_ids.extend(result.new_ids)
        span.sequence.num_computed = span.sequence.num_tokens - 1
    drafters.observe(draft_outcomes(batch, found))
    return batch


@pytest.mark.parametrize(
    ("policy", "confidence"),
    [
        (FirstPolicy, Confidence()),
        slow(FirstPolicy, Confidence(threshold=0.7)),
        (FirstPolicy, Confidence(threshold=0.8, least=2)),
        (PlannedPolicy, Confidence()),
        slow(PlannedPolicy, Confidence(threshold=0.8, least=1)),
    ],
)
def test_unseeded_outputs_have_the_targets_distribution(
    policy: type[Policy], confidence: Confidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "_ASKS_AGAIN", 1)  # look-ups are asked in every step
    params, target = SamplingParams(temperature=0.9), TableModel(1, VOCAB)
    drafters, verifier = make_drafters(policy(), confidence), Verifier(VOCAB)
    requests = [
        Request(request_id=str(i), prompt_token_ids=(0, 1), params=params, seed=i, max_tokens=9)
        for i in range(SAMPLES)
    ]
    sequences = [sequence_of(request) for request in requests]
    for page, sequence in enumerate(sequences):
        sequence.page_table = [page]
    used: Counter[str] = Counter()
    lengths: Counter[int] = Counter()
    for first in range(0, SAMPLES, AT_ONCE):
        group = sequences[first : first + AT_ONCE]
        while active := [s for s in group if s.num_output < LENGTH]:
            spans = [
                Span(sequence=s, start=s.num_computed, length=1, draft_budget=BUDGET, samples=True)
                for s in active
            ]
            batch = step(drafters, verifier, target, spans)
            used.update(span.drafter for span in batch.spans)
            lengths.update(span.num_drafts for span in batch.spans if span.drafter == "model")
    assert used["model"] > SAMPLES / 20 and used["successor"] > 0, used
    if confidence.threshold:
        assert used[""] or min(lengths) < BUDGET, (used, lengths)
    counts = Counter(tuple(s.output_ids[:LENGTH]) for s in sequences)
    assert_fits(counts, chain_probs(target, params))


def test_whoever_begins_is_looked_up_whatever_others_brought(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policies._Asking, "pays", lambda _: False)
    target = TableModel(1, VOCAB)
    drafters, verifier = make_drafters(PlannedPolicy(), Confidence()), Verifier(VOCAB)
    params, found = SamplingParams(temperature=0.9), {True: Counter[str](), False: Counter[str]()}
    requests = [
        Request(request_id=str(i), prompt_token_ids=(0, 1), params=params, seed=i, max_tokens=30)
        for i in range(8)
    ]
    sequences = [sequence_of(request) for request in requests]
    for page, sequence in enumerate(sequences):
        sequence.page_table = [page]
    while min(one.num_output for one in sequences) < 20:
        begins = [one.num_output <= policies._BEGINS for one in sequences]
        spans = [
            Span(sequence=one, start=one.num_computed, length=1, draft_budget=BUDGET, samples=True)
            for one in sequences
        ]
        for new, span in zip(begins, step(drafters, verifier, target, spans).spans, strict=True):
            found[new][span.drafter] += 1
    assert found[True]["successor"]
    assert found[False].keys() == {"model"}
