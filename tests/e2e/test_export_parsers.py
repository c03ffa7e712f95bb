"""What `lab export` writes, read by the parsers of the engines that it is for.

They are installed on the side, below $ENVIRONMENTS, as `make bench-peers-prepare` does it; without
them there is nothing to ask. Files of costs are read by the engines' own modules, taken out of
what `pip download --no-deps` puts below $ENVIRONMENTS/wheels. No model is loaded.
"""

import ast
import bisect
import json
import logging
import math
import os
import shlex
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from foretoken.errors import ConfigError
from foretoken.lab.launch.cost_files import tell_costs
from foretoken.lab.launch.engines import DraftingSetup
from foretoken.lab.launch.launch import LaunchPart
from foretoken.lab.launch.read import read_commands
from foretoken.lab.launch.write import export
from tests.unit.lab.costs import a_model, law_s
from tests.unit.lab.exported import every_command

pytestmark = pytest.mark.slow

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
ENVIRONMENTS = Path(
    os.environ.get("ENVIRONMENTS") or _CACHE / "foretoken" / "bench-peers" / "environments"
)
VLLM = ENVIRONMENTS / "venv-vllm" / "bin" / "python"
LLAMA_SERVER = ENVIRONMENTS / "llama-cpp" / "pool" / "bin" / "llama-server"

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
    by_costs = tell_costs("llama.cpp", DraftingSetup("draft_model", "d.gguf"), a_model(), Path())
    flags = [word for one in by_costs.told if isinstance(one, LaunchPart) for word in one.words]
    for words in [*commands, flags, ["--spec-type", "nonsense"]]:
        # Which is read last, and ends the program before it loads anything.
        command = [str(LLAMA_SERVER), *words, "--version"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
        refused = answer.returncode != 0
        assert refused == ("nonsense" in words), (shlex.join(words), answer.stderr[-500:])


SGLANG_WHEEL = next((ENVIRONMENTS / "wheels").glob("sglang-*.whl"), None)
VLLM_SOURCE = next((ENVIRONMENTS / "wheels").glob("vllm-*.tar.gz"), None)


def run_module(name: str, text: str, **given: Any) -> ModuleType:
    module = ModuleType(name)
    sys.modules[name] = module  # where annotations are looked up
    vars(module).update(given)
    exec(compile(text, name, "exec"), vars(module))
    return module


@pytest.mark.skipif(VLLM_SOURCE is None, reason="no vllm-*.tar.gz below wheels")
def test_vllm_s_own_look_up_takes_the_schedule() -> None:
    assert VLLM_SOURCE is not None
    with tarfile.open(VLLM_SOURCE) as packed:
        name = f"{VLLM_SOURCE.name.removesuffix('.tar.gz')}/vllm/v1/spec_decode/dynamic/utils.py"
        file = packed.extractfile(name)
        assert file is not None
        module = run_module("vllm_dynamic", file.read().decode())
    for scale in (1.0, 2.0):
        costs = a_model(scale)
        told = tell_costs("vllm", DraftingSetup("draft_model", "org/d"), costs, Path()).told
        [part] = [one for one in told if isinstance(one, LaunchPart)]
        schedule = part.value["num_speculative_tokens_per_batch_size"]
        dense = module.build_dynamic_sd_schedule_lookup(
            schedule, 256, part.value["num_speculative_tokens"]
        )
        assert [dense[batch] for first, _, _ in schedule for batch in [first]] == [
            k for _, _, k in schedule
        ]


def sglang_source(name: str) -> str:
    assert SGLANG_WHEEL is not None
    with zipfile.ZipFile(SGLANG_WHEEL) as wheel:
        return wheel.read(f"sglang/srt/speculative/{name}").decode()


@pytest.mark.skipif(SGLANG_WHEEL is None, reason="no sglang-*.whl below wheels")
def test_sglang_s_own_code_takes_the_adaptive_file(tmp_path: Path) -> None:
    tree = ast.parse(sglang_source("adaptive_spec_params.py"))
    wanted = ("_load_adaptive_config", "AdaptiveStepSlot", "AdaptiveSpeculativeParams")
    kept = [one for one in tree.body if getattr(one, "name", "") in wanted]
    assert len(kept) == len(wanted)
    text = "from __future__ import annotations\n" + ast.unparse(ast.Module(kept, []))
    module = run_module(
        "sglang_adaptive", text, json=json, math=math, bisect=bisect,
        cached_property=cached_property, logger=logging.getLogger("sglang"),
        log_info_on_rank0=lambda *_: None,
    )  # fmt: skip
    found = tell_costs("sglang", DraftingSetup("eagle3", "org/h"), a_model(2.0), tmp_path)
    path = tmp_path / "sglang-adaptive.json"
    path.write_text(found.files[path.name], "utf-8")
    words = [word for one in found.told if isinstance(one, LaunchPart) for word in one.words]
    steps = int(words[words.index("--speculative-num-steps") + 1])
    params = module.AdaptiveSpeculativeParams(initial_steps=steps, cfg_path=str(path))
    assert params.get_steps_for_batch(1) == steps and params.get_steps_for_batch(24) == 0
    for _ in range(40):  # nothing is accepted: it goes down, and no further than what pays
        params.on_verify_complete([0], 1)
    assert params.get_steps_for_batch(1) == a_model(2.0).paying(1)[0]


@pytest.mark.skipif(SGLANG_WHEEL is None, reason="no sglang-*.whl below wheels")
def test_sglang_s_own_code_takes_the_cost_table(tmp_path: Path) -> None:
    pytest.importorskip("msgspec")
    module = run_module("sglang_sps", sglang_source("dspark_components/dspark_sps.py"))
    found = tell_costs("sglang", DraftingSetup("dspark", "org/h"), a_model(), tmp_path)
    path = tmp_path / "sglang-dspark-costs.json"
    path.write_text(found.files[path.name], "utf-8")
    table = module.load_sps_table_from_path(str(path))
    assert not module.is_uninitialized_sps_table(table)
    for batch, verified in ((1, 5), (8, 3), (24, 1)):
        drafting_s = law_s(0, 5) - law_s(0, verified)
        found_s = table.step_time(num_reqs=batch, budget=batch * verified)
        assert found_s == pytest.approx(law_s(batch, verified) + drafting_s)
