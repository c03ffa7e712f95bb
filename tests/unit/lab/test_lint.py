"""What the linter says of launches, and how it gives them back; launches.yaml beside the golden
tests has most answers word by word."""

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.config.other_engines import find_other, other_names
from foretoken.lab.findings import Finding
from foretoken.lab.launch.read import read_source
from foretoken.lab.lint.checks import NAMES, LaunchVerdict, lint
from foretoken.lab.lint.fit import Machine, planned_settings
from foretoken.lab.lint.names import todays
from foretoken.lab.plan.setup import resolve_setup
from tests.unit.lab.test_lint_reads import SCRIPT


def findings(text: str, device: str | None = None) -> list[Finding]:
    """Everything the linter says about `text`, by checks that it names."""
    found = lint(read_source(text), Machine(device=device, count=2)).findings
    assert {one.check for one in found} <= {*NAMES, "speculation", "unplanned"}
    return list(found)


def judged(text: str, device: str | None = None) -> LaunchVerdict:
    """The verdict on the one launch of a text."""
    [verdict] = lint(read_source(text), Machine(device=device, count=2)).launches
    return verdict


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["lab", "lint", *words])


def drafting(config: dict[str, Any], target: str = "m", *options: str) -> str:
    """A vLLM command line with a speculative config."""
    return f"vllm serve {target} {' '.join(options)} --speculative-config '{json.dumps(config)}'"


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


def test_names_are_unique() -> None:
    assert len(set(NAMES)) == len(NAMES)


def test_the_command_answers_with_its_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "serve.sh"
    script.write_text(SCRIPT)
    bad = run(str(script))
    assert bad.exit_code == 1 and "--speculative-model" in bad.stdout
    draft = {"method": "draft_model", "model": "d", "num_speculative_tokens": 5}
    warned = drafting({**draft, "parallel_drafting": True})
    assert run(warned).exit_code == 0 and run(warned, "--strict").exit_code == 1
    document = json.loads(run(str(script), "--json").stdout)
    assert document["findings"][str(script)]


@pytest.mark.parametrize(
    "arguments",
    [
        ["absent.yaml"],
        ["echo hello"],
        ['{"prompt": "a"}'],
        ["vllm:spec_decode_efficiency"],
        ["x y", "--engine", "tgi"],
    ],
)
def test_nothing_readable_is_an_error(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


def test_settings_in_a_file_are_not_said_to_be_off() -> None:
    for file, command in {
        "/etc/eagle.yaml": "trtllm-serve m --extra_llm_api_options /etc/eagle.yaml",
        "vllm.yaml": "vllm serve m --config vllm.yaml",
    }.items():
        [finding] = findings(command)
        assert finding.check == "speculation"
        assert finding.message == f"whether it speculates stands in {file}, which was not read"


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
         "foretoken serve demo \\\n  --port 80\n"),
        ("from foretoken import LLM\nllm = LLM('demo', swap_space=4, max_num_seqs=8)",
         'llm = LLM(\n    model="demo",\n    max_num_seqs=8,\n)\n'),
    ],
)  # fmt: skip
def test_foretoken_is_judged_by_its_own_parser(text: str, corrected: str) -> None:
    found = run(text)
    assert found.exit_code == 1 and "leave it out" in found.stdout
    assert found.stdout.split("Corrected:\n\n")[1].strip() == corrected.strip()


@pytest.mark.parametrize(
    ("text", "corrected"),
    [
        ("foretoken serve demo --draft-max 4 --decoding-type NGram --port 80",
         "foretoken serve demo --port 80 "
         """--speculative-config '{"method": "ngram", "num_speculative_tokens": 4}'"""),
        ("foretoken serve demo --draft-max 4", "foretoken serve demo --speculative-config "
         """'{"method": "auto", "num_speculative_tokens": 4}'"""),
        ("""foretoken serve demo --speculative-config '{"method": "ngram", "max_draft_len": 4}'""",
         "foretoken serve demo --speculative-config "
         """'{"method": "ngram", "num_speculative_tokens": 4}'"""),
        ("from foretoken import LLM\nllm = LLM('demo', speculative_model='[ngram]')",
         'llm = LLM( model="demo", speculative_config={ "model": "[ngram]", }, )'),
    ],
)  # fmt: skip
def test_words_of_other_engines_are_translated(text: str, corrected: str) -> None:
    found = run(text)
    assert found.exit_code == 1
    written = found.stdout.split("Corrected:\n\n")[1].replace("\\\n", " ")
    assert " ".join(written.split()) == corrected


@pytest.mark.parametrize(
    ("command", "level", "words"),
    [
        ("foretoken serve demo", "note", "speculates with ngram (up to 10), suffix"),
        ("foretoken serve demo --speculative-config none", "note", "speculation is off"),
        ("foretoken serve demo --spec-model demo-draft", "note", "speculates with draft_model"),
        ("foretoken serve demo --nonsense 5", "error", "--nonsense: got 5"),
        ("foretoken serve demo --port x", "error", "--port: got 'x'"),
        ("foretoken serve", "error", "MODEL: got None"),
    ],
)
def test_what_foretoken_serve_would_do(command: str, level: str, words: str) -> None:
    found = run(command)
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
    found = run("vllm serve Qwen/Qwen3-8B -tp 2", "--device", "h100-sxn")
    assert found.exit_code == 2 and "h100-sxm" in found.stderr


CALL = """from vllm import LLM
llm = LLM(model="m", tensor_parallel_size=args.tp, speculative_config={
    "model": args.draft, "num_speculative_tokens": args.k, "draft_tensor_parallel_size": 4,
    "disable_by_batch_size": args.most})
"""
VALUES = {"DRAFT": "org/draft", "K": "4", "MOST": "16", "TP": "2", "MODEL": "m"}
TODAY = {
    "model": "org/draft",
    "num_speculative_tokens": 4,
    "num_speculative_tokens_per_batch_size": [[1, 16, 4], [17, 4096, 0]],
}


def told(command: str) -> dict[str, object]:
    """The speculative config that a shell gives to the server."""
    shown = subprocess.run(
        ["bash", "-c", command.replace("vllm serve", "printf '%s\\n'")],
        env={**os.environ, **VALUES},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    config: dict[str, object] = json.loads(shown[shown.index("--speculative-config") + 1])
    return config


@pytest.mark.parametrize(
    "command",
    [
        'vllm serve m --speculative-model "$DRAFT" --num-speculative-tokens $K '
        "--speculative-disable-by-batch-size ${MOST}",
        'vllm serve m --speculative-config "{\\"model\\": \\"$DRAFT\\", '
        '\\"num_speculative_tokens\\": $K, \\"disable_by_batch_size\\": $MOST}"',
        'vllm serve m --speculative-config \'{"model": "\'"$DRAFT"\'", '
        "\"num_speculative_tokens\": '$K', \"disable_by_batch_size\": '$MOST'}'",
    ],
)
def test_variables_are_filled_in_where_they_were(command: str) -> None:
    found = judged(command)
    assert not found.remaining, found.remaining
    assert told(found.corrected) == TODAY


def test_expressions_of_a_script_are_kept() -> None:
    found = judged(CALL)
    assert {finding.check for finding in found.findings} == {"removed_key", "batch_schedule",
                                                            "monitoring"}  # fmt: skip
    assert not found.remaining
    assert "[[1, args.most, args.k], [args.most + 1, 4096, 0]]" in found.corrected
    assert '"draft_tensor_parallel_size": 4' in found.corrected, "the target's may be 4"


@pytest.mark.parametrize(
    "command",
    [
        'vllm serve "$MODEL" -tp $TP --per-request-spec-decode-metrics detailed '
        '--speculative-config "{\\"method\\": \\"draft_model\\", \\"model\\": \\"$DRAFT\\", '
        '\\"num_speculative_tokens\\": $K, \\"draft_tensor_parallel_size\\": 4}"',
        "vllm serve m --per-request-spec-decode-metrics detailed --speculative-config "
        '"{\\"method\\": \\"$METHOD\\", \\"num_speculative_tokens\\": 3}"',
    ],
)
def test_what_may_be_right_is_not_called_wrong(command: str) -> None:
    found = judged(command)
    assert not found.findings and not found.corrected, found


def test_a_config_that_stands_elsewhere_is_said_to() -> None:
    for text in (
        'vllm serve m --speculative-config "$SPEC" --use-v2-block-manager',
        'from vllm import LLM\nLLM("m", speculative_config=make(), use_v2_block_manager=True)',
    ):
        found = judged(text)
        [note] = [one for one in found.findings if one.check == "unread_config"]
        assert note.level == "note" and ("$SPEC" in note.message or "make()" in note.message)
        assert not {"broken_config", "speculation"} & {one.check for one in found.findings}
        assert "block" not in found.corrected and not found.remaining
        assert '"$SPEC"' in found.corrected or "make()" in found.corrected


def test_a_shell_fills_in_nothing_in_single_quotes() -> None:
    command = "vllm serve m --speculative-config '{\"num_speculative_tokens\": $K}'"
    assert shlex.split(command)[-1] == '{"num_speculative_tokens": $K}'
    assert [one.check for one in findings(command) if one.level == "error"] == ["broken_config"]


def test_one_rank_is_the_only_one() -> None:
    config = {"method": "ngram", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 2}
    [finding] = [one for one in findings(drafting(config)) if one.check == "draft_ranks"]
    assert finding.message == "it must be the target's 1"


def test_every_variable_leads_to_one_that_is_read() -> None:
    rows = [row for row in other_names() if row.kind == "variables"]
    assert len(rows) > 25
    for row in rows:
        now = find_other("variables", row.now or "", row.engine)
        assert not row.now or (now is not None and not now.gone), row
        others = ("model", "hf_repo", "mmproj", "metrics")
        assert row.flag in others or find_other("flags", row.flag, row.engine), row


ENGINE = """from vllm import LLM
llm = LLM("Qwen/Qwen3-8B", speculative_config={"method": "ngram", "num_speculative_tokens": 3})
"""
SERVE = (
    "vllm serve Qwen/Qwen3-8B --per-request-spec-decode-metrics detailed "
    '--speculative-config \'{"method": "ngram", "num_speculative_tokens": 3}\''
)


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("torn.py", ENGINE + "for x in [1]\n    print(x)\n", 1),
        ("whole.py", ENGINE + "for x in [1]:\n    print(x)\n", 0),
        ("open.sh", f'{SERVE} &\nvllm serve "Qwen/Qwen3-4B --port 8001\n', 1),
        ("open", f'#!/usr/bin/env bash\n{SERVE} &\nllama-server -m "a.gguf\n', 1),
        ("closed.sh", f"# don't\ncat <<EOF\nit's a text\nEOF\n{SERVE}\n", 0),
        ("open.yaml", "services:\n  a:\n    command: vllm serve m\n   x: [\n", 1),
        ("tagged.yaml", "a:\n  image: vllm/vllm-openai\n  command: !override [--model, m]\n", 0),
        ("chart.yaml", "a:\n  command: vllm serve {{ .Values.model }}\n", 0),
        ("torn.json", '{"model": "m", "speculative_config": {"method": "ngram"\nvllm serve m', 1),
    ],
)
def test_a_file_that_ends_in_an_error_fails(
    name: str, text: str, code: int, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert run(str(path)).exit_code == code


@pytest.mark.parametrize(
    ("words", "loads"),
    [
        ("--quantization awq", True),
        ("--quantization gptq_marlin", True),
        ("--quantization fp8_per_tensor", True),
        ("--quantization bf16", False),
        ("", False),
        ("--quantization compressed-tensors", None),
        ("--quantization $Q", None),
    ],
)
def test_weights_are_as_wide_as_the_launch_says(words: str, loads: bool | None) -> None:
    """70 billion of 16 bits do not fit one device; of 4 or 8 they do. None: nobody knows."""
    text = f"vllm serve meta-llama/Llama-3.1-70B-Instruct --max-model-len 4096 {words}"
    found = {one.check for one in findings(text, "h100-sxm")}
    assert ("kv_budget" in found) == (loads is False)
    assert ("unplanned" in found) == (loads is None)


@pytest.mark.parametrize(
    ("options", "target", "draft", "more", "check"),
    [
        ("--max-model-len 90000 --quantization awq", "meta-llama/Llama-3.1-70B-Instruct",
         "meta-llama/Llama-3.1-8B-Instruct", {"quantization": "awq"}, "kv_budget"),
        ("", "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-0.6B",
         {"method": "draft_model", "use_heterogeneous_vocab": True}, "same_tokenizer"),
    ],
    ids=["of few bits", "translated"],
)  # fmt: skip
def test_a_draft_is_judged_by_what_is_said_of_it(
    options: str, target: str, draft: str, more: dict[str, Any], check: str
) -> None:
    machine = Machine(device="rtx-pro-6000" if options else None)
    config = {"model": draft, "num_speculative_tokens": 3}
    alone, told = (
        {one.check for one in lint(read_source(drafting(given, target, options)), machine).findings}
        for given in (config, config | more)
    )
    assert check in alone and check not in told
