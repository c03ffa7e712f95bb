"""What a text is: commands that start servers, settings, requests, names of metrics.

Pulls the same few values out of shell text, YAML, JSON and JSON lines; judges nothing. Also what
each engine knows, from the TOML files beside this one, and how a check of a launch is declared.
"""

import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from foretoken.lab.findings import Finding

ENGINES = ("vllm", "llama.cpp", "foretoken")
_METRIC = re.compile(r"\b(?:vllm|llamacpp|sglang|foretoken):[a-zA-Z_][a-zA-Z0-9_]*")
_FLAG = re.compile(r"^--?[a-zA-Z]")
_SPECULATION_KEYS = ("speculative_config", "speculative-config")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One way to start a server."""

    engine: str
    """One of ENGINES, or `unknown`."""
    model: str | None
    options: Mapping[str, str | bool]
    """Flag without dashes, `-` between words -> its value, True where there is none."""
    speculation: Mapping[str, Any] | None
    """The speculative config; None: speculation is off, as far as the text says."""
    broken: str = ""
    """Why the speculative config could not be read; empty if it could."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LintSource:
    """Everything found in a text."""

    launches: tuple[Launch, ...]
    requests: tuple[Mapping[str, Any], ...]
    metrics: tuple[str, ...]
    """Distinct, in order of appearance."""
    num_unread: int = 0
    """Lines of a JSON lines file that are not JSON."""


def read_source(text: str, engine: str = "auto") -> LintSource:
    """Find what `text` holds; `engine` overrides what the text itself suggests."""
    documents, unread = _documents(text)
    launches: list[Launch] = []
    requests: list[Mapping[str, Any]] = []
    if documents is None:
        launches += _launches_of_shell(text, engine)
    else:
        for document in documents:
            for found in _walk(document, engine):
                (launches if isinstance(found, Launch) else requests).append(found)  # type: ignore[arg-type]
    metrics = tuple(dict.fromkeys(_METRIC.findall(text)))
    return LintSource(
        launches=tuple(launches), requests=tuple(requests), metrics=metrics, num_unread=unread
    )


def _documents(text: str) -> tuple[list[Any] | None, int]:
    """The values of JSON, JSON lines or YAML; None if it is none of them."""
    stripped = text.strip()
    if stripped.startswith(("{", "[")):
        try:
            return [json.loads(stripped)], 0
        except ValueError:
            return _json_lines(stripped)
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError:
        return None, 0
    return ([document], 0) if isinstance(document, dict | list) else (None, 0)


def _json_lines(text: str) -> tuple[list[Any] | None, int]:
    found, unread = [], 0
    for line in filter(str.strip, text.splitlines()):
        try:
            found.append(json.loads(line))
        except ValueError:
            unread += 1
    return (found, unread) if found else (None, 0)


def _walk(value: Any, engine: str) -> Iterator[Launch | Mapping[str, Any]]:
    """Launches and requests anywhere in a document."""
    if isinstance(value, list):
        if value and all(isinstance(part, str) for part in value):
            yield from _launches_of_words(value, engine, loose=False)
        else:
            for part in value:
                yield from _walk(part, engine)
    if not isinstance(value, dict):
        return
    if "prompt" in value or "messages" in value:
        yield value
        return
    settings = _settings(value, engine)
    if settings is not None:
        yield settings
        return
    for key, part in value.items():
        if key in ("command", "args", "entrypoint") and isinstance(part, str):
            yield from _launches_of_shell(part, engine)
        else:
            yield from _walk(part, engine)


def _settings(value: Mapping[str, Any], engine: str) -> Launch | None:
    """A mapping whose keys are settings of an engine, as in `vllm serve --config`."""
    names = {str(key).replace("_", "-"): part for key, part in value.items()}
    is_config = "method" in names and "num-speculative-tokens" in names
    if is_config:
        speculation = {str(k).replace("-", "_"): v for k, v in value.items()}
        own = "vllm" if engine == "auto" else engine
        return Launch(engine=own, model=None, options={}, speculation=speculation)
    nested = any(key in value for key in _SPECULATION_KEYS)
    flat = any(name.startswith(("speculative-", "spec-")) for name in names)
    if not nested and not flat and not ("model" in names and "tensor-parallel-size" in names):
        return None
    options = {
        name: part if isinstance(part, bool) else _as_text(part) for name, part in names.items()
    }
    model = names.get("model")
    own = _guess_engine(options) if engine == "auto" else engine
    return _launch(own, str(model) if model is not None else None, options)


def _as_text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def _launches_of_shell(text: str, engine: str) -> Iterator[Launch]:
    """One launch per command of a shell text that looks like a server."""
    joined = re.sub(r"\\\r?\n", " ", text)
    for line in re.split(r"\n|&&|;(?![^'\"]*['\"])", joined):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        yield from _launches_of_words(words, engine, loose=True)


def _launches_of_words(words: list[str], engine: str, *, loose: bool) -> Iterator[Launch]:
    """A launch, if the words name a server or bring options; `loose`: options are enough."""
    own, rest = _server(words)
    if own == "unknown" and not (loose or any(_FLAG.match(word) for word in words)):
        return
    options, positional = _options(rest)
    if own == "unknown":
        own = _guess_engine(options) if engine == "auto" else engine
        if own == "unknown" or not options:
            return
    elif engine != "auto":
        own = engine
    model = options.get("model") or options.get("m") or (positional[0] if positional else None)
    yield _launch(own, model if isinstance(model, str) else None, options)


def _server(words: list[str]) -> tuple[str, list[str]]:
    """The engine that a command starts, and the words after its name."""
    for index, word in enumerate(words):
        name = word.rsplit("/", 1)[-1]
        following = words[index + 1 : index + 2]
        if name in ("vllm", "foretoken") and following == ["serve"]:
            return name, words[index + 2 :]
        if word.startswith("vllm.entrypoints") or name.startswith("vllm-openai"):
            return "vllm", words[index + 1 :]
        if name in ("llama-server", "llama-cli", "llama-server.exe"):
            return "llama.cpp", words[index + 1 :]
    return "unknown", words


def _options(words: list[str]) -> tuple[dict[str, str | bool], list[str]]:
    """Flags with their values, and the words that belong to no flag."""
    options: dict[str, str | bool] = {}
    positional: list[str] = []
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not _FLAG.match(word):
            positional.append(word)
            continue
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("_", "-") if "." not in name else name
        if equals:
            options[name] = value
        elif index < len(words) and not _FLAG.match(words[index]):
            options[name] = words[index]
            index += 1
        else:
            options[name] = True
    return options, positional


def _guess_engine(options: Mapping[str, Any]) -> str:
    if any(name.startswith("spec-draft") or name in ("spec-type", "md", "ngl") for name in options):
        return "llama.cpp"
    if any(name.startswith(("spec", "tensor-parallel", "ngram-prompt")) for name in options):
        return "vllm"
    return "unknown"


def _launch(engine: str, model: str | None, options: Mapping[str, str | bool]) -> Launch:
    speculation: dict[str, Any] = {}
    broken = ""
    text = options.get("speculative-config") or options.get("sc")
    if isinstance(text, str) and text not in ("None", "null", "none"):
        try:
            value = json.loads(text)
            speculation = {str(k).replace("-", "_"): v for k, v in dict(value).items()}
        except (ValueError, TypeError) as error:
            broken = str(error)
    for name, value in options.items():  # --speculative-config.method ngram
        head, _, key = name.partition(".")
        if head in ("speculative-config", "speculative_config", "sc") and key:
            speculation[key.replace("-", "_")] = _value(value)
    for flag, key in (("spec-method", "method"), ("spec-model", "model")):
        if flag in options and engine == "vllm":
            speculation.setdefault(key, options[flag])
    if "spec-tokens" in options and engine == "vllm":
        speculation.setdefault("num_speculative_tokens", _value(options["spec-tokens"]))
    return Launch(
        engine=engine,
        model=model,
        options=options,
        speculation=speculation or None,
        broken=broken,
    )


def _value(text: str | bool) -> Any:
    if isinstance(text, bool):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


_FILES = {"vllm": "vllm.toml", "llama.cpp": "llama_cpp.toml"}


@cache
def engine_table(engine: str) -> dict[str, Any]:
    """The data of `engine`; empty for one without a file."""
    if engine not in _FILES:
        return {}
    file = resources.files("foretoken.lab.lint").joinpath(_FILES[engine])
    return tomllib.loads(file.read_text("utf-8"))


@dataclass(frozen=True, slots=True)
class LaunchCheck:
    """A named check of one launch, and the engines it is for."""

    name: str
    engines: tuple[str, ...]
    run: Callable[[Launch], Iterator[Finding]]


def number(value: object) -> int | None:
    """`value` as an integer, if it is one."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    try:
        return int(str(value))
    except ValueError:
        return None
