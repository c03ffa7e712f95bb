"""Each symptom is found in a log of its own, with its evidence; right servers' logs show none."""

import json
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from foretoken.cli.app import app
from foretoken.lab.lint.symptoms import diagnose, read_log, symptoms
from tests.mock_server.generator import MockLaw
from tests.mock_server.server import MockServer, mock_running

ROOT = Path(__file__).parents[3]
FILE = Path(__file__).with_name("symptom_logs.toml")
LOGS = tomllib.loads(FILE.read_text("utf-8"))
CLEAN = LOGS.pop("clean")
"""By engine, of servers that are right."""


def test_every_symptom_has_a_log() -> None:
    assert {symptom.name for symptom in symptoms()} == LOGS.keys()
    assert f"[{len(LOGS)} symptoms]" in (ROOT / "docs" / "deciding.md").read_text("utf-8")


@pytest.mark.parametrize("name", LOGS)
def test_a_symptom_is_found_with_its_evidence(name: str) -> None:
    [symptom] = [one for one in symptoms() if one.name == name]
    text = LOGS[name] + (("\n" + LOGS[name]) * (symptom.times - 1))
    log, found = diagnose(text)
    by_name = {one.check: one for one in found}
    assert name in by_name, (log.engine, log.settings, log.facts, list(by_name))
    assert by_name[name].where and by_name[name].remedy
    assert symptom.thread in by_name[name].message
    assert len(found) <= 4, f"one log shows {list(by_name)}"


@pytest.mark.parametrize("engine", CLEAN)
def test_right_servers_show_nothing(engine: str) -> None:
    log, found = diagnose(CLEAN[engine])
    assert log.engine == engine
    assert not found, found


def test_rows_are_whole() -> None:
    for one in symptoms():
        assert one.lines or one.settings or one.facts, one.name
        assert one.thread.startswith(("github.com/", "docs/")), one.name
        assert one.cause[0].islower() and not one.cause.endswith("."), one.name
        assert one.level in ("error", "warning", "note"), one.name


def test_facts_of_a_log() -> None:
    log = read_log(CLEAN["foretoken"])
    assert log.facts["acceptance_mean"] == pytest.approx(0.47)
    assert (log.facts["length_mean"], log.facts["k"]) == (2.41, 3.0)
    sglang = read_log(CLEAN["sglang"])
    assert sglang.settings["speculative-algorithm"] == "EAGLE3"
    assert sglang.facts["acceptance_max"] == 0.63


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["lab", "lint", *words])


def test_the_command_reads_logs_urls_and_commands(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(LOGS["depth-five"])
    found = run("--log", str(log))
    assert found.exit_code == 1, found.output
    assert "speculative-num-steps 5: with five steps answers were corrupt" in found.stdout
    assert "github.com/sgl-project/sglang/issues/33800" in found.stdout
    assert "-> --speculative-num-steps 4" in found.stdout
    law = MockLaw(step_s=0.0, prefill_s=0.0, k=3, alpha=0.0)
    with mock_running(MockServer(law)) as url:
        shown = run("--log", url, "--json")
    assert shown.exit_code == 0, "nothing was drafted yet"
    assert json.loads(shown.stdout)["findings"] == {url: []}
    both = run("llama-server -m t.gguf", "--log", CLEAN["vllm"], "--json")
    assert len(json.loads(both.stdout)["findings"]) == 2


def test_mistakes_are_named(tmp_path: Path) -> None:
    assert run().exit_code == 2
    nothing = run("--log", "a line of nobody's log")
    assert nothing.exit_code == 2 and "a log, a metrics page or a command" in nothing.output
    assert run("--log", "http://127.0.0.1:9").exit_code == 5
    assert run("--log", str(tmp_path / "none.log")).exit_code == 2
