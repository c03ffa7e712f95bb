"""`foretoken serve`: an OpenAI-compatible server. Flags are named as in vLLM.

A file of `--config` holds the same names; the command line wins. Torch-free until it serves.
"""

import logging
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.cli.options import parse_invariant, parse_speculation, read_text
from foretoken.cli.serve_options import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE, option
from foretoken.config.auto import AUTO
from foretoken.config.reader import KeyTable
from foretoken.errors import ConfigError

_SHORT = {"method": "method", "model": "model", "num_speculative_tokens": "tokens"}
_SPECULATION = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
_SERVER = {
    "host": "host",
    "port": "port",
    "served_model_name": "served_model_names",
    "api_key": "api_keys",
    "allowed_host": "allowed_hosts",
    "admin_key": "admin_key",
    "per_request_spec_decode_metrics": "per_request_metrics",
    "metrics_prefix": "metrics_prefix",
    "otlp_traces_endpoint": "otlp_traces_endpoint",
    "tool_call_parser": "tool_parser",
}
_LIMITS = (
    "max_body_bytes", "max_prompt_tokens", "max_tokens", "max_n", "max_queue", "timeout_s",
    "drain_s",
)  # fmt: skip
_ENGINE = (
    "tokenizer", "revision", "dtype", "quantization", "kv_cache_dtype", "device", "seed",
    "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size",
    "enable_prefix_caching", "gpu_memory_utilization", "kv_cache_memory_bytes", "batch_invariant",
    "tensor_parallel_size", "disable_log_stats", "adaptive_speculation",
)  # fmt: skip
_KEYS = KeyTable(where="--config", neutral={}, removed={})

Text = str | None
Texts = list[str] | None
Number = int | None
Real = float | None
Switch = bool | None


def serve(
    model: Annotated[
        Text, typer.Argument(metavar="MODEL", help="Packaged name (`demo`), folder, or hub id.")
    ] = None,
    config: Annotated[Path | None, option("config")] = None,
    host: Annotated[Text, option("host")] = None,
    port: Annotated[Number, option("port")] = None,
    served_model_name: Annotated[Texts, option("served_model_name")] = None,
    api_key: Annotated[Texts, option("api_key")] = None,
    allowed_host: Annotated[Texts, option("allowed_host")] = None,
    admin_key: Annotated[Text, option("admin_key")] = None,
    speculative_config: Annotated[Text, option("speculative_config")] = None,
    spec_method: Annotated[Text, option("spec_method")] = None,
    spec_model: Annotated[Text, option("spec_model")] = None,
    spec_tokens: Annotated[Number, option("spec_tokens")] = None,
    adaptive_speculation: Annotated[Switch, option("adaptive_speculation")] = None,
    tokenizer: Annotated[Text, option("tokenizer")] = None,
    revision: Annotated[Text, option("revision")] = None,
    dtype: Annotated[Text, option("dtype")] = None,
    quantization: Annotated[Text, option("quantization")] = None,
    kv_cache_dtype: Annotated[Text, option("kv_cache_dtype")] = None,
    device: Annotated[Text, option("device")] = None,
    seed: Annotated[Number, option("seed")] = None,
    max_model_len: Annotated[Number, option("max_model_len")] = None,
    max_num_seqs: Annotated[Number, option("max_num_seqs")] = None,
    max_num_batched_tokens: Annotated[Number, option("max_num_batched_tokens")] = None,
    block_size: Annotated[Number, option("block_size")] = None,
    enable_prefix_caching: Annotated[Switch, option("enable_prefix_caching")] = None,
    gpu_memory_utilization: Annotated[Real, option("gpu_memory_utilization")] = None,
    kv_cache_memory_bytes: Annotated[Number, option("kv_cache_memory_bytes")] = None,
    batch_invariant: Annotated[Text, option("batch_invariant")] = None,
    tensor_parallel_size: Annotated[Number, option("tensor_parallel_size")] = None,
    max_body_bytes: Annotated[Number, option("max_body_bytes")] = None,
    max_prompt_tokens: Annotated[Number, option("max_prompt_tokens")] = None,
    max_tokens: Annotated[Number, option("max_tokens")] = None,
    max_n: Annotated[Number, option("max_n")] = None,
    max_queue: Annotated[Number, option("max_queue")] = None,
    timeout_s: Annotated[Real, option("timeout_s")] = None,
    drain_s: Annotated[Real, option("drain_s")] = None,
    tool_call_parser: Annotated[Text, option("tool_call_parser")] = None,
    per_request_spec_decode_metrics: Annotated[
        Text, option("per_request_spec_decode_metrics")
    ] = None,
    log_format: Annotated[Text, option("log_format")] = None,
    disable_log_stats: Annotated[Switch, option("disable_log_stats")] = None,
    metrics_prefix: Annotated[Text, option("metrics_prefix")] = None,
    otlp_traces_endpoint: Annotated[Text, option("otlp_traces_endpoint")] = None,
) -> None:
    """Serve a model through OpenAI's API.

    It speculates unless told otherwise, with whatever there is for the model.
    """
    given = {k: v for k, v in locals().items() if v is not None and k != "config"}
    settings = {**_read_config(config), **given}
    raise typer.Exit(_serve(settings))


def _read_config(path: Path | None) -> dict[str, Any]:
    """The settings of a YAML file, by our option names."""
    if path is None:
        return {}
    import yaml

    text = read_text(path, "--config")
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        why = " ".join(str(error).split())
        raise ConfigError("--config", str(path), f"valid YAML ({why})") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError("--config", str(path), "a mapping such as `max-num-seqs: 32`")
    known = ("model", "log_format", *_SPECULATION, *_SERVER, *_LIMITS, *_ENGINE)
    settings = _KEYS.accept(content, known)
    for name in ("served_model_name", "api_key", "allowed_host"):
        if isinstance(settings.get(name), str):
            settings[name] = [settings[name]]
    return settings


def _serve(settings: dict[str, Any]) -> int:
    model = settings.get("model")
    if not isinstance(model, str):
        raise ConfigError("MODEL", model, "a packaged name, a folder or a Hugging Face id")
    from foretoken.assembly import default_speculation
    from foretoken.config import EngineConfig
    from foretoken.logs import show_logs
    from foretoken.server.observing.log_lines import LOG_FORMATS, LineFormatter
    from foretoken.server.run import serve as run
    from foretoken.server.settings import Limits, ServerConfig

    engine = {name: settings[name] for name in _ENGINE if name in settings}
    if isinstance(engine.get("batch_invariant"), str):
        engine["batch_invariant"] = parse_invariant(engine["batch_invariant"])
    speculation = speculation_of(settings)
    own = {ours: settings[name] for name, ours in _SERVER.items() if name in settings}
    own.setdefault("admin_key", os.environ.get(ADMIN_KEY_VARIABLE))
    if "api_keys" not in own and os.environ.get(API_KEY_VARIABLE):
        own["api_keys"] = os.environ[API_KEY_VARIABLE].split(",")
    for name in ("api_keys", "served_model_names", "allowed_hosts"):
        own[name] = tuple(own.get(name, ()))
    limits = Limits(**{name: settings[name] for name in _LIMITS if name in settings})
    server = ServerConfig(**own, limits=limits)
    log_format = settings.get("log_format", "text")
    if log_format not in LOG_FORMATS:
        raise ConfigError("--log-format", log_format, ", ".join(LOG_FORMATS))
    formatter = LineFormatter(log_format)
    show_logs(formatter)
    for handler in logging.getLogger().handlers:  # what uvicorn and asyncio have to say
        handler.setFormatter(formatter)
    if not any(name in settings for name in _SPECULATION):
        speculation = default_speculation(EngineConfig.from_kwargs(model=model, **engine))
    config = EngineConfig.from_kwargs(model=model, speculative_config=speculation, **engine)
    return run(config, server, lambda line: print(line, flush=True))


def speculation_of(settings: dict[str, Any]) -> dict[str, Any] | None:
    """`--speculative-config` with the three short flags put in; None: `none`, or nothing given.

    Raises:
        ConfigError: the same thing given twice, or a short flag beside `none`.
    """
    given = settings.get("speculative_config")
    named = {key: settings.get(f"spec_{word}") for key, word in _SHORT.items()}
    short = {key: value for key, value in named.items() if value is not None}
    config: dict[str, Any] | None = None
    if isinstance(given, dict):
        config = dict(given)
    elif given is not None:
        config = parse_speculation(given)
    elif short:
        # A length alone: of whatever drafts without being named.
        config = {} if {"method", "model"} & short.keys() else {"method": AUTO}
    if not short:
        return config
    if config is None:
        raise ConfigError("--speculative-config", given, f"JSON, beside {', '.join(short)}")
    twice = [] if given is None else sorted(config.keys() & short.keys())
    if twice:
        allowed = f"left out beside --spec-{_SHORT[twice[0]]}"
        raise ConfigError(f"--speculative-config {twice[0]}", config[twice[0]], allowed)
    return {**config, **short}
