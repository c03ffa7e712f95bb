"""Every launch in a text: a shell text, a Dockerfile, YAML or JSON (compose, Kubernetes, settings),
Python.

Runs nothing and judges nothing, but says what it could not read. A word of a command keeps how it
was written, so that it can be given back with its variables, which stay unknown. Of a script the
syntax tree is read: constants, dictionaries and variables that were assigned such are followed; any
other expression is kept as it was written.
"""

import ast
import json
import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any, NamedTuple

import yaml

from foretoken.config.other_engines import find_other
from foretoken.lab.findings import Finding
from foretoken.lab.launch.engines import ENGINES, READ
from foretoken.lab.launch.launch import ASSIGNED, Expression, Launch, LaunchPart, typed

_CONTINUED = re.compile(r"\\[ \t]*\r?\n|\\[ \t]+(?=-)")
"""A backslash at the end of a line, or where such lines were joined into one by copying."""
_TORN = re.compile(r"\r?\n[ \t]*(?=--[a-z])")
"""Its lack before a line of options, which are no command of their own; marked as `\\v`."""
_COMMENT = re.compile(r"[^\n\v]*")
_COMMAND = re.compile(r"[ \v]-[-\w]|=|vllm|llama-|sglang|foretoken|trtllm|docker|python")
_WORD = re.compile(
    r"""(?:[^\s'"\\`$;&|()#]|\\.|'[^']*'|"(?:\\.|[^"\\])*"|`[^`]*`|\$\((?:[^()]|\([^()]*\))*\)|"""
    r"""\$\{[^}]*\}|\$|(?<=[^\s;&|()])\#|&(?=>)|(?<=>)&)+""",
    re.DOTALL,
)


class Word(NamedTuple):
    """A word of a command."""

    text: str
    raw: str = ""


class Command(NamedTuple):
    """A command, behind what it sets for itself alone (`A=1 command`)."""

    words: list[Word]
    torn: str = ""
    """Its first option at the beginning of a line that the line before does not go on with, where
    a shell would end it."""
    unclosed: str = ""
    """Of a line that was left out since a quotation in it has no end: the line."""


def read_commands(text: str) -> Iterator[Command]:
    """The commands of a text, in order."""
    text = _TORN.sub("\v", _CONTINUED.sub(" ", text))
    words: list[Word] = []
    torn, at = "", 0
    while at <= len(text):
        next_line = text.find("\n", at) + 1 or len(text) + 1
        line = text[text.rfind("\n", 0, at) + 1 : next_line - 1]
        word, char = _WORD.match(text, at), text[at : at + 1]
        # A quotation over several lines only begins in a command.
        if word is not None and ("\n" not in word[0] or _COMMAND.search(line)):
            words.append(_word(word[0]))
            if text[at - 1 : at] == "\v" and words[0].text[:1] != "-":
                torn = torn or words[-1].text
            at = word.end()
        elif char == "(" and words and words[-1].raw.endswith("="):  # an array
            words, at = words[:-1], text.find(")", at) + 1 or len(text)
        elif char == "#":
            at = _COMMENT.match(text, at).end()  # type: ignore[union-attr]
        elif char and char in " \t\r\v\\`":
            at += 1
        else:
            ends = char in "\n;&|()"  # or a quotation begins that has no end
            if words and ends:
                yield Command(words, torn)
            elif not ends:
                yield Command([], unclosed=line.strip())
            words, torn, at = [], "", at + 1 if ends else next_line


def _word(raw: str) -> Word:
    try:
        found = shlex.split(raw)
    except ValueError:
        found = []
    return Word(found[0] if len(found) == 1 else raw, raw)


FLAG = re.compile(r"--?[a-zA-Z]")
SETTERS = ("-e", "--env")
"""Options of containers that set a variable, which is the next word or stands in theirs."""
_SETS = re.compile(r"(--env=|-e=?|)([A-Za-z_]\w*)=(.*)", re.DOTALL)
_SWITCH = re.compile(
    r"(enable|disable|no|use|skip)-|(trust-remote-code|enforce-eager|metrics|adaptive-speculation|"
    r"spec-default)$"
)
_DOCKER_SWITCHES = ("--rm", "-d", "--detach", "-i", "--interactive", "-t", "--tty", "--init",
             "--privileged")  # fmt: skip
_MOST_LOOSE_WORDS = 2
"""Words without an option that may stand beside options alone; more make a sentence."""
_REDIRECTS = re.compile(r"\d*[<>]|&>")
_DEFAULT = re.compile(r"\$\{\w+:?-([^{}]*)\}")


def read_words(
    words: Sequence[Word], engine: str = "auto", *, loose: bool = False
) -> Launch | None:
    """The launch that a command is, by the rules of `engine` (`auto`: by what the command says);
    None if it starts no server. `loose`: options alone are enough, without a server's name."""
    own, start = _server(words)
    if not own and not loose:
        return None
    if not own:  # what it sets for an unknown program says whose options these are
        start = next((i for i, one in enumerate(words) if not ASSIGNED.match(one.text)), 0)
    end = next((i for i, word in enumerate(words) if _REDIRECTS.match(word.raw)), len(words))
    parts = list(options_of(words[start:end]))
    options = {part.name: part.value for part in parts if part.name}
    sets = [match for word in words[:start] if (match := _SETS.match(word.text))]
    owners = [who for one in sets if (who := owner_of(one[2])) and variable(one[2], one[3], who)]
    if not own:
        own = guess_engine(options) if engine == "auto" else engine
        own = own or next(iter(owners), "")
        is_prose = FLAG.match(words[0].text) and len(parts) - len(options) > _MOST_LOOSE_WORDS
        if not own or not (options or owners) or is_prose:
            return None
    elif engine != "auto":
        own = engine
    completed = ENGINES[own].completed
    arguments = (replace(one, name=completed.get(one.name, one.name)) for one in parts)
    after = (LaunchPart(value=one.text, raw=one.raw, role="after") for one in words[end:])
    before = _before(words[:start], own)
    return Launch(engine=own, parts=(*before, *arguments, *after))


def engine_of_image(image: str) -> str:
    """The engine whose server an image starts; empty: it is not known."""
    found = (name for name, own in ENGINES.items() for part in own.images if part in image)
    return next(found, "")


def guess_engine(options: Iterable[str]) -> str:
    """Whose options these are, by those about speculation; empty: nobody's."""
    heads = [name.partition(".")[0] for name in options]
    for head in heads:
        for engine in READ[:-1]:
            if len(head) > 4 and find_other("flags", head, engine) is not None:
                return engine
    if {"md", "ngl", "hfd"} & set(heads):
        return "llama.cpp"
    about = ("spec", "tensor-parallel", "ngram-prompt")
    return "vllm" if any(head.startswith(about) for head in heads) else ""


def _server(words: Sequence[Word]) -> tuple[str, int]:
    """The engine that a command starts, and how many words there are up to its name. The last name
    counts: an image comes before the command that runs in it."""
    found = ("", 0)
    for index, word in enumerate(words):
        if ASSIGNED.match(word.text):
            continue
        name = word.text.rsplit("/", 1)[-1]
        following = words[index + 1].text if index + 1 < len(words) else ""
        for engine, own in ENGINES.items():
            if f"{name} {following}" in own.programs:
                found = engine, index + 2
            elif name in own.programs or (own.module and word.text.startswith(own.module)):
                found = engine, index + 1
            else:
                continue
            break
        else:
            # Behind an option of `docker run` it may be its value; not behind `-p80:80` or `-it`.
            before = words[index - 1].text if index else ""
            has_value = "=" in before or re.match(r"-\w\w", before) or before in _DOCKER_SWITCHES
            image = "" if found[0] else engine_of_image(word.text)
            if image and (has_value or not FLAG.match(before)):
                found = image, index + 1
    return found


def options_of(words: Sequence[Word]) -> Iterator[LaunchPart]:
    """The options of a command with their values, and its other words."""
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        flag, equals, value = word.text.partition("=")
        name = flag.lstrip("-")
        name = name.replace("_", "-") if "." not in name else name
        if not FLAG.match(word.text):
            yield LaunchPart(value=word.text, raw=word.raw)
        elif equals:
            raw = word.raw.partition("=")[2] if word.raw.startswith(flag + "=") else ""
            yield LaunchPart(name=name, written=flag, value=value, raw=raw)
        elif waiting and _is_value(name, waiting[0].text):
            given = waiting.pop(0)
            yield LaunchPart(name=name, written=flag, value=given.text, raw=given.raw)
        else:
            yield LaunchPart(name=name, written=flag)


def _is_value(name: str, text: str) -> bool:
    says_so = text.lower() in ("true", "false") or text.replace(".", "").isdigit()
    return not FLAG.match(text) and (says_so or not _SWITCH.match(name))


def _before(words: Sequence[Word], engine: str) -> Iterator[LaunchPart]:
    """The words up to the server's name, without those that set a variable which is an option
    (`A=1 server`, `docker run -e A=1 --env=A=1 -eA=1 image`), and these options."""
    waiting = list(words)
    while waiting:
        word, setter = waiting.pop(0), None
        if word.text in SETTERS and waiting and ASSIGNED.match(waiting[0].text):
            setter, word = word, waiting.pop(0)
        match = _SETS.match(word.text)
        option = variable(match[2], match[3], engine) if match else None
        if option is not None:
            yield option
        else:
            both = (setter, word) if setter else (word,)
            yield from (LaunchPart(value=one.text, raw=one.raw, role="before") for one in both)


def owner_of(name: str) -> str | None:
    """The engine that a variable is for, by its name; None: of none."""
    known = ((own.variables, engine) for engine, own in ENGINES.items() if own.variables)
    return next((engine for start, engine in known if name.startswith(start)), None)


def variable(name: str, value: str, engine: str) -> LaunchPart | None:
    """A variable of the environment as the option of an engine that it stands for; None: it is not
    known to stand for one, or switches one off."""
    row = find_other("variables", name, engine)
    if row is None or not row.flag:
        return None
    given: str | bool = _DEFAULT.sub(r"\1", value)
    if row.switch and str(given).lower() not in ("1", "true", "on", "enabled"):
        return None
    option = row.flag.replace("_", "-")
    given = True if row.switch else given
    return LaunchPart(name=option, written=name, value=given, role="set")


def with_variables(launch: Launch, variables: Mapping[str, str]) -> Launch:
    """The launch with variables that are set elsewhere, which its own words override."""
    given = (variable(name, value, launch.engine) for name, value in variables.items())
    return launch.having((*filter(None, given), *launch.parts))


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


class LintSource(NamedTuple):
    """Everything found in a text."""

    launches: tuple[Launch, ...]
    findings: tuple[Finding, ...] = ()


def read_source(text: str, engine: str = "auto", name: str = "") -> LintSource:
    """Find what `text` holds; `engine` overrides what the text itself suggests. `name` is that of
    the file it stands in: what by its ending is Python, JSON or YAML has to be that as a whole,
    whatever is found in it."""
    found = list(_read(text, engine, PurePath(name).suffix.lower()))
    if not found and _IMPORTS.match(text.lstrip()) and isinstance(wrong := _python(text), Finding):
        found = [wrong]
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
    if problem is not None and ending in (".json", ".yaml", ".yml"):
        yield problem
    found = [one for document in documents for one in _walk(document, engine)]
    if found or (documents and text.lstrip().startswith(("{", "["))):
        yield from found
        return
    tree, does = _python(text), (ast.Import, ast.ImportFrom, ast.Call)
    if isinstance(tree, ast.Module) and any(isinstance(node, does) for node in ast.walk(tree)):
        yield from _of_python(tree, engine)
    elif ending == ".py":
        yield from (tree,) if isinstance(tree, Finding) else ()
    else:
        yield from _of_shell(text, engine)


def _documents(text: str) -> tuple[list[Any], Finding | None]:
    if text.lstrip().startswith(("{", "[")):
        try:
            return [json.loads(text)], None
        except ValueError as error:
            message = f"is no JSON, so that it was not read as such: {error}"
            return [], Finding(UNREAD_CHECK, "error", "file", message)
    try:
        documents = [one for one in yaml.safe_load_all(text) if one is not None]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        said = getattr(error, "problem", None) or str(error).splitlines()[0]
        message = f"is no YAML, so that it was not read as such: {said}"
        where = f"line {mark.line + 1}" if mark is not None else "file"
        known = "{{" in text or isinstance(error, yaml.constructor.ConstructorError)
        # A chart is filled in before anybody reads it; a tag is for whoever knows it.
        return [], None if known else Finding(UNREAD_CHECK, "error", where, message)
    return (documents if all(isinstance(one, dict | list) for one in documents) else []), None


def _of_shell(text: str, engine: str) -> Iterator[Found]:
    """One launch per command of a shell text that starts a server, and what was not read."""
    variables: dict[str, str] = {}
    for words, torn, unclosed in read_commands(text):
        if unclosed and _STARTS_SERVER.search(unclosed):
            message = f"a quotation has no end, so that it was not read: {unclosed}"
            remedy = "the quotation mark that is missing"
            yield Finding(SHELL_CHECK, "error", "", message, remedy)
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
                yield with_variables(launch, variables)
            if launch is not None and torn:
                message = (
                    "begins a line, and the line before does not end in a backslash: a shell ends "
                    "the command there; it is read here as if it went on"
                )
                remedy = "a backslash at the end of each line but the last"
                yield Finding(SHELL_CHECK, "warning", torn, message, remedy)
            for part in launch.arguments if launch is not None else ():
                if _ARRAY.search(part.raw):
                    message = "arrays of a shell are not read, so that these words were not checked"
                    remedy = "the words themselves in the command"
                    yield Finding(UNREAD_CHECK, "error", part.raw, message, remedy)


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
    given = {name: typed(held[name]) for name in _EXEC if name in held}
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
        launch = read_words(words, engine) or read_words(words, own or engine, loose=True)
        found += [launch] if launch is not None else []
    yield from (one for one in found if isinstance(one, Finding))
    reads = next(filter(None, map(owner_of, variables)), "")
    launches = [one for one in found if isinstance(one, Launch)]
    for launch in launches or [Launch(engine=reads, parts=())]:
        with_all = with_variables(launch, variables)
        yield from (with_all,) if with_all.parts else ()


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
        return Launch(engine=own, parts=(whole,), form="settings", holder="config")
    nested = next((value[key] for key in _CONFIG_KEYS if key in value), None)
    flat = any(name.startswith(("speculative-", "spec-")) for name in names)
    if nested is None and not flat and not {"model", "tensor-parallel-size"} <= set(names):
        return None
    own = engine
    if engine == "auto":
        trt = isinstance(nested, dict) and "decoding_type" in nested
        own = "tensorrt-llm" if trt else guess_engine(names)
    parts = tuple(LaunchPart.keyword(key, part) for key, part in value.items())
    return Launch(engine=own, parts=parts, form="settings")


def _python(text: str) -> ast.Module | Finding:
    """The syntax tree of a script, or why there is none."""
    try:
        return ast.parse(textwrap.dedent(text))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        message = f"is no Python, so that the script was not read: {getattr(error, 'msg', error)}"
        return Finding(PYTHON_CHECK, "error", f"line {line}" if line else "script", message)


def _of_python(tree: ast.Module, engine: str) -> Iterator[Launch]:
    names: dict[str, Any] = {}
    imported: dict[str, str] = {}
    assigned: dict[int, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], _value(node.value, names)
            assigned[id(node.value)] = f"{ast.unparse(target)} = "
            if isinstance(target, ast.Name):  # what is assigned twice only running would tell
                names[target.id] = Expression(target.id) if target.id in names else value
        for one in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            module: str = getattr(node, "module", None) or one.name
            package = module.split(".")[0].replace("_", "-")
            if package in READ:
                imported[one.asname or one.name.split(".")[0]] = package
    names = {name: value for name, value in names.items() if not isinstance(value, Expression)}
    for node in ast.walk(tree):
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        name = called.rpartition(".")[2]
        if not isinstance(node, ast.Call) or name not in _CALLS:
            continue
        own = imported.get(called.partition(".")[0]) or _CALLS[name]
        if name in ("Engine", "ServerArgs") and own != "sglang":
            continue
        own, parts = own if engine == "auto" else engine, tuple(_parts(node, names))
        holder = assigned.get(id(node), "") + called
        yield Launch(engine=own, parts=parts, form="python", holder=holder)


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
        name = ast.unparse(node.func).rpartition(".")[2]
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
