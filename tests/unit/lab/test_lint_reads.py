"""What the linter finds in scripts, containers, manifests, Python and documents."""

import json

import pytest
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.lab.launch.launch import Launch
from foretoken.lab.launch.read import read_commands, read_source

GUIDE = """vllm serve Qwen/Qwen3-8B \\
--speculative-config \\
'{"model": "Qwen/Qwen3-0.6B",
"num_speculative_tokens": 5,
"method": "draft_model"}'
"""
SCRIPT = """#!/bin/bash
# it's the target
if [ -n "$X" ]; then echo "don't"; fi
cat <<EOF
it's a text
EOF
nohup vllm serve "$MODEL" --tensor-parallel-size "${TP:-2}" --speculative-model "$DRAFT" \\
  --num-speculative-tokens 5 > server.log 2>&1 &
"""


def only(text: str) -> Launch:
    """The one launch of a text."""
    [launch] = read_source(text).launches
    return launch


def test_values_that_only_running_would_tell_are_kept_as_written() -> None:
    assert only("from vllm import LLM\nLLM(model=f(x), speculative_model=g())").model is None
    launch = only(SCRIPT)
    assert [part.raw for part in launch.of("before")] == ["nohup", "vllm", "serve"]
    assert (launch.model, launch.arguments[0].raw) == ("$MODEL", '"$MODEL"')
    assert launch.options["tensor-parallel-size"] == "${TP:-2}"
    assert [part.value for part in launch.of("after")] == [">", "server.log", "2>&1"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a 'b c' \"d $e\" f\\ g", ["a", "b c", "d $e", "f g"]),
        ("a # b\nc", ["a", "c"]),
        ("a; b && c | d", ["a", "b", "c", "d"]),
        ("a \\\n  b", ["a", "b"]),
        ("a $(b c) `d e`", ["a", "$(b c)", "`d e`"]),
        ("it's\nvllm serve", ["vllm", "serve"]),
        ("x --y 'z", []),
        ("A=1\nb $A ${B:-2 c}", ["A=1", "b", "$A", "${B:-2 c}"]),
        ("a=(b c) d", ["d"]),
        ('a "b\\"c"', ["a", 'b"c']),
        ("a\\", ["a"]),
        ("a $", ["a", "$"]),
        ("a ${B", ["a", "${B"]),
    ],
)
def test_words_of_a_shell(text: str, words: list[str]) -> None:
    assert [word.text for command in read_commands(text) for word in command.words] == words


@pytest.mark.parametrize(
    "text",
    [
        "The --speculative-model flag is deprecated.",
        "--spec-draft-n-max is the proposal length cap.",
        "You add --speculative-model to your config, run a benchmark, and ship.",
    ],
)
def test_a_sentence_is_no_command(text: str) -> None:
    assert not read_source(text).launches


@pytest.mark.parametrize(
    ("text", "engine", "name", "value"),
    [
        (GUIDE, "vllm", "num_speculative_tokens", 5),
        # A colon and a space make a mapping of it.
        (
            """vllm serve m --speculative-config '{"method": "suffix"}'""",
            "vllm",
            "method",
            "suffix",
        ),
        ("--spec-decoding-acceptance-method t", "vllm", "spec-decoding-acceptance-method", "t"),
        ("./start.sh --speculative-model d", "vllm", "speculative-model", "d"),
        ("sglang serve m --speculative-algo E", "sglang", "speculative-algorithm", "E"),
        ("sglang serve m --mem-fraction 0.7", "sglang", "mem-fraction-static", "0.7"),
        ("vllm serve m --gpu-memory-util=0.9", "vllm", "gpu-memory-utilization", "0.9"),
    ],
)
def test_what_a_command_says(text: str, engine: str, name: str, value: object) -> None:
    """Options alone, and beginnings of them as argparse completes them; JSON over several lines."""
    launch = only(text)
    assert launch.engine == engine
    assert {**launch.options, **launch.speculation}[name] == value


TORN = """vllm serve org/target
  --tensor-parallel 2
  --speculative-config '{"method": "ngram", "num_speculative_tokens": 5}'
"""


@pytest.mark.parametrize(
    ("text", "where", "speculation"),
    [
        (TORN, "--tensor-parallel", {"method": "ngram", "num_speculative_tokens": 5}),
        ("vllm serve m \\\n  # the draft\n  --spec-model d --spec-tokens 3\n", "--spec-model",
         {"model": "d", "num_speculative_tokens": 3}),
    ],
)  # fmt: skip
def test_a_command_goes_on_with_the_options_on_its_next_lines(
    text: str, where: str, speculation: dict[str, object]
) -> None:
    source = read_source(text)
    assert [one.speculation for one in source.launches] == [speculation]
    assert [(one.check, one.where) for one in source.findings] == [("torn_off", where)]


@pytest.mark.parametrize("text", [GUIDE, SCRIPT])
def test_commands_that_go_on_rightly_are_not_torn(text: str) -> None:
    assert not read_source(text).findings


def test_a_script_that_is_no_python_is_said_to_be_none() -> None:
    text = "from vllm import LLM\nllm = LLM(speculative_config={'model': 'a' 'b': 1})\n"
    [finding] = read_source(text).findings
    assert (finding.level, finding.where) == ("error", "line 2")
    assert not read_source("from vllm import LLM\nllm = LLM('a')\n").findings


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve org/target\npython - <<'EOF'\nfrom vllm import LLM\nEOF\n",
        "models:\n  a:\n    cmd: |\n      llama-server -m m.gguf\n      --port 1\n",
        "--model org/target\n--speculative-config '{}'\n",
    ],
    ids=["heredoc", "proxy", "options alone"],
)
def test_what_is_no_broken_script_or_command_is_none(text: str) -> None:
    source = read_source(text)
    assert source.launches
    assert not source.findings


CALL = "llm = LLM(model='org/target', speculative_model='org/draft')"


@pytest.mark.parametrize(
    "text",
    [
        f"You don't need much. It's one call, isn't it:\n{CALL}\nand that's all.",
        f"# A page\n\n```python\nfrom vllm import LLM\n{CALL}\n```\n",
        json.dumps({"cells": [{"cell_type": "code", "source": ["!pip install vllm\n", CALL]}]}),
        "[Service]\nExecStart=/usr/bin/vllm serve org/target --speculative-model org/draft\n",
        "import subprocess\nsubprocess.Popen(['vllm', 'serve', 'm', '--spec-model', 'd'])",
    ],
    ids="prose page notebook unit subprocess".split(),
)
def test_what_is_not_read_is_refused_with_what_is(text: str) -> None:
    assert not read_source(text).launches
    found = CliRunner().invoke(app, ["lab", "lint", text])
    assert found.exit_code == 2
    for word in ("a Python script", "compose", "a Dockerfile", "unit of systemd", "vllm serve"):
        assert word in " ".join(found.output.split())


def test_words_of_an_array_are_not_taken_for_checked() -> None:
    text = 'ARGS=(--tensor-parallel 2\n  --spec-tokens 3)\nvllm serve m "${ARGS[@]}"\n'
    source = read_source(text)
    [found] = source.findings
    assert (found.check, found.level, found.where) == ("unread", "error", '"${ARGS[@]}"')
    assert [one.model for one in source.launches] == ["m"]
