"""What a text is, and everything that is in it: launches, requests, names of metrics.

Shell, Dockerfiles, compose files, manifests, settings, Python, notebooks, JSON, JSON lines and
documents with fenced blocks of these. Judges nothing.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import yaml

from foretoken.config.other_engines import OtherName, find_other
from foretoken.lab.findings import Finding
from foretoken.lab.launch.launch import Form, Launch, LaunchPart, LintSource
from foretoken.lab.launch import containers, python
from foretoken.lab.launch.shell import SHELL_CHECK, Word, commands_as_torn
from foretoken.lab.launch.unreadable import unreadable
from foretoken.lab.launch.variables import (
    exported,
    file_of_variables,
    first_word,
    variables_alone,
    with_variables,
)
from foretoken.lab.launch.read import FLAG, guess_engine, launch_of

_METRIC = re.compile(
    r"\b(?:(?:vllm|llamacpp|sglang|foretoken):[a-zA-Z_]\w*|trtllm_\w+|spec_decode_\w+|"
    r"(?:ray_)?(?:vllm|llamacpp|sglang)_[a-z]\w*)"
)
_WITHOUT_COLON = re.compile(r"(?:ray_)?(vllm|llamacpp|sglang)_")
"""How names begin that passed through Ray or an exporter, which have no colon."""
_EXPLAINED = re.compile(r"^# (?:HELP|TYPE) .*$", re.MULTILINE)
"""Lines of a server's `/metrics` that explain a metric, by another name than its samples have."""
_FENCED = re.compile(r"^[ \t]*```[\w-]*[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_PROGRAM = re.compile(r"-|\.?/|.*\.(sh|py)$|(python3?|exec|nohup|srun|torchrun|docker|podman|uv)$")
"""How a command begins that may start a server by another name; a sentence does not."""
_UNIT = "ExecStart="
_CONFIG_KEYS = ("speculative_config", "speculative-config")

Found = Launch | Mapping[str, Any]


def read_source(text: str, engine: str = "auto", name: str = "") -> LintSource:
    """Find what `text` holds; `engine` overrides what the text itself suggests.

    `name` is that of the file it stands in: what by its ending is Python, JSON, YAML or shell has
    to be that as a whole, whatever is found in it.
    """
    blocks = _FENCED.findall(text)
    unread = 0
    found: list[Found] = []
    for block in blocks or [text]:
        more, skipped = _read(block, engine)
        found += more
        unread += skipped
    named = dict.fromkeys(_METRIC.findall(_EXPLAINED.sub("", text)))
    launches = tuple(one for one in found if isinstance(one, Launch))
    findings = [
        *(one for block in blocks or [text] for one in python.script_findings(block)),
        *(_torn_off(one.torn) for one in launches if one.torn),
    ]
    broken = list(unreadable(text, name))
    if not found and not broken:
        broken += [one for block in blocks or [text] for one in python.syntax_findings(block)]
    findings += broken
    return LintSource(
        launches=launches,
        requests=tuple(one for one in found if not isinstance(one, Launch)),
        metrics=tuple(name for name in named if ":" in name or find_metric(name) is not None),
        num_unread=unread,
        findings=tuple(findings),
        reads_metrics="get_metrics(" in text,
    )


def _torn_off(flag: str) -> Finding:
    return Finding(
        check=SHELL_CHECK,
        level="warning",
        where=flag,
        message="begins a line, and the line before does not end in a backslash: a shell ends the "
        "command there; it is read here as if it went on",
        remedy="a backslash at the end of each line but the last",
    )


def whole_metric(name: str) -> str:
    """A metric's name as its engine has it: scripts may leave the engine out, exporters the
    colon."""
    if ":" in name or name.startswith("trtllm_"):
        return name
    if match := _WITHOUT_COLON.match(name):
        return f"{match[1]}:{name[match.end() :]}"
    return f"vllm:{name}"


def find_metric(name: str) -> OtherName | None:
    """What is known of a metric by a name as it stands in a query; None if nothing is."""
    found = (find_other("metrics", base) for base in _base_names(whole_metric(name)))
    return next(filter(None, found), None)


def _base_names(name: str) -> Iterator[str]:
    """A metric's name, and without the endings that exporters add."""
    yield name
    for ending in ("_total", "_bucket", "_sum", "_count", "_created"):
        if name.endswith(ending):
            yield name.removesuffix(ending)


def _read(text: str, engine: str) -> tuple[list[Found], int]:
    """What a text without fences holds, and how many lines could not be read."""
    if containers.is_dockerfile(text):
        return list(containers.launches_of_dockerfile(text, engine, _of_shell)), 0
    documents, unread = _documents(text)
    found = [one for document in documents or () for one in _walk(document, engine)]
    if found or (documents is not None and text.lstrip().startswith(("{", "["))):
        return found, unread
    if python.is_python(text):
        return [*python.launches_of_python(text, engine), *_of_strings(text, engine)], 0
    found = [*_of_shell(text, engine), *python.launches_in_prose(text, engine)]
    alone = variables_alone(file_of_variables(text), engine, Form(kind="variables"))
    return (found or list(filter(None, [alone]))), 0


def _documents(text: str) -> tuple[list[Any] | None, int]:
    """The values of JSON, JSON lines or YAML; None if it is none of them."""
    stripped = text.strip()
    if stripped.startswith(("{", "[")):
        try:
            return [json.loads(stripped)], 0
        except ValueError:
            return _json_lines(stripped)
    try:
        documents = [one for one in yaml.safe_load_all(text) if one is not None]
    except yaml.YAMLError:
        return None, 0
    whole = bool(documents) and all(isinstance(one, dict | list) for one in documents)
    return (documents, 0) if whole else (None, 0)


def _json_lines(text: str) -> tuple[list[Any] | None, int]:
    found, unread = [], 0
    for line in filter(str.strip, text.splitlines()):
        try:
            found.append(json.loads(line))
        except ValueError:
            unread += 1
    return (found, unread) if found else (None, 0)


def _of_shell(text: str, engine: str) -> Iterator[Launch]:
    """One launch per command of a shell text that starts a server."""
    variables = exported(text)
    for words, torn in commands_as_torn(text):
        following = zip(words, words[1:], strict=False)
        given = (then.text for word, then in following if word.text in ("-c", "-lc"))
        nested = next((text for text in given if " " in text), None)
        if nested is not None:
            yield from _of_shell(nested, engine)
            continue
        found = launch_of(words, engine, loose=bool(_PROGRAM.match(first_word(words).text)))
        if found is not None:
            found = replace(found, torn=torn)
            yield with_variables(found, variables, "Environment=" if _UNIT in text else "export")


def _of_strings(text: str, engine: str) -> Iterator[Launch]:
    """Commands in the strings and lists of a Python script."""
    for words in python.command_lists(text):
        if len(words) == 1:
            yield from _of_shell(words[0], engine)
        else:
            found = launch_of([Word(word, "") for word in words], engine)
            if found is not None:
                yield found


def _walk(value: Any, engine: str) -> Iterator[Found]:
    """Launches and requests anywhere in a document."""
    if isinstance(value, list):
        if value and all(isinstance(part, str) for part in value):
            words = [Word(part, "") for part in value]
            loose = any(FLAG.match(part) for part in value)
            found = launch_of(words, engine, loose=loose, form=Form(kind="list"))
            if found is not None:
                yield found
        else:
            for part in value:
                yield from _walk(part, engine)
    if not isinstance(value, dict):
        return
    if "prompt" in value or "messages" in value:
        yield value
        return
    if value.get("cell_type") == "code":  # of a notebook
        source = "".join(value.get("source", []))
        lines = [line for line in source.splitlines() if not line.startswith(("%", "!"))]
        yield from _read("\n".join(lines), engine)[0]
        yield from _of_shell(source.replace("!", ""), engine)
        return
    settings = _settings(value, engine)
    if settings is not None:
        yield settings
        return
    if containers.is_container(value):
        yield from containers.launches_of_container(value, engine, _of_shell)
        return
    if containers.is_image_alone(value):
        yield from containers.launches_of_container(value, engine, _of_shell)
    for part in value.values():
        yield from _walk(part, engine)


def _settings(value: Mapping[str, Any], engine: str) -> Launch | None:
    """A mapping whose keys are settings of an engine, as in `vllm serve --config`."""
    names = {str(key).replace("_", "-"): part for key, part in value.items()}
    is_config = "method" in names and "num-speculative-tokens" in names
    if is_config or "decoding-type" in names:
        own = ("vllm" if is_config else "tensorrt-llm") if engine == "auto" else engine
        whole = LaunchPart(
            name="speculative-config", written="speculative_config", value=dict(value)
        )
        return Launch(engine=own, parts=(whole,), form=Form(kind="settings", holder="config"))
    nested = next((value[key] for key in _CONFIG_KEYS if key in value), None)
    flat = any(name.startswith(("speculative-", "spec-")) for name in names)
    if nested is None and not flat and not ("model" in names and "tensor-parallel-size" in names):
        return None
    own = engine
    if engine == "auto":
        trt = isinstance(nested, dict) and "decoding_type" in nested
        own = "tensorrt-llm" if trt else guess_engine(names)
    parts = tuple(LaunchPart.keyword(key, part) for key, part in value.items())
    return Launch(engine=own, parts=parts, form=Form(kind="settings"))
