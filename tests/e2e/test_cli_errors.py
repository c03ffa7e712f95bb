"""Mistakes on the command line: one clear line, the right exit code, no traceback."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from foretoken import __version__
from foretoken.cli.app import app


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def assert_one_line(result: Result, exit_code: int, *words: str) -> None:
    assert result.exit_code == exit_code, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("foretoken: ")
    for word in words:
        assert word in lines[0]


def test_version() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout == f"foretoken {__version__}\n"


def test_help_lists_every_subcommand() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for name in ("generate", "demo", "compare", "info", "train"):
        assert name in result.stdout


def test_unknown_model() -> None:
    result = run("info", "./no-such-folder")
    assert_one_line(result, 3, "model", "no-such-folder", "config.json")


@pytest.mark.parametrize("option", ["--quantization", "--kv-cache-dtype"])
def test_kinds_that_info_does_not_know(option: str) -> None:
    assert_one_line(run("info", "demo", option, "int3"), 2, option, "int8")


def test_info_explains_itself() -> None:
    """No `None`, what the second size is larger by, and whether kernels are on."""
    text = run("info", "demo").stdout
    assert "None" not in text and "windows" not in text
    assert "22.0 MB" in text and "25.0 MB (3.1 MB more" in text
    assert re.search(r"kernels +│ (on, \w+|off \()", text), text
    document = json.loads(run("info", "demo", "--json").stdout)
    assert document["kernels"].split(",")[0].split(" ")[0] in ("on", "off")
    assert "more" not in run("info", "demo", "--quantization", "int8").stdout


def test_bad_speculative_json() -> None:
    result = run("generate", "x", "--speculative-config", "{oops")
    assert_one_line(result, 2, "--speculative-config", "{oops")


def test_unknown_speculative_key() -> None:
    config = '{"method": "ngram", "num_speculative_token": 3}'
    result = run("generate", "x", "--speculative-config", config)
    assert_one_line(result, 2, "num_speculative_token", "num_speculative_tokens")


def test_method_that_is_not_built() -> None:
    result = run("generate", "x", "--speculative-config", '{"method": "mtp"}')
    assert_one_line(result, 2, "mtp", "not yet built")


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("--temperature", "-1", "temperature"),
        ("--temperature", "nan", "temperature"),
        ("--top-p", "0", "top_p"),
        ("--max-tokens", "0", "max_tokens"),
        ("--batch-invariant", "maybe", "--batch-invariant"),
        ("--dtype", "int3", "dtype"),
    ],
)
def test_bad_values(option: str, value: str, field: str) -> None:
    assert_one_line(run("generate", "x", option, value), 2, field, value.replace("nan", "nan"))


def test_two_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("x")
    assert_one_line(run("generate", "y", "--file", str(file)), 2, "PROMPT")


def test_missing_prompt_file() -> None:
    assert_one_line(run("generate", "--file", "nowhere.txt"), 2, "--file", "nowhere.txt")


def test_compare_needs_prompts_that_exist() -> None:
    result = run(
        "compare", "demo", "--speculative-config", '{"method": "ngram"}', "--prompts", "nowhere"
    )
    assert_one_line(result, 2, "--prompts", "nowhere")


def test_compare_needs_speculation(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("x\n")
    result = run("compare", "demo", "--speculative-config", "none", "--prompts", str(file))
    assert_one_line(result, 2, "--speculative-config")
