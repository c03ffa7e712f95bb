"""Workload files of every format, broken lines included; acceptance and metrics of every server."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretoken.errors import ConfigError
from foretoken.lab.http.client import grown, parse_metrics
from foretoken.lab.http.read_answer import (
    from_body,
    from_spec_details,
    from_timings,
    parse_events,
    read_answer,
)
from foretoken.lab.http.timed import Answer
from foretoken.lab.measure.workload import (
    Load,
    WorkloadConfig,
    draw_arrivals,
    load_items,
    load_workload,
    take,
)
from foretoken.lab.records.results import RequestRecord


def write(tmp_path: Path, name: str, text: str) -> Path:
    """A file with this text."""
    path = tmp_path / name
    path.write_text(text)
    return path


OWN = '{"prompt": "a", "temperature": 0.4, "min_p": 0.1, "arrival_s": 2}\n'


@pytest.mark.parametrize(
    ("name", "text", "kind", "count"),
    [
        ("p.txt", "one\ntwo\n", "lines", 2),
        ("p.jsonl", OWN + '{"messages": [{"role": "user"}], "arrival_s": 1}\n', "jsonl", 2),
        ("q.jsonl", '{"question_id": 81, "category": "math", "turns": ["x"]}\n', "spec-bench", 1),
        (
            "s.json",
            '[{"id": "c", "conversations": [{"from": "human", "value": "hi"},'
            ' {"from": "gpt", "value": "hello there friend"}]}]',
            "sharegpt",
            1,
        ),
    ],
)
def test_formats(tmp_path: Path, name: str, text: str, kind: str, count: int) -> None:
    items, problems = load_workload(path := write(tmp_path, name, text))
    assert (len(items), problems) == (count, [])
    assert (items, problems) == load_workload(path, format=kind, strict=True)
    assert all(item.prompt or item.messages for item in items)


def test_own_lines_keep_parameters_and_sort_by_arrival(tmp_path: Path) -> None:
    text = OWN + '{"prompt": "b", "arrival_s": 1, "category": "x"}\n'
    (first, second), _ = load_workload(write(tmp_path, "p.jsonl", text))
    assert (first.prompt, first.category) == ("b", "x")
    assert second.parameters == {"min_p": 0.1}
    assert second.temperature == 0.4


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("m.jsonl", '{"timestamp": 1500, "input_length": 600, "output_length": 7}\n'),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,37,4\n"),
    ],
)
def test_lengths_without_texts_are_refused(tmp_path: Path, name: str, text: str) -> None:
    """Drafts would be right or wrong about words that nobody asked."""
    with pytest.raises(ConfigError, match="requests with their texts"):
        load_workload(write(tmp_path, name, text))


def test_broken_lines_are_counted_or_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "p.jsonl", OWN + "{nonsense\n" + '{"max_tokens": 3}\n' + OWN)
    items, problems = load_workload(path)
    assert (len(items), len(problems)) == (2, 2)
    assert "line 2" in problems[0]
    with pytest.raises(ConfigError, match="line 2"):
        load_workload(path, strict=True)
    with pytest.raises(ConfigError, match="at least one"):
        load_workload(write(tmp_path, "e.jsonl", "{nonsense\n"))
    with pytest.raises(ConfigError, match="readable"):
        load_workload(tmp_path / "none")
    with pytest.raises(ConfigError, match="spec-bench"):
        load_workload(path, format="parquet")


def test_items_go_round_with_new_indices(tmp_path: Path) -> None:
    file = write(tmp_path, "p.txt", "one\ntwo\nthree\n")
    items, _ = load_items(WorkloadConfig(file=str(file), temperatures=(0.0, 0.8)))
    taken = take(items, 5, 2)
    assert [(i.index, i.prompt) for i in taken] == [
        (2, "three"), (3, "one"), (4, "two"), (5, "three"), (6, "one"),
    ]  # fmt: skip
    assert [i.temperature for i in items] == [0.0, 0.8, 0.0]


def test_arrivals_have_their_rate_and_burstiness() -> None:
    for kind, burst, spread in (
        ("poisson", 1.0, 1.0),
        ("gamma", 0.25, 2.0),
        ("constant", 1.0, 0.0),
    ):
        load = Load(kind=kind, rate=5.0, burstiness=burst)  # type: ignore[arg-type]
        gaps = np.diff(draw_arrivals(load, 20_000, seed=1))
        assert gaps.mean() == pytest.approx(0.2, rel=0.05)
        assert gaps.std() / gaps.mean() == pytest.approx(spread, abs=0.1)
    same = Load(kind="poisson", rate=5.0)
    assert (draw_arrivals(same, 9, 3) == draw_arrivals(same, 9, 3)).all()
    assert (draw_arrivals(same, 9, 3) != draw_arrivals(same, 9, 4)).any()


def test_events_split_anywhere_keep_the_time_of_their_last_byte() -> None:
    stream = b'data: {"a": 1}\r\n\r\n: ping\n\ndata: {"a": 2}\n\ndata: [DONE]\n\n'
    for cut in range(1, len(stream)):
        pieces = [(1.0, stream[:cut]), (2.0, stream[cut:])]
        events, done = parse_events(pieces)
        assert done and [event["a"] for _, event in events] == [1, 2], cut
    events, done = parse_events([(1.0, b'data: {"a": 1}\n\ndata: {"a"')][:0])
    assert (events, done) == ([], False)


def test_every_source_of_acceptance() -> None:
    body = from_body({"speculative_decoding": {
        "num_draft_tokens": 12, "num_accepted_draft_tokens": 5, "num_spec_steps": 4,
        "acceptance_histogram": {"0": 1, "1": 1, "2": 2},
        "per_step_num_accepted_tokens": [0, 1, 2, 2], "per_step_num_draft_tokens": [3, 3, 3, 3],
    }})  # fmt: skip
    assert body is not None and body.histogram == (1, 1, 2) and body.length == 2.25
    assert body.per_step_accepted == (0, 1, 2, 2)
    totals = from_timings([{"draft_n": 10, "draft_n_accepted": 4, "predicted_n": 9}])
    assert totals is not None and (totals.rate, totals.num_steps) == (0.4, None)
    chunks = from_timings([
        {"draft_n": 0, "draft_n_accepted": 0}, {"draft_n": 3, "draft_n_accepted": 2},
        {"draft_n": 3, "draft_n_accepted": 2}, {"draft_n": 5, "draft_n_accepted": 2},
    ])  # fmt: skip
    assert chunks is not None and chunks.per_step_accepted == (2, 0)
    assert chunks.per_step_drafted == (3, 2) and not chunks.exact
    details = {"spec_verify_ct": 4, "proposed_drafts": 12, "correct_drafts": 5}
    sglang = from_spec_details(details)
    assert sglang is not None and sglang.num_steps == 4
    assert from_body({"speculative_decoding": None}) is None
    assert from_timings([{"predicted_n": 3}]) is None
    assert from_spec_details(None) is None


def test_metrics_pages_of_several_servers() -> None:
    page = """
# HELP x y
vllm:spec_decode_num_drafts_total{engine="0"} 10
vllm:spec_decode_num_drafts_total{engine="1"} 5
vllm:spec_decode_num_drafts_created{engine="0"} 1.7e9
vllm:gpu_cache_usage_perc 0.5
llamacpp:spec_decode_num_draft_tokens 2
vllm:broken{ nan
vllm:broken{a="b"} not-a-number
vllm:e2e_bucket{le="+Inf"} 9
"""
    found = parse_metrics(page)
    assert found["vllm:spec_decode_num_drafts"] == 15
    assert found["vllm:kv_cache_usage_perc"] == 0.5
    assert found["vllm:spec_decode_num_draft_tokens"] == 2
    assert not any("created" in name or "bucket" in name for name in found)
    assert grown({}, found)["vllm:spec_decode_num_drafts"] == 15
    after = {**found, "vllm:spec_decode_num_drafts": 3.0}
    assert grown(found, after)["vllm:spec_decode_num_drafts"] == 3.0, "restarted"


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"usage": {"completion_tokens": "3", "prompt_tokens": None}}, None),
        ({"usage": "none"}, "protocol"),
        ({"choices": [{"text": 5}]}, "protocol"),
        ({"metrics": {"speculative_decoding": {"num_draft_tokens": float("nan")}}}, "protocol"),
    ],
)
def test_numbers_of_an_answer_are_numbers(more: dict[str, Any], error: str | None) -> None:
    body = json.dumps({"choices": [{"text": "a", "token_ids": [1]}], **more}).encode()
    found = read_answer(RequestRecord(index=0), Answer(200, (), ((0.0, body),), 0.0, 0.1), 0.0)
    assert (found.error or "").partition(":")[0] == (error or ""), found.error
    assert error or (found.output_tokens, found.prompt_tokens) == (1, None)
