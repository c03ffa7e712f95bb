"""Small parts of control: reasons, a journal, failures, floors, budgets, what deciding takes."""

import json
import logging
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from foretoken.config import SpeculativeConfig
from foretoken.control.budget import PREDICTED_DRAFTS, LivePolicy, LoadLimit, RequestBudget
from foretoken.control.failsafe import Failsafe
from foretoken.control.floor import FIRST_REST, JUDGED_FROM, LONGEST_REST, AcceptanceFloor
from foretoken.control.plan import (
    DecodingSequence,
    DraftOutcome,
    DraftPlan,
    StepForecast,
    StepLoad,
    plan_no_drafts,
)
from foretoken.control.report import explain
from foretoken.control.report.explain import Outlook
from foretoken.control.report.journal import LOOK_EVERY, MOST_CHANGES, ControlJournal
from foretoken.control.report.reasons import by_plan, by_settings, with_floors
from foretoken.errors import ConfigError
from foretoken.proposers.choose.drafters import Drafters
from foretoken.proposers.choose.offers import Member
from foretoken.proposers.choose.policy import FirstPolicy
from foretoken.server.observing.server_metrics import ControlCollector
from foretoken.types import DEFAULT_GUARD, DraftingTime, RequestMetrics, Speculation, StepStats
from tests.unit.control_fakes import running
from tests.unit.proposing import make_context, make_sequence
from tests.unit.test_contract import Stub

METRICS = RequestMetrics(
    queued_s=0.0, first_token_s=0.1, finished_s=1.0, num_preemptions=0, num_cached_tokens=0
)


def test_why_a_drafter_drafts() -> None:
    outlook = Outlook(4, 2.9, 1.31)
    said = explain.why_drafting("eagle3", outlook, 1, 1)
    assert said == "eagle3 drafts 4: 2.9 tokens expected in 1.31 plain steps"
    said = explain.why_drafting("eagle3", Outlook(2.4, 1.8, 1.2), 3, 8)
    assert said == "eagle3 drafts 2.4 for 3 of 8: 1.8 tokens expected in 1.20 plain steps"


def test_why_a_drafter_rests() -> None:
    said = explain.why_resting(32, Outlook(3, 1.6, 1.9))
    assert said == (
        "resting: at 32 in flight a draft of 3 would take 1.9 plain steps for 1.6 tokens"
    )
    assert "nobody may have its drafts" in explain.why_resting(1, None)
    pays = explain.why_resting(1, Outlook(4, 3.1, 1.9), "eagle3")
    assert pays.endswith("is expected to bring 3.1 tokens in 1.90 plain steps; eagle3 brings more")
    assert "somebody would wait" in explain.why_resting(1, Outlook(4, 3.1, 1.9))
    assert explain.why_below_floor(0.12, 0.3) == (
        "resting: 12% of its recent draft tokens were accepted, min_acceptance is 30%"
    )
    assert "other drafters" in explain.why_passed_over()


def test_lookups_cost_rows_only() -> None:
    assert explain.why_looking_up("ngram", 12, drafts=True).startswith("ngram drafts where")
    assert "seldom repeats" in explain.why_looking_up("ngram", 12, drafts=False)
    assert "one more row" in explain.why_looking_up("ngram", 0, drafts=False)


def test_what_settings_say() -> None:
    assert explain.why_fixed(5) == "drafts up to 5 in every step, as configured"
    assert explain.why_by_load(0, 9) == "no drafts at 9 running, as configured by load"
    assert explain.why_by_load(2, 9) == "drafts up to 2 at 9 running, as configured by load"


@pytest.mark.parametrize(
    ("before", "now", "why", "said"),
    [
        (0, 4, "eagle3 drafts 4: 2.9 tokens", "eagle3 begins to draft 4: 2.9 tokens"),
        (5, 2, "up to 5 drafts at 1 running", "eagle3 drafts 2 instead of 5: up to 5 drafts"),
        (5, 0, "resting: at 32 in flight", "eagle3 rests: at 32 in flight"),
    ],
)
def test_a_change_says_its_reason_once(before: int, now: int, why: str, said: str) -> None:
    assert explain.change("eagle3", before, now, why).startswith(said)


def test_a_request_that_was_served() -> None:
    metrics = replace(
        METRICS,
        drafted_per_step=(4, 4, 8),
        accepted_per_step=(4, 2, 8),
        drafter_per_step=("eagle3", "eagle3", "suffix"),
    )
    said = explain.of_request(metrics, 20, "resting: at 32 in flight it would take longer")
    assert said == (
        "eagle3 served 2 of 6 steps with 4.0 drafts each, 3.0 accepted; suffix served 1 with 8.0 "
        "drafts each, 8.0 accepted; 3 were plain: at 32 in flight it would take longer"
    )
    # The first token comes out of the prompt: that step could not draft.
    assert explain.of_request(metrics, 18, "nobody asked").endswith("8.0 accepted")


def test_a_request_that_was_not() -> None:
    assert explain.of_request(METRICS, 20, "the request asked for none") == (
        "no step drafted: the request asked for none"
    )
    assert explain.of_request(METRICS, 20, "") == "no step drafted"


LOAD = StepLoad(num_decoding=2, num_prefilling=0)
FORECAST = StepForecast(seconds=0.013, plain_s=0.01, tokens=5.8, row_s=0.001, free_rows=12)
RESTING = DraftPlan(load=LOAD, budgets=(0, 0), lengths=(0, 0), drafters=("", ""), forecast=FORECAST)
PLAN = DraftPlan(
    load=LOAD, budgets=(4, 4), lengths=(4, 4), drafters=("eagle3",) * 2, forecast=FORECAST
)


def journal() -> ControlJournal:
    why = by_plan(lambda name: Outlook(3, 1.6, 1.9), looks_up={"ngram"})
    return ControlJournal("adaptive", {"eagle3": 8, "ngram": 4}, why)


def step(
    watched: ControlJournal, plan: DraftPlan, *, drafted: int = 0, accepted: int = 0,
    drafter: str = "eagle3", total_s: float = 0.013,
) -> None:  # fmt: skip
    outcomes = (
        [DraftOutcome(str(i), drafter, drafted, accepted) for i in range(2)] if drafted else []
    )
    timed = (DraftingTime(drafter, 2, drafted, 2 * drafted, 0.001 * drafted),) if drafted else ()
    stats = StepStats(
        num_sequences=2, num_tokens=2 + 2 * drafted, num_drafts=2 * bool(drafted),
        num_draft_tokens=2 * drafted, num_accepted_tokens=2 * accepted,
        num_accepted_tokens_per_pos=(), num_output_tokens=2 + 2 * accepted, num_waiting=0,
        drafting_s=0.0, verifying_s=0.0, total_s=total_s, num_sampled=2, drafters=timed,
    )  # fmt: skip
    watched.observe(plan, outcomes, stats)


def run(watched: ControlJournal, count: int = LOOK_EVERY, drafted: int = 4) -> None:
    for i in range(count):
        step(watched, PLAN if drafted else RESTING, drafted=drafted, accepted=min(i % 3, drafted))


def test_a_failure_is_a_change_and_the_reason_of_everything() -> None:
    watched = journal()
    run(watched)
    watched.fail("control failed learning from a step: ValueError: no")
    found = watched.describe()
    assert found["failed"] == "control failed learning from a step: ValueError: no"
    assert found["changes"][-1]["sentence"] == f"eagle3 rests: {found['failed']}"
    assert {one["why"] for one in found["drafters"].values()} == {found["failed"]}
    assert {one["state"] for one in found["drafters"].values()} == {"resting"}
    assert watched.why_plain() == found["failed"]


def test_before_the_first_step_nothing_is_claimed() -> None:
    found = journal().describe()
    assert found["step"] is None and found["prediction_error"] is None and not found["changes"]
    assert found["drafters"]["eagle3"]["why"] == "no step yet"
    assert json.loads(json.dumps(found)) == found


def test_a_drafter_that_drafts() -> None:
    watched = journal()
    run(watched)
    one = watched.describe()["drafters"]["eagle3"]
    assert one["state"] == "drafting" and one["draft_length"] == 4.0 and one["most"] == 8
    assert one["why"] == "eagle3 drafts 4: 2.9 tokens expected in 1.30 plain steps"
    assert one["chances"] == [pytest.approx(5 / 8, abs=0.07), pytest.approx(5 / 16, abs=0.07), 0, 0]
    assert one["share_of_steps"] == 1.0 and one["draft_tokens"] == 8 * LOOK_EVERY
    assert one["resting_s"] == pytest.approx(0.013 * LOOK_EVERY)  # until the first look


def test_a_change_is_said_once_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    watched = journal()
    with caplog.at_level(logging.INFO, logger="foretoken"):
        run(watched)
    run(watched, drafted=0)
    run(watched, 10 * LOOK_EVERY, drafted=0)
    said = [one["sentence"] for one in watched.describe()["changes"]]
    assert said == [
        "eagle3 begins to draft 4: 2.9 tokens expected in 1.30 plain steps",
        "eagle3 rests: at 2 in flight a draft of 3 would take 1.9 plain steps for 1.6 tokens",
    ]
    assert f"control: {said[0]}" in caplog.text
    assert watched.describe()["drafters"]["eagle3"]["resting_s"] == pytest.approx(
        0.013 * 11 * LOOK_EVERY
    )


def test_another_length_is_a_change_and_a_trial_is_none() -> None:
    watched = journal()
    run(watched)
    run(watched, 8 * LOOK_EVERY, drafted=7)
    assert "instead of 4" in watched.describe()["changes"][-1]["sentence"]
    watched = journal()
    for _ in range(8):
        run(watched, LOOK_EVERY - 1, drafted=0)
        step(watched, PLAN, drafted=2)
    assert not watched.describe()["changes"]


def test_changes_are_forgotten_in_the_end() -> None:
    watched = journal()
    for _ in range(MOST_CHANGES):
        run(watched)
        run(watched, drafted=0)
    found = watched.describe()
    assert len(found["changes"]) == MOST_CHANGES and found["num_changes"] == 2 * MOST_CHANGES


def test_what_models_know_is_said_and_what_was_wasted() -> None:
    watched = journal()
    watched.facts = lambda: {"prediction_error": {"p50": 0.1}, "pass_s": {"eagle3": 0.001}}
    for total_s in (0.013, 0.0065, 0.026):
        step(watched, PLAN, drafted=4, accepted=1, total_s=total_s)
    found = watched.describe()
    assert found["prediction_error"] == {"p50": 0.1}
    assert found["drafters"]["eagle3"]["pass_s"] == 0.001
    assert found["drafters"]["ngram"]["pass_s"] is None
    assert found["wasted_s"] == pytest.approx(3 * 6 * 0.001)
    assert found["step"]["predicted_s"] == 0.013 and found["step"]["measured_s"] == 0.026


def test_steps_in_which_nobody_wants_drafts_say_nothing_of_drafters() -> None:
    watched = ControlJournal("fixed", {"eagle3": 8}, by_settings({"eagle3": 8}))
    run(watched)
    for _ in range(5 * LOOK_EVERY):
        step(watched, DraftPlan(load=LOAD, budgets=(0, 0), wanted=False))
    assert watched.describe()["drafters"]["eagle3"]["state"] == "drafting"
    assert watched.why_plain() == ""


def test_reasons_of_settings_and_of_floors() -> None:
    why = by_settings({"a": 5, "b": 3})
    assert "up to 5 in every step" in why("a", True, PLAN)
    assert "other drafters" in why("b", False, PLAN)
    assert "by load" in why("a", True, DraftPlan(load=LOAD, budgets=(0, 0), limit=2))
    floor = AcceptanceFloor(0.5)
    floor.observe("a", [DraftOutcome("r", "a", 100, 10)])
    floored = with_floors(why, {"a": floor})
    assert "min_acceptance is 50%" in floored("a", False, PLAN)
    assert floored("b", False, PLAN) == why("b", False, PLAN)


def test_what_a_plan_says_of_those_it_leaves_out() -> None:
    why = by_plan(lambda name: None, looks_up={"ngram"})
    assert "up to 12 rows" in why("ngram", True, PLAN)
    assert why("draft_model", False, PLAN).startswith("resting: at 2 in flight nobody may")
    pays = by_plan(lambda name: Outlook(4, 3.1, 1.9), looks_up=())
    assert pays("draft_model", False, PLAN).endswith("eagle3 brings more")
    assert pays("eagle3", True, PLAN).startswith("eagle3 drafts 4")


def test_a_drafter_that_is_left_out_of_a_step_says_why_it_drafts() -> None:
    watched = journal()
    run(watched)
    step(watched, RESTING)
    assert watched.describe()["drafters"]["eagle3"]["why"].startswith("eagle3 drafts 4")


def test_prometheus_has_all_of_it() -> None:
    watched, registry = journal(), CollectorRegistry()
    registry.register(ControlCollector(watched, "demo", "foretoken"))
    generate_latest(registry)
    run(watched)
    error = {"p50": 0.1, "p90": 0.2, "steps": 3}
    watched.facts = lambda: {
        "account_s": 0.25, "trials_s": 0.5, "forgone_tokens": 3.0, "prediction_error": error,
    }  # fmt: skip
    text = generate_latest(registry).decode()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    common = 'engine="0",model_name="demo"'
    for name, value in (
        (f'prediction_error{{{common},quantile="0.9"}}', 0.2),
        (f'draft_length{{drafter="eagle3",{common}}}', 4.0),
        (f"exploring_seconds_total{{{common}}}", 0.5),
        (f"forgone_tokens_total{{{common}}}", 3.0),
        (f"changes_total{{{common}}}", 1.0),
        (f"predicted_step_seconds{{{common}}}", 0.013),
    ):
        assert float(lines["foretoken:control_" + name]) == pytest.approx(value), name
    assert any("control_resting_seconds_total" in line for line in lines)
    assert any("control_wasted_seconds_total" in line for line in lines)


SEQUENCES: list[DecodingSequence] = [running("a"), running("b")]


class Planned:
    """Plans well for some steps."""

    def __init__(self, good: int) -> None:
        self.good, self.asked = good, 0

    def plan(self, sequences: object, load: StepLoad) -> DraftPlan:
        self.asked += 1
        if self.asked > self.good:
            raise ValueError("planted\nin two lines")
        return DraftPlan(load=load, budgets=(3, 3))


def test_a_planner_that_fails_is_asked_no_more(caplog: pytest.LogCaptureFixture) -> None:
    planned, said = Planned(2), list[str]()
    safe = Failsafe(planned.plan, ["eagle3"], said.append)
    drafts = [safe.plan(SEQUENCES, LOAD).budgets for _ in range(5)]
    assert drafts == [(3, 3), (3, 3), (0, 0), (0, 0), (0, 0)]
    assert planned.asked == 3
    assert safe.plan(SEQUENCES, LOAD) == plan_no_drafts(SEQUENCES, LOAD, frozenset({"eagle3"}))
    assert said == ["control failed planning a step: ValueError: planted in two lines"]
    [record] = caplog.records
    assert record.levelno == logging.ERROR and record.exc_info, "with the traceback"
    assert "every step is plain from now on" in record.getMessage()


def test_learning_that_fails_ends_planning_too() -> None:
    planned, said, told = Planned(99), list[str](), list[int]()
    safe = Failsafe(planned.plan, [], said.append)

    def learn(number: int) -> None:
        told.append(number)
        if number == 2:
            raise ZeroDivisionError("planted")

    learns, forgets = safe.guarded(learn), safe.guarded(told.append)
    for number in range(4):
        learns(number)
    forgets(9)
    assert told == [0, 1, 2], "nobody knows what state it is in"
    assert said == ["control failed learning from a step: ZeroDivisionError: planted"]
    assert safe.plan(SEQUENCES, LOAD).budgets == (0, 0) and not planned.asked


def test_interrupts_are_no_failures() -> None:
    def interrupted(sequences: object, load: StepLoad) -> DraftPlan:
        raise KeyboardInterrupt

    safe = Failsafe(interrupted, [], lambda why: None)
    with pytest.raises(KeyboardInterrupt):
        safe.plan(SEQUENCES, LOAD)


def steps(floor: AcceptanceFloor, count: int, accepted: int) -> list[bool]:
    """Whether it rested after each step; drafts of four while it does not."""
    found = []
    for _ in range(count):
        outcomes = [] if floor.rests else [DraftOutcome("r", "d", 4, accepted)]
        floor.observe("d", [*outcomes, DraftOutcome("r", "other", 4, 0)])
        found.append(floor.rests)
    return found


def test_it_rests_once_enough_drafts_were_refused() -> None:
    floor = AcceptanceFloor(0.3)
    assert floor.acceptance == 1.0 and not floor.rests
    judged = JUDGED_FROM // 4
    assert steps(floor, judged, accepted=1) == [False] * (judged - 1) + [True]


def test_it_goes_on_while_enough_is_accepted() -> None:
    floor = AcceptanceFloor(0.3)
    assert not any(steps(floor, 300, accepted=2))
    assert floor.acceptance == pytest.approx(0.5)


def test_rests_grow_while_trials_fail_and_begin_short_again() -> None:
    floor, judged = AcceptanceFloor(0.3), JUDGED_FROM // 4
    lengths = []
    for _ in range(8):
        steps(floor, judged, accepted=0)
        lengths.append(0)
        while floor.rests:
            floor.observe("d", [])
            lengths[-1] += 1
    assert lengths == [min(FIRST_REST << i, LONGEST_REST) for i in range(8)]
    steps(floor, judged, accepted=4)
    while not floor.rests:
        steps(floor, 1, accepted=0)
    assert sum(steps(floor, FIRST_REST, accepted=0)) == FIRST_REST - 1


def test_only_those_drafters_are_left_out() -> None:
    one, two = Stub("one", 1, "a"), Stub("two", 2, "a")
    floor = AcceptanceFloor(0.5)
    members = {
        "one": Member(proposer=one, max_drafts=3, floor=floor),
        "two": Member(proposer=two, max_drafts=3),
    }
    sequence = make_sequence([1], [2], request_id="a")
    both, alone = Drafters(members, FirstPolicy()), Drafters({"one": members["one"]}, FirstPolicy())
    assert both.propose(make_context((sequence, 2))).names == ("one",)
    floor.observe("one", [DraftOutcome("a", "one", JUDGED_FROM, 0)])
    assert both.propose(make_context((sequence, 2))).names == ("two",)
    assert alone.propose(make_context((sequence, 2))).ids == ((),)


def test_the_key_is_a_share() -> None:
    config = SpeculativeConfig.from_dict({"method": "ngram", "min_acceptance": 0.4})
    assert config.drafters[0].stop.min_acceptance == 0.4
    with pytest.raises(ConfigError, match="min_acceptance"):
        SpeculativeConfig.from_dict({"method": "ngram", "min_acceptance": 1.0})


DRAFTERS = {"ngram": 8, "draft_model": 3}


def load(running: int, prefilling: int = 0) -> StepLoad:
    return StepLoad(num_decoding=running - prefilling, num_prefilling=prefilling)


def budget_of(policy: RequestBudget, running: int = 1, **request: Any) -> int:
    [most] = policy.plan([make_sequence([1], [2], **request)], load(running)).budgets
    return most


def wishes(**speculation: Any) -> dict[str, Any]:
    return {"params": {"speculation": speculation}}


@pytest.mark.parametrize(
    ("operator", "own", "budgets"),
    [
        ({}, {}, (8, 8, 3)),
        ({}, {"enabled": False}, (0, 0, 0)),
        ({}, {"num_speculative_tokens": 2}, (2, 2, 2)),
        ({}, {"num_speculative_tokens": 0}, (0, 0, 0)),
        ({}, {"drafter": "draft_model"}, (3, 0, 3)),
        ({}, {"drafter": "draft_model", "num_speculative_tokens": 5}, (3, 0, 3)),
        ({}, {"drafter": "ngram", "num_speculative_tokens": 1}, (1, 1, 0)),
        ({"drafter": "ngram"}, {"drafter": "draft_model"}, (0, 0, 0)),
        ({"num_speculative_tokens": 2}, {"num_speculative_tokens": 4}, (2, 2, 2)),
        ({"enabled": False}, {"num_speculative_tokens": 4}, (0, 0, 0)),
    ],
)
def test_operator_and_request_may_lower_the_longest_drafters(
    operator: dict[str, Any], own: dict[str, Any], budgets: tuple[int, int, int]
) -> None:
    live = LivePolicy()
    live.speculation = Speculation(**operator)
    policy, request = RequestBudget(DRAFTERS, live=live), make_sequence([1], [2], **wishes(**own))
    each = tuple(policy.budget(request.request, one) for one in (None, "ngram", "draft_model"))
    assert (each, budget_of(policy, **wishes(**own))) == (budgets, budgets[0])


def test_a_prediction_is_drafted_from_without_any_drafter() -> None:
    assert budget_of(RequestBudget({})) == 0
    assert budget_of(RequestBudget({}), prediction_ids=(1, 2)) == PREDICTED_DRAFTS
    off = wishes(enabled=False)
    assert budget_of(RequestBudget({}), prediction_ids=(1, 2), **off) == 0


def test_a_schedule_keeps_gaps_and_the_end_as_they_were() -> None:
    policy = RequestBudget(DRAFTERS, LoadLimit([(1, 2, 8), (4, 5, 3), (8, 9, 0), (12, 12, 1)]))
    found = [budget_of(policy, running) for running in range(1, 14)]
    assert found == [8, 8, 8, 3, 3, 3, 3, 0, 0, 0, 0, 1, 1]
    assert budget_of(policy, 8, prediction_ids=(1, 2)) == 0


def test_off_from_a_batch_size_counts_running_sequences_only() -> None:
    policy = RequestBudget(DRAFTERS, LoadLimit.off_from(4, 1 << 30))
    assert [budget_of(policy, running) for running in (1, 3, 4, 50)] == [8, 8, 0, 0]
    sequence = make_sequence([1], [2])
    assert policy.plan([sequence], load(4, prefilling=3)).budgets == (0,)
    assert policy.plan([sequence], load(3)).budgets == (8,)  # 99 wait


def test_the_guard_is_the_requests_own_then_the_operators() -> None:
    live = LivePolicy()
    policy = RequestBudget(DRAFTERS, live=live)

    def guard(**wishes: Any) -> float:
        return policy.guard(make_sequence([1], [2], params={"speculation": wishes}).request)

    assert guard() == DEFAULT_GUARD
    live.speculation = Speculation(guard=0.3)
    assert (guard(), guard(guard=0.0)) == (0.3, 0.0)
