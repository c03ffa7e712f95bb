"""What every command of the lab promises: JSON, exit codes, settings files, and no PyTorch."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import typer.core
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.cli.lab.app import lab_app
from tests.guards.test_commands_in_documents import commands_of_the_claims
from tests.unit.lab.summaries import ab, write_run

GROUP = typer.main.get_command(lab_app)
assert isinstance(GROUP, typer.core.TyperGroup)
COMMANDS = GROUP.commands


def options(name: str) -> set[str]:
    """Everything that may stand behind the command."""
    return {option for parameter in COMMANDS[name].params for option in parameter.opts}


def test_all_commands_are_here() -> None:
    assert set(COMMANDS) == {
        "plan", "lint", "record", "ab", "decide", "tune", "audit", "export",
    }  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_machines_can_use_it(name: str) -> None:
    command = COMMANDS[name]
    assert "--json" in options(name)
    assert "Exit code" in f"{command.help} {command.epilog}"


def test_what_measures_takes_a_file_and_goes_on() -> None:
    assert {"config", "--set", "--dry-run", "--resume", "--out"} <= options("ab")


@pytest.mark.slow
def test_nothing_of_it_needs_torch(tmp_path: Path) -> None:
    """Not only at import: PyTorch stays out while commands run too."""
    write_run(tmp_path / "run", ab(1.6))
    arms = ["--baseline", "http://127.0.0.1:9", "--candidate", "serve {port} {k} {rate}"]
    demo = ["--workload", "demo", "--out", str(tmp_path / "out")]
    calls = [
        ["plan", "demo", "--method", "none", "--device", "this"],
        ["plan", "demo", "--draft", "demo-draft", "--device", "epyc-9755"],
        ["lint", "foretoken serve demo --no-such-word"],
        ["decide", str(tmp_path / "run")],
        ["decide", str(tmp_path / "run"), "--html", str(tmp_path / "page.html")],
        ["ab", "--candidate", "http://127.0.0.1:9", *demo],
        ["ab", *arms, *demo, "--dry-run"],
        ["ab", *arms, *demo, "--grid", "k=1,3", "--dry-run"],
        ["ab", *arms, *demo, "--force-acceptance", "0,0.6", "--dry-run"],
        ["audit", "http://127.0.0.1:9", *demo],
    ]
    code = (
        "import json, sys\n"
        "from typer.testing import CliRunner\n"
        "from foretoken.cli.app import app\n"
        f"codes = [CliRunner().invoke(app, ['lab', *call]).exit_code for call in {calls!r}]\n"
        "print(json.dumps([codes, [n for n in ('torch', 'transformers') if n in sys.modules]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=250
    )
    codes, loaded = json.loads(done.stdout.splitlines()[-1])
    assert loaded == []
    assert codes == [0, 4, 1, 0, 0, 5, 0, 0, 0, 5], "each of them got to its work"


MEASURES = {"tune", "ab", "audit"}
"""Commands with a dry run."""
MODELS = {
    "MODEL": "demo", "DRAFT": "demo-draft", "SMALL": "demo-draft", "LARGE": "demo-draft",
    "DRAFT_INT8": "demo-draft",
}  # fmt: skip
CONFIG = '{"method": "ngram", "num_speculative_tokens": 5}'
FORCED = CONFIG[:-1] + ', "synthetic_acceptance_rates": {rates:5}}'
FILES = {
    "prompts.txt": "one prompt\nanother prompt\n",
    "serve.sh": f"vllm serve org/m --speculative-config '{CONFIG}'\n",
    "server.log": "INFO SpecDecoding metrics: Mean acceptance length: 2.90, Accepted: 9 tokens\n",
    "requests.jsonl": '{"prompt": "x", "parameters": {"top_p": 0.9}}\n',
    "dashboard.json": '{"panels": [{"targets": [{"expr": "vllm:spec_decode_num_drafts_total"}]}]}',
}
EXITS = {"plan": {0, 1, 4}, "lint": {0, 1}}
"""Everything that is an answer; 2 and 3 are mistakes."""


def answerable(words: list[str]) -> bool:
    """Whether the command needs neither a run of before nor a server that is up."""
    return words[1] in MEASURES | set(EXITS)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the page speaks of."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "words", [words for words in commands_of_the_claims() if answerable(words)], ids=shlex.join
)
def test_a_command_answers(words: list[str], reader: Path) -> None:
    dial = FORCED if "--force-acceptance" in words else CONFIG
    off = "vllm serve org/m --port {port}"
    filled = {**MODELS, "$OFF": off, "$ON": f"{off} --speculative-config '{dial}'"}
    call = [filled.get(word, word) for word in words]
    if words[1] in MEASURES:
        call.append("--dry-run")
    if words[1] == "plan" and "--device" not in words:
        call += ["--device", "h100-sxm"]
    done = CliRunner().invoke(app, call)
    assert done.exit_code in EXITS.get(words[1], {0}), done.output + str(done.exception)
    left = {path.name for path in reader.rglob("*") if path.is_file()} - set(FILES)
    assert left <= {"workload.jsonl"}, "a dry run leaves at most the packaged prompts"
