"""Servers that hang, break off, or send what no server should: an audit ends, and says so."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from foretoken.lab.audit.asking import Asker, Reply, read_reply
from foretoken.lab.audit.drafts import loops
from foretoken.lab.audit.judging import CheckResult
from foretoken.lab.audit.run import Audited, AuditPlan, Findings, Hooks, audit
from foretoken.lab.http.client import parse_metrics
from foretoken.lab.http.timed import Answer, HttpPool, TransportError
from tests.mock_server.generator import MockLaw, MockModel
from tests.mock_server.server import MockServer
from tests.unit.lab.in_process import InProcess
from tests.unit.lab.test_audit_pressure import TEXTS, Ticking

PLAN = AuditPlan(prompts=8, samples=4, parameters=({"temperature": 1.0},), depths=(3, 4))
Spoil = Callable[[int, Answer], Answer]
"""What comes in place of the answer to a request, by its number."""


class Spoiled:
    """A mock server whose answers somebody changes."""

    def __init__(self, spoil: Spoil) -> None:
        self.asked = 0
        self._spoil = spoil
        law = MockLaw(step_s=0.0, prefill_s=0.0, k=3, seed=0)
        self._pool = InProcess(MockServer(law, MockModel(rounding=0.004)))

    async def send(self, method: str, path: str, body: bytes = b"", *, timeout_s: float) -> Answer:
        answer = await self._pool.send(method, path, body, timeout_s=timeout_s)
        if path == "/metrics":
            return answer
        self.asked += 1
        return self._spoil(self.asked, answer)


def run(spoil: Spoil, plan: AuditPlan = PLAN) -> tuple[Findings, int]:
    """What an audit of such a server finds, and how many requests the server saw."""
    pool = Spoiled(spoil)

    async def main() -> Findings:
        hooks = Hooks(clock=Ticking())
        return await audit(Asker(pool, "mock"), None, TEXTS, plan, hooks=hooks)

    return asyncio.run(main()), pool.asked


def of(found: Findings) -> Audited:
    return Audited(engine="mock", version=None, model="m", url="", method="", card="",
                   baseline="none", requests=0, seconds=0.0, checks=found.checks,
                   missed=found.missed, gone=found.gone)  # fmt: skip


def with_body(answer: Answer, body: bytes, status: int = 200) -> Answer:
    return Answer(status, answer.headers, ((0.0, body),), 0.0, 0.0)


def never(kind: str) -> Spoil:
    def spoil(number: int, answer: Answer) -> Answer:
        raise TransportError(kind, "as a test has it")

    return spoil


@pytest.mark.parametrize("kind", ["timeout", "connection"])
def test_a_server_that_answers_nothing_is_left_after_a_few_requests(kind: str) -> None:
    found, asked = run(never(kind))
    assert asked <= 8, "all that were in flight"
    assert {one.status for one in found.checks} == {"unasked"}
    assert "requests were left unanswered" in of(found).missing == found.missed[-1]


def test_a_server_that_falls_silent_keeps_what_was_found() -> None:
    def spoil(number: int, answer: Answer) -> Answer:
        return answer if number <= 60 else never("truncated")(number, answer)

    found, asked = run(spoil)
    assert 60 < asked <= 60 + 8 + 8
    assert "ok" in {one.status for one in found.checks} and of(found).missing == found.gone


def test_a_server_that_hangs_now_and_then_is_not_waited_for_for_hours() -> None:
    def spoil(number: int, answer: Answer) -> Answer:
        return never("timeout")(number, answer) if number % 20 == 0 else answer

    found, asked = run(spoil)
    assert asked <= 80 + 8 and found.gone.startswith("4 requests were left unanswered (timeout")


def test_errors_now_and_then_end_nothing() -> None:
    """HTTP 500 to one request in seven: the checks are made of the others."""

    def spoil(number: int, answer: Answer) -> Answer:
        return with_body(answer, b"broken", 500) if number % 7 == 0 else answer

    found, _ = run(spoil)
    asked = {one.name: one for one in found.checks if one.status != "unasked"}
    assert not found.gone and {one.status for one in asked.values()} == {"ok"}, asked
    assert {"seeds", "streams", "copies", "load-12", "zero", "drift"} <= asked.keys()
    assert sum(one.failed for one in asked.values()) > 5


def deep(answer: Answer) -> bytes:
    return b"[" * 100_000


def changed(**more: Any) -> Callable[[Answer], bytes]:
    """A whole answer with other fields; a stream as it is."""

    def change(answer: Answer) -> bytes:
        try:
            value = json.loads(answer.body)
        except ValueError:
            return answer.body
        for name, own in more.items():
            (value if name in ("usage", "metrics", "timings") else value["choices"][0])[name] = own
        return json.dumps(value).encode()

    return change


NULLS = {"prompt_tokens": None, "completion_tokens": None, "prompt_tokens_details": None}
LOGS = {"tokens": ["a"], "token_logprobs": [1e308], "top_logprobs": [{"a": 1e308}]}
STEPS = {"num_draft_tokens": 5, "acceptance_histogram": {"1000000000": 1}}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda answer: b'data: {"choi', "not what an OpenAI-style server sends"),
        (lambda answer: b"<html>moved</html>", "not what an OpenAI-style server sends"),
        (lambda answer: b'{"choices": [{"text": "' + b"x" * 5_000_000 + b'"}]}', "5 MB"),
        (deep, "RecursionError"),
        (changed(usage={"completion_tokens": "many"}), ""),
        (changed(usage=NULLS), ""),
        (changed(usage="none"), "not what an OpenAI-style server sends"),
        (changed(token_ids=[None, "a"]), "token ids that are no numbers"),
        (changed(logprobs=LOGS), "a log-probability of 1e+308"),
        (changed(logprobs={"tokens": ["a"], "top_logprobs": [{"a": None}]}), ""),
        (changed(metrics={"speculative_decoding": STEPS}), "a step of 1000000000 drafts"),
        (changed(finish_reason=5, text="word " * 20_000), ""),
    ],
    ids="half html long deep words nulls text ids logs tops steps words-for-ever".split(),
)  # fmt: skip
def test_whatever_a_server_sends_is_an_answer_or_an_error(
    change: Callable[[Answer], bytes], says: str
) -> None:
    plan = AuditPlan(prompts=2, samples=2, parameters=PLAN.parameters)
    found, _ = run(lambda _, answer: with_body(answer, change(answer)), plan)
    names = {one.name for one in found.checks}
    assert {"seeds", "usage", "placeholders", "zero", "drift"} <= names and not found.gone
    told = [why for one in found.checks for why in (one.why, *one.examples)]
    assert any(says in why for why in told), told


def test_of_a_page_nothing_is_right() -> None:
    """A stream of it has neither text nor end, which was once an answer without a fault."""
    found, _ = run(lambda _, answer: with_body(answer, b"<html>moved</html>"))
    assert of(found).missing == "nothing could be asked"


def test_a_stream_without_its_last_line_is_read() -> None:
    def spoil(number: int, answer: Answer) -> Answer:
        return with_body(answer, answer.body.replace(b"data: [DONE]\n\n", b""))

    found, _ = run(spoil, AuditPlan(prompts=4, only=("streams",)))
    assert [one.status for one in found.checks] == ["ok"]


def test_a_redirect_is_no_answer() -> None:
    moved = Answer(307, (("location", "https://x/"),), ((0.0, b""),), 0.0, 0.0)
    assert read_reply({}, moved).error == "HTTP 307"


def test_numbers_that_are_none_are_left_out_of_metrics() -> None:
    page = 'a 1\nb NaN\nc{quantile="0.5"} nan\nd +Inf\ne 2'
    assert parse_metrics(page) == {"a": 1.0, "e": 2.0}


def test_long_texts_are_looked_at_in_time() -> None:
    assert not loops("".join(map(str, range(200_000)))) and loops("again " * 100_000)


def test_an_endless_answer_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.lab.http.timed.MOST_BYTES", 1 << 20)

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        try:
            while True:
                writer.write(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
                await writer.drain()
        except ConnectionError:
            writer.close()

    async def main() -> Reply:
        server = await asyncio.start_server(endless, "127.0.0.1", 0)
        pool = HttpPool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        async with server:
            reply = await Asker(pool, "m").ask({"prompt": "x"})
            await pool.close()
        return reply

    assert "an answer of more than 1048576 bytes" in str(asyncio.run(main()).error)


def test_results_of_checks_are_told_when_they_come() -> None:
    """Also of a server that is gone: nobody waits for a page that never comes."""
    told: list[CheckResult] = []

    async def main() -> None:
        hooks = Hooks(clock=Ticking(), ended=told.append)
        await audit(Asker(Spoiled(never("timeout")), "m"), None, TEXTS, PLAN, hooks=hooks)

    asyncio.run(main())
    assert len(told) == 17
