"""What other engines are told of a server of Foretoken's: said, named in a comment, or refused."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.config import SpeculativeConfig
from foretoken.errors import ConfigError
from foretoken.lab.launch.launch import Launch
from foretoken.lab.launch.read import read_source
from foretoken.lab.launch.write import EXPORTED, WrittenCommand, export
from foretoken.lab.lint.checks import lint
from foretoken.lab.lint.fit import Machine
from tests.unit.lab.exported import (
    KEYS,
    OPTIONS,
    all_keys,
    all_options,
    config_of,
    every_command,
    without,
)

MODEL = {"model": "org/target"}
OF_THE_FRONT = {"replicas", "max_replicas", "ray_address"}
"""Options of several servers behind one address, which are no server's own."""
NOTHING_TO_SAY = {("vllm", "disable_log_stats")}
"""What is asked for is what the engine does anyhow."""


def written(engine: str, config: dict[str, Any] | None, **settings: Any) -> WrittenCommand:
    read = None if config is None else SpeculativeConfig.from_dict(config)
    return export(engine, {**MODEL, **settings}, read)


def launch(command: WrittenCommand) -> Launch:
    [found] = read_source(command.commented).launches
    return found


def test_every_option_and_every_key_has_a_value_to_export() -> None:
    assert OPTIONS.keys() == all_options() - OF_THE_FRONT
    assert KEYS.keys() == all_keys()


@pytest.mark.parametrize("engine", EXPORTED)
@pytest.mark.parametrize("name", OPTIONS)
def test_no_option_is_dropped_silently(engine: str, name: str) -> None:
    plain = export(engine, MODEL, None)
    found = export(engine, {**MODEL, name: OPTIONS[name]}, None)
    named = {one.name for one in found.unsaid}
    if (engine, name) in NOTHING_TO_SAY:
        return
    assert found.text != plain.text or name in named, found
    assert "secret-word" not in found.commented
    if name in named:
        assert re.search(rf"^# .*\b{name}\b.*: ", found.commented, re.MULTILINE)


@pytest.mark.parametrize("engine", EXPORTED)
@pytest.mark.parametrize("name", KEYS)
def test_no_key_is_dropped_silently(engine: str, name: str) -> None:
    if (engine, name) in NOTHING_TO_SAY:
        return
    try:
        plain = export(engine, MODEL, without(name))
        found = export(engine, MODEL, config_of(name))
    except ConfigError as error:
        assert error.allowed  # a method or a rule that the engine has not
        return
    assert found.text != plain.text or name in {one.name for one in found.unsaid}, found


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama.cpp"])
def test_lint_finds_nothing_wrong_with_what_is_exported(engine: str) -> None:
    judged = 0
    for settings, config in every_command():
        try:
            command = export(engine, settings, config)
        except ConfigError:
            continue
        source = read_source(command.commented)
        assert [one.engine for one in source.launches] == [engine], command.text
        errors = [f for f in lint(source, Machine()).findings if f.level == "error"]
        assert not errors, (command.text, errors)
        judged += 1
    assert judged > 50


def run(*words: str, given: str | None = None) -> Any:
    return CliRunner().invoke(app, ["lab", "export", *words], input=given)


@pytest.mark.parametrize(
    "text",
    [
        "foretoken serve org/m --port 9000 --spec-method ngram --spec-tokens 3",
        """foretoken serve org/m --port 9000 --speculative-config '{"method": "ngram",
        "num_speculative_tokens": 3}'""",
        "FROM python\nCMD [\"foretoken\", \"serve\", \"org/m\", \"--port\", \"9000\", "
        "\"--spec-method\", \"ngram\", \"--spec-tokens\", \"3\"]\n",
        "model: org/m\nport: 9000\nspec-method: ngram\nspec_tokens: 3\n",
    ],
)  # fmt: skip
def test_commands_and_settings_are_read_by_their_own_parser(text: str, tmp_path: Path) -> None:
    file = tmp_path / "given"
    file.write_text(text)
    result = run("vllm", str(file))
    assert result.exit_code == 0, result.output
    [found] = read_source(result.stdout).launches
    assert found.model == "org/m" and found.options["port"] == "9000"
    assert found.speculation is not None and found.speculation["num_speculative_tokens"] == 3


def test_a_speculative_config_alone_leaves_the_model_to_be_named() -> None:
    result = run("sglang", '{"method":"ngram","num_speculative_tokens":4}', "--json")
    document = json.loads(result.stdout)
    assert "--model-path MODEL" in document["text"].replace("\\\n ", "")
    assert "adaptive_speculation" in {one["name"] for one in document["unsaid"]}


def test_a_packaged_model_is_named_by_its_folder() -> None:
    result = run("vllm", "foretoken serve demo")
    assert result.exit_code == 0, result.output
    [found] = read_source(result.stdout).launches
    assert found.model is not None and Path(found.model, "config.json").is_file()
    assert found.speculation is not None, "what serves by default drafts by default"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nothing", "foretoken serve demo"), "llama.cpp"),
        (("vllm", "trtllm-serve org/m --port 1"), "foretoken serve"),
        (("foretoken", "vllm serve org/m --kv-cache-dtype fp8_e5m2"), "kv_cache_dtype"),
        (("foretoken", "foretoken serve demo"), "another engine"),
        (("foretoken", "sglang serve --speculative-algorithm NGRAM"), "names its model"),
        (("vllm", "foretoken serve demo --portt 3"), "--port"),
        (("vllm", "no-such-file.yaml"), "readable"),
    ],
)
def test_mistakes_say_what_would_do(words: tuple[str, ...], said: str) -> None:
    result = run(*words)
    assert isinstance(result.exception, ConfigError | SystemExit), result.output
    assert said in f"{result.output}{result.exception}"


OF_VLLM = (
    "vllm serve org/m --port 8001 -tp 2 --max-model-len 4096 --no-enable-prefix-caching "
    "--speculative-model org/d --num-speculative-tokens 4 --speculative-disable-by-batch-size 32 "
    "--trust-remote-code"
)
OF_LLAMA_CPP = (
    "CUDA_VISIBLE_DEVICES=0 llama-server -m a.gguf --parallel 4 -md b.gguf --draft-max 8 "
    "--spec-draft-p-min 0.5 --spec-draft-device none --metrics"
)
OF_SGLANG = (
    "sglang serve --model-path org/m --speculative-algorithm EAGLE3 --mem-fraction-static 0.8 "
    "--speculative-draft-model-path org/head --speculative-num-steps 3 --speculative-eagle-topk 4 "
    "--speculative-num-draft-tokens 9"
)


SHAPES = (
    ("--speculative-algorithm EAGLE3 --speculative-eagle-topk 1 --speculative-num-steps 3 "
     "--speculative-num-draft-tokens 4", "eagle3", 3),
    ("--speculative-algorithm DFLASH --speculative-num-draft-tokens 16", "dflash", 15),
    ("--speculative-algorithm DFLASH --speculative-num-draft-tokens 8 --speculative-num-steps 1 "
     "--speculative-eagle-topk 1", "dflash", 7),
    ("--speculative-algorithm DSPARK --speculative-dspark-block-size 5", "dspark", 5),
    ("--speculative-algorithm DSPARK --speculative-num-steps 1", "dspark", 7),
)  # fmt: skip
"""SGLang's numbers say each other: along a chain, rows are one more than steps; a block is one."""


@pytest.mark.parametrize(
    ("given", "to", "words", "lost"),
    [
        (OF_VLLM, "foretoken", "foretoken serve org/m --tensor-parallel-size 2 --port 8001 "
         "--max-model-len 4096 --no-enable-prefix-caching --speculative-config "
         '{"method": "draft_model", "model": "org/d", "num_speculative_tokens": 4, '
         '"num_speculative_tokens_per_batch_size": [[1, 32, 4], [33, 4096, 0]]}',
         ["--trust-remote-code"]),
        (OF_VLLM, "sglang", "python -m sglang.launch_server --model-path org/m --tp-size 2 --port "
         "8001 --context-length 4096 --disable-radix-cache --speculative-algorithm STANDALONE "
         "--speculative-draft-model-path org/d --speculative-num-steps 4 --speculative-eagle-topk "
         "1 --speculative-num-draft-tokens 5",
         ["--trust-remote-code", "num_speculative_tokens_per_batch_size"]),
        (OF_LLAMA_CPP, "foretoken", "foretoken serve a.gguf --max-num-seqs 4 --speculative-config "
         '{"method": "draft_model", "model": "b.gguf", "num_speculative_tokens": 8, '
         '"draft_confidence_threshold": 0.5}',
         ["CUDA_VISIBLE_DEVICES", "--spec-draft-device", "--metrics"]),
        (OF_SGLANG, "vllm", "vllm serve org/m --gpu-memory-utilization 0.8 --speculative-config "
         '{"method": "eagle3", "model": "org/head", "num_speculative_tokens": 8}',
         ["--speculative-eagle-topk"]),
        (OF_SGLANG, "foretoken", "foretoken serve org/m --gpu-memory-utilization 0.8 "
         '--speculative-config {"method": "eagle3", "model": "org/head", '
         '"num_speculative_tokens": 8, "tree_top_k": 4, "tree_depth": 3}',
         []),
        *((f"sglang serve --model-path m --speculative-draft-model-path h {words}", "foretoken",
           f'foretoken serve m --speculative-config {{"method": "{method}", "model": "h", '
           f'"num_speculative_tokens": {drafts}}}', [])
          for words, method, drafts in SHAPES),
    ],
)  # fmt: skip
def test_a_command_of_any_engine_is_written_for_another(
    given: str, to: str, words: str, lost: list[str]
) -> None:
    document = json.loads(run(to, given, "--json").stdout)
    assert " ".join(shlex.split(document["text"].replace("\\\n ", ""))) == words
    assert [one["name"] for one in document["unsaid"]] == lost
