"""Break-even where only some steps draft: `decide` and the report against a known truth."""

from dataclasses import replace
from typing import Any

import pytest

from foretoken.cli.lab.run_tables import cells_table
from foretoken.lab.analysis.whole_time import StepCounts, break_even, break_even_of, draft_share_of
from foretoken.lab.decide.decision import decide
from foretoken.lab.decide.overall import JudgedRun
from foretoken.lab.decide.ship_policy import load_policy
from foretoken.lab.records.results import AbSummary, RequestAcceptance, RequestRecord
from foretoken.lab.report.page import Tile, tiles
from foretoken.lab.stats.intervals import Interval, unknown
from tests.marks import slow_but
from tests.unit.lab.drafting import DraftingLaw, ab_of, draw
from tests.unit.lab.summaries import ab, bucket, with_candidate

LAWS = (
    DraftingLaw(share=1.0),
    DraftingLaw(share=1.0, rate=0.1, verify_cost=1.6),
    DraftingLaw(share=0.35),
    DraftingLaw(share=0.35, uneven=True),
    DraftingLaw(share=0.35, rate=0.03, k=8, verify_cost=1.5),
    DraftingLaw(share=0.28, rate=0.2, k=6, verify_cost=2.2),
    DraftingLaw(share=0.1),
)


def says(summary: AbSummary, rule: str) -> str:
    """What a rule of the default policy says."""
    return next(
        j.result.says for j in decide(summary, load_policy(None)).rules if j.rule == rule
    )  # fmt: skip


@pytest.mark.parametrize("law", slow_but(LAWS, LAWS[0], LAWS[-1]), ids=str)
def test_intervals_hold_the_true_break_even(law: DraftingLaw) -> None:
    """Of ten experiments in nine at least."""
    held = 0
    for seed in range(10):
        found = break_even_of(ab_of(draw(law, seed, requests=8, tokens=80)))
        assert found is not None and found.known
        held += found.low <= law.break_even <= found.high
    assert held >= 9, held


def test_look_ups_that_draft_in_a_third_of_the_steps() -> None:
    """Once 26 % where the truth is 7 %."""
    law = DraftingLaw(share=0.35, noise=0.001)
    summary = ab_of(draw(law, requests=30))
    found = break_even_of(summary)
    assert found is not None and found.estimate == pytest.approx(0.07, abs=0.004)
    assert draft_share_of(summary) == pytest.approx(0.35, abs=0.01)
    decision = decide(summary, load_policy(None))
    assert decision.break_even_rate == found.estimate
    assert decision.draft_share == pytest.approx(0.35, abs=0.01)
    for rule in ("acceptance_pays", "p10_acceptance", "temperatures"):
        assert "of steps that draft" in says(summary, rule), rule
        assert "breaks even at 7%" in says(summary, rule), rule


def test_where_every_step_drafts_it_is_the_cost_less_one_over_k() -> None:
    """(AL / s - 1) / k, with 1 + k r tokens a step; the last token of an answer changes nothing."""
    counts = StepCounts(num_tokens=300, num_verifications=100, num_drafted=500, num_accepted=200)
    assert counts.draft_share == 1.0
    for speedup in (0.5, 1.0, 1.6, 2.5):
        found = break_even(counts, Interval(speedup, speedup / 1.1, speedup * 1.1))
        assert found.estimate == pytest.approx((3.0 / speedup - 1) / 5)
        assert found.low == pytest.approx((3.0 / (1.1 * speedup) - 1) / 5)
    assert break_even(counts, Interval(3.5, 3.2, 3.8)) == Interval(0.0, 0.0, 0.0)
    assert break_even(counts, unknown(1.6)).estimate == pytest.approx((3.0 / 1.6 - 1) / 5)
    unsaid = replace(counts, num_tokens=0)
    assert (unsaid.num_steps, unsaid.tokens_per_step) == (100, 3.0), "as if all steps drafted"


def test_a_rate_is_held_against_the_interval_of_break_even() -> None:
    """With few drafts the limit is hardly known: no rate fails by its estimate alone."""
    few: Any = {"num_steps": 100, "num_drafted": 500, "num_accepted": 250}
    drafts = (bucket(**few), bucket("temperature", "0", **few))
    summary = with_candidate(ab(0.985, error=0.01), acceptance=drafts)
    limit = break_even_of(summary)
    assert limit is not None and limit.low < 0.2 and limit.estimate > 1.2
    outcomes = {j.rule: j.result.outcome for j in decide(summary, load_policy(None)).rules}
    for rule in ("acceptance_pays", "p10_acceptance", "temperatures"):
        assert outcomes[rule] == "inconclusive", rule
    assert outcomes["plausible"] == "pass"
    surely = with_candidate(ab(0.8, error=0.01), acceptance=drafts)
    outcomes = {j.rule: j.result.outcome for j in decide(surely, load_policy(None)).rules}
    assert outcomes["acceptance_pays"] == outcomes["temperatures"] == "fail"


def none_drafted(records: list[RequestRecord]) -> list[RequestRecord]:
    """Answers that say that nothing was drafted."""
    nothing = RequestAcceptance(source="body", num_drafted=0, num_accepted=0, num_steps=0)
    return [replace(r, acceptance=nothing) if r.arm == "on" else r for r in records]


def tile_of(summary: AbSummary) -> Tile:
    """The report's tile of the acceptance rate."""
    run = JudgedRun(summary, decide(summary, load_policy(None)))
    return next(tile for tile in tiles(run) if tile.label == "acceptance rate")


def test_where_nothing_was_drafted_that_is_said() -> None:
    records = none_drafted(draw(DraftingLaw(share=0.0), requests=8))
    summary = ab_of(records)
    assert break_even_of(summary) is None and draft_share_of(summary) == 0.0
    for rule in ("acceptance_pays", "p10_acceptance", "temperatures", "plausible"):
        assert says(summary, rule) == "no step drafted anything", rule
    assert tile_of(summary) == Tile(
        label="acceptance rate", value="none", detail="no step drafted anything"
    )
    silent = ab_of([replace(r, acceptance=None) for r in records])
    assert draft_share_of(silent) is None, "a server that tells nothing may have drafted"
    assert "does not say" in says(silent, "acceptance_pays")


def test_the_share_of_steps_that_draft_is_shown() -> None:
    """By `decide` and the report's tile, each with the break-even of whole time."""
    summary = ab_of(draw(DraftingLaw(share=0.35), requests=8))
    detail = tile_of(summary).detail
    assert "breaks even at" in detail and "% of steps draft" in detail
    assert "of steps that draft, breaks even at" in says(summary, "acceptance_pays")
    table = cells_table({"run": ["run"]}, [summary])
    assert "% of steps draft" in str(list(table.columns[3].cells)[0])
