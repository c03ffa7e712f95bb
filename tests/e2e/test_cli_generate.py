"""`foretoken generate` and `foretoken info` on the packaged models."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from foretoken import LLM, SamplingParams
from foretoken.assembly import default_speculation
from foretoken.cli.app import app
from foretoken.config import EngineConfig

PROMPT = "def add(a, b):\n"


def generate(*arguments: str, stdin: str | None = None) -> str:
    result = CliRunner().invoke(app, ["generate", "--max-tokens", "12", *arguments], input=stdin)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def expected() -> str:
    with LLM("demo", max_num_seqs=1, batch_invariant=True) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12)
        return llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text


def test_prompt_argument(expected: str) -> None:
    assert generate(PROMPT, "--batch-invariant", "on") == expected + "\n"


def test_plain_decoding_writes_the_same(expected: str) -> None:
    shown = generate(PROMPT, "--batch-invariant", "on", "--speculative-config", "none")
    assert shown == expected + "\n"


@pytest.mark.parametrize("way", [["--speculative-config", "auto"], []])
def test_auto_writes_the_same(expected: str, way: list[str]) -> None:
    assert generate(PROMPT, "--batch-invariant", "on", *way) == expected + "\n"


def test_where_a_draft_may_change_a_token_nothing_drafts_by_default(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings: dict[str, Any] = {"model": "demo", "dtype": "float16"}
    assert default_speculation(EngineConfig.from_kwargs(**settings)) is None
    assert "float16" in caplog.text and "--speculative-config auto" in caplog.text
    exact = EngineConfig.from_kwargs(**settings, batch_invariant=True)
    assert default_speculation(exact) == {"method": "auto"}


def test_prompt_from_standard_input(expected: str) -> None:
    assert generate("--batch-invariant", "on", stdin=PROMPT) == expected + "\n"


def test_prompt_from_a_file(tmp_path: Path, expected: str) -> None:
    file = tmp_path / "prompt.py"
    file.write_text(PROMPT)
    shown = generate("--batch-invariant", "on", "--file", str(file))
    assert shown == expected + "\n"


@pytest.mark.slow
def test_a_seed_repeats_a_sample() -> None:
    options = (PROMPT, "--temperature", "1", "--seed", "3")
    assert generate(*options) == generate(*options)


def test_info_says_what_the_model_is() -> None:
    result = CliRunner().invoke(app, ["info", "demo", "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["model"] == "demo"
    per_layer = 2 * facts["key_value_heads"] * facts["head_dim"] * 2
    assert facts["dtype"] == "bfloat16" and facts["run_by"] == "Foretoken's own layers"
    assert facts["kv_bytes_per_token"] == facts["layers"] * per_layer
    assert facts["weight_bytes"] == 2 * facts["parameters"]
    table = 2 * facts["vocabulary"] * facts["hidden_size"]
    assert facts["weights_in_memory_bytes"] == facts["weight_bytes"] + table, "a packed head"


def test_info_knows_smaller_weights_and_keys() -> None:
    options = ["--quantization", "int4", "--kv-cache-dtype", "int8", "--json"]
    result = CliRunner().invoke(app, ["info", "demo", *options])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    per_layer = 2 * facts["key_value_heads"] * (facts["head_dim"] + 4)
    assert facts["kv_bytes_per_token"] == facts["layers"] * per_layer
    assert facts["weights_in_memory_bytes"] < 0.6 * facts["weight_bytes"]
    assert facts["activations"] == "16 bits beside integer weights, 8 as a draft model"


def test_info_knows_processes_that_share_a_model() -> None:
    def facts(*options: str) -> dict[str, Any]:
        result = CliRunner().invoke(app, ["info", "demo", "--json", *options])
        assert result.exit_code == 0, result.output
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    alone, shared = facts(), facts("--tensor-parallel-size", "2")
    assert alone["processes"] is None and shared["processes"] == 2
    table = 2 * alone["vocabulary"] * alone["hidden_size"]
    assert shared["weights_in_memory_bytes"] >= alone["weights_in_memory_bytes"] + table
    assert shared["weights_of_a_process_bytes"] == shared["weights_in_memory_bytes"] // 2
    wrong = CliRunner().invoke(app, ["info", "demo", "--tensor-parallel-size", "5"])
    assert wrong.exit_code == 2 and "key heads" in wrong.output + wrong.stderr
    both = CliRunner().invoke(app, ["info", "demo", "--costs", "--tensor-parallel-size", "2"])
    assert both.exit_code == 2 and "--costs" in both.output + both.stderr


def test_info_is_a_table_for_people() -> None:
    result = CliRunner().invoke(app, ["info", "demo-draft"])
    assert result.exit_code == 0, result.output
    assert "kv per token" in result.stdout
