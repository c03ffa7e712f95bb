"""`foretoken serve`: vLLM's names, files with the same names, and errors that suggest."""

import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from foretoken.cli.app import app
from foretoken.cli.serve import _serve, served, speculation_of
from foretoken.cli.serve_options import _put_aside
from foretoken.config.auto import auto_drafters
from foretoken.errors import ConfigError
from tests.guards.sources import ROOT

VLLM = (
    "dtype", "quantization", "max-model-len", "max-num-seqs", "max-num-batched-tokens",
    "gpu-memory-utilization", "enable-prefix-caching", "no-enable-prefix-caching",
    "served-model-name", "api-key", "seed", "speculative-config", "spec-method", "spec-model",
    "spec-tokens", "host", "port", "tokenizer", "revision", "block-size", "tool-call-parser",
    "per-request-spec-decode-metrics", "otlp-traces-endpoint", "disable-log-stats",
)  # fmt: skip


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["serve", *arguments])


def test_vllms_flags_are_there() -> None:
    command: Any = typer.main.get_command(app)
    options = {
        name
        for parameter in command.commands["serve"].params
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    assert {f"--{name}" for name in VLLM} <= options


def test_an_unknown_flag_is_an_error_that_suggests() -> None:
    result = run("demo", "--max-num-sqs", "3")
    assert result.exit_code == 2
    assert "--max-num-seqs" in result.stderr


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("max-num-sqs: 3", "max_num_seqs"),
        ("metrics-prefix: a-b", "metrics_prefix"),
        ("otlp-traces-endpoint: localhost", "otlp_traces_endpoint"),
        ("max-queue: -1", "max_queue"),
        ("api-key: 12345", "api_key"),
        ("api-key: [k1, null]", "api_key"),
        ("api-key: [k1, '']", "api_key"),
        ("admin-key: ' k'", "admin_key"),
        ("served-model-name: 5", "served_model_name"),
        ("[1, 2]", "mapping"),
        ("a: [", "YAML"),
    ],
)
def test_a_file_of_settings_is_checked_like_flags(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    result = run("demo", "--config", str(file))
    assert result.exit_code == 2, result.output
    assert named in result.stderr and len(result.stderr.strip().splitlines()) == 1


def test_a_model_is_needed() -> None:
    result = run()
    assert result.exit_code == 2 and "MODEL" in result.stderr


def test_short_flags_of_speculation() -> None:
    short = {"spec_method": "ngram", "spec_tokens": 4}
    assert speculation_of(short) == {"method": "ngram", "num_speculative_tokens": 4}
    assert speculation_of({"spec_tokens": 2}) == {"method": "auto", "num_speculative_tokens": 2}
    assert speculation_of({"spec_method": "auto"}) == {"method": "auto"}
    assert speculation_of({"speculative_config": "auto"}) == {"method": "auto"}
    assert speculation_of({}) is None
    for clash in ('{"method": "ngram"}', "none"):
        with pytest.raises(ConfigError, match="speculative-config"):
            speculation_of({"speculative_config": clash, "spec_method": "suffix"})


def test_the_document_shows_the_drafts_that_demo_has() -> None:
    """What the banner says of `foretoken serve demo`, and docs/serving.md of it."""
    shown = (ROOT / "docs" / "serving.md").read_text("utf-8")
    for one in auto_drafters("demo"):
        assert f"{one.label} (up to {one.num_speculative_tokens} tokens)" in shown


@pytest.mark.parametrize(
    "given",
    [
        {"spec_tokens": 3},
        {"speculative_config": '{"method": "auto", "num_speculative_tokens": 3}'},
        {"speculative_config": '{"method": "auto", "disable_by_batch_size": 8}'},
        {"speculative_config": '{"method": "auto", "rejection_sample_method": "typical"}'},
    ],
)
def test_what_names_no_drafter_is_about_those_that_there_are(given: dict[str, Any]) -> None:
    config, _ = served({"model": "demo", **given})
    assert config.speculative_config is not None
    drafters = {drafter.label for drafter in config.speculative_config.drafters}
    assert drafters == {drafter.label for drafter in auto_drafters("demo")}
    rule = config.speculative_config.rule.rejection_sample_method
    assert rule == ("typical" if "typical" in str(given) else "auto")


def test_a_key_of_one_drafter_asks_for_its_method() -> None:
    keys = '{"method": "auto", "prompt_lookup_max": 4}'
    with pytest.raises(ConfigError, match="beside auto: give a method"):
        served({"model": "demo", "speculative_config": keys})


@pytest.mark.parametrize(
    ("flag", "pair"),
    [
        ({"spec_decoding_acceptance_method": "typical"}, '{"rejection_sample_method": "typical"}'),
        ({"speculative_disable_by_batch_size": 8}, '{"disable_by_batch_size": 8}'),
        ({"num_speculative_tokens": 3}, '{"num_speculative_tokens": 3}'),
        ({"draft_max": 3}, '{"num_speculative_tokens": 3}'),
        ({"ngram_prompt_lookup_max": 4}, '{"prompt_lookup_max": 4}'),
    ],
)
def test_a_flag_of_another_engine_is_answered_with_our_key(flag: dict[str, Any], pair: str) -> None:
    with pytest.raises(ConfigError) as caught:
        served({"model": "demo", **flag})
    assert caught.value.allowed.partition("; ")[0] == f"--speculative-config '{pair}'"


def test_kv_events_are_json_of_vllm_s_keys_and_one_server_s() -> None:
    on = '{"enable_kv_cache_events": true, "topic": "kv"}'
    given = {"model": "demo", "kv_events_config": on}
    assert served(given)[1].kv_events.is_on
    assert not served({"model": "demo"})[1].kv_events.is_on
    for wrong, said in (("{", "JSON"), ('{"topik": "kv"}', "topic")):
        with pytest.raises(ConfigError, match=said):
            served({**given, "kv_events_config": wrong})
    with pytest.raises(ConfigError, match="--replicas"):
        served({**given, "replicas": 2})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "size", "named"),
    [
        ((), 2, "--tensor-parallel-size: got 1; allowed: 2, the WORLD_SIZE of the launcher"),
        (("--tensor-parallel-size", "2"), 1, "--tensor-parallel-size: got 2; allowed: 1,"),
        (("--replicas", "2"), 1, "--replicas: got 2; allowed: left out under a launcher"),
    ],
)
def test_a_launcher_s_processes_are_those_that_share_the_model(
    given: tuple[str, ...], size: int, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    result = run("demo", *given)
    assert result.exit_code == 2 and named in result.stderr


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        ("k1", ("k1",)),
        ("k1, k2", ("k1", "k2")),
        ("k1,k2 ,\tk3\n", ("k1", "k2", "k3")),
        ("", ()),
        (" \n", ()),
    ],
)
def test_keys_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, given: str, keys: tuple[str, ...]
) -> None:
    """As shells, compose files and mounted secrets write them."""
    monkeypatch.setenv("FORETOKEN_API_KEY", given)
    monkeypatch.setenv("FORETOKEN_ADMIN_KEY", given.split(",")[0] + "\n")
    server = served({"model": "demo"})[1]
    assert server.api_keys == keys and server.admin_key == (keys[0] if keys else None)


@pytest.mark.parametrize("given", ["k1,", ",k1", "k1,,k2", "k1, ,k2", ","])
def test_an_empty_key_among_several_is_an_error(
    monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv("FORETOKEN_API_KEY", given)
    with pytest.raises(ConfigError, match="FORETOKEN_API_KEY: got .*none empty") as error:
        served({"model": "demo"})
    assert "k1" not in str(error.value)


@pytest.mark.parametrize("key", ["", " ", " k", "k\n", "k\xe9"])
@pytest.mark.parametrize("option", ["api_key", "admin_key", "internal_key"])
def test_a_key_that_no_client_can_send_is_an_error(option: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{option}: "):
        served({"model": "demo", option: [key] if option == "api_key" else key})


@pytest.mark.parametrize(
    ("variable", "settings", "why"),
    [
        (None, {"host": "0.0.0.0"}, "no --api-key, no FORETOKEN_API_KEY"),
        (None, {"host": "::"}, "no --api-key"),
        (None, {"host": ""}, "whoever reaches 0.0.0.0 may ask"),
        (None, {"host": "llm.example"}, "whoever reaches llm.example may ask"),
        ("", {}, "FORETOKEN_API_KEY is empty"),
        (" ", {"host": "0.0.0.0"}, "FORETOKEN_API_KEY is empty"),
        (None, {}, None),
        (None, {"host": "localhost"}, None),
        (None, {"host": "::1"}, None),
        ("k", {"host": "0.0.0.0"}, None),
        ("", {"host": "0.0.0.0", "api_key": ["k"]}, None),
    ],
)
def test_a_server_that_is_open_to_others_says_so_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variable: str | None,
    settings: dict[str, Any],
    why: str | None,
) -> None:
    """Before the model is loaded, whoever serves."""
    monkeypatch.delenv("FORETOKEN_API_KEY", raising=False)
    if variable is not None:
        monkeypatch.setenv("FORETOKEN_API_KEY", variable)
    monkeypatch.setattr("foretoken.engine.logs.show_logs", lambda *_: None)
    monkeypatch.setattr("foretoken.server.run.serve", lambda *_: 0)
    with caplog.at_level("WARNING", "foretoken"):
        assert _serve({"model": "demo", "speculative_config": "none", **settings}) == 0
    assert caplog.text.count("no API key is asked for") == (why is not None)
    assert (why or "") in caplog.text


@pytest.mark.parametrize(
    ("flag", "value", "package", "extra"),
    [
        ("--replicas", "2", "ray", "ray"),
        ("--max-replicas", "2", "ray", "ray"),
        ("--otlp-traces-endpoint", "http://127.0.0.1:9", "opentelemetry", "otel"),
        ("--kv-events-config", '{"enable_kv_cache_events": true}', "zmq", "kv-events"),
    ],
)
def test_a_missing_extra_is_named_before_a_model_is_looked_for(
    flag: str, value: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    result = run("no/such-model", flag, value)
    needs = f'needs {package}, which is not installed: pip install "foretoken[{extra}]"\n'
    assert result.exit_code == 2
    assert result.stderr.startswith("foretoken: --") and result.stderr.endswith(needs)


@pytest.mark.parametrize(
    ("given", "found"),
    [("small.gguf", {"speculative_config": {"model": "small.gguf"}}), ("4", {"draft": 4})],
)
def test_a_draft_is_a_model_or_as_to_llama_cpp_a_number(given: str, found: dict[str, Any]) -> None:
    words = ["MODEL", "--draft", given, "--port", "1"]
    rest, settings = _put_aside(words, {"--port": False})
    assert (rest, settings) == (["MODEL", "--port", "1"], found)
