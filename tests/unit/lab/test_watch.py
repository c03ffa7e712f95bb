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

from foretoken.cli.lab.watch import bars, picture
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

LAW = MockLaw(step_s=0.002, prefill_s=0.002, k=3, alpha=0.7, seed=1)
BODY: dict[str, Any] = {"prompt": "hello", "max_tokens": 9, "temperature": 0.0, "stream": True}


def a_reading(rate: float = 0.7, **changes: float) -> Reading:
    """A quiet moment."""
    values: dict[str, Any] = {
        "time_s": 1.0, "rate": rate, "length": 2.0, "by_position": (0.8,), "tokens_per_s": 50.0,
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


def test_a_server_is_watched(tmp_path: Path) -> None:
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
    assert "break_even: acceptance 0.20 is below" in text
    assert bars([0.0, math.nan, 1.0, 0.5]) == "\u2581 \u2588\u2585"
