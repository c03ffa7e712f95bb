"""The whole launch, corrected: ready to paste, and nothing wrong with it any more."""

import ast
import json
import shlex
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.lab.launch.shell import read_commands
from foretoken.lab.launch.sources import read_source
from foretoken.lab.lint.checks import LaunchVerdict, lint
from foretoken.lab.lint.fit import Machine
from tests.unit.lab.test_lint_reads import COMPOSE, DOCKERFILE, KUBERNETES, PYTHON, SCRIPT

TODAY = {"model": "org/draft", "num_speculative_tokens": 5, "method": "draft_model"}


def judged(text: str, device: str | None = None) -> LaunchVerdict:
    """The verdict on the one launch of a text."""
    [verdict] = lint(read_source(text), Machine(device=device, count=2)).launches
    return verdict


def config(verdict: LaunchVerdict) -> Any:
    """The speculative config of a corrected command."""
    words = words_of(verdict.corrected)
    return json.loads(words[words.index("--speculative-config") + 1])


def words_of(text: str) -> list[str]:
    """The words of the one command of a text."""
    [command] = read_commands(text)
    return [word.text for word in command.words]


def sound(text: str) -> None:
    """Nothing that fails is left in a corrected launch, and it is not corrected again."""
    again = judged(text)
    assert not [f for f in again.findings if f.level == "error"], again.findings
    assert not again.corrected


def test_a_script_comes_back_with_its_variables() -> None:
    found = judged(SCRIPT)
    assert found.corrected.startswith('nohup vllm serve "$MODEL" \\\n')
    assert '--tensor-parallel-size "${TP:-2}"' in found.corrected
    assert found.corrected.endswith("> server.log 2>&1")
    assert config(found) == {"model": "$DRAFT", "num_speculative_tokens": 5}
    sound(found.corrected)


def test_containers_come_back_as_lists() -> None:
    for text, key in ((COMPOSE, "command"), (KUBERNETES, "args")):
        words = yaml.safe_load(judged(text).corrected)[key]
        assert words[:3] == ["--model", "org/target", "--speculative-config"]
        assert json.loads(words[3]) == TODAY
    found = judged(DOCKERFILE).corrected
    assert json.loads(found.removeprefix("CMD "))[2] == "--speculative-config"


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


def test_python_comes_back_as_a_call() -> None:
    found = judged(PYTHON).corrected
    assert found.startswith("llm = LLM(\n    model=TARGET,\n    speculative_config={\n")
    [call] = [node for node in ast.walk(ast.parse(found)) if isinstance(node, ast.Call)]
    assert ast.literal_eval(call.keywords[1].value) == TODAY


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--speculative-model '[ngram]' --num-speculative-tokens 5 --ngram-prompt-lookup-max 4",
         {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}),
        ("--speculative-model org/draft --num-speculative-tokens 5 "
         "--speculative-disable-by-batch-size 16",
         {**TODAY, "num_speculative_tokens_per_batch_size": [[1, 16, 5], [17, 4096, 0]]}),
        ("--speculative-model org/draft --num-speculative-tokens 5 -tp 2 "
         "--speculative-draft-tensor-parallel-size 1", {**TODAY, "draft_tensor_parallel_size": 2}),
        ("--speculative-model org/draft --num-speculative-tokens 5 "
         "--spec-decoding-acceptance-method typical_acceptance_sampler "
         "--typical-acceptance-sampler-posterior-threshold 0.09 --num-lookahead-slots 5 "
         "--use-v2-block-manager --speculative-disable-mqa-scorer", TODAY),
        ("--spec-model org/draft --num-speculative-tokens 5", TODAY),
        ("--speculative-config '" + json.dumps({**TODAY, "disable_by_batch_size": 8}) + "'",
         {**TODAY, "num_speculative_tokens_per_batch_size": [[1, 8, 5], [9, 4096, 0]]}),
        ("""--speculative-config '{"method": "deepseek_mtp", "num_speculative_tokens": 1}'""",
         {"method": "mtp", "num_speculative_tokens": 1}),
        ("--speculative-model yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --num-speculative-tokens 3",
         {"method": "eagle3", "model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
          "num_speculative_tokens": 3}),
        ("""--speculative-config '{"method": "medusa", "model": "x/medusa"}' --spec-tokens 3""",
         {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5,
          "prompt_lookup_min": 2}),
    ],
)  # fmt: skip
def test_flags_of_another_age(flags: str, expected: dict[str, Any]) -> None:
    found = judged(f"vllm serve org/target {flags}")
    assert config(found) == expected
    sound(found.corrected)


@pytest.mark.parametrize(
    ("given", "corrected"),
    [
        ("llama-server -m m.gguf -md d.gguf --draft-max 16 --draft-min 4",
         "llama-server -m m.gguf -md d.gguf --spec-draft-n-max 16"),
        ("llama-server -m m.gguf --spec-type draft --draft 8 -md d.gguf",
         "llama-server -m m.gguf --spec-type draft-simple --spec-draft-n-max 8 -md d.gguf"),
        ("python -m sglang.launch_server --model-path m --speculative-algo EAGLE3 "
         "--speculative-draft d --speculative-num-steps 5 --speculative-eagle-topk 1 "
         "--speculative-num-draft-tokens 8",
         "python -m sglang.launch_server --model-path m --speculative-algo EAGLE3 "
         "--speculative-draft-model-path d --speculative-num-steps 5 --speculative-eagle-topk 1 "
         "--speculative-num-draft-tokens 6"),
        ("sglang serve m --speculative-algorithm LOOKAHEAD",
         "sglang serve m --speculative-algorithm NGRAM"),
        ("sglang serve m --speculative-algorithm DFLASH --speculative-draft-model-path d "
         "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 16",
         "sglang serve m --speculative-algorithm DFLASH --speculative-draft-model-path d "
         "--speculative-eagle-topk 1 --speculative-num-draft-tokens 16"),
    ],
)  # fmt: skip
def test_other_servers(given: str, corrected: str) -> None:
    found = judged(given)
    assert words_of(found.corrected) == shlex.split(corrected)
    assert not found.remaining


def test_settings_of_tensorrt_come_back_as_yaml() -> None:
    text = "speculative_config:\n  decoding_type: Eagle3\n  speculative_model_dir: x/head\n"
    found = yaml.safe_load(judged(text).corrected)
    assert found == {
        "speculative_config": {"decoding_type": "Eagle3", "speculative_model": "x/head"}
    }


def test_memory_is_judged_in_the_same_run() -> None:
    """One command of 2024 as guides show it: names, ranks, memory, and what would fit."""
    found = judged(
        "python -m vllm.entrypoints.openai.api_server --model meta-llama/Llama-3.1-70B-Instruct "
        "--speculative-model meta-llama/Llama-3.1-8B-Instruct --num-speculative-tokens 5 "
        "--speculative-draft-tensor-parallel-size 1 --tensor-parallel-size 2 "
        "--gpu-memory-utilization 0.92",
        device="h100-sxm",
    )
    checks = {finding.check for finding in found.findings if finding.level == "error"}
    assert {"removed_flag", "draft_ranks", "kv_budget", "tp_symmetry"} <= checks
    assert [finding.check for finding in found.remaining] == ["kv_budget"]
    assert "--quantization fp8" in found.fitting and "--quantization" not in found.corrected


def test_what_cannot_be_read_is_not_corrected() -> None:
    found = judged("vllm serve org/target --speculative-config '{\"method\": ngram}'")
    assert [f.check for f in found.findings if f.level == "error"] == ["broken_config"]
    assert not found.corrected


@pytest.mark.parametrize(
    "flags",
    [
        "--spec-method ngram --spec-tokens 4",
        "--speculative-config.method ngram --speculative-config.num_speculative_tokens 4",
        """--speculative-config '{"model": "org/draft", "num_speculative_tokens": 5}'""",
        "",
    ],
)
def test_what_is_right_is_not_corrected(flags: str) -> None:
    assert not judged(f"vllm serve org/target {flags}").corrected


def test_methods_that_only_a_name_tells() -> None:
    found = judged("vllm serve a --speculative-model b/c-accelerator --num-speculative-tokens 3")
    assert config(found)["method"] == "ngram"


def test_classes_of_tensorrt_stay_classes() -> None:
    text = """
from tensorrt_llm import LLM
from tensorrt_llm.llmapi import EagleDecodingConfig
llm = LLM("org/target", speculative_config=EagleDecodingConfig(max_draft_len=3,
          speculative_model_dir="org/head"))
"""
    found = judged(text).corrected
    assert "speculative_config=EagleDecodingConfig(\n        max_draft_len=3,\n" in found
    assert 'speculative_model="org/head"' in found


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


@pytest.mark.parametrize(
    ("command", "owner", "remedy"),
    [
        ("vllm serve m --model-draft d", "llama.cpp", '{"model": "d"}'),
        ("vllm serve m --draft-max 8", "llama.cpp", '{"num_speculative_tokens": 8}'),
        ("sglang serve --model-path m --draft-max 8", "llama.cpp", ""),
    ],
)
def test_an_option_of_another_engine_is_named_as_such(
    command: str, owner: str, remedy: str
) -> None:
    found = [one for one in judged(command).findings if one.check == "unknown_flag"]
    assert len(found) == 1 and found[0].level == "error", found
    assert f"one of {owner}" in found[0].message and remedy in found[0].remedy, found


def test_options_that_several_engines_have_are_no_matter() -> None:
    for command in (
        "vllm serve m --model n --quantization fp8 --max-model-len 4096 --kv-cache-dtype fp8",
        "llama-server -m t.gguf -ngl 99 --ctx-size 4096 --threads 8 --seed 1",
        "sglang serve --model-path m --quantization fp8 --mem-fraction-static 0.8 --tp 2",
    ):
        assert not [one for one in judged(command).findings if one.check == "unknown_flag"]
