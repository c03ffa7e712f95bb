"""The options of `foretoken serve`: their groups, texts, and the defaults that its help shows.

Defaults are read off the settings' own classes. No option has one of its own, since a file of
settings stands between the two. Flags of other engines are picked out of the arguments, to be
answered. What each name means is in the table of other engines; whether its value is allowed is
judged where `LLM` judges it. Torch-free.
"""

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, final

import typer
from typer.core import TyperCommand

from foretoken.config import EngineConfig
from foretoken.config.other_engines import find_other
from foretoken.config.translate import ENGINE_KEYS
from foretoken.errors import ConfigError, nearest
from foretoken.replicas.settings import ReplicaConfig
from foretoken.server.settings import Limits, ServerConfig

API_KEY_VARIABLE = "FORETOKEN_API_KEY"
ADMIN_KEY_VARIABLE = "FORETOKEN_ADMIN_KEY"
INTERNAL_KEY_VARIABLE = "FORETOKEN_INTERNAL_KEY"

_RENAMED = {
    "served_model_names": "served_model_name",
    "api_keys": "api_key",
    "allowed_hosts": "allowed_host",
    "per_request_metrics": "per_request_spec_decode_metrics",
    "tool_parser": "tool_call_parser",
    "kv_events": "kv_events_config",
}
"""Fields of the settings' classes whose options have another name."""
_FIELDS: dict[type, dict[str, Any]] = {
    kind: {_RENAMED.get(field.name, field.name): field for field in fields(kind)}
    for kind in (EngineConfig, ServerConfig, Limits, ReplicaConfig)
}
DEFAULTS: dict[str, object] = {
    name: field.default
    for own in _FIELDS.values()
    for name, field in own.items()
    if field.default not in (None, MISSING, ())
} | {"adaptive_speculation": True, "log_format": "text"}
"""Setting -> what holds where it is not given."""


@dataclass(frozen=True, slots=True)
class Row:
    """How one option stands in the help."""

    meaning: str
    metavar: str | None = None
    shown: object = None
    """The default in words, where the settings' classes have none that can be read."""
    short: str | None = None
    many: bool = False
    """Whether it may be given several times."""


GROUPS: dict[str, dict[str, Row]] = {
    "Listening and names": {
        "config": Row("YAML with the names of these options.", "FILE"),
        "host": Row("Address to listen on."),
        "port": Row("0: any free one.", "N"),
        "served_model_name": Row(
            "Name that requests give; may be repeated.", "NAME", "MODEL", many=True
        ),
        "api_key": Row(
            f"Key that /v1 asks for; may be repeated; also {API_KEY_VARIABLE}.",
            "KEY",
            "none",
            many=True,
        ),
        "allowed_host": Row(
            "Name in Host headers to answer to without a key, or *; may be repeated.",
            "NAME",
            "addresses, localhost",
            many=True,
        ),
        "admin_key": Row(f"Opens /admin; also {ADMIN_KEY_VARIABLE}.", "KEY", "no /admin"),
        "internal_key": Row(
            f"Lets requests continue streams of other servers; also {INTERNAL_KEY_VARIABLE}.",
            "KEY",
            "none may",
        ),
    },
    "Speculation": {
        "speculative_config": Row(
            "How to draft, as JSON with vLLM's keys, `auto` or `none`.",
            "JSON",
            "auto, where it never changes a token",
        ),
        "spec_method": Row("Short for the key `method`; `auto`: all that there is.", "NAME"),
        "spec_model": Row("Short for the key `model`.", "NAME"),
        "spec_tokens": Row("Short for the key `num_speculative_tokens`.", "N"),
        "adaptive_speculation": Row("Draft only as far as it is faster at the present load."),
    },
    "Model": {
        "tokenizer": Row("Packaged name, folder, or hub id.", "NAME", "the model's own"),
        "revision": Row("Branch, tag or commit of a hub id.", "NAME", "its main branch"),
        "dtype": Row("auto, bfloat16, float16 or float32.", "TYPE"),
        "quantization": Row(
            "Round the weights while loading: int8 or int4.", "SCHEME", "as stored", "-q"
        ),
        "activations": Row("Beside integer weights: auto, int16 or int8.", "TYPE"),
        "kv_cache_dtype": Row("Keys and values: auto or int8.", "TYPE"),
        "device": Row("auto, cpu or cuda.", "NAME"),
        "seed": Row("For requests that bring none.", "N"),
    },
    "Memory and batching": {
        "max_model_len": Row(
            "Most tokens of a request and its answer.", "N", "the model's context"
        ),
        "max_num_seqs": Row("Most requests at once.", "N"),
        "max_num_batched_tokens": Row("Most tokens of a step.", "N", 2048),
        "block_size": Row("Tokens of a KV page.", "N"),
        "enable_prefix_caching": Row("Reuse the KV of prompt beginnings."),
        "gpu_memory_utilization": Row("Share of a GPU's memory to use.", "SHARE"),
        "kv_cache_memory_bytes": Row(
            "Memory for the KV cache.", "N", "a quarter of what is free; on a GPU what is left"
        ),
        "batch_invariant": Row("Bitwise the same tokens whatever the batch.", "auto|on|off"),
        "tensor_parallel_size": Row("Processes that share every layer; on GPUs one each.", "N"),
        "pipeline_parallel_size": Row("Processes that have some layers each: 1 or 2.", "N"),
        "cpus": Row("Cores to keep to: 0-7,16-23, or a node: numa:0.", "LIST", "all"),
    },
    "Replicas behind one address": {
        "replicas": Row(
            "Processes that serve, started again if they die; numa: one on each NUMA node. "
            "Needs the extra `ray`.",
            "N|numa",
            "one, without Ray",
        ),
        "max_replicas": Row("Most of them under load.", "N", "as many as at the start"),
        "ray_address": Row("Ray cluster to join, or auto.", "HOST:PORT", "a local one"),
    },
    "Limits": {
        "max_body_bytes": Row("Larger bodies are refused.", "N"),
        "max_prompt_tokens": Row("Longer prompts are refused.", "N", "what fits"),
        "max_tokens": Row("A larger max_tokens is refused.", "N", "what fits"),
        "max_n": Row("Most outputs of one request.", "N"),
        "max_queue": Row("Requests that may wait; more are answered with 429.", "N"),
        "timeout_s": Row("Most time of a request.", "SECONDS"),
        "drain_s": Row("Time to finish after SIGTERM.", "SECONDS"),
    },
    "Answers, logs and metrics": {
        "tool_call_parser": Row("How calls stand in the text.", "hermes|llama3_json"),
        "per_request_spec_decode_metrics": Row(
            "What answers tell about their speculation.", "none|summary|detailed"
        ),
        "audit_share": Row(
            "Finished requests decoded again when idle; where speculation changed one, it ends.",
            "SHARE",
            "0, none",
        ),
        "log_format": Row("Of log lines.", "text|json"),
        "disable_log_stats": Row("No line every ten seconds."),
        "metrics_prefix": Row("Of metrics that vLLM has not.", "WORD"),
        "otlp_traces_endpoint": Row(
            "Where OpenTelemetry spans go; needs the extra `otel`.", "URL", "nowhere"
        ),
        "kv_events_config": Row(
            "Who is told of KV pages, with vLLM's keys; needs the extra `kv-events`.",
            "JSON",
            "nobody",
        ),
    },
}


ROWS = {name: (group, row) for group, rows in GROUPS.items() for name, row in rows.items()}
_KINDS: dict[str | None, Any] = {"N": int, "SHARE": float, "SECONDS": float, "FILE": Path}
"""What is read where the help shows such a word; text where it shows another."""


def fields_of(kind: type) -> dict[str, str]:
    """The options that stand for fields of a settings' class, and those fields."""
    return {name: field.name for name, field in _FIELDS[kind].items() if name in ROWS}


def option(name: str) -> Any:
    """The option of the setting `name`: the same with dashes; a pair, with --no-, of a switch."""
    group, row = ROWS[name]
    default = DEFAULTS.get(name) if row.shown is None else row.shown
    flag = "--" + name.replace("_", "-")
    if isinstance(default, bool):
        flag = f"{flag}/--no{flag[1:]}"
        default = "on" if default else "off"
    shown = f"{default:g}" if isinstance(default, float) else str(default)
    return typer.Option(
        flag,
        *((row.short,) if row.short else ()),
        help=row.meaning,
        metavar=row.metavar,
        rich_help_panel=group,
        show_default=False if default is None else shown,
    )


def parameters() -> Iterator[inspect.Parameter]:
    """All of these options as keywords of a command, None where one is not given."""
    for name, (_, row) in ROWS.items():
        kind = bool if isinstance(DEFAULTS.get(name), bool) else _KINDS.get(row.metavar, str)
        kind = list[str] if row.many else kind
        read = Annotated[kind | None, option(name)]  # type: ignore[valid-type]
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=read)


_OTHER = "foretoken.other_settings"
_SAME = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "sc": "speculative_config",
    "m": "model",
    "model": "model",
}
"""Names whose counterpart is an option or the argument, not a key of speculative_config."""
_DRAFT = "draft"
"""A number of drafts to llama.cpp; a model, as to `foretoken generate` and `chat`."""
_NESTED = ("speculative_config.", "sc.")
_IN_WORDS = re.compile(r"\[default: \((.*)\)\]$")
"""Typer puts a default that is a text into parentheses."""


def other_settings(context: typer.Context) -> dict[str, Any]:
    """The settings that were given under names of other engines, under the names of `LLM`."""
    found: dict[str, Any] = context.meta.get(_OTHER, {})
    return found


@final
class ServeCommand(TyperCommand):
    """`foretoken serve`: options under headings; flags of other engines are answered."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put aside the flags of other engines, then parse as usual."""
        own = {
            name: getattr(parameter, "is_flag", False)
            for parameter in self.get_params(ctx)
            for name in (*parameter.opts, *parameter.secondary_opts)
            if name.startswith("-")
        }
        args, ctx.meta[_OTHER] = _put_aside(args, own)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then each group of options in order of its first one. No name is
        cut, as by Typer's tables of rich in a narrow terminal."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            if row is None:
                continue
            kind = "Arguments" if parameter.param_type_name == "argument" else "Other"
            heading = getattr(parameter, "rich_help_panel", None) or kind
            groups.setdefault(heading, []).append((row[0], _IN_WORDS.sub(r"[default: \1]", row[1])))
        for heading, rows in groups.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


def _put_aside(args: list[str], own: Mapping[str, bool]) -> tuple[list[str], dict[str, Any]]:
    """The arguments without other engines' flags, and those as settings; of the command's own
    options is given whether each is a switch."""
    rest: list[str] = []
    found: dict[str, Any] = {}
    waiting = list(args)
    while waiting:
        word = waiting.pop(0)
        flag, equals, value = word.partition("=")
        if word == "--":
            return [*rest, word, *waiting], found
        if not flag.startswith("-") or len(flag) < 2 or flag[1].isdigit():
            rest.append(word)
        elif flag in own:
            rest.append(word)
            if not own[flag] and not equals and waiting:
                rest.append(waiting.pop(0))
        else:
            name = flag.lstrip("-").replace("-", "_")
            given: object = True
            is_switch = any(isinstance(one, bool) for one in ENGINE_KEYS.neutral.get(name, ()))
            if equals:
                given = _typed(value)
            elif not is_switch and waiting and not waiting[0].startswith("--"):
                given = _typed(waiting.pop(0))
            _add(found, name, flag, given, own)
    return rest, found


def _add(
    found: dict[str, Any], name: str, flag: str, given: object, own: Mapping[str, bool]
) -> None:
    """Add one setting under the name that `LLM` knows it by, or refuse a name nobody has."""
    nested = next((name.removeprefix(head) for head in _NESTED if name.startswith(head)), None)
    if nested is not None:
        found.setdefault("speculative_config", {})[nested] = given
    elif name == _DRAFT and isinstance(given, str):
        found.setdefault("speculative_config", {})["model"] = given
    elif name in _SAME:
        found[_SAME[name]] = given
    elif name in ENGINE_KEYS.neutral or find_other("flags", name) or find_other("keys", name):
        found[name] = given
    elif flag not in ("-h", "--help"):
        near = nearest(flag.lstrip("-"), [option.lstrip("-") for option in own])
        allowed = f"--{near}, or another" if near else "an"
        whole = "`foretoken lab lint 'COMMAND'` reads whole commands of other engines"
        raise ConfigError(flag, given, f"{allowed} option of `foretoken serve --help`; {whole}")


def _typed(text: str) -> object:
    """A number, a truth value or JSON, where the text is one."""
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)
