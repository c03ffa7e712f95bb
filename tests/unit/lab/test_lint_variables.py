"""Variables of the environment, wherever a text sets them: read as options, and corrected there.

What llama.cpp's server says of each was tried with build b11434: `LLAMA_ARG_DRAFT_MAX` and
`LLAMA_ARG_DRAFT_MIN` end it at the start, the other old names are ignored without a word.
"""

import json

import pytest
import yaml
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.config.other_engines import find_other, other_names
from foretoken.lab.findings import Finding
from foretoken.lab.launch.launch import Launch
from foretoken.lab.launch.sources import read_source
from foretoken.lab.lint.checks import LaunchVerdict, lint
from foretoken.lab.lint.fit import Machine
from tests.unit.lab.test_lint_corrects import judged, sound
from tests.unit.lab.test_lint_reads import only

BEFORE = "LLAMA_ARG_MODEL_DRAFT=d.gguf LLAMA_ARG_DRAFT_MAX=8 llama-server -m t.gguf --metrics"
WITH_ENV = "env LLAMA_ARG_MODEL_DRAFT=d.gguf LLAMA_ARG_DRAFT_MAX=8 llama-server -m t.gguf --metrics"
DOCKER_RUN = """docker run --rm -e LLAMA_ARG_MODEL_DRAFT=d.gguf \\
  --env LLAMA_ARG_DRAFT_MAX=8 -p 8080:8080 ghcr.io/ggml-org/llama.cpp:server -m t.gguf --metrics
"""
IN_ONE_WORD = """docker run --rm --env=LLAMA_ARG_MODEL_DRAFT=d.gguf -p8080:8080 \\
  -eLLAMA_ARG_DRAFT_MAX=8 ghcr.io/ggml-org/llama.cpp:server -m t.gguf --metrics
"""
EXPORTED = """#!/bin/sh
export LLAMA_ARG_MODEL_DRAFT="d.gguf"
export LLAMA_ARG_DRAFT_MAX=8
exec llama-server -m t.gguf --metrics
"""
COMPOSE = """services:
  llm:
    image: ghcr.io/ggml-org/llama.cpp:server-cuda
    environment:
      - LLAMA_ARG_MODEL=t.gguf
      - LLAMA_ARG_MODEL_DRAFT=d.gguf
      - LLAMA_ARG_DRAFT_MAX=8
      - LLAMA_ARG_ENDPOINT_METRICS=1
      - CUDA_VISIBLE_DEVICES=0
"""
MAPPED = """services:
  llm:
    image: ghcr.io/ggml-org/llama.cpp:server-cuda
    command: -m t.gguf --metrics
    environment:
      LLAMA_ARG_MODEL_DRAFT: d.gguf
      LLAMA_ARG_DRAFT_MAX: 8
"""
KUBERNETES = """spec:
  containers:
  - image: registry/own-image
    command: [/app/llama-server]
    args: [-m, t.gguf, --metrics]
    env:
    - {name: LLAMA_ARG_MODEL_DRAFT, value: d.gguf}
    - {name: LLAMA_ARG_DRAFT_MAX, value: "8"}
    - name: HF_TOKEN
      valueFrom: {secretKeyRef: {name: hub, key: token}}
"""
DOCKERFILE = """FROM ghcr.io/ggml-org/llama.cpp:server AS base
ENV LLAMA_ARG_MODEL_DRAFT=d.gguf
FROM base
ENV LLAMA_ARG_DRAFT_MAX 8
CMD ["-m", "t.gguf", "--metrics"]
"""
DOTENV = """# of the server
LLAMA_ARG_MODEL=t.gguf
LLAMA_ARG_MODEL_DRAFT=d.gguf
LLAMA_ARG_DRAFT_MAX=8
LLAMA_ARG_ENDPOINT_METRICS=true
"""
ALL = {
    "before": BEFORE,
    "env": WITH_ENV,
    "docker run": DOCKER_RUN,
    "in one word": IN_ONE_WORD,
    "exported": EXPORTED,
    "compose": COMPOSE,
    "mapped": MAPPED,
    "kubernetes": KUBERNETES,
    "dockerfile": DOCKERFILE,
    ".env": DOTENV,
}


def of(verdict: LaunchVerdict, check: str = "variable") -> list[Finding]:
    return [finding for finding in verdict.findings if finding.check == check]


@pytest.mark.parametrize("text", ALL.values(), ids=ALL)
def test_the_same_options_wherever_they_are_set(text: str) -> None:
    launch: Launch = only(text)
    options = launch.options
    assert (launch.engine, launch.model) == ("llama.cpp", "t.gguf")
    assert (options["model-draft"], options["draft-max"]) == ("d.gguf", "8")
    assert options["metrics"] is True


@pytest.mark.parametrize("text", ALL.values(), ids=ALL)
def test_gone_names_are_named_and_replaced_where_they_stand(text: str) -> None:
    found = judged(text)
    assert {finding.where: finding.remedy for finding in of(found)} == {
        "LLAMA_ARG_MODEL_DRAFT": "LLAMA_ARG_SPEC_DRAFT_MODEL=d.gguf",
        "LLAMA_ARG_DRAFT_MAX": "LLAMA_ARG_SPEC_DRAFT_N_MAX=8",
    }
    said = {finding.where: finding.message for finding in of(found)}
    assert "starts without it" in said["LLAMA_ARG_MODEL_DRAFT"]
    assert "does not start" in said["LLAMA_ARG_DRAFT_MAX"]
    assert "LLAMA_ARG_SPEC_DRAFT_N_MAX" in found.corrected
    assert "LLAMA_ARG_DRAFT_MAX" not in found.corrected
    assert not found.remaining


def test_commands_come_back_with_their_variables() -> None:
    now = "LLAMA_ARG_SPEC_DRAFT_MODEL=d.gguf LLAMA_ARG_SPEC_DRAFT_N_MAX=8 llama-server"
    assert judged(BEFORE).corrected.startswith(f"{now} \\\n  -m t.gguf")
    assert judged(WITH_ENV).corrected.startswith(f"env {now}")
    again = judged(DOCKER_RUN).corrected
    assert "--rm -e LLAMA_ARG_SPEC_DRAFT_MODEL=d.gguf --env LLAMA_ARG_SPEC_DRAFT_N_MAX=8" in again
    again = judged(IN_ONE_WORD).corrected
    assert "--env=LLAMA_ARG_SPEC_DRAFT_MODEL=d.gguf -p8080:8080 -eLLAMA_ARG_SPEC_DRAFT_N" in again
    gone = judged("docker run --env=LLAMA_ARG_SPEC_DRAFT_N_MIN=4 " + IN_ONE_WORD.split("--rm ")[1])
    assert "N_MIN" not in gone.corrected and gone.corrected.startswith("docker run --env=LLAMA")
    lines = judged(EXPORTED).corrected.splitlines()
    assert lines[1] == "export LLAMA_ARG_SPEC_DRAFT_N_MAX=8" and lines[2].startswith("exec llama")
    for text in (BEFORE, WITH_ENV, DOCKER_RUN, IN_ONE_WORD, EXPORTED, DOTENV):
        sound(judged(text).corrected)
    other = judged("CUDA_VISIBLE_DEVICES=0 vllm serve m --speculative-model d")
    assert other.corrected.startswith("CUDA_VISIBLE_DEVICES=0 vllm serve")


def test_containers_come_back_with_all_of_theirs() -> None:
    assert yaml.safe_load(judged(COMPOSE).corrected) == {
        "environment": {
            "LLAMA_ARG_MODEL": "t.gguf",
            "LLAMA_ARG_SPEC_DRAFT_MODEL": "d.gguf",
            "LLAMA_ARG_SPEC_DRAFT_N_MAX": "8",
            "LLAMA_ARG_ENDPOINT_METRICS": "1",
            "CUDA_VISIBLE_DEVICES": "0",
        }
    }
    kubernetes = yaml.safe_load(judged(KUBERNETES).corrected)
    assert kubernetes["args"] == ["-m", "t.gguf", "--metrics"]
    assert kubernetes["env"][1] == {"name": "LLAMA_ARG_SPEC_DRAFT_N_MAX", "value": "8"}
    assert kubernetes["env"][2]["valueFrom"]["secretKeyRef"]["key"] == "token"
    lines = judged(DOCKERFILE).corrected.splitlines()
    assert lines[:2] == [
        "ENV LLAMA_ARG_SPEC_DRAFT_MODEL=d.gguf",
        "ENV LLAMA_ARG_SPEC_DRAFT_N_MAX=8",
    ]
    assert json.loads(lines[2].removeprefix("CMD ")) == ["-m", "t.gguf", "--metrics"]


def test_values_are_read_as_those_of_options_are() -> None:
    found = judged("LLAMA_ARG_SPEC_TYPE=draft llama-server -m t.gguf -md d.gguf --metrics")
    [finding] = of(found, "removed_method")
    assert (finding.where, finding.remedy) == ("LLAMA_ARG_SPEC_TYPE", "draft-simple")
    assert found.corrected.startswith("LLAMA_ARG_SPEC_TYPE=draft-simple llama-server")
    least = judged(
        "LLAMA_ARG_SPEC_DRAFT_N_MIN=4 llama-server -m t.gguf --spec-draft-model d.gguf --metrics"
    )
    assert of(least, "n_min_discards") and least.corrected.startswith("llama-server")


def test_an_option_overrides_a_variable() -> None:
    text = "LLAMA_ARG_SPEC_DRAFT_N_MAX=8 llama-server -m t -md d --spec-draft-n-max 4 --metrics"
    [finding] = of(judged(text))
    assert finding.level == "warning" and "--spec-draft-n-max 4" in finding.message
    assert only(text).options["spec-draft-n-max"] == "4"


@pytest.mark.parametrize(
    ("text", "level", "said"),
    [
        ("LLAMA_ARG_SPEC_DRAFT_NMAX=8 llama-server -m t", "error", "LLAMA_ARG_SPEC_DRAFT_N_MAX"),
        ("VLLM_SPECULATIVE_CONFIG=x vllm serve m", "warning", "--speculative-config x"),
        ("VLLM_NUM_SPECULATIVE_TOKENS=5 vllm serve m", "warning", "num_speculative_tokens"),
        ("VLLM_USE_V1=0 vllm serve m", "error", "leave it out"),
        ("VLLM_ATTENTION_BACKEND=FLASHINFER vllm serve m", "error", "--attention-backend FLASH"),
        ("LLAMA_ARG_DRAFT_MAX=8 vllm serve m", "warning", "leave it out"),
        ("LLAMA_ARG_DRAFT_MAX=8 foretoken serve demo", "error", "--draft-max 8"),
        ("SGLANG_SIMULATE_ACC_LEN=3 sglang serve --model m", "warning", ""),
    ],
)
def test_names_that_are_not_read(text: str, level: str, said: str) -> None:
    [finding] = of(judged(text))
    assert finding.level == level and said in finding.remedy, finding


@pytest.mark.parametrize(
    "text",
    [
        "VLLM_LOGGING_LEVEL=DEBUG vllm serve m",
        "LLAMA_ARG_CTX_SIZE=4096 llama-server -m t",
        "export VLLM_SPEC_TYPE=ngram\nvllm serve m --spec-method $VLLM_SPEC_TYPE --spec-tokens 5",
        "VLLM_SPEC_TOKENS=5\nvllm serve m --spec-method ngram --spec-tokens $VLLM_SPEC_TOKENS",
    ],
)
def test_other_variables_are_no_matter(text: str) -> None:
    assert not of(judged(text))


def test_a_variable_that_is_off_is_no_option() -> None:
    text = "LLAMA_ARG_ENDPOINT_METRICS=0 llama-server -m t --spec-draft-model d"
    assert "metrics" not in only(text).options
    assert of(judged(text), "llama_other")


def test_an_option_in_place_of_a_variable_stands_behind_the_others() -> None:
    found = judged("VLLM_ATTENTION_BACKEND=FLASHINFER vllm serve m --speculative-model d")
    assert found.corrected.startswith("vllm serve m")
    assert "--attention-backend FLASHINFER" in found.corrected
    sound(found.corrected)


def test_a_prose_line_is_no_file_of_variables() -> None:
    assert not read_source("LLAMA_ARG_DRAFT_MAX=8 is what the guide says").launches
    assert not read_source("A=1\nB=2").launches


def test_every_variable_leads_to_one_that_is_read() -> None:
    rows = [row for row in other_names() if row.kind == "variables"]
    assert len(rows) > 30
    for row in rows:
        if row.gone and row.now and not row.now.startswith("flag:"):
            now = find_other("variables", row.now, row.engine)
            assert now is not None and not now.gone, row
            assert bool(now.switch) == bool(row.switch), row
        others = (None, "model", "hf_repo", "mmproj", "metrics", "attention_backend")
        about_drafts = row.flag not in others
        assert not about_drafts or find_other("flags", row.flag, row.engine), row


def test_a_single_word_is_enough() -> None:
    for text, said in (
        ("LLAMA_ARG_DRAFT_MAX=8", "LLAMA_ARG_SPEC_DRAFT_N_MAX=8"),
        ("vllm:spec_decode_efficiency", "vllm:spec_decode_num_drafts_total"),
    ):
        run = CliRunner().invoke(app, ["lab", "lint", text])
        assert run.exit_code == 1 and said in run.output, run.output
    assert CliRunner().invoke(app, ["lab", "lint", "nothing.sh"]).exit_code == 2


@pytest.mark.parametrize(
    ("query", "level", "said"),
    [
        ("llamacpp:draft_tokens_accepted_total", "error", "llamacpp:spec_decode_num"),
        ("rate(llamacpp:spec_decode_num_drafts[5m])", "error", "num_drafts_total"),
        ("vllm:spec_decode_acceptance_rate", "error", "spec_decode"),
        ("sglang:spec_acceptance_length > 2", "warning", "sglang:spec_accept_length"),
        ("ray_vllm_spec_decode_efficiency", "error", "rate(ray_vllm_spec_decode_num_accepted"),
        ("vllm_spec_decode_draft_acceptance_rate", "error", "rate(vllm_spec_decode_num_draft"),
    ],
)
def test_metrics_that_nobody_exports(query: str, level: str, said: str) -> None:
    [finding] = lint(read_source(query), Machine()).findings
    assert finding.level == level and said in finding.remedy, finding


@pytest.mark.parametrize(
    "query",
    [
        "llamacpp:spec_decode_num_accepted_tokens_per_pos_total",
        "sglang:spec_accept_rate",
        "trtllm_spec_decode_acceptance_length",
        '{__name__=~"vllm:spec_decode.*"}',
        "vllm:num_requests_running + llamacpp:requests_processing",
    ],
)
def test_metrics_that_are_there(query: str) -> None:
    assert not lint(read_source(query), Machine()).findings
