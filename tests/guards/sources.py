"""The package's source files, parsed once, for the guard tests."""

import ast
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "foretoken"


@dataclass(frozen=True, slots=True)
class Module:
    """A source file: its path below the package, its text and its syntax tree."""

    path: str
    text: str
    tree: ast.Module


@cache
def modules() -> tuple[Module, ...]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text("utf-8")
        found.append(Module(path.relative_to(PACKAGE).as_posix(), text, ast.parse(text)))
        gc.freeze()  # of a million nodes in all, which stay to the end
    return tuple(found)


@cache
def importers() -> dict[str, set[str]]:
    paths = {_dotted(module.path): module.path for module in modules()}
    found: dict[str, set[str]] = {path: set() for path in paths.values()}
    for module in modules():
        for name in _imported(module):
            path = paths.get(name) or paths.get(name.rpartition(".")[0])
            if path not in (None, module.path):
                found[path].add(module.path)
    return found


def _dotted(path: str) -> str:
    return f"foretoken.{path.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__")


def _imported(module: Module) -> Iterator[str]:
    """`a.b.name` of each `from a.b import name`, and `a.b` of each `import a.b`."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@cache
def classes() -> list[tuple[Module, ast.ClassDef]]:
    return [
        (module, node)
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    ]


def last_name(node: ast.expr) -> str:
    """`C` of `a.b.C`, `C[...]` and `C(...)`."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    if isinstance(node, ast.Subscript):
        return last_name(node.value)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
