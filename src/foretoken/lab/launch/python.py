"""Calls that build an engine in a Python script, with what their arguments are.

Reads the syntax tree and runs nothing. Constants, dictionaries and variables that were assigned
such are followed; any other expression is kept as it was written.
"""

import ast
import json
import textwrap
from collections.abc import Iterator
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
}
_PACKAGES = {
    "vllm": "vllm",
    "sglang": "sglang",
    "tensorrt_llm": "tensorrt-llm",
    "foretoken": "foretoken",
}
PYTHON_CHECK = "script"


def parsed(text: str) -> ast.Module | None:
    """The syntax tree of a script that imports, assigns or calls something; None: it is none."""
    try:
        tree = ast.parse(textwrap.dedent(text))
    except (SyntaxError, ValueError):
        return None
    does = (ast.Import, ast.ImportFrom, ast.Call)
    return tree if any(isinstance(node, does) for node in ast.walk(tree)) else None


def launches_of_python(tree: ast.Module, engine: str) -> Iterator[Launch]:
    """One launch per call that builds an engine."""
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


def script_findings(tree: ast.Module) -> Iterator[Finding]:
    """What will go wrong in a script beside the arguments of its engines."""
    nodes = list(ast.walk(tree))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    is_vllm = _imported(tree).get("LLM", "vllm") == "vllm"
    engines = [
        {one.arg: one.value for one in node.value.keywords}
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        if _called(node.value) == "LLM" and is_vllm
    ]
    if len(engines) > 1 and not all("gpu_memory_utilization" in given for given in engines):
        message = (
            f"{len(engines)} engines in one process: each takes gpu_memory_utilization (0.92) of "
            "the device, so the second one finds no memory"
        )
        remedy = "run each in a process of its own, or give each less than half"
        yield _finding("LLM", message, remedy)
    asks = any(_called(call) == "get_metrics" for call in calls)
    if asks and engines and not any(map(_keeps_counters, engines)):
        message = (
            "LLM keeps no counters unless disable_log_stats is False: the call ends in an "
            "AssertionError"
        )
        yield _finding("get_metrics()", message, "disable_log_stats=False")
    if any(map(_reads_one_value, nodes)):
        message = (
            "vllm:spec_decode_num_accepted_tokens_per_pos is a Vector without a value: the loop "
            "ends in an AttributeError"
        )
        remedy = 'getattr(metric, "value", None) or metric.values'
        yield _finding("metric.value", message, remedy)


def _finding(where: str, message: str, remedy: str) -> Finding:
    return Finding(check=PYTHON_CHECK, level="error", where=where, message=message, remedy=remedy)


def not_python(text: str) -> Iterator[Finding]:
    """Where a text stops being Python."""
    try:
        ast.parse(textwrap.dedent(text))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        message = f"is no Python, so that the script was not read: {getattr(error, 'msg', error)}"
        yield _finding(f"line {line}" if line else "script", message, "")


def _keeps_counters(given: dict[str | None, ast.expr]) -> bool:
    """Whether an engine keeps counters, as far as its arguments say."""
    said = given.get("disable_log_stats")
    return None in given or (
        said is not None and not (isinstance(said, ast.Constant) and said.value)
    )


def _reads_one_value(node: ast.AST) -> bool:
    """Whether a loop over metrics reads `.value` of all whose names contain spec_decode."""
    if not isinstance(node, ast.If) or "'spec_decode'" not in ast.unparse(node.test):
        return False
    return any(isinstance(part, ast.Attribute) and part.attr == "value" for part in ast.walk(node))


def _imported(tree: ast.Module) -> dict[str, str]:
    """Name -> engine, of names that were imported from an engine's package."""
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
