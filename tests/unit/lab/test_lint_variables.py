"""Variables of the environment, wherever a text sets them: read as options, and corrected there.

What llama.cpp's server says of each was tried with build b11434: `LLAMA_ARG_DRAFT_MAX` and
`LLAMA_ARG_DRAFT_MIN` end it at the start, the other old names are ignored without a word.
"""

import pytest
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.config.other_engines import find_other, other_names
from foretoken.lab.findings import Finding
from foretoken.lab.launch.launch import Launch
from foretoken.lab.launch.sources import read_source
from foretoken.lab.lint.checks import LaunchVerdict
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
