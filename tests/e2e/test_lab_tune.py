"""`foretoken lab tune` with real processes: it starts servers, asks them, and says what to do."""

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.lab.measure.workload import Item
from foretoken.lab.tune.real import StartedServer
from foretoken.lab.tune.settings import OFF, NextVisit
from foretoken.lab.verdict import EXIT_CODES

pytestmark = pytest.mark.slow

MOCK = f"{sys.executable} -m tests.mock_server --port {{port}} --k {{k}} --seed 1"
LAW = "--step-ms 4 --row-ms 0.02 --prefill-ms 1 --draft-ms 0.1 --alpha 0.8 --restart-sd 0.01"
ASKED = ["--loads", "1,4", "-k", "1,4", "--minutes", "0.4"]


@pytest.fixture
def workload(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"prompt": f"say {i}", "max_tokens": 16, "category": ("chat", "code")[i % 2]}
        for i in range(24)
    ]
    path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    return str(path)


def test_a_mock_is_tuned_to_a_sentence_and_a_command(tmp_path: Path, workload: str) -> None:
    out = tmp_path / "out"
    call = ["lab", "tune", f"{MOCK} {LAW}", "--workload", workload, "--out", str(out), *ASKED]
    done = CliRunner().invoke(app, [*call, "--json"])
    said = " ".join(done.stderr.split())
    assert done.exit_code in (0, 1, 4), said
    assert "At most 0.4 minutes" in said
    found = json.loads(done.stdout)
    assert found == json.loads((out / "answer.json").read_text("utf-8"))
    assert EXIT_CODES[found["verdict"]] == done.exit_code
    assert found["sentence"] in said
    drafts = found["setting"].removeprefix("k k=") if done.exit_code == 0 else "0"
    assert f"--k {drafts}" in found["command"]
    assert found["minutes"] <= 0.4
    again = CliRunner().invoke(app, call)
    assert again.exit_code == 2
    assert "--resume" in again.stderr
    assert CliRunner().invoke(app, [*call, "--resume"]).exit_code == done.exit_code


def test_on_a_slow_server_answers_are_cut_so_that_there_is_something_to_compare(
    tmp_path: Path,
) -> None:
    """Eight answers of 400 tokens would take 64 s of the 48 s that are given."""
    items = [Item(index=i, prompt=f"say {i}", max_tokens=400) for i in range(16)]
    slow = MOCK.replace("{k}", "0") + " --step-ms 20 --prefill-ms 1"
    server = StartedServer(lambda _: slow, items, tmp_path, budget_s=48.0)
    visits = [server.visit(NextVisit(OFF, turn, ((1, 8),))) for turn in (0, 1)]
    [most] = {visit.most_tokens for visit in visits}
    assert 16 <= most < 100
    lengths = [
        json.loads(line)["output_tokens"]
        for line in (tmp_path / "requests.jsonl").read_text("utf-8").splitlines()
    ]
    assert lengths == [most] * 16
    known = StartedServer(lambda _: slow, items, tmp_path, most_tokens=most)
    assert known.visit(NextVisit(OFF, 2, ((1, 2),))).most_tokens == most


def test_killed_it_leaves_no_server_and_goes_on(tmp_path: Path, workload: str) -> None:
    out = tmp_path / "out"
    call = [sys.executable, "-m", "foretoken", "lab", "tune", f"{MOCK} {LAW}"]
    call += ["--workload", workload, "--out", str(out), *ASKED]
    process = subprocess.Popen(call, stderr=subprocess.DEVNULL)
    visits = out / "visits.jsonl"
    until = time.monotonic() + 60
    while time.monotonic() < until and not (
        visits.is_file() and visits.read_bytes().count(b"\n") > 1
    ):
        time.sleep(0.05)
    time.sleep(0.7)  # the next server is up by now
    process.kill()
    process.wait()
    before = visits.read_bytes()
    assert before.count(b"\n") > 1
    until = time.monotonic() + 20
    while orphans() and time.monotonic() < until:
        time.sleep(0.1)
    assert orphans() == 0
    done = subprocess.run([*call, "--resume"], capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 1), done.stderr
    assert visits.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    assert orphans() == 0


def orphans() -> int:
    found = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            parent = (folder / "stat").read_text().rsplit(") ", 1)[1].split()[1]
        except (OSError, IndexError):
            continue
        found += b"tests.mock_server" in words and b"--restart-sd" in words and parent == "1"
    return found


SGLANG = """#!{python}
import os, sys
words = sys.argv[1:]
def value(flag, default):
    return words[words.index(flag) + 1] if flag in words else default
steps = value("--speculative-num-steps", "0")
if steps != "0":
    assert value("--speculative-algorithm", "") == "EAGLE3"
    assert value("--speculative-draft-model-path", "") == "org/head"
    assert int(value("--speculative-num-draft-tokens", "0")) == int(steps) + 1
    print("steps", steps, flush=True)
os.execv("{python}", ["{python}", "-m", "tests.mock_server", "--port", value("--port", ""),
                      "--k", steps, *"{law}".split()])
"""


def test_sglang_is_told_in_its_own_words(tmp_path: Path, workload: str) -> None:
    """Its flags arrive at a stand-in, which serves the mock as they say."""
    program = tmp_path / "sglang"
    program.write_text(SGLANG.format(python=sys.executable, law=LAW), "utf-8")
    program.chmod(0o755)
    out = tmp_path / "out"
    command = shlex.join([str(program), "serve", "--model-path", "m", "--port", "30000"])
    call = ["lab", "tune", command, "--drafter", "eagle3:org/head", "--workload", workload]
    done = CliRunner().invoke(app, [*call, "--out", str(out), "--loads", "1", "-k", "2",
                                    "--minutes", "2", "--json"])  # fmt: skip
    assert done.exit_code in (0, 1), done.stderr
    found = json.loads(done.stdout)
    assert "--port 30000" in found["command"]
    logs = {path.name: path.read_text("utf-8") for path in (out / "logs").iterdir()}
    assert "steps 2" in logs["eagle3-head-k-2.log"]
    assert "steps" not in logs["off.log"]


def test_a_server_that_does_not_start_is_told(tmp_path: Path, workload: str) -> None:
    call = ["lab", "tune", "false {k} {port}", "--workload", workload, "--out", str(tmp_path / "o")]
    done = CliRunner().invoke(app, call)
    assert done.exit_code == 5
    assert "while starting" in done.stderr


def test_a_dry_run_shows_every_command(tmp_path: Path) -> None:
    out = tmp_path / "never"
    call = ["lab", "tune", "vllm serve m --port 8001", "--workload", "demo", "--dry-run"]
    done = CliRunner().invoke(app, [*call, "--out", str(out), "-k", "3"])
    assert done.exit_code == 0
    assert "off: vllm serve m --port 8001" in done.stderr
    assert '"num_speculative_tokens": 3' in done.stderr
    assert not out.exists()


@pytest.mark.parametrize(
    ("server", "named", "hinted"),
    [
        ("vllm serve m", [], True),
        ("vllm serve m", ["--drafter", "ngram"], False),
        ("foretoken serve demo", [], False),
    ],
)
def test_whoever_names_no_drafter_is_told_what_is_left_out(
    server: str, named: list[str], hinted: bool
) -> None:
    """A look-up needs no name; a draft model or a head does, and may be the best."""
    call = ["lab", "tune", server, *named, "--workload", "demo", "--dry-run"]
    done = CliRunner().invoke(app, call)
    assert done.exit_code == 0
    assert ("--drafter draft_model:MODEL" in done.stderr) == hinted
