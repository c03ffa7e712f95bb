"""What a text is, and everything that is in it: launches, requests, names of metrics.

Shell commands, Dockerfiles, YAML (compose, Kubernetes, settings), Python, JSON and JSON lines.
Judges nothing, but says what it could not read.
"""

import json
import re
from collections.abc import Iterator, Mapping
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
from foretoken.lab.launch.shell import ASSIGNED, Word, read_commands

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
_DOCUMENTS = (".json", ".yaml", ".yml")
_HOLDERS = ("entrypoint", "command", "cmd", "args")
"""Keys of a container whose words follow each other."""
_EXEC: tuple[str, ...] = ("ENTRYPOINT", "CMD")
_SETTING_KEYS = ("environment", "env")
"""Keys of a container that set variables."""
_CONFIG_KEYS = ("speculative_config", "speculative-config")

Found = Launch | Finding | Mapping[str, Any]


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

    `name` is that of the file it stands in: what by its ending is Python, JSON or YAML has to be
    that as a whole, whatever is found in it.
    """
    found = list(_read(text, engine, PurePath(name).suffix.lower()))
    if not found and _IMPORTS.match(text.lstrip()):
        found = list(python.not_python(text))
    named = dict.fromkeys(_METRIC.findall(_EXPLAINED.sub("", text)))
    return LintSource(
        launches=tuple(one for one in found if isinstance(one, Launch)),
        requests=tuple(one for one in found if isinstance(one, Mapping)),
        metrics=tuple(name for name in named if ":" in name or find_metric(name) is not None),
        findings=tuple(one for one in found if isinstance(one, Finding)),
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


def _read(text: str, engine: str, ending: str) -> Iterator[Found]:
    """Everything in a text, and what keeps it from being what its name says."""
    named = {match[1].upper() for match in _INSTRUCTION.finditer(text)}
    if "FROM" in named and len(named) > 1:
        yield from _of_dockerfile(text, engine)
        return
    documents, problem = _documents(text)
    if problem is not None and (problem.level != "error" or ending in _DOCUMENTS):
        yield problem
    found = [one for document in documents for one in _walk(document, engine)]
    tree = None if found else python.parsed(text)
    if found or (documents and text.lstrip().startswith(("{", "["))):
        yield from found
    elif tree is not None:
        yield from python.launches_of_python(tree, engine)
        yield from python.script_findings(tree)
    elif ending == ".py":
        yield from python.not_python(text)
    else:
        yield from _of_shell(text, engine)


def _documents(text: str) -> tuple[list[Any], Finding | None]:
    """The values of JSON, JSON lines or YAML, and why there are none or not all."""
    problem = None
    if text.lstrip().startswith(("{", "[")):
        try:
            return [json.loads(text)], None
        except ValueError as error:
            message = f"is no JSON, so that it was not read as such: {error}"
            problem = Finding.of(UNREAD_CHECK, "error", "file", message)
        lines = list(filter(str.strip, text.splitlines()))
        values = [value for line in lines for value in _json(line)]
        if values and len(values) < len(lines):
            message = f"{len(lines) - len(values)} lines are not JSON"
            problem = Finding.of(UNREAD_CHECK, "warning", "", message)
        return values, problem if len(values) < len(lines) else None
    try:
        documents = [one for one in yaml.safe_load_all(text) if one is not None]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        said = getattr(error, "problem", None) or str(error).splitlines()[0]
        message = f"is no YAML, so that it was not read as such: {said}"
        where = f"line {mark.line + 1}" if mark is not None else "file"
        known = "{{" in text or isinstance(error, yaml.constructor.ConstructorError)
        # A chart is filled in before anybody reads it; a tag is for whoever knows it.
        return [], None if known else Finding.of(UNREAD_CHECK, "error", where, message)
    return (documents if all(isinstance(one, dict | list) for one in documents) else []), None


def _json(line: str) -> list[Any]:
    try:
        return [json.loads(line)]
    except ValueError:
        return []


def _of_shell(text: str, engine: str) -> Iterator[Launch | Finding]:
    """One launch per command of a shell text that starts a server, and what was not read."""
    variables: dict[str, str] = {}
    found: list[Launch | Finding] = []
    for words, torn, unclosed in read_commands(text):
        if unclosed and _STARTS_SERVER.search(unclosed):
            message = f"a quotation has no end, so that it was not read: {unclosed}"
            remedy = "the quotation mark that is missing"
            found.append(Finding.of(SHELL_CHECK, "error", "", message, remedy))
        following = zip(words, words[1:], strict=False)
        given = (then.text for word, then in following if word.text in ("-c", "-lc"))
        nested = next((text for text in given if " " in text), None)
        set_here = _assignments([word.text for word in words if word.text != "export"])
        if nested is not None:
            found += _of_shell(nested, engine)
        elif set_here:
            exports = words[0].text == "export" or len(words) == 1
            variables |= set_here if exports else {}
        elif words:
            first = next(word.text for word in words if not ASSIGNED.match(word.text))
            launch = read_words(words, engine, loose=bool(_PROGRAM.match(first)))
            found += () if launch is None else [launch, *_not_given(launch, torn)]
    read = {name: value for name, value in variables.items() if owner_of(name)}
    launches = [one for one in found if isinstance(one, Launch)]
    for one in found:
        yield with_variables(one, read, "export") if isinstance(one, Launch) else one
    if not launches:
        alone = variables_alone(variables, engine, Form(kind="variables"))
        yield from filter(None, [alone])


def _not_given(launch: Launch, torn: str) -> Iterator[Finding]:
    """What a shell would not give a command, and what is not known of its words."""
    if torn:
        message = (
            "begins a line, and the line before does not end in a backslash: a shell ends the "
            "command there; it is read here as if it went on"
        )
        remedy = "a backslash at the end of each line but the last"
        yield Finding.of(SHELL_CHECK, "warning", torn, message, remedy)
    for part in launch.arguments:
        if _ARRAY.search(part.raw):
            message = "arrays of a shell are not read, so that these words were not checked"
            remedy = "the words themselves in the command"
            yield Finding.of(UNREAD_CHECK, "error", part.raw, message, remedy)


def _assignments(words: list[str]) -> dict[str, str]:
    """The variables of words that do nothing but set some; empty for any other."""
    pairs = [(word.partition("=")[0], word.partition("=")[2]) for word in words]
    return dict(pairs) if all(ASSIGNED.match(word) for word in words) else {}


def _of_dockerfile(text: str, engine: str) -> Iterator[Launch | Finding]:
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
            words = [word.text for command in read_commands(value) for word in command.words]
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
) -> Iterator[Launch | Finding]:
    """The launch of a container: words under keys or instructions that follow each other, behind
    its image's own entry point, and its variables."""
    words: list[Word] = []
    found: list[Launch | Finding] = []
    own = engine_of_image(image) if engine == "auto" else engine
    for holder, value in given.items():
        if isinstance(value, str) and (form.kind == "exec" or holder == "cmd"):
            text = value if form.kind == "exec" else value.replace("\n", " ")
            found += _of_shell(text, engine)
        elif isinstance(value, str):
            value = [word.text for command in read_commands(value) for word in command.words]
        if isinstance(value, list) and value:
            form = replace(form, elsewhere=len(words), holder=holder)
            words += [Word(str(word)) for word in value]
    if any(word.text in ("-c", "-lc") for word in words):  # sh -c "the whole command"
        nested = [word.text for word in words if " " in word.text]
        found += [launch for text in nested for launch in _of_shell(text, engine)]
    elif words:
        launch = read_words(words, engine, form=form)
        rules = engine if own == "unknown" else own
        launch = launch or read_words(words, rules, loose=True, form=form)
        found += [launch] if launch is not None else []
    for one in found:
        if isinstance(one, Launch):
            shell = one.form.kind == "shell" and form.kind == "list"
            about = {name: value for name, value in variables.items()
                     if owner_of(name) or not shell}  # fmt: skip
            one = with_variables(one, about, "export" if shell else form.variables)
        yield one
    if not found and variables:
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
