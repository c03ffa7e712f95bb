"""What `lab export` writes, read by the parsers of the engines that it is for.

They are installed on the side, below $ENVIRONMENTS, as `make bench-peers-prepare` does it; without
them there is nothing to ask. No model is loaded.
"""

import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foretoken.errors import ConfigError
from foretoken.lab.launch.read import read_commands
from foretoken.lab.launch.write import export
from tests.unit.lab.exported import every_command

pytestmark = pytest.mark.slow

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
ENVIRONMENTS = Path(
    os.environ.get("ENVIRONMENTS") or _CACHE / "foretoken" / "bench-peers" / "environments"
)
VLLM = ENVIRONMENTS / "venv-vllm" / "bin" / "python"
LLAMA_SERVER = ENVIRONMENTS / "llama-cpp" / "pool" / "bin" / "llama-server"
OPENVINO = ENVIRONMENTS / "venv-openvino" / "bin" / "python"

READ_BY_VLLM = """
import json, sys, typing
from pydantic import TypeAdapter
from vllm.config.speculative import SpeculativeConfig
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = make_arg_parser(FlexibleArgumentParser(exit_on_error=False))
kinds = typing.get_type_hints(SpeculativeConfig, include_extras=True)
for words in json.load(sys.stdin):
    try:
        config = parser.parse_args(words).speculative_config or {}
        for key, value in dict(config).items():
            TypeAdapter(kinds[key]).validate_python(value)
    except BaseException as error:
        print(json.dumps([words, repr(error)]))
"""
RUN_BY_OPENVINO = """
import json, sys
import openvino, openvino_genai

class Pipeline:
    def __init__(self, folder, device, scheduler_config=None, draft_model=None,
                 prompt_lookup=False, **properties):
        assert scheduler_config is None or isinstance(
            scheduler_config, openvino_genai.SchedulerConfig)
        openvino.Core().set_property(device, properties)
    def get_generation_config(self):
        return openvino_genai.GenerationConfig(eos_token_id=1)
    def generate(self, prompt, config):
        config.validate()

assert openvino_genai.LLMPipeline and openvino_genai.draft_model
openvino_genai.LLMPipeline = Pipeline
openvino_genai.draft_model = lambda folder, device: None
for text in json.load(sys.stdin):
    try:
        exec(text, {})
    except BaseException as error:
        print(json.dumps([text, repr(error)]), file=sys.stderr)
"""


def texts(engine: str) -> Iterator[str]:
    for settings, config in every_command():
        try:
            yield export(engine, settings, config).text
        except ConfigError:
            continue


def command_words(text: str) -> list[str]:
    """The words behind the program's name; variables stand on lines of their own."""
    *_, command = read_commands(text)
    return [word.text for word in command.words]


def asked(python: Path, script: str, given: list[Any]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), "-W", "ignore", "-c", script],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.skipif(not VLLM.exists(), reason=f"no vLLM in {VLLM.parents[1]}")
def test_vllm_s_parser_takes_every_command() -> None:
    commands = [command_words(text)[2:] for text in texts("vllm")]
    assert len(commands) > 60
    answer = asked(VLLM, READ_BY_VLLM, commands)
    assert answer.returncode == 0, answer.stderr[-2000:]
    refused = [line for line in answer.stdout.splitlines() if line.startswith("[[")]
    assert not refused, "\n".join(refused)
    wrong = asked(VLLM, READ_BY_VLLM, [["m", "--speculative-config", '{"methodd": "x"}']])
    assert "methodd" in wrong.stdout, "a wrong key would be found"


@pytest.mark.skipif(not LLAMA_SERVER.exists(), reason=f"no llama-server at {LLAMA_SERVER}")
def test_llama_server_s_parser_takes_every_command() -> None:
    commands = [command_words(text)[1:] for text in texts("llama.cpp")]
    assert len(commands) > 50
    for words in [*commands, ["--spec-type", "nonsense"]]:
        # Which is read last, and ends the program before it loads anything.
        command = [str(LLAMA_SERVER), *words, "--version"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
        refused = answer.returncode != 0
        assert refused == ("nonsense" in words), (shlex.join(words), answer.stderr[-500:])


@pytest.mark.skipif(not OPENVINO.exists(), reason=f"no OpenVINO in {OPENVINO.parents[1]}")
def test_openvino_s_classes_take_every_script() -> None:
    scripts = list(texts("openvino"))
    assert len(scripts) > 40
    answer = asked(OPENVINO, RUN_BY_OPENVINO, scripts)
    assert answer.returncode == 0 and not answer.stderr.strip(), answer.stderr[-3000:]
    wrong = asked(
        OPENVINO, RUN_BY_OPENVINO, ["import openvino_genai as o\no.SchedulerConfig().x = 1"]
    )
    assert wrong.stderr.strip(), "a wrong name would be found"
