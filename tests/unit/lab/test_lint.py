"""What the linter reads, and what it says about it."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.lab.findings import Finding
from foretoken.lab.launch.sources import read_source
from foretoken.lab.lint.checks import NAMES, lint
from foretoken.lab.lint.fit import Machine, planned_settings
from foretoken.lab.lint.names import todays
from foretoken.lab.plan.planner import build_plan
from foretoken.lab.plan.setup import PlanSettings, resolve_setup
from tests.marks import slow_but

OLD = """
# as of 2024
python -m vllm.entrypoints.openai.api_server --model meta-llama/Llama-3.1-70B-Instruct \\
  --tensor-parallel-size 2 --gpu-memory-utilization 0.92 \\
  --speculative-model meta-llama/Llama-3.1-8B-Instruct --num-speculative-tokens 5 \\
  --speculative-draft-tensor-parallel-size 1 --spec-decoding-acceptance-method rejection_sampler \\
  --speculative-disable-by-batch-size 32 --quantization bitsandbytes
"""


def findings(text: str, *, device: str | None = None, engine: str = "auto") -> list[Finding]:
    """Everything the linter says about `text`, by checks that it names."""
    found = lint(read_source(text, engine), Machine(device=device, count=2), engine).findings
    assert {one.check for one in found} <= {*NAMES, "speculation", "unplanned"}
    return list(found)


def said(text: str, **options: Any) -> set[tuple[str, str]]:
    """(check, level) of every finding."""
    return {(f.check, f.level) for f in findings(text, **options)}


def vllm(config: dict[str, Any], *options: str) -> str:
    """A vLLM command line with a speculative config."""
    return f"vllm serve org/model {' '.join(options)} --speculative-config '{json.dumps(config)}'"


@pytest.mark.parametrize(
    ("config", "complete"),
    [
        ({"model": "deepseek-ai/dspark_qwen3_8b_block7"}, True),
        ({"method": "dspark", "model": "org/head"}, True),
        ({"model": "z-lab/Qwen3-8B-DFlash-b16"}, False),
        ({"method": "dflash", "model": "org/head"}, False),
        ({"model": "z-lab/Qwen3-8B-DFlash-b16", "num_speculative_tokens": 15}, True),
    ],
)
def test_block_heads_say_their_length_or_need_one(config: dict[str, Any], complete: bool) -> None:
    """vLLM takes the block of a DSpark head for its length, and wants one of DFlash; the name of a
    head says which it is."""
    assert (("broken_config", "error") not in said(vllm(config))) == complete


def test_a_command_line_of_2024_is_all_removed_flags() -> None:
    found = [f for f in findings(OLD) if f.check == "removed_flag"]
    assert {f.where for f in found} == {
        "--speculative-model",
        "--num-speculative-tokens",
        "--speculative-draft-tensor-parallel-size",
        "--spec-decoding-acceptance-method",
        "--speculative-disable-by-batch-size",
    }
    assert all(f.remedy and f.level == "error" for f in found)
    assert ("removed_value", "error") in said(OLD)


@pytest.mark.parametrize("flag", ["--speculative-config", "-sc"])
def test_a_key_in_the_json_and_beside_it_is_told_however_the_json_is_given(flag: str) -> None:
    config = json.dumps({"method": "ngram", "num_speculative_tokens": 3})
    [twice] = [
        f
        for f in findings(f"vllm serve m {flag} '{config}' --spec-tokens 4")
        if f.check == "given_twice"
    ]
    assert (twice.level, twice.where) == ("error", "--spec-tokens")


def test_the_same_command_line_in_today_s_words_does_not_fit() -> None:
    config = {
        "method": "draft_model",
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "num_speculative_tokens": 5,
        "draft_tensor_parallel_size": 1,
    }
    text = (
        "vllm serve meta-llama/Llama-3.1-70B-Instruct --tensor-parallel-size 2 "
        f"--gpu-memory-utilization 0.92 --speculative-config '{json.dumps(config)}'"
    )
    found = said(text, device="h100-sxm")
    assert {("draft_ranks", "error"), ("kv_budget", "error"), ("tp_symmetry", "error")} <= found


@pytest.mark.parametrize("engine", slow_but(["vllm", "llama.cpp", "foretoken"], "vllm"))
@pytest.mark.parametrize(
    "method", ["draft_model", "ngram", "suffix", "eagle3", "dflash", "dspark", "none"]
)
@pytest.mark.parametrize("temperature", slow_but([0.0, 1.0], 0.0))
def test_accepts_every_command_that_plan_writes(
    engine: str, method: str, temperature: float
) -> None:
    plan = build_plan(
        PlanSettings(
            target="qwen3-8b",
            draft="qwen3-0.6b",
            method=method,
            temperature=temperature,
            acceptance="0.3:0.6",
        )
    )
    command = plan.commands[engine]
    if command.startswith("# ") and "\n" not in command:
        pytest.skip(command)
    source = read_source(command)
    assert source.launches[0].engine == engine
    if engine == "foretoken" and method in ("suffix", "eagle3", "dflash", "dspark"):
        return
    errors = [f for f in lint(source, Machine()).findings if f.level == "error"]
    assert not errors, (command, errors)


@pytest.mark.parametrize(
    ("text", "method", "drafts"),
    [
        ("""vllm serve Qwen/Qwen3-8B --speculative-config '{"method": "dspark", "model": "h"}'""",
         "dspark", 7),
        ("""vllm serve Qwen/Qwen3-8B --speculative-config '{"method": "dflash", "model": "h", """
         """"num_speculative_tokens": 15}'""", "dflash", 15),
        ("sglang serve Qwen/Qwen3-8B --speculative-algorithm DFLASH "
         "--speculative-num-draft-tokens 16", "dflash", 15),
        ("sglang serve Qwen/Qwen3-8B --speculative-algorithm DSPARK --speculative-num-steps 1 "
         "--speculative-dspark-block-size 5", "dspark", 5),
    ],
)  # fmt: skip
def test_blocks_are_planned(text: str, method: str, drafts: int) -> None:
    [launch] = read_source(text).launches
    settings = planned_settings(todays(launch)[0], Machine(device="h100-sxm"))
    assert settings is not None
    setup = resolve_setup(settings)
    assert (setup.method, setup.k) == (method, drafts)


def test_the_head_of_a_block_has_to_fit_too() -> None:
    text = "vllm serve Qwen/Qwen3-8B --max-model-len 20000 --speculative-config "
    look_up = {"method": "ngram", "num_speculative_tokens": 7}
    head = {"method": "dflash", "model": "org/head", "num_speculative_tokens": 7}
    for config, fits in ((look_up, True), (head, False)):
        found = lint(read_source(f"{text} '{json.dumps(config)}'"), Machine(device="l4")).findings
        errors = {one.check for one in found if one.level == "error"}
        assert errors == (set() if fits else {"kv_budget"}), found


DRAFT = {"method": "draft_model", "model": "org/draft", "num_speculative_tokens": 5}


@pytest.mark.parametrize(
    ("config", "options", "check", "level"),
    [
        ({**DRAFT, "disable_by_batch_size": 8}, (), "removed_key", "error"),
        ({**DRAFT, "prompt_lookup_maxx": 8}, (), "removed_key", "error"),
        ({**DRAFT, "tensor_parallel_size": 2}, (), "removed_key", "error"),
        ({"method": "medusa", "num_speculative_tokens": 3}, (), "removed_method", "error"),
        ({"method": "mlp_speculator", "num_speculative_tokens": 3}, (), "removed_method", "error"),
        ({"method": "deepseek_mtp", "num_speculative_tokens": 1}, (), "removed_method", "warning"),
        ({**DRAFT, "rejection_sample_method": "probabilistic"}, (), "removed_value", "error"),
        ({"method": "ngram"}, (), "broken_config", "error"),
        ({**DRAFT, "num_speculative_tokens": 200}, (), "broken_config", "error"),
        (DRAFT, ("--spec-tokens", "3"), "given_twice", "error"),
        ({**DRAFT, "draft_tensor_parallel_size": 1}, ("-tp", "2"), "draft_ranks", "error"),
        ({**DRAFT, "draft_tensor_parallel_size": 3}, ("-tp", "4"), "draft_ranks", "error"),
        ({"method": "ngram", "num_speculative_tokens": 3, "draft_sample_method": "probabilistic"},
         (), "draft_rule", "error"),
        ({**DRAFT, "rejection_sample_method": "fly"}, (), "draft_rule", "warning"),
        ({**DRAFT, "rejection_sample_method": "synthetic"}, (), "draft_rule", "error"),
        ({**DRAFT, "use_heterogeneous_vocab": True, "draft_sample_method": "probabilistic"},
         (), "draft_rule", "error"),
        ({**DRAFT, "parallel_drafting": True}, (), "parallel_drafting", "warning"),
        ({**DRAFT, "disable_padded_drafter_batch": True}, (), "parallel_drafting", "error"),
        ({**DRAFT, "num_speculative_tokens_per_batch_size": [[1, 8, 5], [9, 64, 0]]}, (),
         "batch_schedule", "note"),
        ({**DRAFT, "num_speculative_tokens_per_batch_size": [[1, 8, 5], [4, 64, 0]]}, (),
         "batch_schedule", "error"),
        ({**DRAFT, "num_speculative_tokens_per_batch_size": [[2, 8, 5]]}, (),
         "batch_schedule", "error"),
        ({**DRAFT, "num_speculative_tokens_per_batch_size": 32}, (), "batch_schedule", "error"),
        ({**DRAFT, "num_speculative_tokens_per_batch_size": [[1, 8, 5]]},
         ("--data-parallel-size", "2"), "batch_schedule", "warning"),
        (DRAFT, ("--logits-processors", "my.module"), "incompatible", "error"),
        (DRAFT, ("--max-num-batched-tokens", "512", "--max-num-seqs", "256"), "incompatible",
         "warning"),
        ({**DRAFT, "max_model_len": 8192}, ("--max-model-len", "4096"), "incompatible", "error"),
        (DRAFT, ("--disable-log-stats",), "monitoring", "warning"),
        (DRAFT, (), "monitoring", "note"),
    ],
)  # fmt: skip
def test_vllm(config: dict[str, Any], options: tuple[str, ...], check: str, level: str) -> None:
    assert (check, level) in said(vllm(config, *options))


def test_a_sound_launch_has_nothing_to_say() -> None:
    options = ("--per-request-spec-decode-metrics", "detailed")
    assert not findings(vllm(DRAFT, *options))


@pytest.mark.parametrize(
    ("options", "check", "level"),
    [
        ("-md d.gguf --draft-max 16 --draft-min 4", "removed_flag", "error"),
        ("-md d.gguf --spec-draft-n-max 16 --spec-draft-n-min 4", "n_min_discards", "warning"),
        ("-md d.gguf --spec-draft-n-max 16", "llama_defaults", "note"),
        ("-md d.gguf --spec-draft-n-min 4", "n_min_discards", "error"),
        ("--spec-type ngram-complex", "removed_method", "error"),
        ("--spec-draft-n-max 4", "llama_types", "warning"),
        ("-md d.gguf --spec-draft-sampling random", "llama_types", "error"),
        ("-md d.gguf --spec-synth-len 2", "llama_other", "warning"),
        ("-md d.gguf --mmproj p.gguf", "llama_other", "warning"),
    ],
)
def test_llama_cpp(options: str, check: str, level: str) -> None:
    assert (check, level) in said(f"llama-server -m m.gguf {options}")


def test_foretoken_answers_with_its_own_errors() -> None:
    text = """foretoken serve demo --speculative-config '{"method": "ngram", "banana": 3}'"""
    [found] = [f for f in findings(text) if f.level == "error"]
    assert found.check == "foretoken_settings"
    assert "banana" in found.where


def test_vocabularies_are_compared_without_a_device() -> None:
    config = {**DRAFT, "model": "Qwen/Qwen2.5-0.5B-Instruct"}
    text = f"vllm serve Qwen/Qwen2.5-72B-Instruct -tp 4 --speculative-config '{json.dumps(config)}'"
    assert ("same_tokenizer", "error") in said(text)


@pytest.mark.parametrize(
    "text",
    [
        "model: org/model\ntensor-parallel-size: 2\nspeculative-config:\n"
        "  method: draft_model\n  model: org/draft\n  num_speculative_tokens: 5\n"
        "  disable_by_batch_size: 4\n",
        json.dumps({"model": "m", "speculative_config": {**DRAFT, "disable_by_batch_size": 4}}),
        json.dumps({**DRAFT, "disable_by_batch_size": 4}),
        "services:\n  llm:\n    image: vllm/vllm-openai\n    command: >\n      vllm serve m\n"
        '      --speculative-config \'{"method": "ngram", "disable_by_batch_size": 4}\'\n',
        "spec:\n  containers:\n  - args: ['vllm', 'serve', 'm', '--speculative-config', "
        '\'{"method": "ngram", "disable_by_batch_size": 4}\']\n',
        "docker run --gpus all vllm/vllm-openai:v0.33 --model m "
        "--speculative-config.disable_by_batch_size 4 --speculative-config.method ngram",
    ],
    ids=["yaml", "json", "bare json", "compose", "kubernetes", "docker with dots"],
)
def test_finds_settings_wherever_they_are(text: str) -> None:
    assert ("removed_key", "error") in said(text)


def test_requests_that_would_be_refused_are_counted() -> None:
    lines = [{"prompt": "a", "min_p": 0.1}, {"messages": [], "min_p": 0.0}, {"prompt": "b"},
             {"messages": [], "parameters": {"logit_bias": {"5": -100}}}]  # fmt: skip
    text = "\n".join(map(json.dumps, lines)) + "\nbroken\n"
    found = findings(text)
    assert {f.where: f.message.split(":")[0] for f in found if f.check == "refused_parameter"} == {
        "min_p": "1 of 4 requests (25.0%) set it",
        "logit_bias": "1 of 4 requests (25.0%) set it",
    }
    assert [f.check for f in found if f.level == "warning"] == ["unread"]
    assert not [f for f in findings(text, engine="llama.cpp") if f.level == "error"]


def test_dashboards_name_the_successors() -> None:
    dashboard = {
        "panels": [
            {"expr": "vllm:spec_decode_draft_acceptance_rate"},
            {"expr": "histogram_quantile(0.99, vllm:time_per_output_token_seconds_bucket)"},
            {"expr": "rate(vllm:spec_decode_num_drafts[5m])"},
            {"expr": "vllm:kv_cache_usage_perc"},
        ]
    }
    found = {f.where: (f.level, f.remedy) for f in findings(json.dumps(dashboard))}
    assert found["vllm:spec_decode_draft_acceptance_rate"][0] == "error"
    assert "num_accepted_tokens_total" in found["vllm:spec_decode_draft_acceptance_rate"][1]
    assert "inter_token_latency" in found["vllm:time_per_output_token_seconds_bucket"][1]
    assert found["vllm:spec_decode_num_drafts"] == ("warning", "vllm:spec_decode_num_drafts_total")
    assert "vllm:kv_cache_usage_perc" not in found


def test_names_are_unique() -> None:
    assert len(set(NAMES)) == len(NAMES)


def test_the_command_answers_with_its_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "serve.sh"
    script.write_text(OLD)
    runner = CliRunner()
    bad = runner.invoke(app, ["lab", "lint", str(script)])
    assert bad.exit_code == 1, bad.output
    assert "--speculative-model" in bad.stdout
    warned = vllm({**DRAFT, "parallel_drafting": True})
    assert runner.invoke(app, ["lab", "lint", warned]).exit_code == 0
    assert runner.invoke(app, ["lab", "lint", warned, "--strict"]).exit_code == 1
    document = json.loads(runner.invoke(app, ["lab", "lint", str(script), "--json"]).stdout)
    assert document["findings"][str(script)]


@pytest.mark.parametrize("arguments", [["absent.yaml"], ["echo hello"], ["x y", "--engine", "tgi"]])
def test_nothing_readable_is_an_error(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["lab", "lint", *arguments])
    assert result.exit_code == 2, result.output


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("trtllm-serve m --extra_llm_api_options /etc/eagle.yaml", "/etc/eagle.yaml"),
        ("vllm serve m --config vllm.yaml", "vllm.yaml"),
    ],
)
def test_settings_in_a_file_are_not_said_to_be_off(command: str, said: str) -> None:
    [finding] = lint(read_source(command), Machine()).findings
    assert finding.check == "speculation"
    assert finding.message == f"whether it speculates stands in {said}, which was not read"
