"""From two servers to a verdict and a page, on a mock and on the packaged pair."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.lab.verdict import LEAVE_IT_OFF, MEASURE_MORE, USE_IT
from tests.mock_server.generator import MockLaw
from tests.mock_server.server import MockServer, mock_running

SLOW = MockLaw(step_s=0.004, prefill_s=0.004, seed=1)
FAST = MockLaw(step_s=0.004, prefill_s=0.004, k=5, alpha=0.9, draft_s=0.0002, seed=1)
ANYWHERE = ("--set", "client_lag=null", "--set", "busy_host=null", "--set", "plausible=null")
"""Other tests run beside these: the machine is busy, and the client late for one of two dozen."""
QUICK = (*ANYWHERE, "--set", "restarts.least_blocks=3", "--set", "tail_tpot=null",
         "--set", "ttft=null", "--set", "speedup.least=1.1")  # fmt: skip
"""Without the rules that a run of seconds cannot meet: tails need hundreds of requests. Servers
given by URL are one start each."""


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"def f{i}(x):\n", "max_tokens": 24} for i in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def measure(out: Path, prompts: Path, baseline: str, candidate: str) -> None:
    options = ["--baseline", baseline, "--candidate", candidate, "--workload", str(prompts)]
    options += ["--load", "closed:2", "--blocks", "3", "--requests", "8", "--max-tokens", "24"]
    result = CliRunner().invoke(app, ["lab", "ab", "--out", str(out), *options])
    assert result.exit_code in (0, 1, 4), result.output
    verdict = result.output.strip().splitlines()[-1].split(":")[0]
    assert f"<h1>{verdict}" in (out / "page.html").read_text("utf-8"), "the page says the verdict"


def decided(out: Path, *options: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The document of `foretoken lab decide --json`, and its rules by name."""
    result = CliRunner().invoke(app, ["lab", "decide", str(out), "--json", *options])
    document: dict[str, Any] = json.loads(result.stdout)
    assert result.exit_code == document["exit_code"], result.output
    [decision] = document["decisions"]
    return document, {judged["rule"]: judged["result"] for judged in decision["rules"]}


def assert_commands_read(out: Path) -> None:
    """What other lengths would have done in a measured A/B."""
    one, three = decided(out, "--k", "1,3")[0]["other_lengths"]
    assert 1 < one["tokens_per_step"] <= 2 < three["tokens_per_step"] <= 4
    assert three["speedup"] > 1.2


@pytest.mark.slow
def test_one_server_is_measured(tmp_path: Path, prompts: Path) -> None:
    options = ["--out", str(tmp_path), "--workload", str(prompts), "--load", "poisson:40"]
    options += ["--blocks", "1", "--requests", "10", "--slo", "ttft=5", "--json"]
    with mock_running(MockServer(FAST)) as url:
        bench = CliRunner().invoke(app, ["lab", "ab", "--candidate", url, *options])
    assert bench.exit_code == 0, bench.output
    arm = json.loads(bench.stdout)["arm"]
    assert arm["num_requests"] == 10 and arm["attained"]["estimate"] == 1.0


@pytest.mark.slow
def test_a_known_gain_is_decided(tmp_path: Path, prompts: Path) -> None:
    out = tmp_path / "ab"
    with mock_running(MockServer(SLOW)) as slow, mock_running(MockServer(FAST)) as fast:
        measure(out, prompts, slow, fast)
        measure(tmp_path / "reverse", prompts, fast, slow)
    careful, _ = decided(out, *ANYWHERE)
    assert careful["verdict"] == MEASURE_MORE, careful["sentence"]
    assert careful["decisions"][0]["needed_blocks"] >= 200 / 8, "a P95 takes 200 requests"
    quick, rules = decided(out, *QUICK)
    assert quick["verdict"] == USE_IT, quick["sentence"]
    assert rules["speedup"]["value"]["estimate"] > 1.4
    assert rules["monitoring"]["outcome"] == rules["acceptance_pays"]["outcome"] == "pass"
    backwards, _ = decided(tmp_path / "reverse", *QUICK)
    assert backwards["verdict"] == LEAVE_IT_OFF
    assert_commands_read(out)
    page = out / "page.html"
    found = CliRunner().invoke(app, ["lab", "decide", str(out), *QUICK, "--html", str(page)])
    assert found.exit_code == 0, found.output
    assert "<h1>USE IT</h1>" in page.read_text("utf-8")
    assert found.stdout.splitlines()[-1].startswith("USE IT: faster: proven")


@pytest.mark.slow
def test_the_packaged_pair_is_measured_and_decided(tmp_path: Path, prompts: Path) -> None:
    """Which verdict depends on the machine; that every rule found its numbers does not."""
    serve = f"{sys.executable} -m foretoken serve demo --port {{port}} --max-num-seqs 8"
    serve += f" --kv-cache-memory-bytes {64 << 20} --no-adaptive-speculation"
    serve += " --per-request-spec-decode-metrics detailed"
    measure(tmp_path / "ab", prompts, f"{serve} --speculative-config none", serve)
    document, rules = decided(tmp_path / "ab", *QUICK)
    assert document["verdict"] in (USE_IT, LEAVE_IT_OFF, MEASURE_MORE)
    assert rules["outputs"]["outcome"] == "pass", rules["outputs"]["says"]
    assert "24 of 24" in rules["outputs"]["says"]
    assert rules["errors"]["outcome"] == "pass"
    assert rules["monitoring"]["outcome"] == "pass"
    assert rules["speedup"]["value"]["estimate"] > 0
    assert document["decisions"][0]["break_even_rate"] < 1
