"""The files of a run: what is written is what is read, and a torn end is no loss."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from foretoken.errors import ConfigError
from foretoken.lab.plain import from_plain, to_plain
from foretoken.lab.records.results import AbSummary, ArmGain, RequestAcceptance, RequestRecord
from foretoken.lab.records.run_files import (
    LineWriter,
    finished_ab,
    read_ab,
    read_requests,
    read_summary,
    write_json,
)
from foretoken.lab.stats.intervals import Interval, unknown
from tests.unit.lab.summaries import ab, arm

RECORD = RequestRecord(
    index=3,
    arm="on",
    block=1,
    temperature=0.4,
    scheduled_s=1.0,
    sent_s=1.001,
    first_s=1.1,
    last_s=1.5,
    chunk_s=(1.1, 1.3, 1.5),
    chunk_tokens=(1, 3, 2),
    output_tokens=6,
    acceptance=RequestAcceptance(source="body", num_drafted=10, num_accepted=3, num_steps=2),
)


def test_times_of_a_request() -> None:
    assert RECORD.ttft_s == pytest.approx(0.1)
    assert RECORD.e2e_s == pytest.approx(0.5)
    assert RECORD.tpot_s == pytest.approx(0.4 / 5)
    assert RECORD.acceptance is not None
    assert RECORD.acceptance.rate == pytest.approx(0.3)
    assert RECORD.acceptance.length == pytest.approx(2.5)


def test_a_first_chunk_of_several_tokens_is_not_counted_as_decoded_after_it() -> None:
    record = RequestRecord(
        index=0, first_s=1.0, last_s=2.0, output_tokens=6, chunk_tokens=(2, 4), chunk_s=(1.0, 2.0)
    )
    assert record.tpot_s == pytest.approx(0.25)


def test_requests_survive_the_file(tmp_path: Path) -> None:
    with LineWriter(tmp_path / "requests.jsonl") as writer:
        writer.write(RECORD)
        writer.write(RequestRecord(index=4, error="timeout: 30 s"))
    assert read_requests(tmp_path) == [RECORD, RequestRecord(index=4, error="timeout: 30 s")]


def test_a_torn_last_line_is_dropped_and_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    with LineWriter(path) as writer:
        writer.write(RECORD)
    with path.open("a") as file:
        file.write('{"index": 7, "arm"')
    assert [r.index for r in read_requests(tmp_path)] == [3]
    with LineWriter(path) as writer:
        writer.write(RequestRecord(index=8))
    assert [r.index for r in read_requests(tmp_path)] == [3, 8]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text('{"index": 1}\nnonsense\n{"index": 2}\n')
    with pytest.raises(ConfigError, match="line 2"):
        read_requests(tmp_path)


def test_a_summary_survives_the_file(tmp_path: Path) -> None:
    gain = ArmGain(
        metric="tpot_p50", ratio=Interval(1.4, 1.3, 1.5), num_blocks=8, num_pairs=80, enough=True
    )
    summary = AbSummary(
        baseline="off",
        candidate="on",
        arms=(arm("off"), arm("on", tokens_per_s=unknown(6.0))),
        gains=(gain,),
    )
    write_json(tmp_path / "summary.json", summary)
    read = read_summary(tmp_path)
    assert read.gain("tpot_p50") == gain
    assert read.gain("ttft_p50") is None
    assert math.isnan(read.arm("on").tokens_per_s.low), "infinite ends come back as not known"
    assert not read.arm("on").tokens_per_s.known


def test_a_run_of_one_arm_is_no_ab(tmp_path: Path) -> None:
    write_json(
        tmp_path / "summary.json", AbSummary(baseline="on", candidate="on", arms=(arm("on"),))
    )
    assert finished_ab(tmp_path) is None
    with pytest.raises(ConfigError, match="this is a run of one arm"):
        read_ab(tmp_path)
    write_json(tmp_path / "summary.json", replace(ab(1.5), complete=False))
    assert finished_ab(tmp_path) is None
    assert read_ab(tmp_path).gain("tpot_p50") is not None


def test_another_schema_is_refused(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"kind": "ab", "schema": 99}))
    with pytest.raises(ConfigError, match=r"schema.*99"):
        read_summary(tmp_path)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ({"indx": 1}, r"indx"),
        ({}, r"index: got None"),
        ({"index": "one"}, r"index.*an integer"),
        ({"index": True}, r"index.*an integer"),
        ({"index": 1, "chunk_s": ["x"]}, r"chunk_s\[0\].*a number"),
        ({"index": 1, "acceptance": {"source": "x"}}, r"acceptance.num_drafted"),
        ([], r"a mapping"),
    ],
)
def test_wrong_fields_are_named(value: object, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        from_plain(RequestRecord, value, "r")


def test_infinite_numbers_become_null() -> None:
    assert to_plain({"a": math.inf, "b": (1, math.nan)}) == {"a": None, "b": [1, None]}
