"""`foretoken serve`: an OpenAI-compatible server. Flags are named as in vLLM.

A file of `--config` holds the same names; the command line wins. Torch-free until it serves.
"""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.options import parse_invariant, parse_speculation, read_text, with_parameters
from foretoken.cli.output import say
from foretoken.cli.serve_options import (
    ADMIN_KEY_VARIABLE,
    API_KEY_VARIABLE,
    INTERNAL_KEY_VARIABLE,
    ROWS,
    fields_of,
    other_settings,
    parameters,
)
from foretoken.config import EngineConfig, SpeculativeConfig
from foretoken.config.auto import AUTO
from foretoken.config.other_engines import other_names
from foretoken.config.reader import KeyTable, read, require
from foretoken.config.translate import ENGINE_KEYS
from foretoken.errors import ConfigError
from foretoken.extras import require_package
from foretoken.placement import cores_of, keep_to
from foretoken.replicas.settings import ReplicaConfig
from foretoken.server.settings import KVEventsConfig, Limits, ServerConfig

if TYPE_CHECKING:
    from foretoken.distributed.launched import LaunchedRank

logger = logging.getLogger("foretoken")

_SHORT = {"method": "method", "model": "model", "num_speculative_tokens": "tokens"}
SPECULATION = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
"""The settings that say how to draft."""
_SERVER, _LIMITS = fields_of(ServerConfig), fields_of(Limits)
_REPLICAS = fields_of(ReplicaConfig)
_ENGINE = fields_of(EngineConfig).keys() - {"speculative_config"}
_KNOWN = ("model", *(name for name in ROWS if name != "config"))
_KEYS = KeyTable(where="--config", neutral={})

ModelArgument = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="Packaged name (`demo`), folder, or hub id.")
]


@with_parameters(parameters())
def serve(context: typer.Context, model: ModelArgument = None, **given: Any) -> None:
    """Serve a model through OpenAI's API; it speculates unless told otherwise."""
    raise typer.Exit(_serve(settings_of({"model": model, **given}, other_settings(context))))


def settings_of(given: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a command line: those of its file, and over them what it says itself.

    Args:
        given: the options by their names, None where one is not given.
        others: what stands under names of other engines.

    Raises:
        ConfigError: the file cannot be read, or names an unknown setting; or two models.
    """
    said = {name: value for name, value in given.items() if value is not None}
    config = said.pop("config", None)
    if "model" in others and said.get("model", others["model"]) != others["model"]:
        allowed = f"nothing beside the model {said['model']!r}; a draft model is --spec-model"
        raise ConfigError("--model", others["model"], allowed)
    return {**_read_config(config), **others, **said}


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
    others = (row.name for row in other_names() if row.kind in ("flags", "keys"))
    settings = _KEYS.accept(content, (*_KNOWN, *ENGINE_KEYS.neutral, *others))
    for name in ("served_model_name", "api_key", "allowed_host"):
        if isinstance(settings.get(name), str):
            settings[name] = [settings[name]]
    return settings


def _serve(settings: dict[str, Any]) -> int:
    if "cpus" in settings:
        keep_to(cores_of(str(settings["cpus"])))  # before PyTorch counts them
    config, server = served(settings)
    from foretoken.distributed.launched import Launched, LaunchedRank, come

    launch = LaunchedRank.found(os.environ)
    if launch is not None:
        _check_launch(launch, config, replicas_of(settings))
        if launch.rank:
            return come(launch)
    _check_extras(server, replicated=any(name in settings for name in _REPLICAS))
    from foretoken.engine.logs import show_logs
    from foretoken.engine.wiring import default_speculation
    from foretoken.server.observing.log_lines import LOG_FORMATS, LineFormatter
    from foretoken.server.run import serve as run

    others = None if launch is None or launch.size == 1 else Launched(launch)
    log_format = settings.get("log_format", "text")
    if log_format not in LOG_FORMATS:
        raise ConfigError("--log-format", log_format, ", ".join(LOG_FORMATS))
    formatter = LineFormatter(log_format)
    show_logs(formatter)
    for handler in logging.getLogger().handlers:  # what uvicorn and asyncio have to say
        handler.setFormatter(formatter)
    _warn_if_open(server)
    if speculates_by_default(settings, config):
        speculation = default_speculation(config)
        if speculation is not None:
            found = SpeculativeConfig.from_dict(speculation, target=config.model)
            config = replace(config, speculative_config=found)
    replicas = replicas_of(settings)
    if replicas is None:
        return run(config, server, say, others)
    from foretoken.replicas.run import serve_replicas

    return serve_replicas(config, server, replicas, say, log_format)


def _check_extras(server: ServerConfig, *, replicated: bool) -> None:
    """Refuse where packages of optional parts lack, before a model is looked for or loaded."""
    if replicated:
        require_package("--replicas", "ray")
    if server.otlp_traces_endpoint is not None:
        require_package("--otlp-traces-endpoint", "opentelemetry")
    if server.kv_events.is_on:
        require_package("--kv-events-config", "zmq")
        require_package("--kv-events-config", "msgspec")


def _check_launch(
    launch: "LaunchedRank", config: EngineConfig, replicas: ReplicaConfig | None
) -> None:
    """Refuse where the processes that were launched are not those that the settings ask for."""
    ranks, allowed = config.num_processes, f"{launch.size}, the WORLD_SIZE of the launcher"
    kind = "pipeline" if config.pipeline_parallel_size > 1 else "tensor"
    require(f"--{kind}-parallel-size", ranks, ranks == launch.size, allowed)
    allowed = "left out under a launcher of processes, such as torchrun"
    require("--replicas", replicas and replicas.replicas, replicas is None, allowed)


def replicas_of(settings: Mapping[str, Any]) -> ReplicaConfig | None:
    """What settings say about replicas; None: nothing, so that one process serves without Ray.
    Raises ConfigError: a value is not allowed."""
    own = {name: settings[name] for name in _REPLICAS if name in settings}
    return ReplicaConfig.of_options(own) if own else None


def served(settings: dict[str, Any]) -> tuple[EngineConfig, ServerConfig]:
    """What settings ask for; names of other engines among them are answered as by `LLM`.

    Raises:
        ConfigError: a setting is unknown or out of its range.
        NotYetError: a setting of vLLM whose part is not built.
    """
    model = settings.get("model")
    if not isinstance(model, str):
        raise ConfigError("MODEL", model, "a packaged name, a folder or a Hugging Face id")
    engine = {k: v for k, v in settings.items() if k not in _KNOWN or k in _ENGINE}
    if isinstance(engine.get("batch_invariant"), str):
        engine["batch_invariant"] = parse_invariant(engine["batch_invariant"])
    speculation = speculation_of(settings)
    own = {ours: settings[name] for name, ours in _SERVER.items() if name in settings}
    own.setdefault("admin_key", os.environ.get(ADMIN_KEY_VARIABLE, "").strip() or None)
    own.setdefault("internal_key", os.environ.get(INTERNAL_KEY_VARIABLE, "").strip() or None)
    own.setdefault("api_keys", _keys_in(os.environ.get(API_KEY_VARIABLE, "")))
    for name in ("api_keys", "served_model_names", "allowed_hosts"):
        given = own.get(name, ())
        ok = isinstance(given, list | tuple) and all(isinstance(one, str) for one in given)
        shown = "..." if name == "api_keys" else given
        require(name.removesuffix("s"), shown, ok, "text, or a list of texts, in quotation marks")
        own[name] = tuple(given)
    if "kv_events" in own:
        several = any(name in settings for name in _REPLICAS)
        own["kv_events"] = _kv_events(own["kv_events"], several=several)
    limits = Limits(**{name: settings[name] for name in _LIMITS if name in settings})
    server = ServerConfig(**own, limits=limits)
    try:
        config = EngineConfig.from_kwargs(model=model, speculative_config=speculation, **engine)
    except ConfigError as error:
        raise _as_flag(error, engine) from None
    return config, server


def _keys_in(variable: str) -> tuple[str, ...]:
    """The API keys of the environment; an empty one would let nobody in, or everybody."""
    keys = tuple(key.strip() for key in variable.split(","))
    if keys == ("",):
        return ()
    require(API_KEY_VARIABLE, "...", all(keys), "keys with one comma between each two, none empty")
    return keys


def _warn_if_open(server: ServerConfig) -> None:
    """Say that no key is asked for where that may not be meant."""
    emptied = not (server.api_keys or os.environ.get(API_KEY_VARIABLE, "unset").strip())
    if emptied or server.is_open:
        why = f"{API_KEY_VARIABLE} is empty" if emptied else f"no --api-key, no {API_KEY_VARIABLE}"
        host = server.host or "0.0.0.0"
        logger.warning("no API key is asked for (%s): whoever reaches %s may ask", why, host)


def _kv_events(given: object, *, several: bool) -> KVEventsConfig:
    """The settings of KV events from JSON, or from a mapping of a file."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            allowed = f'JSON such as {{"enable_kv_cache_events": true}} ({error})'
            raise ConfigError("--kv-events-config", given, allowed) from error
    found: KVEventsConfig = read(KVEventsConfig, given, "kv_events_config")
    if several and found.is_on:
        allowed = "left out beside --replicas: one address cannot be that of several servers"
        raise ConfigError("--kv-events-config", found.endpoint, allowed)
    return found


def _as_flag(error: ConfigError, engine: dict[str, Any]) -> ConfigError:
    """The error about a keyword of `LLM` that stood on the command line, in its words."""
    field = error.field.removeprefix(f"{ENGINE_KEYS.where}.")
    if field not in engine or field in _ENGINE:
        return error
    allowed = error.allowed
    if error.given is True:
        allowed = allowed.replace("False (", "left out (")
    if allowed.startswith("speculative_config={"):
        pair, semicolon, rest = allowed.partition("=")[2].partition("; ")
        allowed = f"--speculative-config '{pair}'{semicolon}{rest}"
    return type(error)(f"--{field.replace('_', '-')}", error.given, allowed)


def speculates_by_default(settings: dict[str, Any], config: EngineConfig) -> bool:
    """Whether nothing was said about speculation, so that whatever there is drafts."""
    named = any(name in settings for name in SPECULATION)
    return not named and config.speculative_config is None


def speculation_of(settings: dict[str, Any]) -> dict[str, Any] | None:
    """`--speculative-config` with the three short flags put in; None: `none`, or nothing given.
    Raises ConfigError: the same thing given twice, or a short flag beside `none`."""
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
