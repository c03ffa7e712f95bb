"""What control says: numbers in, one sentence out."""

from dataclasses import replace

import pytest

from foretoken.control.report import explain
from foretoken.control.report.explain import Outlook
from foretoken.types import RequestMetrics

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


@pytest.mark.parametrize(
    ("drafts", "ms", "said"),
    [
        (3, {0: 1.4, 3: 1.2}, "up to 3 drafts at 5 to 8 running: 1.20 ms a token, 1.40 without"),
        (0, {0: 1.4, 3: 1.6, 5: 1.5}, "no drafts at 5 to 8 running: 1.40 ms a token, 1.50 with up"),
        (0, {0: 1.4}, "nothing else was tried yet"),
        (3, {0: 1.4}, "not measured yet at 5 to 8 running: up to 3 drafts"),
    ],
)
def test_why_a_length_that_was_tried(drafts: int, ms: dict[int, float], said: str) -> None:
    assert said in explain.why_measured(drafts, ms, "5 to 8")


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
