"""Results of other load generators become the folder of a run."""

import json
from pathlib import Path

import pytest

from examples.read_load_generator import main, read_other_tool
from foretoken.errors import ConfigError
from foretoken.lab.records.results import ArmSummary
from foretoken.lab.records.run_files import read_summary
from tests.unit.lab.test_traces import write


def test_other_tools_results(tmp_path: Path) -> None:
    row = {
        "metadata": {"session_num": 0, "request_start_ns": 5_000_000_000, "conversation_id": "c"},
        "metrics": {
            "time_to_first_token": {"value": 50.0, "unit": "ms"},
            "request_latency": {"value": 250.0, "unit": "ms"},
            "output_sequence_length": {"value": 5, "unit": "tokens"},
        },
        "error": None,
    }
    failed = {**row, "metrics": {}, "error": {"type": "Timeout", "message": "no"}}
    text = "\n".join([json.dumps(row), "broken", json.dumps(failed)])
    found = read_other_tool(write(tmp_path, "profile_export.jsonl", text), "on")
    assert (found.tool, len(found.records), found.skipped) == ("aiperf", 2, 1)
    assert found.records[0].ttft_s == pytest.approx(0.05)
    assert found.records[0].tpot_s == pytest.approx(0.05)
    assert found.records[1].error == "server: Timeout: no"
    good = {"request_start_time": 100.0, "time_to_first_token_ms": 20.0, "request_latency": 0.12,
            "output_tokens": 11}  # fmt: skip
    benchmarks = {"benchmarks": [{"requests": {"successful": [good], "errored": []}}]}
    found = read_other_tool(write(tmp_path, "g.json", json.dumps(benchmarks)), "on")
    assert found.tool == "guidellm"
    assert found.records[0].tpot_s == pytest.approx(0.01)
    with pytest.raises(ConfigError, match="AIPerf"):
        read_other_tool(write(tmp_path, "n.json", "{}"), "on")


def test_the_folder_of_a_run_is_made_of_them(tmp_path: Path) -> None:
    good = {"request_start_time": 100.0, "time_to_first_token_ms": 20.0, "request_latency": 0.12,
            "output_tokens": 11}  # fmt: skip
    slow = {**good, "time_to_first_token_ms": 80.0}
    rows = {"benchmarks": [{"requests": {"successful": [good, slow, {"broken": 1}]}}]}
    file = str(write(tmp_path, "g.json", json.dumps(rows)))

    def read(*options: str, out: str = "out") -> ArmSummary:
        main([file, "--out", str(tmp_path / out), *options])
        [arm] = read_summary(tmp_path / out).arms
        return arm

    arm = read("--slo", "ttft=0.05")
    assert arm.num_requests == 2 and arm.attained is not None and arm.attained.estimate == 0.5
    assert "1 broken entries skipped" in arm.notes[0]
    assert len((tmp_path / "out" / "requests.jsonl").read_text().splitlines()) == 2
    with pytest.raises(ConfigError, match="a new folder"):
        read()  # nothing is appended to a run
    with pytest.raises(ConfigError, match="broken entries"):
        read("--strict", out="other")


@pytest.mark.parametrize(
    ("text", "said"), [('{"benchmarks": [1]}', "1 broken.*; allowed: AIPerf"), ("{}", "AIPerf")]
)
def test_a_file_without_requests_is_an_error(tmp_path: Path, text: str, said: str) -> None:
    file = str(write(tmp_path, "g.json", text))
    with pytest.raises(ConfigError, match=f"FILE: .*{said}"):
        main([file, "--out", str(tmp_path / "out")])
