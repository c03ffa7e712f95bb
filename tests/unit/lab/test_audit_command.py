"""`foretoken lab audit` as its user sees it."""

import asyncio
import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from foretoken.cli.app import app
from foretoken.errors import ConfigError
from foretoken.lab.audit.asking import Asker
from foretoken.lab.audit.page import row_of
from foretoken.lab.audit.run import Audited, AuditPlan, Hooks, audit
from foretoken.lab.http.client import connect
from foretoken.lab.measure.experiment import ArmConfig
from tests.mock_server.faults import MockFaults, faults_of
from tests.mock_server.generator import MockLaw
from tests.mock_server.server import MockServer, mock_running

FAST = MockLaw(step_s=0.0, prefill_s=0.0, k=3)


def run(tmp_path: Path, *options: str) -> Result:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"what is number {i} good for, if anything?\n" for i in range(12)))
    rest = ["--workload", str(prompts), "--prompts", "8", "--out", str(tmp_path / "out")]
    rest += ["--samples", "4", "--minutes", "0.05"]
    return CliRunner().invoke(app, ["lab", "audit", *rest, *options])


@pytest.mark.slow
def test_a_right_server_and_a_faulty_one(tmp_path: Path) -> None:
    wrong = MockServer(FAST, faults=MockFaults(miss_stop=1.0))
    with mock_running(MockServer(FAST)) as off, mock_running(wrong) as on:
        found = run(tmp_path, on, "--baseline", off, "--json")
        right = run(tmp_path, off, "--baseline", off, "--only", "stops,usage")
    assert found.exit_code == 1, found.output
    assert "FAULTY: stops" in found.stderr
    assert "the text goes on past the stop string" in found.stderr
    saved = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert saved["kind"] == "audit"
    checks = {check["name"]: check for check in json.loads(found.stdout)["checks"]}
    assert checks["stops"]["status"] == "fault" and checks["stops"]["plain_wrong"] == 0
    assert {c["status"] for name, c in checks.items() if name != "stops"} == {"ok"}
    assert right.exit_code == 0 and "no fault in 2 checks" in right.stderr


def test_the_time_is_told_of_what_is_asked() -> None:
    requests, work = AuditPlan().work(compared=True)
    assert work < requests, "most ask for few tokens"
    tools = AuditPlan(only=("tools",))
    asked = tools.prompts * 2 * 2
    assert tools.work(compared=True) == (asked, asked * 0.6), "no greedy texts are needed"
    told: list[str] = []

    async def ask() -> int:
        with mock_running(MockServer(MockLaw(step_s=0.002, prefill_s=0.0))) as url:
            client = await connect(ArmConfig(url=url))
            askers = [Asker(client.pool, client.info.model) for _ in range(2)]
            texts = [f"what is number {i} good for?" for i in range(12)]
            plan = AuditPlan(prompts=12, max_tokens=16, only=("greedy", "stops", "usage"))
            await audit(askers[0], askers[1], texts, plan, hooks=Hooks(say=told.append))
            await client.close()
        return sum(one.num_asked for one in askers)

    num_asked = asyncio.run(ask())
    _, said = told
    found = re.match(r"about (\d+) requests, \d+ s; a suspicious check looks again with 6 ", said)
    assert found is not None and 0.5 * num_asked < int(found[1]) <= 1.2 * num_asked, said


def test_without_a_baseline_the_rest_is_checked(tmp_path: Path) -> None:
    few = "greedy,verification,grammars,usage"
    wrong = MockServer(FAST, faults=MockFaults(drop_grammar=1.0))
    with mock_running(wrong) as on:
        found = run(tmp_path, on, "--only", few)
    assert found.exit_code == 1, found.output
    assert "FAULTY: grammars" in found.stderr
    assert "it needs a server without speculation: give --baseline" in found.stderr
    assert "compared with none" in found.stderr
    with mock_running(MockServer(FAST)) as on:
        found = run(tmp_path, on, "--only", few)
    assert found.exit_code == 4, "texts were not compared"
    assert "not enough compared: it needs a server without speculation" in found.stderr


def test_what_both_do_is_blamed_on_nobody(tmp_path: Path) -> None:
    faults = MockFaults(drop_grammar=1.0)
    with mock_running(MockServer(FAST, faults=faults)) as off:
        with mock_running(MockServer(FAST, faults=faults)) as on:
            found = run(tmp_path, on, "--baseline", off, "--only", "grammars")
    assert found.exit_code == 0, found.output
    assert "not by speculation" in found.stderr


def test_what_a_server_refuses_is_said(tmp_path: Path) -> None:
    faults = MockFaults(refuse=("tools", "logprobs"))
    with mock_running(MockServer(FAST, faults=faults)) as on:
        found = run(tmp_path, on, "--only", "tools,logprobs")
    assert found.exit_code == 4, found.output
    assert "tools is not supported" in found.stderr
    assert "nothing could be asked" in found.stderr


def test_mistakes_are_named(tmp_path: Path) -> None:
    found = run(tmp_path, "http://127.0.0.1:9", "--only", "stop")
    assert found.exit_code == 2 and "stops" in found.output
    wrong = run(tmp_path, "http://127.0.0.1:9", "--parameters", "top_p=1")
    assert wrong.exit_code == 2 and "--parameters: got 'top_p=1'" in wrong.output
    assert run(tmp_path, "http://127.0.0.1:9").exit_code == 5
    with pytest.raises(ConfigError, match="did you mean 'miss_stop'"):
        faults_of(["miss_stops"])
    with pytest.raises(ConfigError, match="a share from 0 to 1"):
        faults_of(["miss_stop=3"])


def test_dry_run_says_what_it_takes(tmp_path: Path) -> None:
    found = run(tmp_path, "http://127.0.0.1:9", "--dry-run", "--json")
    planned = json.loads(found.stdout)
    assert len(planned["checks"]) == 18 and planned["requests"] > 100
    assert list(tmp_path.iterdir()) == [tmp_path / "prompts.txt"], "a dry run writes nothing"


def test_the_page_and_its_row(tmp_path: Path) -> None:
    """What others collect: engine, version, method, card, checks, verdict."""
    wrong, table = MockServer(FAST, faults=MockFaults(alter_copy=1.0)), tmp_path / "audits.md"
    named = ["--only", "copies", "--method", "eagle3:ORG/NAME", "--card", "H|100"]
    with mock_running(wrong) as on:
        found = run(tmp_path, on, *named, "--submit", str(table))
        again = run(tmp_path, on, *named, "--submit", str(table))
    assert found.exit_code == again.exit_code == 1, found.output
    page = (tmp_path / "out" / "audit.md").read_text()
    assert "**FAULTY: copies.**" in page and "| card | H\\|100 |" in page
    assert re.search(r"\d+ of \d+ identifiers \(\d+\.\d%, .*\) came altered", page), page
    head, rule, *rows = table.read_text().splitlines()
    assert head.count("|") == rule.count("|") == 9 and len(rows) == 2
    assert rows[0].endswith(
        "| mock | 1 | mock | eagle3:ORG/NAME | H\\|100 | 0 of 1 ok | FAULTY: copies |"
    )
    (tmp_path / "other.md").write_text("# Notes\n")
    refused = run(tmp_path, "http://127.0.0.1:9", "--submit", str(tmp_path / "other.md"))
    assert refused.exit_code == 2 and "--submit" in refused.output


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("draft_model:/models/of/me/draft-q4.gguf", "draft_model:draft-q4.gguf"),
        ("eagle3:ORG/NAME", "eagle3:ORG/NAME"),
        ("ngram", "ngram"),
        ("draft_model:./draft/", "draft_model:draft"),
    ],
)
def test_a_row_names_no_folder_of_a_machine(told: str, name: str) -> None:
    found = Audited(engine="mock", version=None, model="/models/m.gguf", url="", method=told,
                    card="", baseline="none", requests=0, seconds=0.0, checks=())  # fmt: skip
    assert f"| m.gguf | {name} | not told |" in row_of(found)


def test_lengths_and_minutes_that_are_none(tmp_path: Path) -> None:
    wrong = run(tmp_path, "http://127.0.0.1:9", "--depths", "3,x")
    assert wrong.exit_code == 2 and "lengths from 1 to 64" in wrong.output
    wrong = run(tmp_path, "http://127.0.0.1:9", "--minutes", "0")
    assert wrong.exit_code == 2 and "minutes" in wrong.output


@pytest.mark.slow
def test_a_command_is_started_with_each_depth(tmp_path: Path) -> None:
    mock = f"{sys.executable} -m tests.mock_server --port {{port}} --k {{k}} --step-ms 0"
    command = f"{mock} --prefill-ms 0 --fault wrong_depth=0.7"
    found = run(tmp_path, command, "--only", "depths", "--depths", "4,5", "--minutes", "5")
    assert found.exit_code == 1, found.output
    assert "FAULTY: depth-5" in found.stderr
    assert "ok  depth-4: drafts of 4" in found.stderr
    assert {path.name for path in (tmp_path / "out" / "logs").iterdir()} == {
        "on.log", "on-4.log", "on-5.log",
    }  # fmt: skip
