"""What goes wrong around a measurement is said, and what was measured stays."""

import errno
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from foretoken.errors import ConfigError
from foretoken.lab.http.timed import now
from foretoken.lab.measure import segments
from foretoken.lab.measure.ab import summarize_ab
from foretoken.lab.measure.bench import gather, run_bench
from foretoken.lab.measure.experiment import AbConfig, ArmConfig, RunConfig, Sizes, WorkloadConfig
from foretoken.lab.measure.segments import SegmentEnd
from foretoken.lab.records.results import RequestRecord, ServerInfo
from foretoken.lab.records.run_files import REQUESTS, LineWriter, read_requests
from tests.mock_server.faults import MockFaults
from tests.mock_server.generator import MockLaw
from tests.mock_server.server import MockServer, mock_running

LAW = MockLaw(step_s=0.002, prefill_s=0.001, seed=1)


@pytest.fixture
def workload(tmp_path: Path) -> WorkloadConfig:
    """A few prompts."""
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"prompt {i}\n" for i in range(8)))
    return WorkloadConfig(file=str(path), max_tokens=6)


def a_run(url: str, workload: WorkloadConfig, blocks: int = 1) -> RunConfig:
    """A few requests at one server."""
    sizes = Sizes(blocks=blocks, requests_per_block=4, warm_up=0)
    return RunConfig(arm=ArmConfig(name="server", url=url), workload=workload, sizes=sizes)


def test_a_jump_of_the_wall_clock_is_noted() -> None:
    """Requests are timed by the monotonic clock; the note is for whoever compares logs."""
    assert segments._jump(time.time() - now()) == 0.0
    jumped = segments._jump(time.time() - now() - 3600)
    assert jumped == pytest.approx(3600, abs=1)
    server = ServerInfo(url="http://a", engine="vllm")
    ends = [SegmentEnd(arm="on", block=3, seconds=1.0, server=server, clock_jump_s=jumped)]
    assert any(
        "wall clock jumped (+3600.0 s in block 3)" in note for note in gather("on", ends).notes
    )


@pytest.mark.slow
def test_a_server_without_metrics_is_measured_and_said_so(
    tmp_path: Path, workload: WorkloadConfig
) -> None:
    with mock_running(MockServer(LAW, faults=MockFaults(no_metrics=True))) as url:
        summary = run_bench(a_run(url, workload), tmp_path / "out")
    assert summary.arm.num_requests == 4 and summary.arm.num_errors == 0
    assert any("no /metrics" in note for note in summary.arm.notes)


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_what_was_written_can_go_on(
    tmp_path: Path, workload: WorkloadConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, write = 0, LineWriter.write

    def full(self: LineWriter, value: object) -> None:
        nonlocal written
        written += isinstance(value, RequestRecord)
        if written > 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, value)

    with mock_running(MockServer(LAW)) as url:
        with monkeypatch.context() as patch:
            patch.setattr(LineWriter, "write", full)
            with pytest.raises(ConfigError, match="No space left.*--resume"):
                run_bench(a_run(url, workload, blocks=3), tmp_path / "out")
        before = len(read_requests(tmp_path / "out"))
        assert before == 6
        summary = run_bench(a_run(url, workload, blocks=3), tmp_path / "out", resume=True)
    assert summary.complete and summary.arm.num_requests == 12


def test_mixed_versions_and_models_are_noted(tmp_path: Path, workload: WorkloadConfig) -> None:
    server = ServerInfo(url="http://a", engine="vllm", version="0.32.0", model="one")
    other = replace(server, version="0.33.0", model="two")
    ends = [
        SegmentEnd(arm=arm, block=block, seconds=1.0, server=info)
        for arm, block, info in (
            ("on", 0, server), ("on", 1, other), ("off", 0, server), ("off", 1, server),
        )
    ]  # fmt: skip
    notes = gather("on", ends).notes
    assert "mixed versions of the server: vllm 0.32.0, vllm 0.33.0" in notes
    assert "mixed models: one, two" in notes
    config = AbConfig(
        baseline=ArmConfig(name="off", url="http://a"),
        candidate=ArmConfig(name="on", url="http://b"),
        workload=workload,
    )
    (tmp_path / REQUESTS).write_text("")
    summary = summarize_ab(config, tmp_path, ends)
    assert "the arms run different versions: 0.32.0 and 0.33.0" in summary.notes


@pytest.mark.slow
def test_a_server_that_cuts_streams_is_counted(tmp_path: Path, workload: WorkloadConfig) -> None:
    with mock_running(MockServer(LAW, faults=MockFaults(truncate_every=2))) as url:
        summary = run_bench(a_run(url, workload), tmp_path / "out")
    assert summary.arm.errors == {"truncated": 2}
    kept = [json.loads(line) for line in (tmp_path / "out" / REQUESTS).read_text().splitlines()]
    assert sum(bool(row["error"]) for row in kept) == 2
