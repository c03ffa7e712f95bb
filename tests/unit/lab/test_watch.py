"""The watcher tells what changes, and when nothing can be told any more."""

import asyncio
import io
import json
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from foretoken.cli.lab.watch import _judged_by, _targets, bars, picture
from foretoken.errors import ConfigError, EndpointError
from foretoken.lab.http.scraping import parse_buckets
from foretoken.lab.http.timed import HttpPool
from foretoken.lab.measure.watch import (
    Alarm,
    Reading,
    Targets,
    WatchConfig,
    blank_reading,
    bucket_quantile,
    drifting,
    find_alarms,
    render_page,
    watch,
)
from foretoken.lab.mock.generator import MockLaw
from foretoken.lab.mock.server import MockServer, mock_running
from foretoken.lab.records.run_files import write_json
from tests.unit.lab.summaries import ab

LAW = MockLaw(step_s=0.002, prefill_s=0.002, k=3, alpha=0.7, seed=1)
BODY: dict[str, Any] = {"prompt": "hello", "max_tokens": 9, "temperature": 0.0, "stream": True}


def a_reading(rate: float = 0.7, **changes: float) -> Reading:
    """A quiet moment."""
    values: dict[str, Any] = {
        "time_s": 1.0, "rate": rate, "length": 1 + 3 * rate, "num_drafts": 100.0,
        "num_drafted": 300.0, "num_accepted": 300 * rate, "by_position": (0.8,),
        "tokens_per_s": 50.0,
        "running": 2.0, "waiting": 0.0, "kv_usage": 0.3, "preemptions": 0.0,
        "tpot_p50_s": 0.01, "tpot_p99_s": 0.02,
    }  # fmt: skip
    return Reading(**{**values, **changes})


def rules(readings: list[Reading], targets: Targets) -> set[str]:
    """Names of the rules that fire."""
    return {alarm.rule for alarm in find_alarms(readings, targets)}


def test_rules_fire_on_what_they_are_about() -> None:
    targets = Targets(break_even=0.4, tpot_p50_s=0.02, tpot_p99_s=0.05)
    assert rules([a_reading()], targets) == set()
    assert rules([a_reading(0.3)], targets) == {"break_even"}
    assert rules([a_reading(tpot_p99_s=0.09)], targets) == {"mixed_workload"}
    assert rules([a_reading(kv_usage=0.99, preemptions=3.0)], targets) == {"kv_squeeze"}
    calm = [0.70, 0.72, 0.69, 0.71, 0.70, 0.68, 0.71, 0.70, 0.72, 0.69]
    fallen = [a_reading(rate) for rate in [*calm, *[0.62] * 6]]
    assert rules(fallen, targets) == {"drift"}
    assert drifting([*calm, *calm]) == ""
    assert drifting([*calm, *[0.8] * 6]) == "risen"


def test_a_hopeless_draft_is_an_alarm_without_a_break_even() -> None:
    """At an acceptance of 0.03 the watcher was silent and ended with 0."""
    nothing = Targets()
    [alarm] = find_alarms([a_reading(0.03)], nothing)
    assert alarm.rule == "acceptance_length" and "at most 1.09x" in alarm.text
    assert rules([a_reading(0.5)], nothing) == set()
    # Length 1.6 at a rate of 0.03 is nothing that no cost could make worth it: k is 20 here.
    assert rules([a_reading(0.03, num_drafts=15.0, num_accepted=9.0)], nothing) == set()


def test_few_drafts_are_put_together_before_they_are_judged() -> None:
    small = a_reading(0.1, num_drafts=10.0, num_drafted=30.0, num_accepted=3.0)
    assert rules([small] * 3, Targets(break_even=0.4)) == set()
    assert rules([small] * 7, Targets(break_even=0.4)) == {"break_even"}
    lucky = a_reading(0.1, num_drafts=10.0, num_drafted=30.0, num_accepted=20.0)
    assert rules([lucky] * 6 + [small], Targets(break_even=0.4)) == set()


def test_a_server_that_drafts_nothing_is_an_alarm() -> None:
    none = {"num_drafts": 0.0, "num_drafted": 0.0, "num_accepted": 0.0}
    quiet = [a_reading(math.nan, time_s=float(n), **none) for n in range(1, 6)]
    assert rules(quiet, Targets()) == {"no_drafts"}
    assert rules(quiet[:2], Targets()) == set(), "so few tokens say nothing"
    assert rules([a_reading(0.6), *quiet], Targets()) == set(), "control may rest"


def test_an_ab_gives_the_break_even(tmp_path: Path) -> None:
    """`--baseline RUN` alone is enough: rate 0.5 at k = 5 and 1.6x break even at 0.24."""
    write_json(tmp_path / "summary.json", ab(1.6))
    targets = _targets(tmp_path, None)
    assert targets.break_even == pytest.approx((3.5 / 1.6 - 1) / 5)
    assert targets.tpot_p50_s == pytest.approx(0.02)
    assert _targets(tmp_path, 0.4).break_even == 0.4
    assert "measured in" in _judged_by(targets, tmp_path)
    assert "not known" in _judged_by(Targets(), None)


def test_quantiles_of_histograms() -> None:
    page = "\n".join(
        f'vllm:request_time_per_output_token_seconds_bucket{{engine="{e}",le="{edge}"}} {count}'
        for e in "01"
        for edge, count in (("0.01", 5), ("0.02", 10), ("+Inf", 10))
    )
    counts = parse_buckets(page)
    assert counts == {0.01: 10.0, 0.02: 20.0, math.inf: 20.0}
    assert bucket_quantile(counts, 0.5) == pytest.approx(0.01)
    assert bucket_quantile(counts, 0.75) == pytest.approx(0.015)
    assert math.isnan(bucket_quantile({}, 0.5))


@pytest.mark.slow
def test_a_server_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A busy machine serves few requests in these tenths of a second.
    monkeypatch.setattr("foretoken.lab.measure.watch.FEWEST_DRAFTED", 1)
    seen: list[tuple[int, list[Alarm]]] = []
    page = tmp_path / "watch.html"
    with mock_running(MockServer(LAW)) as url:

        async def main() -> list[Alarm]:
            pool = HttpPool(url)
            config = WatchConfig(url=url, every_s=0.1, page=page, ticks=4,
                                 targets=Targets(break_even=0.99))  # fmt: skip
            watching = asyncio.create_task(
                watch(config, lambda readings, alarms: seen.append((len(readings), alarms)))
            )
            data = json.dumps(BODY).encode()
            while not watching.done():
                await pool.send("POST", "/v1/completions", data, timeout_s=60.0)
            await pool.close()
            return await watching

        fired = asyncio.run(main())
    assert [count for count, _ in seen] == [1, 2, 3, 4]
    assert [alarm.rule for alarm in fired] == ["break_even"]
    text = page.read_text()
    assert "<svg" in text and "<script" not in text
    with pytest.raises(EndpointError, match="no metrics"):
        asyncio.run(watch(WatchConfig(url="http://127.0.0.1:9"), lambda *_: None))


def test_a_server_that_falls_silent_is_an_alarm(tmp_path: Path) -> None:
    """The page must not go on saying that no rule fires."""
    seen: list[tuple[Reading, list[Alarm]]] = []
    page = tmp_path / "watch.html"
    with ExitStack() as running:
        url = running.enter_context(mock_running(MockServer(LAW)))

        def show(readings: list[Reading], alarms: list[Alarm]) -> None:
            seen.append((readings[-1], alarms))
            running.close()

        fired = asyncio.run(watch(WatchConfig(url=url, every_s=0.01, page=page, ticks=3), show))
    assert not seen[0][1]
    assert [alarm.rule for alarm in fired] == ["unreachable"]
    assert math.isnan(seen[2][0].running) and "no metrics since" in page.read_text()


def test_the_page_remembers_what_fired() -> None:
    config = WatchConfig(url="http://a")
    page = render_page(config, [a_reading()], [], [Alarm(rule="drift", text="fallen < 1")])
    assert "no rule fires now" in page and "fired earlier: <b>drift</b> fallen &lt; 1" in page


def test_a_page_that_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    with mock_running(MockServer(LAW)) as url:
        config = WatchConfig(url=url, every_s=0.01, page=tmp_path / "none" / "page.html", ticks=1)
        with pytest.raises(ConfigError, match="--html"):
            asyncio.run(watch(config, lambda *_: None))


def test_a_terminal_gets_numbers_course_and_rules() -> None:
    readings = [a_reading(0.7), blank_reading(2.0), a_reading(0.2)]
    targets = Targets(break_even=0.4)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(picture(readings, find_alarms(readings, targets), targets))
    text = console.export_text()
    assert "acceptance rate" in text and "0.20" in text and "breaks even at 0.40" in text
    assert "break_even: acceptance 0.20 over 300 drafted tokens is below" in text
    assert bars([0.0, math.nan, 1.0, 0.5]) == "\u2581 \u2588\u2585"
