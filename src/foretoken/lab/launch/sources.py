"""What a text is, and everything that is in it: launches, requests, names of metrics.

Shell commands, Dockerfiles, YAML (compose, Kubernetes, settings), Python, JSON and JSON lines.
Judges nothing, but says what it could not read.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import yaml

from foretoken.config.other_engines import OtherName, find_other
from foretoken.lab.findings import Finding
from foretoken.lab.launch import python
from foretoken.lab.launch.launch import Form, Launch, LaunchPart
from foretoken.lab.launch.read import (
    FLAG,
    engine_of_image,
    guess_engine,
    owner_of,
    read_words,
    variables_alone,
    with_variables,
)
from foretoken.lab.launch.shell import ASSIGNED, Word, commands_as_torn, open_quotations

READABLE = (
    "one command of a server, a Python script that calls LLM(...), YAML (compose, Kubernetes, "
    "settings), a Dockerfile, requests or a dashboard in JSON; out of anything else, such as a "
    "page, a notebook or a unit of systemd, the command itself, such as 'vllm serve MODEL', in "
    "quotes"
)
SHELL_CHECK, UNREAD_CHECK = "torn_off", "unread"
_METRIC = re.compile(
    r"\b(?:(?:vllm|llamacpp|sglang|foretoken):[a-zA-Z_]\w*|trtllm_\w+|spec_decode_\w+|"
    r"(?:ray_)?(?:vllm|llamacpp|sglang)_[a-z]\w*)"
)
_WITHOUT_COLON = re.compile(r"(?:ray_)?(vllm|llamacpp|sglang)_")
"""How names begin that passed through Ray or an exporter, which have no colon."""
_EXPLAINED = re.compile(r"^# (?:HELP|TYPE) .*$", re.MULTILINE)
"""Lines of a server's `/metrics` that explain a metric, by another name than its samples have."""
_IMPORTS = re.compile(r"^(?:from|import) (?:vllm|sglang|tensorrt_llm|foretoken)\b")
_STARTS_SERVER = re.compile(
    r"\b(?:vllm|sglang|foretoken|trtllm-|llama-)[. -]?(?:serve|entryp|laun)"
)
_PROGRAM = re.compile(r"-|\.?/|.*\.(sh|py)$|(python3?|exec|nohup|srun|torchrun|docker|podman|uv)$")
"""How a command begins that may start a server by another name; a sentence does not."""
_ARRAY = re.compile(r"\$\{\w+\[[@*]\]\}")
_INSTRUCTION = re.compile(
    r"^[ \t]*(FROM|CMD|ENTRYPOINT|ENV|RUN)[ \t]+((?:\\[ \t]*\n|.)*)", re.MULTILINE | re.IGNORECASE
)
_HOLDERS = ("entrypoint", "command", "cmd", "args")
"""Keys of a container whose words follow each other."""
_EXEC: tuple[str, ...] = ("ENTRYPOINT", "CMD")
_SETTING_KEYS = ("environment", "env")
"""Keys of a container that set variables."""
_CONFIG_KEYS = ("speculative_config", "speculative-config")

Found = Launch | Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LintSource:
    """Everything found in a text."""

    launches: tuple[Launch, ...]
    requests: tuple[Mapping[str, Any], ...]
    metrics: tuple[str, ...]
    """Distinct, in order of appearance."""
    findings: tuple[Finding, ...] = ()
    """What is wrong with the text itself, beside its launches."""
    reads_metrics: bool = False
    """Whether metrics are read in Python, where counters have no `_total`."""


def read_source(text: str, engine: str = "auto", name: str = "") -> LintSource:
    """Find what `text` holds; `engine` overrides what the text itself suggests.

    `name` is that of the file it stands in: what by its ending is Python, JSON, YAML or shell has
    to be that as a whole, whatever is found in it.
    """
    found, unread = _read(text, engine)
    launches = tuple(one for one in found if isinstance(one, Launch))
    findings = [finding for launch in launches for finding in _of_words(launch)]
    if unread:
        findings.append(_finding("warning", "", f"{unread} lines are not JSON"))
    tree = python.parsed(text)
    findings += python.script_findings(tree) if tree else ()
    check = _ENDINGS.get(PurePath(name).suffix.lower())
    if check is None and text.startswith("#!") and "sh" in text.split("\n", 1)[0]:
        check = _no_shell
    broken = list(check(text)) if check else []
    if not found and not broken and _IMPORTS.match(text.lstrip()):
        broken = list(python.not_python(text))
    named = dict.fromkeys(_METRIC.findall(_EXPLAINED.sub("", text)))
    return LintSource(
        launches=launches,
        requests=tuple(one for one in found if not isinstance(one, Launch)),
        metrics=tuple(name for name in named if ":" in name or find_metric(name) is not None),
        findings=(*findings, *broken),
        reads_metrics="get_metrics(" in text,
    )


def whole_metric(name: str) -> str:
    """A metric's name as its engine has it: scripts may leave the engine out, exporters the
    colon."""
    if ":" in name or name.startswith("trtllm_"):
        return name
    match = _WITHOUT_COLON.match(name)
    return f"{match[1]}:{name[match.end() :]}" if match else f"vllm:{name}"


def find_metric(name: str) -> OtherName | None:
    """What is known of a metric by a name as it stands in a query; None if nothing is."""
    whole = whole_metric(name)
    endings = ("", "_total", "_bucket", "_sum", "_count", "_created")
    bases = (whole.removesuffix(ending) for ending in endings if whole.endswith(ending))
    return next(filter(None, (find_other("metrics", base) for base in bases)), None)


def _finding(
    level: str, where: str, message: str, remedy: str = "", check: str = UNREAD_CHECK
) -> Finding:
    return Finding(check=check, level=level, where=where, message=message, remedy=remedy)


def _of_words(launch: Launch) -> Iterator[Finding]:
    """What a shell would make of a command's words, and what is not known of them."""
    if launch.torn:
        message = (
            "begins a line, and the line before does not end in a backslash: a shell ends the "
            "command there; it is read here as if it went on"
        )
        remedy = "a backslash at the end of each line but the last"
        yield _finding("warning", launch.torn, message, remedy, SHELL_CHECK)
    for part in launch.arguments:
        if _ARRAY.search(part.raw):
            message = "arrays of a shell are not read, so that these words were not checked"
            yield _finding("error", part.raw, message, "the words themselves in the command")


def _read(text: str, engine: str) -> tuple[list[Found], int]:
    """What a text holds, and how many of its lines are not JSON where others are."""
    named = {match[1].upper() for match in _INSTRUCTION.finditer(text)}
    if "FROM" in named and len(named) > 1:
        return list(_of_dockerfile(text, engine)), 0
    documents, unread = _documents(text)
    found = [one for document in documents or () for one in _walk(document, engine)]
    if found or (documents is not None and text.lstrip().startswith(("{", "["))):
        return found, unread
    tree = python.parsed(text)
    if tree is not None:
        return list(python.launches_of_python(tree, engine)), 0
    return list(_of_shell(text, engine)), 0


def _documents(text: str) -> tuple[list[Any] | None, int]:
    """The values of JSON, JSON lines or YAML; None if it is none of them."""
    if text.lstrip().startswith(("{", "[")):
        try:
            return [json.loads(text)], 0
        except ValueError:
            lines = list(filter(str.strip, text.splitlines()))
            values = [value for line in lines for value in _json(line)]
            return (values, len(lines) - len(values)) if values else (None, 0)
    try:
        documents = [one for one in yaml.safe_load_all(text) if one is not None]
    except yaml.YAMLError:
        return None, 0
    whole = bool(documents) and all(isinstance(one, dict | list) for one in documents)
    return (documents, 0) if whole else (None, 0)


def _json(line: str) -> list[Any]:
    try:
        return [json.loads(line)]
    except ValueError:
        return []


def _of_shell(text: str, engine: str) -> Iterator[Launch]:
    """One launch per command of a shell text that starts a server."""
    variables: dict[str, str] = {}
    found: list[Launch] = []
    for words, torn in commands_as_torn(text):
        following = zip(words, words[1:], strict=False)
        given = (then.text for word, then in following if word.text in ("-c", "-lc"))
        nested = next((text for text in given if " " in text), None)
        if nested is not None:
            found += _of_shell(nested, engine)
            continue
        set_here = _assignments([word.text for word in words if word.text != "export"])
        variables |= set_here if words[0].text == "export" or len(words) == 1 else {}
        first = next((word.text for word in words if not ASSIGNED.match(word.text)), "")
        launch = read_words(words, engine, loose=bool(_PROGRAM.match(first)))
        found += [replace(launch, torn=torn)] if launch is not None and not set_here else []
    read = {name: value for name, value in variables.items() if owner_of(name)}
    yield from (with_variables(launch, read, "export") for launch in found)
    if not found:
        alone = variables_alone(variables, engine, Form(kind="variables"))
        yield from filter(None, [alone])


def _assignments(words: list[str]) -> dict[str, str]:
    """The variables of words that do nothing but set some; empty for any other."""
    pairs = [(word.partition("=")[0], word.partition("=")[2]) for word in words]
    return dict(pairs) if all(ASSIGNED.match(word) for word in words) else {}


def _of_dockerfile(text: str, engine: str) -> Iterator[Launch]:
    """The launch of the last stage, from its entry point, its command and its variables."""
    held: dict[str, str] = {}
    stages: dict[str, tuple[str, dict[str, str]]] = {}
    variables: dict[str, str] = {}
    for match in _INSTRUCTION.finditer(text):
        name, value = match[1].upper(), re.sub(r"\\[ \t]*\n", " ", match[2]).strip()
        if name == "FROM":
            image, *alias = value.split()
            whole, inherited = stages.get(image, (image, {}))
            held, variables = {"FROM": whole}, dict(inherited)
            stages[alias[-1] if alias else image] = whole, variables
        elif name == "ENV":  # `A=1 B=2`, or `A 1`
            words = [word.text for words, _ in commands_as_torn(value) for word in words]
            first, _, rest = value.partition(" ")
            variables |= _assignments(words) or {first: rest.strip()}
        else:
            held[name] = value
    given = {name: (_json(held[name]) or [held[name]])[0] for name in _EXEC if name in held}
    yield from _of_holders(
        given, held["FROM"], variables, engine, Form(kind="exec", variables="ENV")
    )


def _of_holders(
    given: Mapping[str, Any], image: str, variables: Mapping[str, Any], engine: str, form: Form
) -> Iterator[Launch]:
    """The launch of a container: words under keys or instructions that follow each other, behind
    its image's own entry point, and its variables."""
    words: list[Word] = []
    found: list[Launch] = []
    for holder, value in given.items():
        if isinstance(value, str) and (form.kind == "exec" or holder == "cmd"):
            text = value if form.kind == "exec" else value.replace("\n", " ")
            found += _of_shell(text, engine)
        elif isinstance(value, str):
            value = [word.text for words, _ in commands_as_torn(value) for word in words]
        if isinstance(value, list) and value:
            form = replace(form, elsewhere=len(words), holder=holder)
            words += [Word(str(word)) for word in value]
    nested = [word.text for word in words if " " in word.text]
    if any(word.text in ("-c", "-lc") for word in words):  # sh -c "the whole command"
        found += [launch for text in nested for launch in _of_shell(text, engine)]
    elif words:
        own = engine_of_image(image) if engine == "auto" else engine
        launch = read_words(words, engine, form=form)
        launch = launch or read_words(
            words, engine if own == "unknown" else own, loose=True, form=form
        )
        found += filter(None, [launch])
    for launch in found:
        shell = launch.form.kind == "shell" and form.kind == "list"
        about = {name: one for name, one in variables.items() if owner_of(name) or not shell}
        yield with_variables(launch, about, "export" if shell else form.variables)
    if not found and variables:
        own = engine_of_image(image) if engine == "auto" else engine
        yield from filter(None, [variables_alone(variables, own, form)])


def _walk(value: Any, engine: str) -> Iterator[Found]:
    """Launches and requests anywhere in a document."""
    if isinstance(value, list):
        if value and all(isinstance(part, str) for part in value):
            words = [Word(part) for part in value]
            loose = any(FLAG.match(part) for part in value)
            launch = read_words(words, engine, loose=loose, form=Form(kind="list", holder="args"))
            yield from filter(None, [launch])
        else:
            yield from (found for part in value for found in _walk(part, engine))
    if not isinstance(value, dict):
        return
    if "prompt" in value or "messages" in value:
        yield value
        return
    settings = _settings(value, engine)
    if settings is not None:
        yield settings
        return
    given = {key: value[key] for key in _HOLDERS if isinstance(value.get(key), list | str)}
    key, variables = _variables(value)
    image = value.get("image")
    if any(given.values()) or (isinstance(image, str) and variables):
        form = Form(kind="list", holder="args", variables=key)
        yield from _of_holders(given, str(image), variables, engine, form)
    if not any(given.values()):
        yield from (found for part in value.values() for found in _walk(part, engine))


def _variables(value: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The key of a container that sets variables, and these."""
    for key in _SETTING_KEYS:
        given = value.get(key)
        if isinstance(given, Mapping) and given:
            return key, {str(name): _plain(one) for name, one in given.items()}
        if isinstance(given, list) and given:
            return key, dict(map(_entry, given))
    return "", {}


def _entry(one: Any) -> tuple[str, Any]:
    if isinstance(one, Mapping):  # of a manifest
        rest = {key: part for key, part in one.items() if key != "name"}
        return str(one.get("name", "")), _plain(rest["value"]) if set(rest) == {"value"} else rest
    name, equals, value = str(one).partition("=")
    return name, value if equals else None


def _plain(value: Any) -> Any:
    """A value as the server gets it: YAML reads 8 as a number."""
    if value is None or isinstance(value, Mapping):
        return value
    return str(value).lower() if isinstance(value, bool) else str(value)


def _settings(value: Mapping[str, Any], engine: str) -> Launch | None:
    """A mapping whose keys are settings of an engine, as in `vllm serve --config`."""
    names = [str(key).replace("_", "-") for key in value]
    is_config = {"method", "num-speculative-tokens"} <= set(names)
    if is_config or "decoding-type" in names:
        own = ("vllm" if is_config else "tensorrt-llm") if engine == "auto" else engine
        whole = LaunchPart.keyword("speculative_config", dict(value))
        return Launch(engine=own, parts=(whole,), form=Form(kind="settings", holder="config"))
    nested = next((value[key] for key in _CONFIG_KEYS if key in value), None)
    flat = any(name.startswith(("speculative-", "spec-")) for name in names)
    if nested is None and not flat and not {"model", "tensor-parallel-size"} <= set(names):
        return None
    own = engine
    if engine == "auto":
        trt = isinstance(nested, dict) and "decoding_type" in nested
        own = "tensorrt-llm" if trt else guess_engine(names)
    parts = tuple(LaunchPart.keyword(key, part) for key, part in value.items())
    return Launch(engine=own, parts=parts, form=Form(kind="settings"))


def _no_shell(text: str) -> Iterator[Finding]:
    for line, words in open_quotations(text):
        if _STARTS_SERVER.search(words):  # else such as a text that stands in the script
            message = f"a quotation has no end, so that it was not read: {words}"
            remedy = "the quotation mark that is missing"
            yield _finding("error", f"line {line}", message, remedy, SHELL_CHECK)


def _no_json(text: str) -> Iterator[Finding]:
    try:
        json.loads(text)
    except ValueError as error:
        if not all(map(_json, filter(str.strip, text.splitlines()))):  # nor one on each line
            yield _finding("error", "file", f"is no JSON, so that it was not read as such: {error}")


def _no_yaml(text: str) -> Iterator[Finding]:
    try:
        list(yaml.parse(text, Loader=yaml.SafeLoader))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}" if mark is not None else "file"
        said = getattr(error, "problem", None) or str(error).splitlines()[0]
        if "{{" not in text:  # of a chart, which is filled in before anybody reads it as YAML
            yield _finding("error", where, f"is no YAML, so that it was not read as such: {said}")


_ENDINGS: dict[str, Callable[[str], Iterator[Finding]]] = {
    ".py": python.not_python,
    ".sh": _no_shell,
    ".bash": _no_shell,
    ".json": _no_json,
    ".yaml": _no_yaml,
    ".yml": _no_yaml,
}
