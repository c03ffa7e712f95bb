"""The checks again under load and at each draft length, in the minutes given."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from foretoken.errors import EndpointError
from foretoken.lab.audit.asking import Asker
from foretoken.lab.audit.judging import CheckResult
from foretoken.lab.audit.pressure import STAGES
from foretoken.lab.audit.run import AuditPlan, Findings, Hooks, audit
from tests.marks import slow_but
from tests.mock_server.faults import MockFaults
from tests.mock_server.generator import MockLaw, MockModel
from tests.mock_server.server import MockServer
from tests.unit.lab.in_process import InProcess

TEXTS = [f"prompt {i}: write about what number {i} is good for" for i in range(60)]


class Ticking:
    """A clock that goes on by a second whenever it is read."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1.0
        return self.seconds


def run(
    faults: MockFaults,
    plan: AuditPlan,
    ended: Callable[[CheckResult], None] = lambda result: None,
    not_started: Sequence[int] = (),
    plain: MockFaults | None = None,
) -> tuple[Findings, MockServer]:
    law = MockLaw(step_s=0.0, prefill_s=0.0, k=3, seed=0)
    model = MockModel(rounding=0.004)
    server = MockServer(law, model, faults)
    pool = InProcess(server)

    @asynccontextmanager
    async def at_depth(length: int) -> AsyncIterator[Asker]:
        if length in not_started:
            raise EndpointError(f"it ended with code 1; the end of the log:\nno\nlength {length}")
        fields = {"speculation": {"num_speculative_tokens": length}}
        yield Asker(pool, "mock", extra_body=fields)

    async def main() -> Findings:
        arm = Asker(pool, "mock")
        hooks = Hooks(clock=Ticking(), ended=ended)
        off = None if plain is None else Asker(InProcess(MockServer(law, model, plain)), "mock")
        return await audit(arm, off, TEXTS, plan, at_depth=at_depth, hooks=hooks)

    return asyncio.run(main()), server


@pytest.mark.parametrize("share", slow_but([1.0, 0.5, 0.3], 0.3))
def test_a_leaked_page_is_named_under_load(share: float) -> None:
    """Nothing of it shows at 8 in flight."""
    plan = AuditPlan(prompts=4, only=("copies", "load"), minutes=1.0)
    found, _ = run(MockFaults(leak_page=share), plan)
    copies, load = found.checks
    assert copies.status == "ok", copies
    assert load.name == "load-12" and load.status == "fault", load
    assert any("leak: the answer to client zq" in why for why in load.examples), load.examples
    assert found.missed[-1] == f"load: {STAGES[-1].said}"
    assert len(found.missed) >= len(STAGES) - 1, found.missed


@pytest.mark.parametrize("refuse", [(), ("logprobs",)])
def test_text_that_no_token_is_likely_to_begin_is_a_fault_under_load(
    refuse: tuple[str, ...],
) -> None:
    """Where the server tells log-probabilities; the texts alone leave it open."""
    plan = AuditPlan(prompts=4, only=("copies", "load"), minutes=1.0)
    found, _ = run(MockFaults(garble_loaded=0.3, refuse=refuse), plan)
    copies, load = found.checks
    assert copies.status == "ok" and load.name == "load-12", found
    assert load.status == ("open" if refuse else "fault"), load
    assert load.altered > 0 and any("!" in why for why in load.examples), load


@pytest.mark.parametrize(("also", "status"), [(False, "fault"), (True, "both")])
@pytest.mark.parametrize("fault", [MockFaults(garble_loaded=0.5), MockFaults(leak_page=0.5)])
def test_what_plain_decoding_does_under_the_same_load_is_not_by_speculation(
    fault: MockFaults, also: bool, status: str
) -> None:
    plan = AuditPlan(prompts=4, only=("copies", "load"), minutes=1.0)
    found, _ = run(fault, plan, plain=fault if also else MockFaults())
    load = found.checks[-1]
    assert (load.name, load.status) == ("load-12", status), load
    assert (load.plain_wrong > 0) == also and load.wrong > 0, load


def test_a_right_server_passes_every_stage_that_the_minutes_allow() -> None:
    plan = AuditPlan(prompts=4, only=("load",), minutes=0.5)
    found, server = run(MockFaults(), plan)
    assert [one.name for one in found.checks] == ["load-12"], found.missed
    assert {one.status for one in found.checks} == {"ok"}, found.checks
    assert len(found.missed) >= len(STAGES) - 1, found.missed
    assert not server.engine.running, "long requests were cancelled"


@pytest.mark.slow
def test_every_stage_is_reached_where_there_is_time() -> None:
    found, server = run(MockFaults(), AuditPlan(prompts=4, only=("load",), minutes=60.0))
    assert [one.name for one in found.checks] == [f"load-{one.in_flight}" for one in STAGES]
    assert {one.status for one in found.checks} == {"ok"}, found.checks
    assert found.missed == () and not server.engine.running


def test_one_wrong_depth_is_found_among_right_ones() -> None:
    plan = AuditPlan(prompts=8, only=("depths",), depths=(3, 4, 5, 6))
    found, _ = run(MockFaults(wrong_depth=0.5), plan)
    assert {one.name: one.status for one in found.checks} == {
        "depth-3": "ok", "depth-4": "ok", "depth-5": "fault", "depth-6": "ok",
    }  # fmt: skip


def test_depths_that_were_not_reached_are_said() -> None:
    found, _ = run(MockFaults(), AuditPlan(prompts=4, only=("depths",), minutes=0.05))
    assert 1 <= len(found.checks) < 7
    assert found.missed and found.missed[0].startswith("depths: ")


def test_what_a_server_refuses_is_said() -> None:
    found, _ = run(MockFaults(refuse=("prompt",)), AuditPlan(prompts=4, only=("load",)))
    assert any("prompt is not supported" in said for said in found.missed), found


def test_a_length_that_is_refused_is_said_and_the_next_is_looked_at() -> None:
    """In the answer to a request, or by a server that does not start with it."""
    plan = AuditPlan(prompts=4, only=("depths",), depths=(4, 5, 6))
    found, _ = run(MockFaults(longest=5), plan, not_started=(4,))
    assert [one.status for one in found.checks] == ["unasked", "ok", "unasked"], found
    assert found.checks[0].why == "it ended with code 1; the end of the log: length 4"
    assert "at most 5 draft tokens" in found.checks[2].why
    assert found.missed == ()


@pytest.mark.parametrize("last", ["seeds", "load-12"])
def test_an_audit_that_is_stopped_keeps_what_it_found(last: str) -> None:
    def stop(result: CheckResult) -> None:
        task = asyncio.current_task()
        if result.name == last and task is not None:
            task.cancel()

    plan = AuditPlan(prompts=4, only=("seeds", "copies", "usage", "load", "zero"), minutes=30.0)
    found, _ = run(MockFaults(miscount=1.0), plan, stop)
    names = [one.name for one in found.checks]
    assert names[-2:] == [last, "usage"], names
    assert found.checks[-1].status == "fault", "what was answered is still read"
    assert "the audit was stopped" in found.missed[-1], found.missed
