"""What control did: states, lengths, changes and errors of predictions, from steps."""

import json
import logging

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from foretoken.control.floor import AcceptanceFloor
from foretoken.control.measured import MeasuredLimit
from foretoken.control.plan import DraftOutcome, DraftPlan, StepForecast, StepLoad
from foretoken.control.report.explain import Outlook
from foretoken.control.report.journal import LOOK_EVERY, MOST_CHANGES, ControlJournal
from foretoken.control.report.reasons import by_plan, by_settings, by_trial, with_floors
from foretoken.server.observing.control import ControlCollector
from foretoken.types import DraftingTime, StepStats

LOAD = StepLoad(num_decoding=2, num_prefilling=0, num_waiting=0)
FORECAST = StepForecast(seconds=0.013, plain_s=0.01, tokens=5.8, row_s=0.001, free_rows=12)
RESTING = DraftPlan(load=LOAD, drafts=(0, 0), lengths=(0, 0), drafters=("", ""), forecast=FORECAST)
PLAN = DraftPlan(
    load=LOAD, drafts=(4, 4), lengths=(4, 4), drafters=("eagle3",) * 2, forecast=FORECAST
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
        step(watched, DraftPlan(load=LOAD, drafts=(0, 0), wanted=False))
    assert watched.describe()["drafters"]["eagle3"]["state"] == "drafting"
    assert watched.why_plain() == ""


def test_reasons_of_settings_and_of_trials() -> None:
    why = by_settings({"a": 5, "b": 3})
    assert "up to 5 in every step" in why("a", True, PLAN)
    assert "other drafters" in why("b", False, PLAN)
    assert "by load" in why("a", True, DraftPlan(load=LOAD, drafts=(0, 0), limit=2))
    limit = MeasuredLimit(3)
    tried = by_trial(limit)
    assert "no drafts at 2 to 2 running" in tried("a", False, PLAN) or "not measured" in tried(
        "a", False, PLAN
    )
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
