"""Whole comparisons against mock servers: the known speed-up comes back, runs can be resumed."""

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.types import Receive, Scope, Send
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.errors import ConfigError, EndpointError
from foretoken.lab.measure import servers
from foretoken.lab.measure.ab import gather, plan_ab, run_ab, summarize
from foretoken.lab.measure.driving import run_to_end
from foretoken.lab.measure.experiment import (
    AbConfig,
    ArmConfig,
    ServiceLevels,
    Sizes,
    load_settings,
)
from foretoken.lab.measure.segments import Segment, SegmentEnd
from foretoken.lab.measure.servers import serving
from foretoken.lab.measure.workload import Load, WorkloadConfig, load_items
from foretoken.lab.records.results import ArmSummary, RequestRecord, ServerInfo
from foretoken.lab.records.run_files import REQUESTS, LineWriter, read_requests, read_summary
from tests.mock_server.faults import MockFaults
from tests.mock_server.generator import MockLaw
from tests.mock_server.server import MockServer, mock_running

SLOW = MockLaw(step_s=0.008, prefill_s=0.004, seed=1)
FAST = MockLaw(step_s=0.008, prefill_s=0.004, k=3, alpha=0.7, draft_s=0.0003, seed=1)


@pytest.fixture
def workload(tmp_path: Path) -> WorkloadConfig:
    """Forty prompts in two classes."""
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"prompt {i}", "max_tokens": 16, "category": "ab"[i % 2]} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return WorkloadConfig(file=str(path), temperatures=(0.0, 0.8))


def an_ab(urls: tuple[str, str], workload: WorkloadConfig, **changes: object) -> AbConfig:
    """A small comparison of two running servers."""
    config = AbConfig(
        baseline=ArmConfig(name="off", url=urls[0]),
        candidate=ArmConfig(name="on", url=urls[1]),
        workload=workload,
        load=Load(concurrency=4),
        sizes=Sizes(blocks=3, requests_per_block=8, warm_up=2),
        slo=ServiceLevels(tpot_s=0.007),
    )
    return replace(config, **changes)  # type: ignore[arg-type]


def measure_one(url: str, workload: WorkloadConfig, out: Path, **changes: Any) -> ArmSummary:
    """One server by itself: a block of nine requests."""
    arm = ArmConfig(name="m", url=url, api_key_env=changes.pop("api_key_env", None))
    sizes = Sizes(blocks=changes.pop("blocks", 1), requests_per_block=9, warm_up=0)
    config = AbConfig(candidate=arm, workload=workload, sizes=sizes)
    found = run_ab(config, out, **changes)
    assert found.complete and not found.compared
    return found.arms[0]


def true_tpots(server: MockServer) -> np.ndarray:
    """Seconds per token by the mock's own clock; of a block's ten requests two warm up."""
    counted = [timing for n, timing in enumerate(server.timings) if n % 10 >= 2]
    return np.array([(t.last_s - t.first_s) / (t.tokens - 1) for t in counted])


@pytest.mark.slow
def test_a_known_speedup_is_found(tmp_path: Path, workload: WorkloadConfig) -> None:
    slow, fast = MockServer(SLOW), MockServer(FAST)
    with mock_running(slow) as off, mock_running(fast) as on:
        summary = run_ab(an_ab((off, on), workload), tmp_path / "out")
    truth = [true_tpots(server) for server in (slow, fast)]
    gain = summary.gain("tpot_p50")
    assert gain is not None and gain.num_blocks == 3 and gain.num_pairs == 24
    known = float(np.median(truth[0]) / np.median(truth[1]))
    assert gain.ratio.estimate == pytest.approx(known, rel=0.15)
    assert gain.ratio.low < gain.ratio.estimate < gain.ratio.high
    assert len(gain.ratio_by_block) == 3
    assert summary.gain("tokens_per_s") is not None
    p99 = summary.gain("tpot_p99")
    assert p99 is not None and not p99.enough
    off_arm, on_arm = summary.arms
    assert off_arm.acceptance == ()
    assert {b.value for b in on_arm.acceptance if b.by == "temperature"} == {"0", "0.8"}
    assert on_arm.counters["vllm:spec_decode_num_drafts"] > 50
    for arm, own in zip((off_arm, on_arm), truth, strict=True):
        assert arm.attained is not None
        assert arm.attained.estimate == pytest.approx(np.mean(own <= 0.007), abs=0.15)
    assert summary.equality is not None and summary.equality.num_compared == 12
    assert summary.equality.num_equal == 12
    read = read_summary(tmp_path / "out")
    assert read.gain("tpot_p50") == gain


def test_blocks_alternate_and_arms_get_the_same(workload: WorkloadConfig) -> None:
    config = an_ab(("http://a", "http://b"), workload)
    segments = plan_ab(config, load_items(workload)[0])
    assert [s.arm.name for s in segments] == ["off", "on", "on", "off", "off", "on"]
    assert segments[0].items == segments[1].items
    assert segments[0].arrival_seed == segments[1].arrival_seed
    indices = [item.index for s in segments[::2] for item in s.items]
    assert len(set(indices)) == 24, "prompts of blocks differ"


class Interrupt(Exception):
    """Stops a measurement in the middle."""


@pytest.mark.slow
def test_a_stopped_run_is_saved_and_goes_on(tmp_path: Path, workload: WorkloadConfig) -> None:
    out = tmp_path / "out"
    begun: list[str] = []

    def note(segment: Segment, record: RequestRecord | None) -> None:
        if record is None:
            begun.append(f"{segment.arm.name}{segment.block}")

    def stop(segment: Segment, record: RequestRecord | None) -> None:
        note(segment, record)
        if len(begun) == 4:
            raise Interrupt

    with mock_running(MockServer(SLOW)) as off, mock_running(MockServer(FAST)) as on:
        config = an_ab((off, on), workload)
        with pytest.raises(Interrupt):
            run_ab(config, out, watch=stop)
        partial = read_summary(out)
        assert not partial.complete
        assert partial.gains[0].num_blocks == 1
        with pytest.raises(ConfigError, match="--resume"):
            run_ab(config, out)
        with pytest.raises(ConfigError, match="seed"):
            run_ab(replace(config, seed=5), out, resume=True)
        with (out / "requests.jsonl").open("a") as file:
            file.write('{"index": 99, "arm": "off", "block": 1}\n{"half')
        begun.clear()
        summary = run_ab(config, out, resume=True, watch=note)
    assert begun == ["off1", "off2", "on2"]
    assert summary.complete
    assert len([r for r in read_requests(out) if not r.warm_up]) == 48


@pytest.mark.slow
def test_more_blocks_are_another_look(tmp_path: Path, workload: WorkloadConfig) -> None:
    out = tmp_path / "out"
    with mock_running(MockServer(SLOW)) as off, mock_running(MockServer(FAST)) as on:
        first = run_ab(an_ab((off, on), workload), out)
        more = Sizes(blocks=4, requests_per_block=8, warm_up=2)
        second = run_ab(an_ab((off, on), workload, sizes=more), out, resume=True)
    assert (first.look, second.look) == (1, 2)
    assert second.gains[0].num_blocks == 4


async def _serve(arm: ArmConfig, folder: Path) -> ServerInfo:
    async with serving(arm, folder / "log") as client:
        return client.info


@pytest.mark.slow
def test_servers_are_started_and_stopped(tmp_path: Path) -> None:
    command = f"{sys.executable} -m tests.mock_server --port {{port}} --step-ms 1"
    arm = ArmConfig(name="m", command=command, ready_timeout_s=200)
    info = asyncio.run(_serve(arm, tmp_path))
    assert info.engine == "mock"
    with pytest.raises(EndpointError):
        asyncio.run(_serve(ArmConfig(name="gone", url=info.url), tmp_path))


RESTART = """
import os, pathlib, signal, subprocess, sys, time
arm, url, pid = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
if pid.exists():
    old = int(pid.read_text())
    os.kill(old, signal.SIGKILL)
command = [sys.executable, "-m", "tests.mock_server", "--step-ms", "1", "--seed", "1"]
k = "3" if arm == "on" else "0"
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
new = subprocess.Popen([*command, "--k", k, "--port", url.rsplit(":", 1)[1]], **quiet)
pid.write_text(str(new.pid))
"""
"""Ends the one server and starts the other at the same URL."""


@pytest.mark.slow
def test_a_server_by_url_is_restarted_before_every_block(
    tmp_path: Path, workload: WorkloadConfig
) -> None:
    """By the user's command: every block is then a start, as if the lab had started it."""
    script, pid = tmp_path / "restart.py", tmp_path / "pid"
    script.write_text(RESTART)
    url = f"http://127.0.0.1:{servers.free_port()}"
    log = tmp_path / "restarts"
    command = f"echo {{arm}} >> {log} && {sys.executable} {script} {{arm}} {{url}} {pid}"
    arms = [ArmConfig(name=name, url=url, restart_command=command) for name in ("off", "on")]
    config = an_ab((url, url), workload, sizes=Sizes(blocks=3, requests_per_block=4, warm_up=1))
    try:
        summary = run_ab(replace(config, baseline=arms[0], candidate=arms[1]), tmp_path / "out")
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)
    assert log.read_text().split() == ["off", "on", "on", "off", "off", "on"]
    assert [arm.server.restarted_by for arm in summary.arms] == [command, command]
    drafted = [arm.counters["vllm:spec_decode_num_draft_tokens"] for arm in summary.arms]
    assert drafted[0] == 0 < drafted[1]
    assert all(gain.ratio.unseen_sd == 0.0 for gain in summary.gains)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("echo no unit vllm-{arm} >&2; exit 4", r"(?s)code 4.*no unit vllm-m"),
        ("sleep 60", "had not ended after 1 s"),
        ("true", "does not answer 1 s after"),
    ],
)
def test_a_restart_that_fails_is_told(tmp_path: Path, command: str, said: str) -> None:
    url = f"http://127.0.0.1:{servers.free_port()}"
    arm = ArmConfig(name="m", url=url, restart_command=command, ready_timeout_s=1.0)
    with pytest.raises(EndpointError, match=said):
        asyncio.run(_serve(arm, tmp_path))


class Started(MockServer):
    """Says since when it runs."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") == "/metrics":
            page = b"process_start_time_seconds 1.7e9\n"
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": page, "more_body": False})
            return
        await super().__call__(scope, receive, send)


def test_a_restart_that_restarts_nothing_is_found(tmp_path: Path) -> None:
    """The word of a command is not enough where the server says since when it runs."""
    with mock_running(Started(SLOW)) as url:
        arm = ArmConfig(name="m", url=url, restart_command="true")
        with pytest.raises(EndpointError, match="still the process of before"):
            asyncio.run(_serve(arm, tmp_path))


def test_a_restart_belongs_to_a_url() -> None:
    with pytest.raises(ConfigError, match="restart_command"):
        ArmConfig(name="m", command="serve --port {port}", restart_command="true")


@pytest.mark.parametrize("sigint", [signal.SIG_IGN, signal.default_int_handler])
def test_sigterm_ends_a_run_at_an_await(sigint: signal.Handlers) -> None:
    """Not wherever it comes: around a fork an exception is lost, and so the server was kept."""
    seen: list[str] = []

    async def run() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            seen.append("went on")
            await asyncio.sleep(60.0)
        finally:
            await asyncio.sleep(0.0)
            seen.append("stopped")

    def before(number: int, frame: object) -> None:
        seen.append("as before")

    old = signal.signal(signal.SIGINT, sigint), signal.signal(signal.SIGTERM, before)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_to_end(run())
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGINT, old[0])
        signal.signal(signal.SIGTERM, old[1])
    assert seen == ["went on", "stopped", "as before"]


@pytest.mark.slow
@pytest.mark.parametrize("sigint", [signal.SIG_DFL, signal.SIG_IGN])
def test_sigterm_stops_the_servers_too(tmp_path: Path, sigint: signal.Handlers) -> None:
    """Also where a shell had SIGINT ignored, as of what a script starts in the background."""
    prompts, pid_file = tmp_path / "prompts.txt", tmp_path / "pid"
    prompts.write_text("hello there\n" * 200)
    mock = f"{sys.executable} -m tests.mock_server --port {{port}} --step-ms 20"
    server = f"sh -c 'echo $$ > {pid_file}; exec {mock}'"
    files = ["--workload", str(prompts), "--out", str(tmp_path / "out"), "--requests", "200"]
    command = [sys.executable, "-m", "foretoken", "lab", "ab", "--candidate", server, *files]
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, sigint),
    ) as run:
        while not (pid_file.exists() and pid_file.read_text()):
            assert run.poll() is None, run.returncode
            time.sleep(0.001)
        run.send_signal(signal.SIGTERM)
        said = run.communicate(timeout=60)[1].decode()
        assert run.returncode == 130 and "--resume goes on" in said, said
    deadline = time.monotonic() + 30
    with pytest.raises(ProcessLookupError):  # once whoever inherits it has taken its end note
        while time.monotonic() < deadline:
            os.kill(int(pid_file.read_text()), 0)
            time.sleep(0.01)


class Locked(MockServer):
    """Wants a key for everything."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (b"authorization", b"Bearer sesame") not in scope["headers"]:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"{}", "more_body": False})
            return
        await super().__call__(scope, receive, send)


@pytest.mark.slow
def test_a_key_goes_with_every_request(
    tmp_path: Path, workload: WorkloadConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a started server is ready is asked with it too, and it is written nowhere."""
    monkeypatch.setenv("THE_KEY", "sesame")
    with mock_running(Locked(SLOW)) as url:
        out = tmp_path / "out"
        arm = measure_one(url, workload, out, api_key_env="THE_KEY")

        async def ready() -> None:
            arm = ArmConfig(url=url, api_key_env="THE_KEY", ready_timeout_s=60.0)
            sleeping = await asyncio.create_subprocess_exec("sleep", "60")
            try:
                await servers._wait_ready(arm, url, tmp_path / "log", "late", sleeping)
            finally:
                sleeping.kill()
                await sleeping.wait()

        asyncio.run(ready())
    assert arm.num_errors == 0
    assert not any("no /metrics" in note for note in arm.notes)
    assert not any(b"sesame" in path.read_bytes() for path in out.rglob("*") if path.is_file())
    with pytest.raises(ConfigError, match="OTHER_KEY"):
        measure_one(url, workload, tmp_path / "other", api_key_env="OTHER_KEY")


DIES = "import sys; print('no such flag {port}', file=sys.stderr); sys.exit(3)"
READS = "import os, sys; sys.exit(int(os.environ['OWN']))"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (f'{sys.executable} -c "{DIES}"', r"(?s)code 3.*no such flag"),
        # As one types variables before `vllm serve`.
        (f'OWN=9 {sys.executable} -c "{READS}" {{port}}', "ended with code 9"),
        ("true", "port"),
    ],
)
def test_a_server_that_does_not_start_is_told_with_its_log(
    command: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises((EndpointError, ConfigError), match=said):
        asyncio.run(_serve(ArmConfig(name="m", command=command), tmp_path))


@pytest.mark.slow
def test_what_failed_is_counted_and_a_server_without_metrics_is_measured(
    tmp_path: Path, workload: WorkloadConfig
) -> None:
    server = MockServer(SLOW, faults=MockFaults(truncate_every=3, no_metrics=True))
    with mock_running(server) as url:
        arm = measure_one(url, workload, tmp_path / "out")
    assert arm.errors == {"truncated": 3}
    assert arm.num_requests == 9
    assert any("no /metrics" in note for note in arm.notes)
    assert arm.tpot is not None and not arm.tpot.p99.known
    kept = [json.loads(line) for line in (tmp_path / "out" / REQUESTS).read_text().splitlines()]
    assert sum(bool(row["error"]) for row in kept) == 3


@pytest.mark.slow
def test_a_server_that_answers_nothing_is_no_verdict(
    tmp_path: Path, workload: WorkloadConfig
) -> None:
    """Its first request is answered, as the one that tells how long it will take."""
    dead = MockServer(SLOW, faults=MockFaults(error_every=2))
    options = ["--workload", workload.file, "--out", str(tmp_path / "out"), "--blocks", "1"]
    options += ["--requests", "1", "--set", "sizes.warm_up=0", "--json"]
    with mock_running(MockServer(SLOW)) as off, mock_running(dead) as on:
        one = CliRunner().invoke(app, ["lab", "ab", "--candidate", on, *options])
        options[3] = str(tmp_path / "two")
        arms = ["--baseline", off, "--candidate", on]
        two = CliRunner().invoke(app, ["lab", "ab", *arms, *options])
    assert one.exit_code == 4 and "failed: 1 server" in one.stderr, one.output
    assert two.exit_code == 4 and json.loads(two.stdout)["exit_code"] == 4, two.output


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_what_was_written_can_go_on(
    tmp_path: Path, workload: WorkloadConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, write = 0, LineWriter.write

    def full(self: LineWriter, value: object) -> None:
        nonlocal written
        written += isinstance(value, RequestRecord)
        if written > 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, value)

    with mock_running(MockServer(SLOW)) as url:
        with monkeypatch.context() as patch:
            patch.setattr(LineWriter, "write", full)
            with pytest.raises(ConfigError, match="No space left.*--resume"):
                measure_one(url, workload, tmp_path / "out", blocks=3)
        assert len(read_requests(tmp_path / "out")) == 12
        arm = measure_one(url, workload, tmp_path / "out", blocks=3, resume=True)
    assert arm.num_requests == 27


def test_odd_things_are_noted(tmp_path: Path, workload: WorkloadConfig) -> None:
    server = ServerInfo(url="http://a", engine="vllm", version="0.32.0", model="one")
    other = replace(server, version="0.33.0", model="two")
    arms = (("on", 0, server), ("on", 1, other), ("off", 0, server), ("off", 1, server))
    ends = [SegmentEnd(arm=arm, block=block, seconds=1.0, server=info) for arm, block, info in arms]
    notes = gather("on", ends).notes
    assert "mixed versions of the server: vllm 0.32.0, vllm 0.33.0" in notes
    assert "mixed models: one, two" in notes
    (tmp_path / REQUESTS).write_text("")
    summary = summarize(an_ab(("http://a", "http://b"), workload), tmp_path, ends)
    assert "the arms run different versions: 0.32.0 and 0.33.0" in summary.notes


def test_settings_come_from_yaml_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "ab.yaml"
    path.write_text(
        "baseline: {name: off, url: 'http://a'}\ncandidate: {name: on, url: 'http://b'}\n"
        "workload: {file: x.jsonl}\nload: {kind: poisson, rate: 3}\n"
    )
    config = load_settings(AbConfig, path, ["load.rate=5", "sizes.blocks=12"])
    assert config.load.rate == 5.0 and config.sizes.blocks == 12
    for override, match in (
        ("load.rat=5", "rat"),
        ("load.rate=-1", r"load.rate"),
        ("load.kind=fast", "closed, constant"),
        ("sizes.blocks=0", "blocks"),
        ("candidate.name=off", "another"),
        ("nonsense", "--set"),
        ("baseline.command=x", "exactly one"),
    ):
        with pytest.raises(ConfigError, match=match):
            load_settings(AbConfig, path, [override])
    with pytest.raises(ConfigError, match="readable"):
        load_settings(AbConfig, tmp_path / "none.yaml", [])
    with pytest.raises(ConfigError, match="--candidate"):
        AbConfig(workload=WorkloadConfig(file="x"))
