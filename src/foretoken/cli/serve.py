"""`foretoken serve`: an OpenAI-compatible server. Flags are named as in vLLM.

A file of `--config` holds the same names; the command line wins. Torch-free until it serves.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.cli.options import (
    SpeculativeOption,
    parse_invariant,
    parse_speculation,
    read_text,
)
from foretoken.config.keys import KeyTable
from foretoken.errors import ConfigError

API_KEY_VARIABLE = "FORETOKEN_API_KEY"
ADMIN_KEY_VARIABLE = "FORETOKEN_ADMIN_KEY"
_SPECULATION = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
_SERVER = {
    "host": "host",
    "port": "port",
    "served_model_name": "served_model_names",
    "api_key": "api_keys",
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
Number = int | None


def serve(
    model: Annotated[
        Text, typer.Argument(help="Packaged name (`demo`), folder, or Hugging Face id.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="YAML file with the names of these options.")
    ] = None,
    host: Annotated[Text, typer.Option(help="Address to listen on; default 127.0.0.1.")] = None,
    port: Annotated[Number, typer.Option(help="Port; default 8000, 0: any.")] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name that requests give; may be repeated.")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help=f"Key that /v1 asks for; may be repeated; also {API_KEY_VARIABLE}."),
    ] = None,
    admin_key: Annotated[
        Text, typer.Option(help=f"Opens /admin, which is off without; also {ADMIN_KEY_VARIABLE}.")
    ] = None,
    speculative_config: SpeculativeOption = None,
    spec_method: Annotated[Text, typer.Option(help="Short for the key `method`.")] = None,
    spec_model: Annotated[Text, typer.Option(help="Short for the key `model`.")] = None,
    spec_tokens: Annotated[
        Number, typer.Option(help="Short for the key `num_speculative_tokens`.")
    ] = None,
    adaptive_speculation: Annotated[
        bool | None,
        typer.Option(
            "--adaptive-speculation/--no-adaptive-speculation",
            help="Draft only as far as measured faster at the present load; default on.",
        ),
    ] = None,
    tokenizer: Annotated[Text, typer.Option(help="Default: the model's own.")] = None,
    revision: Annotated[Text, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    dtype: Annotated[Text, typer.Option(help="auto, bfloat16, float16 or float32.")] = None,
    quantization: Annotated[Text, typer.Option("--quantization", "-q", help="Scheme.")] = None,
    kv_cache_dtype: Annotated[Text, typer.Option(help="auto or int8.")] = None,
    device: Annotated[Text, typer.Option(help="auto, cpu or cuda.")] = None,
    seed: Annotated[Number, typer.Option(help="For requests that bring none.")] = None,
    max_model_len: Annotated[
        Number, typer.Option(help="Most tokens of a request; default: the model's context.")
    ] = None,
    max_num_seqs: Annotated[Number, typer.Option(help="Most requests at once.")] = None,
    max_num_batched_tokens: Annotated[Number, typer.Option(help="Most tokens a step.")] = None,
    block_size: Annotated[Number, typer.Option(help="Tokens of a KV page.")] = None,
    enable_prefix_caching: Annotated[
        bool | None,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Reuse the KV of prompt beginnings; default on.",
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="Share of a GPU's memory to use.")
    ] = None,
    kv_cache_memory_bytes: Annotated[Number, typer.Option(help="Memory for the KV cache.")] = None,
    batch_invariant: Annotated[
        Text, typer.Option(metavar="auto|on|off", help="Bitwise the same whatever the batch.")
    ] = None,
    tensor_parallel_size: Annotated[Number, typer.Option(help="Devices to share a layer.")] = None,
    disable_log_stats: Annotated[
        bool | None,
        typer.Option(
            "--disable-log-stats/--no-disable-log-stats", help="No line every ten seconds."
        ),
    ] = None,
    per_request_spec_decode_metrics: Annotated[
        Text,
        typer.Option(
            metavar="none|summary|detailed", help="What answers tell about their speculation."
        ),
    ] = None,
    tool_call_parser: Annotated[
        Text, typer.Option(metavar="hermes|llama3_json", help="How calls stand in the text.")
    ] = None,
    otlp_traces_endpoint: Annotated[
        Text, typer.Option(help="Where OpenTelemetry spans go; needs the extra `otel`.")
    ] = None,
    metrics_prefix: Annotated[Text, typer.Option(help="Of metrics that vLLM has not.")] = None,
    max_body_bytes: Annotated[Number, typer.Option(help="Larger bodies are refused.")] = None,
    max_prompt_tokens: Annotated[Number, typer.Option(help="Longer prompts are refused.")] = None,
    max_tokens: Annotated[Number, typer.Option(help="A larger max_tokens is refused.")] = None,
    max_n: Annotated[Number, typer.Option(help="Most outputs of one request.")] = None,
    max_queue: Annotated[
        Number, typer.Option(help="Requests that may wait; more are answered with 429.")
    ] = None,
    log_format: Annotated[Text, typer.Option(metavar="text|json", help="Of log lines.")] = None,
    timeout_s: Annotated[float | None, typer.Option(help="Most seconds of a request.")] = None,
    drain_s: Annotated[float | None, typer.Option(help="Seconds to finish after SIGTERM.")] = None,
) -> None:
    """Serve a model through OpenAI's API.

    The model `demo` speculates with `demo-draft` unless told otherwise.
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
    for name in ("served_model_name", "api_key"):
        if isinstance(settings.get(name), str):
            settings[name] = [settings[name]]
    return settings


def _serve(settings: dict[str, Any]) -> int:
    model = settings.get("model")
    if not isinstance(model, str):
        raise ConfigError("MODEL", model, "a packaged name, a folder or a Hugging Face id")
    from foretoken.config import EngineConfig
    from foretoken.logs import show_logs
    from foretoken.server.log_lines import LOG_FORMATS, LineFormatter
    from foretoken.server.run import serve as run
    from foretoken.server.settings import Limits, ServerConfig

    engine = {name: settings[name] for name in _ENGINE if name in settings}
    if isinstance(engine.get("batch_invariant"), str):
        engine["batch_invariant"] = parse_invariant(engine["batch_invariant"])
    speculation = speculation_of(settings, model)
    own = {ours: settings[name] for name, ours in _SERVER.items() if name in settings}
    own.setdefault("admin_key", os.environ.get(ADMIN_KEY_VARIABLE))
    if "api_keys" not in own and os.environ.get(API_KEY_VARIABLE):
        own["api_keys"] = os.environ[API_KEY_VARIABLE].split(",")
    for name in ("api_keys", "served_model_names"):
        own[name] = tuple(own.get(name, ()))
    limits = Limits(**{name: settings[name] for name in _LIMITS if name in settings})
    server = ServerConfig(**own, limits=limits)
    log_format = settings.get("log_format", "text")
    if log_format not in LOG_FORMATS:
        raise ConfigError("--log-format", log_format, ", ".join(LOG_FORMATS))
    show_logs(LineFormatter(log_format))
    config = EngineConfig.from_kwargs(model=model, speculative_config=speculation, **engine)
    if "adaptive_speculation" not in engine and not config.has_lengths_by_load:
        config = replace(config, adaptive_speculation=True)
    return run(config, server, lambda line: print(line, flush=True))


def speculation_of(settings: dict[str, Any], model: str) -> dict[str, Any] | None:
    """`--speculative-config` with the three short flags put in.

    Raises:
        ConfigError: the same thing given twice, or a short flag beside `none`.
    """
    given = settings.get("speculative_config")
    short = {
        "method": settings.get("spec_method"),
        "model": settings.get("spec_model"),
        "num_speculative_tokens": settings.get("spec_tokens"),
    }
    short = {key: value for key, value in short.items() if value is not None}
    if isinstance(given, dict):
        config: dict[str, Any] | None = dict(given)
    else:
        named = {"method", "model"} & short.keys()
        config = {} if given is None and named else parse_speculation(given, model)
    if not short:
        return config
    if config is None:
        raise ConfigError("--speculative-config", given, f"JSON, beside {', '.join(short)}")
    twice = [] if given is None else sorted(config.keys() & short.keys())
    if twice:
        raise ConfigError(f"--speculative-config {twice[0]}", config[twice[0]], "given once")
    return {**config, **short}
