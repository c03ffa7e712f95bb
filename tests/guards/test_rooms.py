"""What lets a newcomer find things: rooms that do not grow unasked, folders that can be surveyed,
names with one meaning, one table of drafting methods."""

import ast
import re
import tomllib
from collections import Counter, defaultdict
from graphlib import TopologicalSorter
from pathlib import Path, PurePosixPath
from typing import Any

from foretoken.config.method_registry import known_methods
from tests.guards.sources import PACKAGE, ROOT, Module, classes, importers, modules

BUDGETS = Path(__file__).with_name("rooms.toml")
BESIDE = ("benchmarks", "tests", "tools")
"""Rooms beside the package."""
MOST_FILES_OF_A_FOLDER = 16
FEWEST_LINES = 25
TABLE = "config/method_registry.py"
WHERE_METHODS_ARE_NAMED = {
    "cli/demo.py": "which of them the demo measures, and how far they draft",
    "config/drafter.py": "what a model without a method is",
    "lab/launch/engines.py": "which methods engines have, under which names",
    "lab/lint/fit.py": "what a launch without a method means to vLLM",
    "lab/lint/names.py": "what vLLM concludes from the names of drafters",
    "lab/lint/checks.py": "vLLM's own rules about its methods",
    "lab/records/proxy.py": "a field of OpenAI's completions has the same name",
    "lab/plan/setup.py": "what a plan without a method is",
    "lab/tune/server_command.py": "the look-up that every engine has",
    "training/trained_kinds.py": "which methods are trained, and by what",
    "shape/gguf_architectures.py": "llama.cpp's names of architectures are the same",
}
"""Files that name a method though they are not its own, with the reason."""


def test_no_room_grows_beyond_its_budget() -> None:
    budgets = _table()["lines"]
    lines = _lines_by_room()
    grown = [
        f"{room} has {count} lines, its budget is {budgets.get(room, 0)}"
        for room, count in sorted(lines.items())
        if count > budgets.get(room, 0)
    ]
    assert not grown, (
        "take lines out, or edit the budget in tests/guards/rooms.toml, with the reason in the "
        "commit:\n" + "\n".join(grown)
    )
    gone = sorted(budgets.keys() - lines.keys())
    assert not gone, f"these rooms are gone; take them out of tests/guards/rooms.toml: {gone}"


def test_modules_are_cut_by_what_they_mean() -> None:
    """A module whose only importer lies beside it is part of that one, unless a reason is given."""
    table = _table()
    alone = _modules_with_one_importer()
    unexplained = defaultdict(list)
    for path in sorted(alone - table["reasons"].keys()):
        unexplained[_room(path)].append(path)
    more = {
        room: paths
        for room, paths in unexplained.items()
        if len(paths) > table["one_importer"].get(room, 0)
    }
    assert not more, (
        "one of these is new and has one importer, in its own folder: join the two, or give a line "
        f"of reason in tests/guards/rooms.toml: {more}"
    )
    fewer = {
        room: len(unexplained[room])
        for room, count in table["one_importer"].items()
        if len(unexplained[room]) < count
    }
    assert not fewer, f"fewer than in tests/guards/rooms.toml; write these there: {fewer}"
    gone = sorted(table["reasons"].keys() - alone)
    assert not gone, f"these need their reason no more: {gone}"
    assert all(len(reason) > 20 for reason in table["reasons"].values()), "say why"


def test_folders_can_be_surveyed() -> None:
    files = Counter(
        str(PurePosixPath(module.path).parent)
        for module in modules()
        if not module.path.endswith("__init__.py")
    )
    full = {folder: count for folder, count in files.items() if count > MOST_FILES_OF_A_FOLDER}
    assert not full, f"give these files rooms by what they are for: {full}"


def test_class_names_are_used_once() -> None:
    places = defaultdict(list)
    for module, node in classes():
        if not node.name.startswith("_"):
            places[node.name].append(module.path)
    twice = {name: paths for name, paths in places.items() if len(paths) > 1}
    assert not twice, f"one name, one meaning: {twice}"


def test_no_short_file_only_forwards() -> None:
    """A file of a few lines without a function or class of its own is a detour."""
    forwarding = [
        module.path
        for module in modules()
        if module.text.count("\n") < FEWEST_LINES
        and not module.path.endswith(("__init__.py", "__main__.py"))
        and not any(isinstance(node, ast.ClassDef | ast.FunctionDef) for node in module.tree.body)
    ]
    assert not forwarding, f"put it where it is used: {forwarding}"


def test_settings_are_imported_in_one_direction() -> None:
    """No circle among the files of config, imports inside functions included."""
    above = {
        path: {one for one in by if one.startswith("config/")} - {"config/__init__.py"}
        for path, by in importers().items()
        if path.startswith("config/") and path != "config/__init__.py"
    }
    tuple(TopologicalSorter(above).static_order())


def test_methods_are_known_in_one_place() -> None:
    """Whoever wants to know something of a method asks the table."""
    names = {method.name for method in known_methods()}
    naming = {
        module.path
        for module in modules()
        if module.path != TABLE and any(name in names for name in _words(module))
    }
    elsewhere = {path for path in naming if not _is_own(path, names)}
    unexplained = elsewhere - WHERE_METHODS_ARE_NAMED.keys()
    assert not unexplained, f"ask {TABLE} instead, or give a reason here: {sorted(unexplained)}"
    gone = WHERE_METHODS_ARE_NAMED.keys() - elsewhere
    assert not gone, f"these need their exception no more: {sorted(gone)}"


def _table() -> dict[str, dict[str, Any]]:
    return tomllib.loads(BUDGETS.read_text("utf-8"))


def _lines_by_room() -> Counter[str]:
    """Lines of .py, .c and .h of each folder of the package, and of .py of those beside it."""
    lines: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.[pch]*"):
        if path.suffix in (".py", ".c", ".h"):
            room = _room(path.relative_to(PACKAGE).as_posix())
            lines[room] += path.read_bytes().count(b"\n")
    for name in BESIDE:
        lines[name] = sum(path.read_bytes().count(b"\n") for path in (ROOT / name).rglob("*.py"))
    return lines


def _room(path: str) -> str:
    """The folder directly below the package; the lab's commands are the lab's."""
    if path.startswith("cli/lab/"):
        return "lab"
    folder, _, rest = path.partition("/")
    return folder if rest else "top"


def _modules_with_one_importer() -> set[str]:
    """Those whose importer lies in their folder and is not its `__init__`, which is its face."""
    alone = set()
    for path, by in importers().items():
        only = PurePosixPath(next(iter(by))) if len(by) == 1 else None
        if only and only.parent == PurePosixPath(path).parent and only.name != "__init__.py":
            alone.add(path)
    return {path for path in alone if not path.endswith("__init__.py")}


def _words(module: Module) -> list[str]:
    """Text constants of a module, docstrings and keys of other dictionaries included."""
    return [
        node.value
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def _is_own(path: str, names: set[str]) -> bool:
    """Whether a file, or a folder that it lies in, has the name of a method."""
    parts = re.split(r"[/.]", path)
    return any(part in names for part in parts) and path.startswith(("proposers/", "training/"))
