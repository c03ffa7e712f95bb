"""What docs/deciding.md tells a reader to ask does what is said, up to the first request."""

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foretoken.cli.app import app
from tests.guards.test_commands_in_documents import commands_of_the_claims

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
