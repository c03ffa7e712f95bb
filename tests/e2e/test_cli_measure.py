"""`foretoken demo` and `foretoken compare` on the packaged models: documents and exit codes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.cli.demo import QUICK, Plan, _passes, installed_methods

NGRAM = '{"method": "ngram", "num_speculative_tokens": 3}'


@pytest.mark.slow
def test_demo_ends_with_one_json_document() -> None:
    result = CliRunner().invoke(app, ["demo", "--quick", "--json"])
    assert result.exit_code == 0, result.output
    [line] = result.stdout.splitlines()
    document = json.loads(line)
    assert document["identical"] is True
    rows = {(row["workload"], row["arm"]) for row in document["results"]}
    assert len(rows) == len(document["results"]) == 3 * len(installed_methods(QUICK))
    for row in document["results"]:
        assert row["identical"], row
        assert row["tokens_per_s"] > 0
        assert row["acceptance_length"] >= 1.0
        if row["arm"] == "draft_model":
            assert len(row["acceptance_by_position"]) == 4
            assert list(row["acceptance_by_position"]) == sorted(
                row["acceptance_by_position"], reverse=True
            )


@pytest.mark.slow
def test_demo_prints_a_table_for_people() -> None:
    result = CliRunner().invoke(app, ["demo", "--quick"])
    assert result.exit_code == 0, result.output
    assert "All methods wrote the same tokens." in result.stdout
    for name in installed_methods(QUICK):
        assert name in result.stdout
    assert "One prompt, run once." in " ".join(result.stdout.split())


def test_demo_says_how_many_passes_there_were() -> None:
    """Not `repeat 1 of 3` and then `medians over 1 repeats`."""
    plan = Plan()
    assert _passes(3, 6, plan) == "Medians over 6 prompts of medians over 3 passes"
    assert _passes(1, 6, plan) == (
        "Medians over 6 prompts, each run once (no time for 3 within 110 s)"
    )


@pytest.mark.slow
def test_compare_answers_with_table_document_and_exit_code(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def f(x):\nimport os\n")
    arguments = ["compare", "demo", "--speculative-config", NGRAM, "--prompts", str(prompts)]
    options = ["--repeats", "2", "--max-tokens", "12", "--batch-invariant", "on", "--json"]
    result = CliRunner().invoke(app, arguments + options)
    document = json.loads(result.stdout)
    assert result.exit_code == document["exit_code"]
    assert result.exit_code == 4 and document["verdict"] == "MEASURE MORE", "two prompts are few"
    off, on = document["results"]
    assert (off["arm"], on["arm"]) == ("off", "on")
    assert on["identical"]
    assert on["num_prompts"] == 2
    assert on["num_repeats"] == 2
    assert on["speedup"]["low"] <= on["speedup"]["median"] <= on["speedup"]["high"]
    assert "latency per request" in result.stderr
