"""How long a request would wait, by requests that have come and gone."""

import pytest

from foretoken.server.routed.pace import Paces, ServerPace
from foretoken.types import FinishReason, Output, Request, RequestMetrics, SamplingParams


def request(name: str, tokens: int) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=(1,) * tokens,
        params=SamplingParams(),
        seed=0,
        max_tokens=9,
    )


def queue_s(pace: ServerPace) -> float:
    return pace.backlog.seconds(pace.paces)


def token(name: str) -> Output:
    return Output(request_id=name, new_token_ids=(5,))


def end(name: str, queued: float, first: float, last: float, cached: int = 0) -> Output:
    times = RequestMetrics(
        queued_s=queued,
        first_token_s=first,
        finished_s=last,
        num_preemptions=0,
        num_cached_tokens=cached,
    )
    reason = FinishReason.LENGTH
    return Output(request_id=name, new_token_ids=(5,), finish_reason=reason, metrics=times)


def test_what_waits_is_counted() -> None:
    now = [0.0]
    pace = ServerPace(2, clock=lambda: now[0])
    assert pace.paces == Paces(0.0, 0.0, 0.0) and queue_s(pace) == 0.0
    pace.opened([request("a", 110)])
    now[0] = 5.0
    pace.observe([token("a")])
    now[0] = 5.5
    pace.observe([end("a", 1.0, 5.0, 5.5, cached=10)])
    assert pace.paces.prefill_token_s == pytest.approx(4.0 / 100)
    assert queue_s(pace) == 0.0, "nobody is there"
    pace.opened([request("b", 50)])
    assert queue_s(pace) == pytest.approx(0.5 + 50 * 0.04)
    now[0] = 100.0
    pace.observe([token("b")])
    assert queue_s(pace) == pytest.approx(0.5), "the time without requests is no step's"
    pace.opened([request("c", 25), request("d", 25)])
    # Two of four have to wait for others to end, of which two run at once.
    assert queue_s(pace) == pytest.approx(0.5 + 50 * 0.04 + 2 * 4.5 / 2)


def test_an_aborted_request_leaves_nothing() -> None:
    pace = ServerPace(1)
    pace.opened([request("a", 10)])
    pace.observe([Output(request_id="a", finish_reason=FinishReason.ABORT)])
    assert queue_s(pace) == 0.0 and not pace._open and not pace._unread
    pace.observe([token("a stranger")])
