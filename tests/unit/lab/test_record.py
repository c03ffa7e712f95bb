"""The recording proxy never breaks what it passes; the watcher tells what changes."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

from foretoken.errors import EndpointError
from foretoken.lab.http1 import Answer, HttpPool
from foretoken.lab.mock_engine import MockLaw
from foretoken.lab.mock_run import mock_running
from foretoken.lab.mock_server import MockFaults, MockServer
from foretoken.lab.record import RecordConfig, RecordingProxy
from foretoken.lab.recording import Prompts, redact_secrets
from foretoken.lab.results_io import LineWriter
from foretoken.lab.sse import parse_events
from foretoken.lab.traces import load_workload
from foretoken.lab.watch import WatchConfig, watch
from foretoken.lab.watching import (
    Alarm,
    Reading,
    Targets,
    bucket_quantile,
    drifting,
    find_alarms,
    parse_buckets,
)

LAW = MockLaw(step_s=0.002, prefill_s=0.002, k=3, alpha=0.7, seed=1)
BODY: dict[str, Any] = {"prompt": "my key is sk-abcdefghijklmnop1234", "max_tokens": 9,
                        "temperature": 0.0, "stream": True, "min_p": 0.1}  # fmt: skip


def ask(url: str, body: dict[str, Any], **headers: str) -> Answer:
    """One request."""

    async def main() -> Answer:
        pool = HttpPool(url, headers={"authorization": "Bearer sk-secret-of-the-client", **headers})
        data = json.dumps(body).encode()
        answer = await pool.send("POST", "/v1/completions", data, timeout_s=5.0)
        await pool.close()
        return answer

    return asyncio.run(main())


def record(
    tmp_path: Path,
    body: dict[str, Any],
    faults: MockFaults | None = None,
    prompts: Prompts = "keep",
) -> tuple[Answer, Answer, list[dict[str, Any]]]:
    """A request to a mock, the same through the proxy, and the recorded lines."""  # fmt: skip
    path = tmp_path / "recorded.jsonl"
    writer = LineWriter(path)
    with mock_running(MockServer(LAW, faults=faults)) as upstream:
        proxy = RecordingProxy(RecordConfig(upstream=upstream, prompts=prompts), writer)
        with mock_running(proxy) as front:
            direct = ask(upstream, body)
            through = ask(front, body, **{"x-class": "code", "x-tenant": "t1"})
    writer.close()
    return direct, through, [json.loads(line) for line in path.read_text().splitlines()]


def texts(answer: Answer) -> tuple[str, list[str], bool]:
    """Text, keys of the last event, and whether it ended well."""
    events, done = parse_events(answer.pieces)
    text = "".join(c["text"] for _, e in events for c in e["choices"])
    return text, sorted(events[-1][1]), done


def test_a_stream_passes_and_is_recorded(tmp_path: Path) -> None:
    direct, through, lines = record(tmp_path, BODY)
    assert through.status == 200 and through.broken is None
    assert texts(through)[0] == texts(direct)[0]
    assert texts(through)[2]
    assert "usage" in texts(direct)[1], "the mock sends it always"
    assert "usage" not in texts(through)[1], "not asked for, so taken out"
    assert len({at for at, _ in through.pieces}) > 2, "as it comes, not at once"
    (line,) = lines
    assert line["prompt"] == "my key is [redacted]"
    assert line["parameters"] == {"min_p": 0.1}
    assert line["category"] == "code"
    assert line["observed"]["tags"]["tenant"] == "t1"
    assert line["observed"]["acceptance"]["num_drafted"] > 0
    assert line["observed"]["output_tokens"] == 9
    assert "secret" not in json.dumps(lines)


def test_usage_stays_where_it_was_asked_for(tmp_path: Path) -> None:
    body = {**BODY, "stream_options": {"include_usage": True}}
    _, through, _ = record(tmp_path, body)
    assert "usage" in texts(through)[1]


@pytest.mark.parametrize("prompts", ["hash", "none"])
def test_prompts_need_not_be_kept(tmp_path: Path, prompts: Prompts) -> None:
    _, _, (line,) = record(tmp_path, BODY, prompts=prompts)
    assert "prompt" not in line and "my key" not in json.dumps(line)
    assert bool(line["prompt_hash"]) == (prompts == "hash")


def test_what_was_recorded_can_be_replayed(tmp_path: Path) -> None:
    record(tmp_path, BODY, prompts="hash")
    (item,) = load_workload(tmp_path / "recorded.jsonl").items
    assert len(item.prompt.split()) == 4, "as many words as the prompt had tokens"
    assert (item.max_tokens, item.temperature, item.category) == (9, 0.0, "code")
    assert item.arrival_s is not None and item.parameters == {"min_p": 0.1}


def test_an_answer_that_is_not_streamed_passes_unchanged(tmp_path: Path) -> None:
    direct, through, lines = record(tmp_path, {**BODY, "stream": False})
    one, other = json.loads(direct.body), json.loads(through.body)
    assert one["choices"] == other["choices"]
    assert lines[0]["observed"]["output_tokens"] == 9


def test_errors_and_broken_streams_pass_as_they_are(tmp_path: Path) -> None:
    _, through, lines = record(tmp_path, BODY, MockFaults(refuse=("min_p",)))
    assert through.status == 400 and b"min_p is not supported" in through.body
    assert lines[0]["observed"]["error"].startswith("refused")
    (tmp_path / "recorded.jsonl").unlink()
    _, through, lines = record(tmp_path, BODY, MockFaults(truncate_every=2))
    assert through.broken is not None, "a cut stream must not look whole"


def test_a_missing_upstream_is_a_502(tmp_path: Path) -> None:
    writer = LineWriter(tmp_path / "r.jsonl")
    with mock_running(RecordingProxy(RecordConfig(upstream="http://127.0.0.1:9"), writer)) as front:
        answer = ask(front, BODY)
    writer.close()
    assert answer.status == 502 and b"upstream" in answer.body


def test_a_full_disk_does_not_stop_the_traffic() -> None:
    writer = LineWriter(Path("/dev/full"))
    with mock_running(MockServer(LAW)) as upstream:
        proxy = RecordingProxy(RecordConfig(upstream=upstream), writer)
        with mock_running(proxy) as front:
            assert [ask(front, BODY).status for _ in range(2)] == [200, 200]
    assert proxy.lost == 2
    writer.close()


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("use sk-proj-abcdefghijklmnop please", "use [redacted] please"),
        ("Authorization: Bearer abcdefghijklmnop.qr", "Authorization: [redacted]"),
        ("password = hunter2222 ok", "[redacted] ok"),
        ("a task of skill", "a task of skill"),
    ],
)
def test_secrets_are_taken_out(text: str, left: str) -> None:
    assert redact_secrets(text) == left


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
            config = WatchConfig(url=url, every_s=0.2, page=page, ticks=2,
                                 targets=Targets(break_even=0.99))  # fmt: skip
            watching = asyncio.create_task(
                watch(config, lambda readings, alarms: seen.append((len(readings), alarms)))
            )
            await asyncio.sleep(0.05)
            data = json.dumps(BODY).encode()
            await pool.send("POST", "/v1/completions", data, timeout_s=5.0)
            await pool.close()
            return await watching

        fired = asyncio.run(main())
    assert [count for count, _ in seen] == [1, 2]
    assert [alarm.rule for alarm in fired] == ["break_even"]
    text = page.read_text()
    assert "<svg" in text and "<script" not in text
    with pytest.raises(EndpointError, match="no metrics"):
        asyncio.run(watch(WatchConfig(url="http://127.0.0.1:9"), lambda *_: None))
