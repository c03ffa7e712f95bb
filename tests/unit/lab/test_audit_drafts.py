"""Stretches of acceptance at 0 and 1, loops, and drift beside what is published."""

import asyncio
import json
from dataclasses import replace

import pytest

from foretoken.lab.audit.asking import Asker, read_reply
from foretoken.lab.audit.drafts import DraftWindow, card_of, loops, stretches
from foretoken.lab.audit.judging import CheckResult
from foretoken.lab.audit.run import AuditPlan, Findings, Hooks, audit
from foretoken.lab.http.timed import Answer
from tests.mock_server.faults import MockFaults
from tests.mock_server.generator import MockLaw, MockModel
from tests.mock_server.server import MockServer
from tests.unit.lab.in_process import InProcess
from tests.unit.lab.test_audit_pressure import TEXTS, Ticking

PLAN = AuditPlan(prompts=8, max_tokens=16)


def run(
    faults: MockFaults, plan: AuditPlan, *, alpha: float = 0.7, k: int = 3, seed: int = 0
) -> Findings:
    law = MockLaw(step_s=0.0, prefill_s=0.0, k=k, alpha=alpha, seed=seed)
    arm = Asker(InProcess(MockServer(law, MockModel(rounding=0.004), faults)), "mock")
    return asyncio.run(audit(arm, None, TEXTS, plan, hooks=Hooks(clock=Ticking())))


@pytest.mark.parametrize("share", [0.3, 0.5])
@pytest.mark.parametrize("fault", ["stuck_acceptance", "sure_acceptance"])
def test_a_stretch_is_found_with_its_time(fault: str, share: float) -> None:
    found = run(MockFaults(**{fault: share}), replace(PLAN, only=("zero",)))  # type: ignore[arg-type]
    [zero] = found.checks
    assert zero.status == "fault", zero
    said = "acceptance exactly 0 of" if fault == "stuck_acceptance" else "acceptance exactly 1 of"
    assert any(said in why and "s after the start" in why for why in zero.examples), zero.examples
    if fault == "stuck_acceptance":
        assert "drawn answers in a row repeat themselves, from " in zero.examples[0]


def test_a_right_server_has_no_stretches() -> None:
    found = run(MockFaults(), replace(PLAN, only=("zero", "greedy", "copies")))
    assert {one.name: one.status for one in found.checks}["zero"] == "ok", found.checks


def test_acceptance_of_zero_from_beginning_to_end_is_a_fault() -> None:
    found = run(MockFaults(stuck_acceptance=1.0), replace(PLAN, only=("zero",)))
    assert "and nothing else" in found.checks[0].why or "repeat" in found.checks[0].why


def test_a_server_that_tells_nothing_of_its_drafts_is_said() -> None:
    found = run(MockFaults(no_metrics=True), replace(PLAN, only=("zero", "drift")))
    zero, drift = found.checks
    assert zero.status == "ok" and drift.status == "unasked"
    assert any("tells nothing of its drafts" in said for said in found.missed)


def test_a_server_that_drafts_nothing_is_told_from_one_that_tells_nothing() -> None:
    """One that leaves off drafting where it does not pay, as under load."""
    found = run(MockFaults(), replace(PLAN, only=("zero", "drift")), k=0)
    assert found.checks[1].why == "the server drafted nothing"
    assert "zero: acceptance, since the server drafted nothing" in found.missed

    async def under_load() -> Findings:
        server = MockServer(MockLaw(step_s=0.0, prefill_s=0.0, k=3), MockModel())

        def ended(result: CheckResult) -> None:
            server.law = replace(server.law, k=0 if result.name == "seeds" else 3)

        plan = replace(PLAN, only=("seeds", "load"))
        arm = Asker(InProcess(server), "mock")
        return await audit(arm, None, TEXTS, plan, hooks=Hooks(ended=ended, clock=Ticking()))

    assert "load: with drafts, since the server drafted nothing" in asyncio.run(under_load()).missed


def test_chances_of_stretches() -> None:
    def window(accepted: int) -> DraftWindow:
        return DraftWindow("zero", 0.0, 1.0, steps=20, drafted=60, accepted=accepted)

    usual = [window(24), window(30), window(20), window(28)]
    assert stretches(usual, accepted=False) == []
    [(first, last, chance)] = stretches([*usual, window(0), window(0)], accepted=False)
    assert (first, last) == (4, 6) and chance < 1e-6
    rare = [window(2), window(1), window(0), window(1)]
    assert stretches(rare, accepted=False) == [], "a bad drafter is none that is stuck"
    assert stretches([window(0)] * 20, accepted=False) == [(0, 20, 0.0)]
    assert stretches([window(0)] * 3, accepted=False) == [], "too few to be believed"
    assert [one[:2] for one in stretches([*usual, window(60)], accepted=True)] == [(4, 5)]


def test_loops_are_told_from_prose() -> None:
    assert loops("It is the the the the the the the the the")
    assert loops("a" * 40)
    assert not loops("one two three four five six seven eight nine ten")


def test_drift_is_held_against_the_card() -> None:
    plan = replace(PLAN, only=("drift",), drafter="eagle3:RedHatAI/Qwen3-8B-speculator.eagle3")
    good = run(MockFaults(), plan, alpha=0.8, k=7).checks[0]
    assert good.status == "ok", good
    assert any(line.startswith("published: 5.30 math") for line in good.told)
    bad = run(MockFaults(), plan, alpha=0.1, k=7).checks[0]
    assert bad.status == "open" and "of the card's 2.66 (chat)" in bad.why, bad
    unknown = run(MockFaults(), replace(plan, drafter="mine"), alpha=0.1).checks[0]
    assert unknown.status == "ok" and "no published length for mine" in unknown.told


def test_cards_are_found_by_name() -> None:
    card = card_of("z-lab/Qwen3-8B-DFlash-b16")
    assert card is not None and card.lengths["math"] == 5.33 and card.trained == 4096
    assert card_of("ngram") is None


def test_what_an_answer_tells_of_its_drafts_is_read_beside_its_token_ids() -> None:
    event = {
        "prompt_token_ids": [1, 2],
        "choices": [{"text": "a", "token_ids": [3], "finish_reason": "length"}],
        "metrics": {"speculative_decoding": {"num_draft_tokens": 6, "num_spec_steps": 2,
                                             "num_accepted_draft_tokens": 3}},
    }  # fmt: skip
    body = json.dumps(event).encode()
    reply = read_reply({}, Answer(200, (), ((0.0, body),), 0.0, 0.0))
    assert reply.acceptance is not None and reply.acceptance.length == 2.5
    assert reply.prompt_ids == (1, 2)
