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
