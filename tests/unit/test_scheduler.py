"""Who is served, with how many tokens, what a shortage does, and how each output ends."""

from collections.abc import Sequence
from random import Random

import pytest

from foretoken.control.plan import DecodingSequence, DraftPlan, StepLoad, plan_no_drafts
from foretoken.errors import CapacityError, ConfigError, PromptError, RequestError
from foretoken.models.tensors import Draft
from foretoken.runtime.batch import Batch
from foretoken.runtime.scheduling.scheduler import SchedulerConfig
from foretoken.runtime.sequence import SequenceState
from foretoken.text.tokenizer import StopMatch
from foretoken.types import FinishReason, Output, TokenSource
from tests.unit.scheduler_fakes import (
    VOCAB,
    FakeEngine,
    at_most,
    continuation,
    expected_output,
    make_request,
    noisy,
    nothing,
    perfect,
)

LONG = tuple([1, 2, 3, 4] * 5)


def shape(batch: Batch) -> list[tuple[str, int, int, int]]:
    """(request, start, length, draft budget) of each span."""
    return [(s.sequence.request.request_id, s.start, s.length, s.draft_budget) for s in batch.spans]


def engine_of(num_pages: int = 16, num_drafts: int = 0, **limits: int) -> FakeEngine:
    limits.setdefault("max_model_len", 64)
    return FakeEngine(
        num_pages=num_pages,
        drafter=perfect,
        plan_drafts=at_most(num_drafts),
        config=SchedulerConfig(**limits),  # type: ignore[arg-type]
    )


def test_prompts_are_chunked_and_decoding_comes_first() -> None:
    engine = engine_of(max_num_batched_tokens=8)
    engine.add(make_request("a", (1, 2, 3)))
    engine.add(make_request("b", LONG))
    batch = engine.plan()
    assert shape(batch) == [("a", 0, 3, 0), ("b", 0, 5, 0)]
    assert [span.samples for span in batch.spans] == [True, False]
    engine.finish(batch)
    batch = engine.plan()
    assert shape(batch) == [("a", 3, 1, 0), ("b", 5, 7, 0)]
    engine.finish(batch)
    batch = engine.plan()
    assert shape(batch) == [("a", 4, 1, 0), ("b", 12, 7, 0)]
    engine.finish(batch)
    batch = engine.plan()
    assert shape(batch) == [("a", 5, 1, 0), ("b", 19, 1, 0)]
    assert batch.spans[1].samples


def test_drafts_take_at_most_half_of_the_rest_while_prompts_wait() -> None:
    engine = engine_of(max_num_batched_tokens=9, num_drafts=20)
    engine.add(make_request("a", (1, 2, 3), max_tokens=50))
    engine.step()
    batch = engine.plan()
    assert shape(batch) == [("a", 3, 1, 8)]
    engine.finish(batch)
    engine.add(make_request("b", LONG))
    assert shape(engine.plan()) == [("a", 12, 1, 4), ("b", 0, 4, 0)]


def test_drafts_of_all_sequences_share_the_rest_of_the_step() -> None:
    engine = engine_of(max_num_batched_tokens=9, num_drafts=5)
    for name in "abc":
        engine.add(make_request(name, (1, 2, 3)))
    engine.step()
    assert [span.draft_budget for span in engine.plan().spans] == [5, 1, 0]


def test_who_comes_while_drafts_are_made_joins_the_step() -> None:
    config = SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=3, max_model_len=64)
    engine = FakeEngine(config=config, drafter=perfect, plan_drafts=at_most(3))
    engine.add(make_request("a", (1, 2)))
    engine.step()
    batch = engine.plan()
    assert batch.num_drafts == 3
    for name, length in (("b", 4), ("c", 20), ("d", 1)):
        engine.add(make_request(name, tuple(n % 5 for n in range(length))))
    joined = engine.scheduler.join(batch)
    # 1 + 3 of "a", 4 of "b", and what is left of 16 for "c"; there is no seat for "d".
    assert [(s.sequence.request.request_id, s.num_tokens) for s in joined.spans] == [
        ("a", 4), ("b", 4), ("c", 8),
    ]  # fmt: skip
    assert joined.spans[0] == batch.spans[0]
    assert batch.draft is not None
    assert joined.draft == Draft(ids=(*batch.draft.ids, (), ()))
    outputs = engine.finish(joined)
    assert [output.request_id for output in outputs] == ["a", "b"]
    engine.run()
    for name in "abcd":
        [*_, last] = engine.outputs[name]
        assert last.finish_reason is not None


def test_nobody_joins_a_step_without_room() -> None:
    config = SchedulerConfig(max_num_batched_tokens=4, max_model_len=64)
    engine = FakeEngine(config=config, drafter=perfect, plan_drafts=at_most(3))
    engine.add(make_request("a", (1, 2)))
    engine.step()
    batch = engine.plan()
    engine.add(make_request("b", (3,)))
    assert engine.scheduler.join(batch) is batch
    engine.finish(batch)
    with pytest.raises(AssertionError):
        engine.scheduler.join(batch)
    engine.run()


@pytest.mark.slow
def test_joined_requests_give_what_they_give_alone() -> None:
    random = Random(5)
    for _ in range(40):
        config = SchedulerConfig(
            max_num_batched_tokens=random.randint(4, 24),
            max_num_seqs=random.randint(1, 6),
            max_model_len=48,
        )
        engine = FakeEngine(
            num_pages=random.randint(14, 30), config=config, drafter=noisy(random),
            plan_drafts=at_most(3),
        )  # fmt: skip
        coming = [
            make_request(
                f"r{i}", tuple(random.randrange(VOCAB) for _ in range(random.randint(1, 9)))
            )
            for i in range(12)
        ]
        requests = list(coming)
        while coming or engine.scheduler.has_unfinished:
            if coming and random.random() < 0.3:
                engine.add(coming.pop())
            batch = engine.plan()
            while coming and random.random() < 0.4:
                engine.add(coming.pop())
            if batch.spans:
                batch = engine.scheduler.join(batch)
                if random.random() < 0.1:
                    engine.scheduler.cancel(batch)
                else:
                    engine.finish(batch)
        for request in requests:
            expected, _ = expected_output(request, 48)
            assert engine.tokens(request.request_id) == expected
        assert engine.pool.num_used == 0 or engine.scheduler.prefix is not None


def test_no_more_seats_than_there_are() -> None:
    engine = engine_of(max_num_seqs=2)
    for name in "abc":
        engine.add(make_request(name, (1, 2, 3), max_tokens=3))
    engine.step()
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (2, 1)
    engine.run()
    assert all(engine.tokens(name) == continuation((1, 2, 3), 3) for name in "abc")


def test_priority_then_arrival_then_order_of_adding() -> None:
    engine = engine_of(max_num_seqs=1)
    engine.add(make_request("late", (1,), arrival=2.0, max_tokens=1))
    engine.add(make_request("low", (1,), priority=1, max_tokens=1))
    engine.add(make_request("early", (1,), arrival=1.0, max_tokens=1))
    engine.add(make_request("twin", (1,), arrival=1.0, max_tokens=1))
    engine.add(make_request("high", (1,), priority=-1, arrival=9.0, max_tokens=1))
    served = [output.request_id for _ in range(5) for output in engine.step()]
    assert served == ["high", "early", "twin", "late", "low"]


@pytest.mark.parametrize(
    ("max_tokens", "max_model_len", "budget"),
    [(8, 64, 6), (3, 64, 1), (2, 64, 0), (8, 6, 1), (8, 5, 0), (50, 64, 6)],
)
def test_drafts_end_where_the_output_must_end(
    max_tokens: int, max_model_len: int, budget: int
) -> None:
    engine = engine_of(num_drafts=6, max_model_len=max_model_len)
    engine.add(make_request("a", (1, 2, 3), max_tokens=max_tokens))
    engine.step()
    assert shape(engine.plan()) == [("a", 3, 1, budget)]


def test_drafts_are_dropped_before_anyone_is_preempted() -> None:
    engine = engine_of(num_pages=4, num_drafts=7, max_num_seqs=2)
    engine.add(make_request("a", (1, 2, 3, 4, 5, 6), max_tokens=9))
    engine.add(make_request("b", (2, 2, 2), max_tokens=9))
    engine.step()
    engine.scheduler.check_integrity()
    batch = engine.plan()
    budgets = [span.draft_budget for span in batch.spans]
    assert len(budgets) == 2
    assert budgets[0] == 5
    assert budgets[1] == 0
    assert engine.scheduler.num_preemptions == 0


def test_a_shortage_that_only_drafts_cause_preempts_nobody() -> None:
    """With their look-ahead both sequences would need more pages than there are, at every step."""
    engines = [engine_of(num_pages=6, num_drafts=n, max_num_seqs=2) for n in (0, 12)]
    for engine in engines:
        for name in "ab":
            engine.add(make_request(name, (1, 2, 3, 4), max_tokens=8))
        engine.run()
        assert engine.scheduler.num_preemptions == 0
        assert engine.tokens("a") == engine.tokens("b") == continuation((1, 2, 3, 4), 8)


def test_drafts_do_not_keep_anyone_waiting() -> None:
    """The pages that the next in the queue needs are not lent to drafts."""
    engine = engine_of(num_pages=7, num_drafts=12, max_num_seqs=2)
    engine.add(make_request("a", (1, 2, 3), max_tokens=40))
    engine.step()
    engine.add(make_request("b", LONG[:12], max_tokens=2))
    batch = engine.plan()
    assert [span.sequence.request.request_id for span in batch.spans] == ["a", "b"]
    assert batch.spans[0].draft_budget == 8, "what is left of its page, and one page more"


def test_the_lowest_priority_and_latest_is_preempted_and_loses_nothing() -> None:
    engine = engine_of(num_pages=6)
    engine.add(make_request("low", (3, 3, 3), priority=5, max_tokens=12))
    engine.add(make_request("a", (1, 2, 3), arrival=0.0, max_tokens=12))
    engine.add(make_request("b", (2, 2, 3), arrival=1.0, max_tokens=12))
    victims: list[str] = []
    for _ in range(100):
        before = {i: s.num_preemptions for i, s in engine.scheduler.sequences.items()}
        if not before:
            break
        engine.step()
        now = engine.scheduler.sequences
        victims += [i for i in before if i in now and now[i].num_preemptions > before[i]]
    assert victims[:1] == ["low"]
    assert "a" not in victims
    for name, prompt in (("a", (1, 2, 3)), ("b", (2, 2, 3)), ("low", (3, 3, 3))):
        assert engine.tokens(name) == continuation(prompt, 12)
    metrics = engine.outputs["low"][-1].metrics
    assert metrics is not None
    assert metrics.num_preemptions == victims.count("low")


def test_a_preempted_sequence_comes_back_before_later_arrivals() -> None:
    engine = engine_of(num_pages=4, max_num_seqs=2)
    engine.add(make_request("a", (1, 2, 3), max_tokens=9))
    engine.add(make_request("b", (2, 2, 3), arrival=1.0, max_tokens=9))
    while engine.scheduler.num_preemptions == 0:
        engine.step()
    engine.add(make_request("c", (3, 2, 3), arrival=0.5, max_tokens=9))
    engine.run()
    ends = [
        (outputs[-1].metrics.finished_s + arrival, name)
        for name, arrival in (("a", 0.0), ("b", 1.0), ("c", 0.5))
        if (outputs := engine.outputs[name])[-1].metrics is not None
    ]
    assert [name for _, name in sorted(ends)] == ["a", "b", "c"]


def test_prompts_that_can_never_run_are_refused() -> None:
    engine = engine_of(num_pages=2, max_model_len=9)
    with pytest.raises(CapacityError, match="7 tokens"):
        engine.add(make_request("a", (1,) * 8))
    with pytest.raises(PromptError, match="8 tokens"):
        engine.add(make_request("a", (1,) * 9))
    with pytest.raises(PromptError, match="at least one"):
        engine.add(make_request("a", ()))
    engine.add(make_request("a", (1,) * 7))
    with pytest.raises(RequestError, match="not in use"):
        engine.add(make_request("a", (1,)))
    engine.run()
    assert engine.tokens("a") == continuation((1,) * 7, 1)


def test_aborting_a_waiting_a_running_and_an_unknown_request() -> None:
    engine = engine_of(max_num_seqs=1)
    engine.add(make_request("a", LONG))
    engine.add(make_request("b", LONG))
    engine.step()
    for name in "ab":
        engine.abort(name)
        output = engine.outputs[name][-1]
        assert output.finish_reason is FinishReason.ABORT
        assert output.metrics is not None
    assert engine.scheduler.abort("a") is None
    assert not engine.scheduler.has_unfinished
    assert engine.pool.num_available == engine.pool.num_pages
    engine.scheduler.check_integrity()
    assert engine.scheduler.schedule().spans == ()


def test_aborting_during_a_step_drops_its_result() -> None:
    engine = engine_of()
    engine.add(make_request("a", (1, 2, 3)))
    engine.add(make_request("b", (1, 2, 4)))
    batch = engine.plan()
    sequence = batch.spans[0].sequence
    engine.abort("a")
    assert [output.request_id for output in engine.finish(batch)] == ["b"]
    assert sequence.state is SequenceState.FINISHED
    assert engine.tokens("a") == []


def test_failing_tells_why() -> None:
    engine = engine_of()
    engine.add(make_request("a", (1, 2, 3)))
    output = engine.scheduler.fail("a", "the sky fell")
    assert output is not None
    assert (output.finish_reason, output.error) == (FinishReason.ERROR, "the sky fell")


def test_a_cancelled_step_is_as_if_it_never_was() -> None:
    engine = engine_of(num_drafts=6)
    engine.add(make_request("a", (1, 2, 3)))
    engine.step()
    used = engine.pool.num_used
    batch = engine.plan()
    assert engine.pool.num_used > used
    engine.scheduler.cancel(batch)
    assert engine.pool.num_used == used
    engine.run()
    assert engine.tokens("a") == continuation((1, 2, 3), 8)


def test_one_step_at_a_time() -> None:
    engine = engine_of()
    engine.add(make_request("a", (1, 2, 3)))
    engine.plan()
    with pytest.raises(AssertionError, match="neither committed nor cancelled"):
        engine.scheduler.schedule()


def test_prefixes_are_reused_and_counted() -> None:
    engine = engine_of()
    engine.add(make_request("a", LONG))
    engine.run()
    engine.add(make_request("b", LONG))
    batch = engine.plan()
    assert shape(batch) == [("b", 16, 4, 0)]
    engine.finish(batch)
    engine.run()
    assert engine.tokens("a") == engine.tokens("b") == continuation(LONG, 8)
    metrics = engine.outputs["b"][-1].metrics
    assert metrics is not None
    assert metrics.num_cached_tokens == 16


def test_generated_tokens_are_a_prefix_too() -> None:
    engine = engine_of()
    engine.add(make_request("a", LONG, max_tokens=10))
    engine.run()
    turn = (*LONG, *engine.tokens("a"), 1, 2)
    engine.add(make_request("b", turn, max_tokens=4))
    assert shape(engine.plan()) == [("b", 28, 4, 0)]


def test_prompt_logprobs_need_every_position() -> None:
    engine = engine_of(max_num_batched_tokens=8, max_prompt_logprob_tokens=6)
    engine.add(make_request("a", LONG))
    engine.run()
    engine.add(make_request("b", LONG, prompt_logprobs=0))
    assert shape(batch := engine.plan()) == [("b", 0, 6, 0)]
    engine.finish(batch)
    engine.run()
    first, *later = engine.outputs["b"]
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    assert [next(iter(e)) for e in first.prompt_logprobs[1:] if e] == list(LONG[1:])
    assert all(output.prompt_logprobs is None for output in later)


def test_times_are_since_arrival() -> None:
    engine = engine_of()
    engine.clock = 10.0
    engine.add(make_request("a", (1, 2, 3), arrival=8.0, max_tokens=3))
    engine.run()
    metrics = engine.outputs["a"][-1].metrics
    assert metrics is not None
    assert (metrics.queued_s, metrics.first_token_s, metrics.finished_s) == (3.0, 3.0, 5.0)


def test_the_policy_sees_decoding_sequences_and_the_load() -> None:
    seen: list[tuple[list[str], StepLoad]] = []

    def policy(sequences: Sequence[DecodingSequence], load: StepLoad) -> DraftPlan:
        seen.append(([sequence.request.request_id for sequence in sequences], load))
        return plan_no_drafts(sequences, load)

    engine = FakeEngine(
        config=SchedulerConfig(max_model_len=64, max_num_seqs=2), plan_drafts=policy
    )
    engine.add(make_request("a", (1, 2, 3)))
    engine.step()
    assert [ids for ids, _ in seen] == [[]]
    engine.add(make_request("b", (1, 2, 3)))
    engine.add(make_request("c", (1, 2, 3)))
    batch = engine.plan()
    load = StepLoad(num_decoding=1, num_prefilling=0, num_prompt_tokens=3)
    assert seen[1:] == [(["a"], load)]
    assert (batch.plan.load, batch.plan.budgets) == (load, (0,))
    assert batch.draft == Draft.empty(2)


def test_limits_are_checked() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        SchedulerConfig(max_model_len=8, max_num_seqs=0)


def test_preemption_during_a_prompt_starts_its_logprobs_anew() -> None:
    engine = engine_of(num_pages=6, max_prompt_logprob_tokens=1)
    engine.add(make_request("a", (1, 2, 3), max_tokens=16))
    engine.step()
    engine.add(make_request("b", LONG[:12], prompt_logprobs=0, max_tokens=2, arrival=1.0))
    engine.run()
    output = engine.outputs["b"][0]
    assert engine.outputs["b"][-1].metrics is not None
    assert engine.outputs["b"][-1].metrics.num_preemptions == 1
    assert output.prompt_logprobs is not None
    assert [next(iter(e)) for e in output.prompt_logprobs[1:] if e] == list(LONG[1:12])


def test_resumed_sequences_come_before_those_that_wait() -> None:
    engine = engine_of(max_num_seqs=1)
    engine.add(make_request("a", (1, 2), max_tokens=2))
    engine.step()
    engine.add(make_request("fresh", (1, 3), arrival=1.0, max_tokens=2))
    engine.add(make_request("resumed", (1, 4), arrival=2.0, max_tokens=2, resumed_ids=(0,)))
    engine.add(make_request("urgent", (1, 4), arrival=3.0, max_tokens=2, priority=-1))
    began: list[str] = []
    while engine.scheduler.has_unfinished:
        engine.step()
        began += [i for i, out in engine.outputs.items() if out and i not in began]
    assert began == ["a", "urgent", "resumed", "fresh"]


def test_resumed_output_needs_room_and_is_no_cached_prompt() -> None:
    engine = engine_of(num_pages=4)
    with pytest.raises(CapacityError, match="16 tokens"):
        engine.add(make_request("a", (1, 2), resumed_ids=(1,) * 14, max_tokens=20))
    prompt = (1, 2, 3, 4)
    whole = continuation(prompt, 11)
    engine.add(make_request("a", prompt, max_tokens=11))
    engine.run()
    engine.add(make_request("b", prompt, max_tokens=11, resumed_ids=tuple(whole[:10])))
    engine.run()
    assert engine.tokens("b") == whole[10:]
    metrics = engine.outputs["b"][-1].metrics
    assert metrics is not None and metrics.num_cached_tokens == 4, "of 12 that were found"


PROMPT = (1, 2, 3)
PLAIN = continuation(PROMPT, 12)


def run(num_drafts: int = 0, **changes: object) -> tuple[FakeEngine, list[Output]]:
    drafter = perfect if num_drafts else nothing
    engine = FakeEngine(drafter=drafter, plan_drafts=at_most(num_drafts))
    engine.add(make_request("a", PROMPT, **changes))
    engine.run()
    assert engine.pool.num_available == engine.pool.num_pages
    return engine, engine.outputs["a"]


def first_place(token: int) -> int:
    return PLAIN.index(token)


@pytest.mark.parametrize("num_drafts", [0, 4])
def test_stop_id(num_drafts: int) -> None:
    token = PLAIN[3]
    engine, outputs = run(
        num_drafts, max_tokens=12, stop_ids=frozenset({token}), stop_token_ids=(token,)
    )
    assert engine.tokens("a") == PLAIN[: first_place(token) + 1]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (FinishReason.STOP, token)


def test_end_of_sequence_has_no_stop_reason() -> None:
    _, outputs = run(max_tokens=12, stop_ids=frozenset({PLAIN[3]}))
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (FinishReason.STOP, None)


def test_all_pages_are_a_context_limit_too() -> None:
    engine = FakeEngine(num_pages=2, page_size=4)
    engine.add(make_request("a", PROMPT, max_tokens=50))
    engine.run()
    assert engine.scheduler.max_len == 8
    assert engine.tokens("a") == PLAIN[:5]
    assert engine.outputs["a"][-1].finish_reason is FinishReason.LENGTH


class Strings:
    """Finds a stop string at a given number of output tokens; records what it is asked."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.seen: list[int] = []

    def find(self, request_id: str, new_ids: tuple[int, ...]) -> StopMatch | None:
        before = len(self.seen)
        self.seen += new_ids
        if before < self.at <= len(self.seen):
            return StopMatch(self.at - before, "halt")
        return None


@pytest.mark.parametrize("num_drafts", [0, 4])
@pytest.mark.parametrize("at", [1, 3, 4])
def test_stop_string(num_drafts: int, at: int) -> None:
    strings = Strings(at)
    engine = FakeEngine(
        drafter=perfect if num_drafts else nothing,
        plan_drafts=at_most(num_drafts),
        find_stop_string=strings.find,
    )
    engine.add(make_request("a", PROMPT, max_tokens=12, stop="halt"))
    engine.run()
    last = engine.outputs["a"][-1]
    assert engine.tokens("a") == PLAIN[:at]
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, "halt")


def test_text_is_searched_without_the_final_stop_id() -> None:
    token = PLAIN[3]
    strings = Strings(99)
    engine = FakeEngine(drafter=perfect, plan_drafts=at_most(4), find_stop_string=strings.find)
    engine.add(make_request("a", PROMPT, max_tokens=12, stop_ids=frozenset({token})))
    engine.run()
    assert strings.seen == PLAIN[: first_place(token)]


def test_a_stop_string_beats_a_later_stop_id() -> None:
    token = next(t for t in PLAIN if first_place(t) >= 2)
    strings = Strings(2)
    engine = FakeEngine(drafter=perfect, plan_drafts=at_most(6), find_stop_string=strings.find)
    engine.add(make_request("a", PROMPT, max_tokens=12, stop_ids=frozenset({token})))
    engine.run()
    assert engine.tokens("a") == PLAIN[:2]
    assert engine.outputs["a"][-1].stop_reason == "halt"


def test_only_kept_tokens_are_counted() -> None:
    engine, outputs = run(4, max_tokens=12, logprobs=0, stop_ids=frozenset({PLAIN[3]}))
    end = first_place(PLAIN[3]) + 1
    metrics = outputs[-1].metrics
    assert metrics is not None
    kept_drafts = sum(
        source is TokenSource.ACCEPTED for output in outputs for source in output.sources
    )
    assert sum(metrics.accepted_per_step) == kept_drafts
    assert kept_drafts == end - 1
    for output in outputs:
        assert output.logprobs is not None
        assert [next(iter(e)) for e in output.logprobs] == list(output.new_token_ids)
