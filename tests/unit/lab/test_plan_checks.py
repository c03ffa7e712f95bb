"""What a plan warns of, its commands, its settings, and the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.errors import ConfigError
from foretoken.lab.plan.memory_plan import DraftLoad, plan_memory
from foretoken.lab.plan.planner import build_plan
from foretoken.lab.plan.setup import PlanSettings, resolve_setup

PAIR: dict[str, Any] = {
    "target": "llama-3.1-70b",
    "draft": "llama-3.1-8b",
    "count": 2,
    "quantization": "int8",
}


def levels(**settings: object) -> dict[str, str]:
    """Check -> its level."""
    plan = build_plan(PlanSettings.from_mapping(settings))
    return {finding.check: finding.level for finding in plan.findings}


def test_a_pair_that_fits_by_size_times_bytes_does_not_load() -> None:
    found = levels(**{**PAIR, "quantization": "bf16"}, draft_tensor_parallel_size=1)
    assert found["kv_budget"] == "error"
    assert found["tp_symmetry"] == "error"


def test_a_draft_on_one_rank_costs_twice() -> None:
    given = {**PAIR, "utilization": 0.92, "overhead_gb": 0}
    load = DraftLoad(weight_bytes=16e9, kv_bytes_per_token=0, lookahead=5)
    even, uneven = (
        plan_memory(resolve_setup(PlanSettings(**given, draft_tensor_parallel_size=ranks)), load)
        for ranks in (2, 1)
    )
    assert even.kv_pool_bytes - uneven.kv_pool_bytes == pytest.approx(16e9)
    assert uneven.imbalance_bytes == pytest.approx(16e9)
    assert uneven.fullest_rank_bytes - even.fullest_rank_bytes == pytest.approx(8e9)


def test_a_drafter_of_foretoken_on_a_cpu_takes_only_its_weights_from_the_cache() -> None:
    """Its keys and values are written in memory that the target leaves, as the engine does it."""
    settings = {"target": "llama-3.1-8b", "draft": "llama-3.2-1b", "device": "epyc-9654"}
    found = {
        engine: build_plan(PlanSettings.from_mapping({**settings, "engine": engine}))
        for engine in ("foretoken", "llama.cpp")
    }
    own, other = (found[engine].speculating for engine in ("foretoken", "llama.cpp"))
    assert own.tokens == int(own.kv_pool_bytes / own.kv_bytes_per_token)
    both = other.kv_bytes_per_token + other.draft_kv_bytes_per_token
    assert other.tokens == int(other.kv_pool_bytes / both)
    [said] = [one.message for one in found["foretoken"].findings if one.check == "draft_kv"]
    assert "give it back" in said
    on_gpu = build_plan(
        PlanSettings.from_mapping({**settings, "engine": "foretoken", "device": "h100-sxm"})
    )
    assert on_gpu.speculating.draft_kv_reserved


@pytest.mark.parametrize(
    ("settings", "check", "level"),
    [
        ({"target": "qwen2.5-72b", "draft": "qwen2.5-0.5b", "count": 4}, "same_tokenizer", "error"),
        ({"target": "qwen2.5-72b", "draft": "qwen2.5-7b", "count": 4}, "same_tokenizer", "ok"),
        ({"target": "llama-3.1-70b", "draft": "qwama-0.5b", "count": 4}, "same_tokenizer", "ok"),
        ({"target": "llama-3.1-70b", "draft": "qwama-0.5b", "count": 4}, "same_family", "warning"),
        ({"target": "qwen3-8b", "draft": "llama-3.1-8b"}, "same_tokenizer", "error"),
        ({"target": "qwen2.5-72b", "draft": "qwen2.5-0.5b", "count": 4}, "ranks_divide", "error"),
        ({"target": "qwen3-8b", "draft": "qwen3-0.6b", "temperature": 0.9}, "hot_sampling",
         "warning"),
        ({"target": "llama-3.1-70b", "quantization": "int4", "method": "ngram"}, "quantized_target",
         "warning"),
        ({"target": "qwen3-8b", "method": "ngram"}, "quantize_first", "note"),
        ({"target": "qwen3-8b", "draft": "qwen3-0.6b", "context": 40000, "peak_concurrency": 4},
         "long_context", "warning"),
        ({"target": "qwen3-8b", "method": "ngram", "peak_concurrency": 2048}, "step_rows",
         "warning"),
        ({"target": "llama-3.1-70b", "quantization": "int8", "method": "ngram"}, "target_share",
         "warning"),
    ],
)  # fmt: skip
def test_checks_fire(settings: dict[str, Any], check: str, level: str) -> None:
    assert levels(**settings).get(check) == level


def test_a_method_without_memory_takes_none() -> None:
    plan = build_plan(PlanSettings(target="qwen3-8b", method="ngram"))
    assert plan.speculating.tokens == plan.plain.tokens
    assert plan.speculating.lookahead == 0


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"target": "qwen3-8b", "drafts": "x"}, "draft"),
        ({"target": "qwen3-8b", "count": "two"}, "count"),
        ({"target": "qwen3-8b", "count": 0}, "count"),
        ({"target": "qwen3-8b", "method": "sorcery"}, "ngram"),
        ({"target": "qwen3-8b", "acceptance": "0.9:0.1"}, "acceptance"),
        ({"target": "qwen3-8b", "method": "draft_model"}, "draft"),
        ({"target": "qwen3-8b", "device": "abacus"}, "device"),
        ({"draft": "qwen3-8b"}, "target"),
    ],
)
def test_wrong_settings_are_named(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        build_plan(PlanSettings.from_mapping(given))


@pytest.mark.slow
def test_the_command_prints_tables_and_answers_with_its_exit_code(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text("target: llama-3.1-70b\ndraft: llama-3.1-8b\ncount: 2\n")
    runner = CliRunner()
    wide = {"COLUMNS": "160"}
    bad = runner.invoke(app, ["lab", "plan", "--config", str(file)], env=wide)
    assert bad.exit_code == 1, bad.output
    assert "does not load" in bad.stdout
    smaller = ["lab", "plan", "--config", str(file), "--quantization", "int8"]
    good = runner.invoke(app, smaller, env=wide)
    assert good.exit_code == 0, good.output
    assert "What fits" in good.stdout and "break-even rate" not in good.stdout
    assert "break-even rate" in runner.invoke(app, [*smaller, "--details"], env=wide).stdout


def test_the_command_answers_with_one_json_document() -> None:
    options = ["--draft", "qwen3-0.6b", "--json"]
    result = CliRunner().invoke(app, ["lab", "plan", "qwen3-8b", *options])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["prediction"]["loads"]
    assert document["assumptions"]
