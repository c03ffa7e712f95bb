"""Each rule by which an output ends, and what is kept when it ends inside accepted drafts."""

import pytest

from foretoken.runtime.scheduling.scheduler import SchedulerConfig
from foretoken.text.tokenizer import StopMatch
from foretoken.types import FinishReason, Output, TokenSource
from tests.unit.scheduler_fakes import (
    FakeEngine,
    at_most,
    continuation,
    make_request,
    nothing,
    perfect,
)

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
@pytest.mark.parametrize("max_tokens", [1, 2, 5, 6])
def test_max_tokens(num_drafts: int, max_tokens: int) -> None:
    engine, outputs = run(num_drafts, max_tokens=max_tokens)
    assert engine.tokens("a") == PLAIN[:max_tokens]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (FinishReason.LENGTH, None)


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


@pytest.mark.parametrize("num_drafts", [0, 4])
def test_no_stop_id_before_min_tokens(num_drafts: int) -> None:
    token = PLAIN[0]
    places = [i for i, t in enumerate(PLAIN) if t == token]
    engine, _ = run(num_drafts, max_tokens=12, min_tokens=3, stop_ids=frozenset({token}))
    end = next(place for place in places if place >= 2)
    assert engine.tokens("a") == PLAIN[: end + 1]


def test_a_stop_id_as_the_last_of_min_tokens_stops() -> None:
    end = first_place(PLAIN[3])
    engine, _ = run(max_tokens=12, min_tokens=end + 1, stop_ids=frozenset({PLAIN[3]}))
    assert engine.tokens("a") == PLAIN[: end + 1]


def test_a_stop_id_at_max_tokens_is_a_stop() -> None:
    end = first_place(PLAIN[3])
    _, outputs = run(max_tokens=end + 1, stop_ids=frozenset({PLAIN[3]}))
    assert outputs[-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("num_drafts", [0, 4])
def test_context_limit(num_drafts: int) -> None:
    engine = FakeEngine(
        config=SchedulerConfig(max_model_len=10),
        drafter=perfect if num_drafts else nothing,
        plan_drafts=at_most(num_drafts),
    )
    engine.add(make_request("a", PROMPT, max_tokens=50))
    engine.run()
    assert engine.tokens("a") == PLAIN[:7]
    assert engine.outputs["a"][-1].finish_reason is FinishReason.LENGTH


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
