"""What every drafter has to keep to, as functions that any test suite can run.

    @pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
    def test_my_drafter(check):
        check(lambda settings: MyProposer(settings))

Each check asks for fresh drafters and raises AssertionError with what was wrong. The drafters get
sequences over a small vocabulary and, in the last check, a tiny random model to draft for. Knows
no test framework.
"""

import copy
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

from foretoken.config import EngineConfig
from foretoken.engine.engine import Engine
from foretoken.engine.wiring import build_engine
from foretoken.models.tensors import Draft
from foretoken.proposers.base import Context, Proposer, ProposerSettings
from foretoken.runtime.batch import Span
from foretoken.runtime.sequence import Sequence
from foretoken.testing import write_tiny_llama
from foretoken.types import Request, SamplingParams

VOCAB = 97
MOST_DRAFTS = 6
MakeProposer = Callable[[ProposerSettings], Proposer]

_SETTINGS = ProposerSettings(
    vocab_size=VOCAB, max_model_len=256, num_speculative_tokens=MOST_DRAFTS
)


def budgets_are_kept(make: MakeProposer) -> None:
    """Never more drafts than the budget, one entry per span, ids of the vocabulary, and
    distributions, if there are any, that belong to the drafts."""
    for draft, context in _steps(make(_SETTINGS), seed=1):
        draft.check()
        assert len(draft.ids) == len(context.spans), (len(draft.ids), len(context.spans))
        for ids, span in zip(draft.ids, context.spans, strict=True):
            assert len(ids) <= span.draft_budget, f"{len(ids)} drafts for {span.draft_budget}"
            assert all(0 <= token < VOCAB for token in ids), f"{ids}: not all in [0, {VOCAB})"
        if draft.probs_KV is not None:
            assert draft.probs_KV.shape[1] == VOCAB, draft.probs_KV.shape
            sums_K = draft.probs_KV.sum(dim=-1)
            assert bool(((sums_K - 1).abs() < 1e-3).all()), f"rows sum to {sums_K.tolist()}"


def budget_zero_gets_nothing(make: MakeProposer) -> None:
    """A span with budget 0 has no draft, alone or among others."""
    proposer, sequence = make(_SETTINGS), _sequence("zero", [1, 2, 3, 1, 2])
    for _ in range(3):
        draft = proposer.propose(Context((_span(sequence, 0),)))
        assert draft.ids == ((),), f"{draft.ids} at budget 0"
        sequence.token_ids.append(3)
        sequence.num_computed += 1


def sequences_are_left_alone(make: MakeProposer) -> None:
    """What a drafter is shown, it only reads."""
    proposer = make(_SETTINGS)
    sequence = _sequence("read only", [5, 6, 7, 5, 6, 7, 5])
    before = copy.deepcopy(sequence)
    proposer.propose(Context((_span(sequence, MOST_DRAFTS),)))
    for name in Sequence.__dataclass_fields__:
        now, then = getattr(sequence, name), getattr(before, name)
        same = now == then if name != "request" else now.request_id == then.request_id
        assert same, f"Sequence.{name} was changed from {then!r} to {now!r}"


def requests_can_end_at_any_time(make: MakeProposer) -> None:
    """Unknown requests are released without complaint, and a name can be used again."""
    proposer = make(_SETTINGS)
    proposer.release("never seen")
    for tokens in ([1, 2, 1, 2, 1], [9, 8, 9, 8]):
        sequence = _sequence("again", tokens)
        draft = proposer.propose(Context((_span(sequence, MOST_DRAFTS),)))
        assert len(draft.ids) == 1, draft.ids
        proposer.release("again")
        proposer.release("again")


def looked_up_drafts_follow_from_the_text(make: MakeProposer) -> None:
    """A drafter that says `looks_up` draws nothing: the same texts give the same drafts, and
    drafts come without distributions."""
    one, other = make(_SETTINGS), make(_SETTINGS)
    if not one.looks_up:
        return
    for (first, _), (second, _) in zip(_steps(one, seed=2), _steps(other, seed=2), strict=True):
        assert first.ids == second.ids, f"{first.ids} and then {second.ids} for the same text"
        assert first.probs_KV is None, "a looked-up draft needs no distribution"


def outputs_stay_the_same(make: MakeProposer) -> None:
    """With the drafter and without: the same tokens, greedy and seeded requests in one batch."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_llama(Path(folder), vocab_size=VOCAB)
        expected = _outputs(_engine(model, None))
        found = _outputs(_engine(model, make(_SETTINGS)))
    assert found == expected, "the drafter changed what the model says"


CONTRACT: tuple[Callable[[MakeProposer], None], ...] = (
    budgets_are_kept,
    budget_zero_gets_nothing,
    sequences_are_left_alone,
    requests_can_end_at_any_time,
    looked_up_drafts_follow_from_the_text,
    outputs_stay_the_same,
)
"""All of them; each takes a function that makes a drafter from its settings."""


def _sequence(name: str, token_ids: list[int], num_prompt: int = 1) -> Sequence:
    request = Request(
        request_id=name,
        prompt_token_ids=tuple(token_ids[:num_prompt]),
        params=SamplingParams(temperature=0.0),
        seed=0,
        max_tokens=200,
    )
    sequence = Sequence.of(request)
    sequence.token_ids.extend(token_ids[num_prompt:])
    sequence.num_computed = sequence.num_tokens - 1
    return sequence


def _span(sequence: Sequence, budget: int) -> Span:
    start = sequence.num_computed
    return Span(sequence=sequence, start=start, length=1, draft_budget=budget, samples=True)


def _steps(proposer: Proposer, *, seed: int, count: int = 40) -> list[tuple[Draft, Context]]:
    """Steps over some sequences that grow, pause and end, with budgets from 0 up."""
    draw, steps = random.Random(seed), []
    running: list[Sequence] = []
    for step in range(count):
        if len(running) < 4:
            tokens = [draw.randrange(4) for _ in range(draw.randint(2, 12))]
            running.append(_sequence(f"request {step}", tokens))
        chosen = [one for one in running if draw.random() < 0.8] or running[:1]
        spans = tuple(_span(one, draw.randint(0, MOST_DRAFTS)) for one in chosen)
        steps.append((proposer.propose(Context(spans)), Context(spans)))
        for one in chosen:
            one.token_ids.extend(draw.randrange(4) for _ in range(draw.randint(1, 3)))
            one.num_computed = one.num_tokens - 1
        if draw.random() < 0.2:
            proposer.release(running.pop(0).request.request_id)
    return steps


def _engine(model: Path, proposer: Proposer | None) -> Engine:
    config = EngineConfig.from_kwargs(
        model=str(model), dtype="float32", batch_invariant=True, kv_cache_memory_bytes=4 << 20
    )
    return build_engine(config, proposer)


def _outputs(engine: Engine) -> dict[str, list[int]]:
    kinds = (
        SamplingParams(temperature=0.0, max_tokens=32, detokenize=False),
        SamplingParams(temperature=0.9, seed=3, max_tokens=32, detokenize=False),
    )
    found: dict[str, list[int]] = {}
    for index in range(6):
        prompt = [(7 * index + 3 * i) % VOCAB for i in range(4 + 5 * index)]
        for request in engine.make_requests(str(index), prompt, kinds[index % 2]):
            engine.add_request(request)
            found[request.request_id] = []
    while engine.has_unfinished:
        for output in engine.step():
            found[output.request_id].extend(output.new_token_ids)
    return found
