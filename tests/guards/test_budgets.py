"""Files and functions stay short; what does not is in budget.toml with its reason."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.guards.sources import Module, modules

MOST_LINES_OF_A_FILE = 800
MOST_LINES_OF_A_FUNCTION = 60
MOST_ARGUMENTS = 6
BUDGET = Path(__file__).with_name("budget.toml")


def functions(module: Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    def visit(node: ast.AST, prefix: str) -> Iterator[Any]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                continue
            name = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}.{child.name}" if prefix else child.name
                if not isinstance(child, ast.ClassDef):
                    yield f"{module.path}:{name}", child
            yield from visit(child, name)

    yield from visit(module.tree, "")


def is_command(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether the arguments are a command line's options, annotated for typer."""
    arguments = [*node.args.args, *node.args.kwonlyargs]
    return any("typer." in ast.unparse(a.annotation) for a in arguments if a.annotation)


def is_device_code(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether Triton compiles it, which takes pointers, sizes and constants one by one and knows no
    records; one call site names them."""
    return any(ast.unparse(one).startswith("triton.jit") for one in node.decorator_list)


def count_arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Arguments beside self and cls, an injected default value `_` included."""
    spec = node.args
    names = [a.arg for a in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)]
    return sum(name not in ("self", "cls") for name in names)


def measure() -> dict[str, dict[str, int]]:
    over: dict[str, dict[str, int]] = {"files": {}, "functions": {}, "arguments": {}}
    for module in modules():
        lines = module.text.count("\n")
        if lines > MOST_LINES_OF_A_FILE:
            over["files"][module.path] = lines
        for place, node in functions(module):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MOST_LINES_OF_A_FUNCTION:
                over["functions"][place] = length
            count = count_arguments(node)
            if count > MOST_ARGUMENTS and not is_command(node) and not is_device_code(node):
                over["arguments"][place] = count
    return over


def test_nothing_is_over_its_budget() -> None:
    allowed = tomllib.loads(BUDGET.read_text("utf-8"))
    problems = []
    for kind, found in measure().items():
        exceptions = allowed.get(kind, {})
        for place, size in found.items():
            limit = exceptions.get(place, {}).get("limit", 0)
            if size > limit:
                problems.append(f"{kind}: {place} has {size}")
        for place in exceptions.keys() - found.keys():
            problems.append(f"{kind}: {place} needs its exception no more; take it out")
    assert not problems, "split these, or give a reason in budget.toml:\n" + "\n".join(problems)


def test_every_exception_has_a_reason() -> None:
    for kind, exceptions in tomllib.loads(BUDGET.read_text("utf-8")).items():
        assert kind in ("files", "functions", "arguments"), kind
        for place, entry in exceptions.items():
            assert len(entry["reason"]) > 20, f"{place}: say why"
