"""What other engines are told of a server of Foretoken's: said, named in a comment, or refused."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.config import SpeculativeConfig
from foretoken.errors import ConfigError
from foretoken.lab.launch.export import EXPORTED_TO, export
from foretoken.lab.launch.launch import Launch
from foretoken.lab.launch.sources import read_source
from foretoken.lab.launch.write import WrittenCommand
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
NOTHING_TO_SAY = {
    ("sglang", "disable_padded_drafter_batch"),
    ("llama.cpp", "disable_padded_drafter_batch"),
    ("openvino", "disable_padded_drafter_batch"),
    ("vllm", "disable_log_stats"),
}
"""What is asked for is what the engine does anyhow."""


def written(engine: str, config: dict[str, Any] | None, **settings: Any) -> WrittenCommand:
    read = None if config is None else SpeculativeConfig.from_dict(config)
    return export(engine, {**MODEL, **settings}, read)


def launch(command: WrittenCommand) -> Launch:
    [found] = read_source(command.commented).launches
    return found


def spoken(command: WrittenCommand) -> dict[str, Any]:
    found = launch(command).speculation
    assert found is not None
    return found


def test_every_option_and_every_key_has_a_value_to_export() -> None:
    assert OPTIONS.keys() == all_options() - OF_THE_FRONT
    assert KEYS.keys() == all_keys()


@pytest.mark.parametrize("engine", EXPORTED_TO)
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


@pytest.mark.parametrize("engine", EXPORTED_TO)
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


@pytest.mark.parametrize(
    ("engine", "method"),
    [("vllm", "mlp"), ("vllm", "medusa"), ("sglang", "medusa"), ("llama.cpp", "eagle"),
     ("llama.cpp", "parallel"), ("openvino", "suffix"), ("openvino", "eagle")],
)  # fmt: skip
def test_a_method_that_an_engine_has_not_is_an_error(engine: str, method: str) -> None:
    model = {} if method == "suffix" else {"model": "org/head"}
    with pytest.raises(ConfigError, match=method):
        written(engine, {"method": method, **model})


@pytest.mark.parametrize("engine", EXPORTED_TO)
def test_what_would_change_outputs_is_never_left_out(engine: str) -> None:
    draft = {"method": "draft_model", "model": "org/draft"}
    with pytest.raises(ConfigError, match="outputs"):
        written(engine, {**draft, "rejection_sample_method": "typical"})
    with pytest.raises(ConfigError, match="cannot load a Proposer"):
        written(engine, {"method": "custom_class", "model": "package.module.Class"})


def test_vllm_is_told_the_same_in_its_own_words() -> None:
    config = {
        "method": "draft_model",
        "model": "org/draft",
        "num_speculative_tokens": 4,
        "disable_by_batch_size": 16,
        "kv_cache_dtype": "int8",
        "rejection_sample_method": "block",
    }
    found = written("vllm", config, max_num_seqs=8, quantization="int8", batch_invariant="on")
    assert spoken(found) == {
        "method": "draft_model",
        "model": "org/draft",
        "num_speculative_tokens": 4,
        "kv_cache_dtype": "int8_per_token_head",
        "rejection_sample_method": "block",
        "num_speculative_tokens_per_batch_size": [[1, 15, 4], [16, 4096, 0]],
    }
    options = launch(found).options
    assert (options["max-num-seqs"], options["quantization"]) == (
        "8",
        "int8_per_channel_weight_only",
    )
    assert "export VLLM_BATCH_INVARIANT=1" in found.text
    assert {one.name for one in found.unsaid} == {"adaptive_speculation"}


def test_vllm_has_other_words_for_parallel_drafts_and_shorter_look_ups() -> None:
    pard = spoken(written("vllm", {"method": "parallel", "model": "org/pard"}))
    assert (pard["method"], pard["parallel_drafting"]) == ("draft_model", True)
    ngram = spoken(written("vllm", {"method": "ngram", "num_speculative_tokens": 3}))
    assert (ngram["prompt_lookup_min"], ngram["prompt_lookup_max"]) == (2, 5)


def test_a_schedule_that_rises_is_one_length_elsewhere() -> None:
    rising = [[1, 4, 2], [5, 64, 5]]
    draft = {"method": "draft_model", "model": "org/draft"}
    config = {**draft, "num_speculative_tokens_per_batch_size": rising}
    for engine in EXPORTED_TO:
        found = written(engine, config)
        assert "num_speculative_tokens_per_batch_size" in {one.name for one in found.unsaid}
        assert "4096" not in found.text


def test_sglang_counts_the_root_and_drafts_trees() -> None:
    chain = launch(written("sglang", {"method": "eagle3", "model": "org/head"})).options
    assert [chain[f"speculative-{name}"] for name in ("num-steps", "eagle-topk",
            "num-draft-tokens")] == ["5", "1", "6"]  # fmt: skip
    tree = {"method": "eagle3", "model": "org/head", "tree_top_k": 4, "tree_depth": 3}
    grown = launch(written("sglang", tree)).options
    assert [grown[f"speculative-{name}"] for name in ("num-steps", "eagle-topk",
            "num-draft-tokens")] == ["3", "4", "13"]  # fmt: skip
    chained = spoken(written("vllm", tree))
    assert chained["num_speculative_tokens"] == 3 and "tree_top_k" not in chained


def test_sglang_has_words_of_its_own_for_blocks() -> None:
    for method, said in (
        ("dflash", {"speculative-num-draft-tokens": "8"}),
        ("dspark", {"speculative-dspark-block-size": "7"}),
    ):
        config = {"method": method, "model": "org/head", "num_speculative_tokens": 7}
        options = launch(written("sglang", config)).options
        found = {name: value for name, value in options.items() if name.startswith("speculative-")}
        assert found == {
            "speculative-algorithm": method.upper(),
            "speculative-draft-model-path": "org/head",
            **said,
        }


def test_llama_cpp_reads_gguf_files_and_divides_its_context() -> None:
    config = {"method": "draft_model", "model": "org/draft", "quantization": "int8"}
    found = written("llama.cpp", config, max_model_len=4096, max_num_seqs=4)
    options = launch(found).options
    assert (options["model"], options["spec-draft-model"]) == (
        "target-bf16.gguf",
        "draft-q8_0.gguf",
    )
    assert (options["ctx-size"], options["parallel"]) == ("16384", "4")
    assert "# model: target-bf16.gguf is org/target as llama.cpp's" in found.commented
    four = written("llama.cpp", None, quantization="int4")
    assert "llama-quantize" in four.commented and "llama-quantize" not in found.commented
    given = written("llama.cpp", {"method": "ngram"}, model="a.gguf")
    assert launch(given).options["spec-ngram-simple-size-n"] == "2"
    assert "convert" not in given.commented


def test_openvino_is_a_script_that_parses() -> None:
    for settings, config in every_command():
        try:
            command = export("openvino", settings, config)
        except ConfigError:
            continue
        ast.parse(command.commented)
    found = written(
        "openvino", {"method": "draft_model", "model": "org/draft"}, max_num_seqs=8, device="cpu"
    )
    assert 'draft_model=openvino_genai.draft_model("draft-openvino", "CPU")' in found.text
    assert "config.num_assistant_tokens = 5" in found.text
    assert "scheduler.max_num_seqs = 8" in found.text
    by_confidence = written(
        "openvino",
        {"method": "draft_model", "model": "org/draft", "draft_confidence_threshold": 0.4},
    )
    assert "config.assistant_confidence_threshold = 0.4" in by_confidence.text
    assert "num_assistant_tokens =" not in by_confidence.text, "GenAI takes one of them"
    looked_up = written("openvino", {"method": "ngram", "num_speculative_tokens": 3})
    assert "prompt_lookup=True" in looked_up.text and "max_ngram_size = 5" in looked_up.text


def test_of_several_drafters_one_is_written_and_the_others_are_named() -> None:
    drafters = [{"method": "suffix"}, {"method": "eagle3", "model": "org/head"}]
    found = written("vllm", {"drafters": drafters})
    assert spoken(found)["method"] == "suffix"
    assert "drafter eagle3" in {one.name for one in found.unsaid}
    best = written("vllm", {"drafters": drafters, "policy": "best"})
    assert spoken(best)["method"] == "eagle3"
    only_heads = written("openvino", {"drafters": drafters})
    assert "org/head" in only_heads.commented


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
        (("nothing", "foretoken serve demo"), "openvino"),
        (("vllm", "vllm serve org/m --port 1"), "foretoken serve"),
        (("vllm", "foretoken serve demo --portt 3"), "--port"),
        (("vllm", "no-such-file.yaml"), "readable"),
    ],
)
def test_mistakes_say_what_would_do(words: tuple[str, ...], said: str) -> None:
    result = run(*words)
    assert isinstance(result.exception, ConfigError | SystemExit), result.output
    assert said in f"{result.output}{result.exception}"
