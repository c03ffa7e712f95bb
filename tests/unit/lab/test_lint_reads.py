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


def test_json_over_several_lines_in_quotes() -> None:
    assert only(GUIDE).speculation == {
        "model": "Qwen/Qwen3-0.6B",
        "num_speculative_tokens": 5,
        "method": "draft_model",
    }


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


def test_a_command_with_one_key_is_no_yaml() -> None:
    """A colon and a space make a mapping of it."""
    assert only("""vllm serve m --speculative-config '{"method": "suffix"}'""").engine == "vllm"


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


def test_options_alone_are_read() -> None:
    assert only("--spec-decoding-acceptance-method typical_acceptance_sampler").engine == "vllm"
    assert only("./start.sh --speculative-model org/draft").options["speculative-model"]


TORN = """vllm serve org/target
  --tensor-parallel 2
  --speculative-config '{"method": "ngram", "num_speculative_tokens": 5}'
"""


def test_a_command_goes_on_with_the_options_on_its_next_lines() -> None:
    source = read_source(TORN)
    [launch] = source.launches
    assert launch.speculation == {"method": "ngram", "num_speculative_tokens": 5}
    assert launch.options["tensor-parallel-size"] == "2"
    [finding] = source.findings
    assert (finding.check, finding.where) == ("torn_off", "--tensor-parallel")


def test_a_comment_within_ends_the_command_too() -> None:
    source = read_source("vllm serve m \\\n  # the draft\n  --spec-model d --spec-tokens 3\n")
    assert [one.where for one in source.findings] == ["--spec-model"]
    assert source.launches[0].speculation == {"model": "d", "num_speculative_tokens": 3}


@pytest.mark.parametrize("text", [GUIDE, SCRIPT])
def test_commands_that_go_on_rightly_are_not_torn(text: str) -> None:
    assert not read_source(text).findings


def test_a_script_that_is_no_python_is_said_to_be_none() -> None:
    text = "from vllm import LLM\nllm = LLM(speculative_config={'model': 'a' 'b': 1})\n"
    [finding] = read_source(text).findings
    assert (finding.level, finding.where) == ("error", "line 2")
    assert not read_source("from vllm import LLM\nllm = LLM('a')\n").findings


@pytest.mark.parametrize(
    ("command", "name", "value"),
    [
        ("sglang serve m --speculative-algo EAGLE", "speculative-algorithm", "EAGLE"),
        ("sglang serve m --mem-fraction 0.7", "mem-fraction-static", "0.7"),
        ("vllm serve m --gpu-memory-util=0.9", "gpu-memory-utilization", "0.9"),
    ],
)
def test_beginnings_of_options_are_what_argparse_makes_of_them(
    command: str, name: str, value: str
) -> None:
    [launch] = read_source(command).launches
    assert launch.options[name] == value


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
