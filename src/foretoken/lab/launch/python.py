"""Calls that build an engine in a Python script, with what their arguments are.

Reads the syntax tree and runs nothing. Constants, dictionaries and variables that were assigned
such are followed; any other expression is kept as it was written.
"""

import ast
import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from foretoken.lab.findings import Finding
from foretoken.lab.launch.launch import Form, Launch, LaunchPart
from foretoken.lab.launch.values import Expression

_CALLS = {
    "LLM": "vllm",
    "AsyncLLM": "vllm",
    "EngineArgs": "vllm",
    "AsyncEngineArgs": "vllm",
    "Engine": "sglang",
    "ServerArgs": "sglang",
    "EngineConfig.from_kwargs": "foretoken",
}
_PACKAGES = {
    "vllm": "vllm",
    "sglang": "sglang",
    "tensorrt_llm": "tensorrt-llm",
    "foretoken": "foretoken",
}
_IMPORTS = re.compile(
    r"^from (?:vllm|sglang|tensorrt_llm|foretoken)\b.* import |^import (?:vllm|sglang)", re.M
)
_IN_PROSE = re.compile(r"^[ \t]*(?:\w+[ \t]*=[ \t]*)?(?:LLM|AsyncEngineArgs|EngineArgs)\(", re.M)
STARTS_SERVER = re.compile(
    r"\b(?:vllm serve|vllm\.entrypoints|sglang\.launch_server|sglang serve|llama-server|"
    r"trtllm-serve|foretoken serve)\b"
)
PYTHON_CHECK = "script"


def is_python(text: str) -> bool:
    """Whether a text is Python that imports, assigns or calls something."""
    tree = _parsed(text)
    return tree is not None and any(
        isinstance(node, ast.Import | ast.ImportFrom | ast.Call) for node in ast.walk(tree)
    )


def launches_of_python(text: str, engine: str) -> Iterator[Launch]:
    """One launch per call that builds an engine."""
    tree = _parsed(text)
    if tree is None:
        return
    names = _assigned(tree)
    imported = _imported(tree)
    assigned = {
        id(node.value): f"{ast.unparse(node.targets[0])} = "
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found = _launch(node, engine, names, imported)
            if found is not None:
                before = assigned.get(id(node), "")
                yield replace(found, form=Form(kind="python", holder=before + found.form.holder))


def launches_in_prose(text: str, engine: str) -> Iterator[Launch]:
    """Calls in a text that as a whole is no Python, such as a page copied from a browser."""
    for match in _IN_PROSE.finditer(text):
        call = _balanced(text, match.start())
        if call:
            yield from launches_of_python(textwrap.dedent(call), engine)


def command_lists(text: str) -> Iterator[list[str]]:
    """Commands in the strings and lists of a script, such as those for `subprocess`."""
    tree = _parsed(text)
    if tree is None:
        return
    names = _assigned(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.List):
            value = _value(node, names)
            words = [str(word) for word in value] if isinstance(value, list) else []
            if STARTS_SERVER.search(" ".join(words)):
                yield words
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if STARTS_SERVER.search(node.value):
                yield [node.value]


def script_findings(text: str) -> Iterator[Finding]:
    """What will go wrong in a script beside the arguments of its engines."""
    tree = _parsed(text)
    if tree is None:
        return
    engines = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and _called(node.value) == "LLM"
        and _imported(tree).get("LLM", "vllm") == "vllm"
    ]
    shares = [any(k.arg == "gpu_memory_utilization" for k in e.value.keywords) for e in engines]  # type: ignore[attr-defined]
    if len(engines) > 1 and not all(shares):
        yield Finding(
            check=PYTHON_CHECK,
            level="error",
            where="LLM",
            message=f"{len(engines)} engines in one process: each takes gpu_memory_utilization "
            "(0.92) of the device, so the second one finds no memory",
            remedy="run each in a process of its own, or give each less than half",
        )
    if _reads_counters(tree) and engines and not any(map(_keeps_counters, engines)):
        yield Finding(
            check=PYTHON_CHECK,
            level="error",
            where="get_metrics()",
            message="LLM keeps no counters unless disable_log_stats is False: the call ends in an "
            "AssertionError",
            remedy="disable_log_stats=False",
        )
    if "spec_decode" in text and any(map(_reads_one_value, ast.walk(tree))):
        yield Finding(
            check=PYTHON_CHECK,
            level="error",
            where="metric.value",
            message="vllm:spec_decode_num_accepted_tokens_per_pos is a Vector without a value: the "
            "loop ends in an AttributeError",
            remedy='getattr(metric, "value", None) or metric.values',
        )


def syntax_findings(text: str) -> Iterator[Finding]:
    """Where a script that imports an engine stops being Python."""
    if _IMPORTS.search(text) is not None:
        yield from not_python(text)


def not_python(text: str) -> Iterator[Finding]:
    """Where a text stops being Python."""
    try:
        ast.parse(textwrap.dedent(text))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        yield Finding(
            check=PYTHON_CHECK,
            level="error",
            where=f"line {line}" if line else "script",
            message="is no Python, so that the script was not read: "
            f"{getattr(error, 'msg', error)}",
        )


def _reads_counters(tree: ast.Module) -> bool:
    """Whether a script asks an engine for its metrics."""
    return any(
        isinstance(node, ast.Call) and _called(node) == "get_metrics" for node in ast.walk(tree)
    )


def _keeps_counters(built: ast.Assign) -> bool:
    """Whether an engine keeps counters, as far as its arguments say."""
    given = {k.arg: k.value for k in built.value.keywords}  # type: ignore[attr-defined]
    said = given.get("disable_log_stats")
    unsaid = None in given or not (said is None or isinstance(said, ast.Constant))
    return unsaid or (isinstance(said, ast.Constant) and not said.value)


def _reads_one_value(node: ast.AST) -> bool:
    """Whether a loop over metrics reads `.value` of all whose names contain spec_decode."""
    if not isinstance(node, ast.If) or '"spec_decode"' not in ast.unparse(node.test).replace(
        "'", '"'
    ):
        return False
    return any(isinstance(part, ast.Attribute) and part.attr == "value" for part in ast.walk(node))


def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(textwrap.dedent(text))
    except (SyntaxError, ValueError):
        return None


def _balanced(text: str, start: int) -> str:
    """The text from `start` to the parenthesis that closes its first one."""
    depth = 0
    for place in range(text.index("(", start), len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return text[start : place + 1].lstrip("\n")
    return ""


def _imported(tree: ast.Module) -> dict[str, str]:
    """Name -> engine, of names that were imported from an engine's package."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            engine = _PACKAGES.get(node.module.split(".")[0])
            if engine:
                found |= {alias.asname or alias.name: engine for alias in node.names}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                engine = _PACKAGES.get(alias.name.split(".")[0])
                if engine:
                    found[alias.asname or alias.name.split(".")[0]] = engine
    return found


def _assigned(tree: ast.Module) -> dict[str, Any]:
    """Variable -> value, of variables that were assigned a constant or a dictionary once."""
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, ast.Name):
                value = _value(node.value, found)
                known = target.id not in found and not isinstance(value, Expression)
                found[target.id] = value if known else Expression(target.id)
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
        known = {"decoding_type": kind} if kind != name else {}
        return {**known, **keywords}
    return Expression(ast.unparse(node))


def _called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _launch(
    node: ast.Call, engine: str, names: dict[str, Any], imported: dict[str, str]
) -> Launch | None:
    name = _called(node)
    if name not in _CALLS:
        return None
    root = node.func
    while isinstance(root, ast.Attribute):
        root = root.value
    own = imported.get(root.id if isinstance(root, ast.Name) else name) or _CALLS[name]
    if name in ("Engine", "ServerArgs") and own != "sglang":
        return None
    parts = [_part("model", value, names) for value in node.args[:1]]
    for keyword in node.keywords:
        if keyword.arg:
            parts.append(_part(keyword.arg, keyword.value, names))
            continue
        spread = _value(keyword.value, names)
        if isinstance(spread, dict):
            parts += [LaunchPart.keyword(key, one) for key, one in spread.items()]
        else:
            parts.append(
                LaunchPart(name="**", written="**", value=spread, raw=ast.unparse(keyword.value))
            )
    form = Form(kind="python", holder=ast.unparse(node.func))
    return Launch(engine=own if engine == "auto" else engine, parts=tuple(parts), form=form)


def _part(name: str, node: ast.AST, names: dict[str, Any]) -> LaunchPart:
    value = _value(node, names)
    raw = ast.unparse(node) if isinstance(node, ast.Name) else ""
    return LaunchPart.keyword(name, value, raw)
