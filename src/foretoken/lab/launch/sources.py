"""What a text is, and every launch in it.

A shell text, a Dockerfile, YAML or JSON (compose, Kubernetes, settings), Python. Of a script the
syntax tree is read and nothing is run: constants, dictionaries and variables that were assigned
such are followed; any other expression is kept as it was written. Judges nothing, but says what it
could not read.
"""

import ast
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import yaml

from foretoken.lab.findings import Finding
from foretoken.lab.launch.launch import Form, Launch, LaunchPart
from foretoken.lab.launch.read import (
    ASSIGNED,
    FLAG,
    Word,
    engine_of_image,
    guess_engine,
    read_commands,
    read_words,
    with_variables,
)
from foretoken.lab.launch.values import Expression

READABLE = (
    "one command of a server, a Python script that calls LLM(...), YAML (compose, Kubernetes, "
    "settings) or a Dockerfile; out of anything else, such as a page, a notebook or a unit of "
    "systemd, the command itself, such as 'vllm serve MODEL', in quotes"
)
TEXT_CHECKS = SHELL_CHECK, UNREAD_CHECK, PYTHON_CHECK = "torn_off", "unread", "script"
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
_EXEC: tuple[str, ...] = ("ENTRYPOINT", "CMD")
_CONFIG_KEYS = ("speculative_config", "speculative-config")

Found = Launch | Finding
_CALLS = {
    "LLM": "vllm",
    "AsyncLLM": "vllm",
    "EngineArgs": "vllm",
    "AsyncEngineArgs": "vllm",
    "Engine": "sglang",
    "ServerArgs": "sglang",
}
_PACKAGES = {
    "vllm": "vllm",
    "sglang": "sglang",
    "tensorrt_llm": "tensorrt-llm",
    "foretoken": "foretoken",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LintSource:
    """Everything found in a text."""

    launches: tuple[Launch, ...]
    findings: tuple[Finding, ...] = ()


def read_source(text: str, engine: str = "auto", name: str = "") -> LintSource:
    """Find what `text` holds; `engine` overrides what the text itself suggests.

    `name` is that of the file it stands in: what by its ending is Python, JSON or YAML has to be
    that as a whole, whatever is found in it.
    """
    found = list(_read(text, engine, PurePath(name).suffix.lower()))
    if not found and _IMPORTS.match(text.lstrip()):
        found = list(_not_python(text))
    return LintSource(
        launches=tuple(one for one in found if isinstance(one, Launch)),
        findings=tuple(one for one in found if isinstance(one, Finding)),
    )


def _read(text: str, engine: str, ending: str) -> Iterator[Found]:
    named = {match[1].upper() for match in _INSTRUCTION.finditer(text)}
    if "FROM" in named and len(named) > 1:
        yield from _of_dockerfile(text, engine)
        return
    documents, problem = _documents(text)
    if problem is not None and ending in _DOCUMENTS:
        yield problem
    found = [one for document in documents for one in _walk(document, engine)]
    tree = None if found else _parsed(text)
    if found or (documents and text.lstrip().startswith(("{", "["))):
        yield from found
    elif tree is not None:
        yield from _of_python(tree, engine)
    elif ending == ".py":
        yield from _not_python(text)
    else:
        yield from _of_shell(text, engine)


def _documents(text: str) -> tuple[list[Any], Finding | None]:
    if text.lstrip().startswith(("{", "[")):
        try:
            return [json.loads(text)], None
        except ValueError as error:
            message = f"is no JSON, so that it was not read as such: {error}"
            return [], Finding.of(UNREAD_CHECK, "error", "file", message)
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


def _of_shell(text: str, engine: str) -> Iterator[Found]:
    """One launch per command of a shell text that starts a server, and what was not read."""
    variables: dict[str, str] = {}
    for words, torn, unclosed in read_commands(text):
        if unclosed and _STARTS_SERVER.search(unclosed):
            message = f"a quotation has no end, so that it was not read: {unclosed}"
            remedy = "the quotation mark that is missing"
            yield Finding.of(SHELL_CHECK, "error", "", message, remedy)
        following = zip(words, words[1:], strict=False)
        given = (then.text for word, then in following if word.text in ("-c", "-lc"))
        nested = next((text for text in given if " " in text), None)
        set_here = _assignments([word.text for word in words if word.text != "export"])
        if nested is not None:
            yield from _of_shell(nested, engine)
        elif set_here:
            variables |= set_here if words[0].text == "export" else {}
        elif words:
            first = next(word.text for word in words if not ASSIGNED.match(word.text))
            launch = read_words(words, engine, loose=bool(_PROGRAM.match(first)))
            if launch is not None:
                yield from filter(None, [with_variables(launch, variables)])
                yield from _not_given(launch, torn)


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
    yield from _of_holders(given, held["FROM"], variables, engine)


def _of_holders(
    given: Mapping[str, Any], image: str, variables: Mapping[str, Any], engine: str
) -> Iterator[Found]:
    """The launch of a container: words under keys or instructions that follow each other, behind
    its image's own entry point, and its variables."""
    words: list[Word] = []
    found: list[Found] = []
    own = engine_of_image(image) if engine == "auto" else engine
    for holder, value in given.items():
        if isinstance(value, str) and holder in ("cmd", *_EXEC):
            found += _of_shell(value if holder in _EXEC else value.replace("\n", " "), engine)
        elif isinstance(value, str):
            words += [word for command in read_commands(value) for word in command.words]
        elif isinstance(value, list):
            words += [Word(str(word)) for word in value]
    if any(word.text in ("-c", "-lc") for word in words):  # sh -c "the whole command"
        nested = [word.text for word in words if " " in word.text]
        found += [launch for text in nested for launch in _of_shell(text, engine)]
    elif words:
        rules = engine if own == "unknown" else own
        launch = read_words(words, engine) or read_words(words, rules, loose=True)
        found += [launch] if launch is not None else []
    yield from (one for one in found if isinstance(one, Finding))
    launches: list[Launch | None] = [one for one in found if isinstance(one, Launch)]
    for launch in launches or [None]:
        yield from filter(None, [with_variables(launch, variables)])


def _walk(value: Any, engine: str) -> Iterator[Found]:
    if isinstance(value, list):
        if value and all(isinstance(part, str) for part in value):
            words = [Word(part) for part in value]
            loose = any(FLAG.match(part) for part in value)
            yield from filter(None, [read_words(words, engine, loose=loose)])
        else:
            yield from (found for part in value for found in _walk(part, engine))
    if not isinstance(value, dict):
        return
    settings = _settings(value, engine)
    if settings is not None:
        yield settings
        return
    given = {key: value[key] for key in _HOLDERS if isinstance(value.get(key), list | str)}
    variables = _variables(value)
    image = value.get("image")
    if any(given.values()) or (isinstance(image, str) and variables):
        yield from _of_holders(given, str(image), variables, engine)
    if not any(given.values()):
        yield from (found for part in value.values() for found in _walk(part, engine))


def _variables(value: Mapping[str, Any]) -> dict[str, str]:
    found = value.get("environment") or value.get("env")
    if isinstance(found, list):
        named = [one for one in found if isinstance(one, Mapping)]
        pairs = [str(one).partition("=")[::2] for one in found if not isinstance(one, Mapping)]
        found = {**{one.get("name"): one.get("value") for one in named}, **dict(pairs)}
    given = found.items() if isinstance(found, Mapping) else ()
    return {str(name): str(one) for name, one in given if one is not None}


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


def _parsed(text: str) -> ast.Module | None:
    """The syntax tree of a script that imports, assigns or calls something; None: it is none."""
    try:
        tree = ast.parse(textwrap.dedent(text))
    except (SyntaxError, ValueError):
        return None
    does = (ast.Import, ast.ImportFrom, ast.Call)
    return tree if any(isinstance(node, does) for node in ast.walk(tree)) else None


def _of_python(tree: ast.Module, engine: str) -> Iterator[Launch]:
    names, imported = _assigned(tree), _imported(tree)
    assigned = {
        id(node.value): f"{ast.unparse(node.targets[0])} = "
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or (name := _called(node)) not in _CALLS:
            continue
        root: ast.expr = node.func
        while isinstance(root, ast.Attribute):
            root = root.value
        own = imported.get(root.id if isinstance(root, ast.Name) else name) or _CALLS[name]
        if name in ("Engine", "ServerArgs") and own != "sglang":
            continue
        form = Form(kind="python", holder=assigned.get(id(node), "") + ast.unparse(node.func))
        own = own if engine == "auto" else engine
        yield Launch(engine=own, parts=tuple(_parts(node, names)), form=form)


def _parts(call: ast.Call, names: dict[str, Any]) -> Iterator[LaunchPart]:
    given = [("model", value) for value in call.args[:1]]
    for name, node in [*given, *((one.arg, one.value) for one in call.keywords)]:
        value = _value(node, names)
        if name:
            raw = ast.unparse(node) if isinstance(node, ast.Name) else ""
            yield LaunchPart.keyword(name, value, raw)
        elif isinstance(value, dict):
            yield from (LaunchPart.keyword(key, one) for key, one in value.items())
        else:
            yield LaunchPart(name="**", written="**", value=value, raw=ast.unparse(node))


def _not_python(text: str) -> Iterator[Finding]:
    try:
        ast.parse(textwrap.dedent(text))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        message = f"is no Python, so that the script was not read: {getattr(error, 'msg', error)}"
        yield Finding.of(PYTHON_CHECK, "error", f"line {line}" if line else "script", message)


def _imported(tree: ast.Module) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            engine = _PACKAGES.get(node.module.split(".")[0])
            found |= {one.asname or one.name: engine for one in node.names if engine}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                package = alias.name.split(".")[0]
                if package in _PACKAGES:
                    found[alias.asname or package] = _PACKAGES[package]
    return found


def _assigned(tree: ast.Module) -> dict[str, Any]:
    """Variable -> value, of variables that were assigned a constant or a dictionary once."""
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name):
            value = _value(node.value, found)
            found[target.id] = Expression(target.id) if target.id in found else value
    return {name: value for name, value in found.items() if not isinstance(value, Expression)}


def _value(node: ast.AST, names: dict[str, Any]) -> Any:
    """The value of an expression, an Expression where only running it would tell."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.Dict) and None not in node.keys:
        keys = [_value(key, names) for key in node.keys if key is not None]
        if not any(isinstance(key, Expression) for key in keys):
            return dict(zip(keys, (_value(one, names) for one in node.values), strict=True))
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(one, names) for one in node.elts]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _value(node.operand, names)
        return -value if isinstance(value, int | float) else Expression(ast.unparse(node))
    if isinstance(node, ast.Call):
        return _value_of_call(node, names)
    return Expression(ast.unparse(node))


def _value_of_call(node: ast.Call, names: dict[str, Any]) -> Any:
    name = _called(node)
    keywords = {k.arg: _value(k.value, names) for k in node.keywords if k.arg}
    if name == "dict" and not node.args:
        return keywords
    if name == "dumps" and len(node.args) == 1:
        value = _value(node.args[0], names)
        return value if isinstance(value, Expression) else json.dumps(value, default=str)
    if name.endswith(("DecodingConfig", "SpeculativeConfig")):
        kind = name.removesuffix("DecodingConfig")
        return {**({"decoding_type": kind} if kind != name else {}), **keywords}
    return Expression(ast.unparse(node))


def _called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""
