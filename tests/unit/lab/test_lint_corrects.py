"""The whole launch, corrected: ready to paste, and nothing wrong with it any more."""

import json

import pytest
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.lab.launch.sources import read_source
from foretoken.lab.lint.checks import LaunchVerdict, lint
from foretoken.lab.lint.fit import Machine
from tests.unit.lab.test_lint_reads import SCRIPT


def judged(text: str, device: str | None = None) -> LaunchVerdict:
    """The verdict on the one launch of a text."""
    [verdict] = lint(read_source(text), Machine(device=device, count=2)).launches
    return verdict


@pytest.mark.slow
def test_without_a_length_the_target_s_own_has_to_fit() -> None:
    serve = "vllm serve meta-llama/Llama-3.1-70B-Instruct -tp 2 --spec-method ngram --spec-tokens 3"

    def errors(length: str) -> list[str]:
        found = judged(f"{serve} {length}", device="h100").findings
        return [f"{one.message} {one.remedy}" for one in found if one.level == "error"]

    [error] = errors("")
    assert "one request needs 131,07" in error and "a context of at most 33," in error
    for fits in ("--max-model-len 32768", "--max-model-len 32k", "--max-model-len auto"):
        assert not errors(fits), fits
    assert "one request needs 65,5" in errors("--max-model-len 64K")[0]


@pytest.mark.parametrize(
    ("text", "corrected"),
    [
        ("foretoken serve demo --num-lookahead-slots 5 --use-v2-block-manager --max-num-seqs 8",
         "foretoken serve demo \\\n  --max-num-seqs 8\n"),
        ("containers:\n- command: [foretoken, serve]\n"
         "  args: [demo, --swap-space, '4', --port, '80']\n",
         "args:\n- demo\n- --port\n- '80'\n"),
        ("from foretoken import LLM\nllm = LLM('demo', swap_space=4, max_num_seqs=8)",
         'llm = LLM(\n    model="demo",\n    max_num_seqs=8,\n)\n'),
    ],
)  # fmt: skip
def test_foretoken_is_judged_by_its_own_parser(text: str, corrected: str) -> None:
    found = CliRunner().invoke(app, ["lab", "lint", text])
    assert found.exit_code == 1 and "leave it out" in found.stdout
    assert found.stdout.split("Corrected:\n\n")[1].strip() == corrected.strip()


@pytest.mark.parametrize(
    ("command", "level", "words"),
    [
        ("foretoken serve demo", "note", "speculates with ngram (up to 10), suffix"),
        ("foretoken serve demo --speculative-config none", "note", "speculation is off"),
        ("foretoken serve demo --model-draft demo-draft", "note", "speculates with draft_model"),
        ("foretoken serve demo --nonsense 5", "error", "--nonsense: got 5"),
        ("foretoken serve demo --port x", "error", "--port: got 'x'"),
        ("foretoken serve", "error", "MODEL: got None"),
    ],
)
def test_what_foretoken_serve_would_do(command: str, level: str, words: str) -> None:
    found = CliRunner().invoke(app, ["lab", "lint", command])
    assert found.exit_code == (1 if level == "error" else 0)
    assert words in found.stdout and f"  {level} " in found.stdout


def test_what_is_printed_can_be_pasted() -> None:
    """No colours, no broken lines, whatever the width; the same in the JSON document."""
    runner = CliRunner()
    shown = runner.invoke(app, ["lab", "lint", SCRIPT], env={"COLUMNS": "40"}).stdout
    corrected = judged(SCRIPT).corrected
    assert f"\n\n{corrected}\n\n" in shown
    document = json.loads(runner.invoke(app, ["lab", "lint", SCRIPT, "--json"]).stdout)
    assert document["corrected"] == {SCRIPT: [corrected]}


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve Qwen/Qwen3-8B --spec-method ngram --spec-tokens -1",
        "llm = LLM(model=1, speculative_config={'model': f(), 'disable_by_batch_size': None})",
        "vllm serve",
        "vllm serve m --speculative-config '[1]'",
        "sglang serve m --speculative-num-steps x --speculative-eagle-topk 1",
    ],
)
def test_odd_values_end_in_findings(text: str) -> None:
    judged(text, device="h100-sxm")


def test_an_unknown_device_is_named() -> None:
    arguments = ["lab", "lint", "vllm serve Qwen/Qwen3-8B -tp 2", "--device", "h100-sxn"]
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 2 and "h100-sxm" in found.stderr
