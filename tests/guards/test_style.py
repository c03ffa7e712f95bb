"""Rules of the house that a linter does not know."""

import ast
import re

from tests.guards.sources import ROOT, classes, last_name, modules

MUTABLE_DATACLASSES = {
    "control/adaptive/drafter.py:DrafterState": "what one drafter did of late",
    "control/adaptive/made.py:MadePlan": "a plan, and what its requests gain by it",
    "control/adaptive/tracked.py:TrackedRequest": "how far drafters have read a request",
    "runtime/sequence.py:Sequence": "the one mutable state of a request",
    "training/loop.py:Progress": "what a training run resumes from",
}
ABSTRACT_BASES = {"ABC", "Protocol"}


def test_modules_say_what_they_own() -> None:
    silent = [m.path for m in modules() if not ast.get_docstring(m.tree)]
    assert not silent, f"open with what the module owns and does not know: {silent}"


def test_no_drawer_for_everything() -> None:
    drawers = re.compile(r"(^|/)(utils?|helpers?|common|misc)(\.py|/)")
    bad = [m.path for m in modules() if drawers.search(m.path)]
    assert not bad, f"name the module by what it owns: {bad}"


def test_no_globals() -> None:
    bad = [
        f"{module.path}:{node.lineno}"
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Global)
    ]
    assert not bad, f"pass it as an argument: {bad}"


def test_code_is_ascii() -> None:
    bad = [m.path for m in modules() if not m.text.isascii()]
    assert not bad, f"ASCII only in code: {bad}"


def test_todos_have_a_link() -> None:
    bad = [
        f"{module.path}:{number}"
        for module in modules()
        for number, line in enumerate(module.text.splitlines(), 1)
        if re.search(r"\b(TODO|FIXME|XXX)\b", line) and "http" not in line and "#" not in line
    ]
    assert not bad, f"link the issue: {bad}"


def test_dataclasses_are_frozen() -> None:
    """Private ones may hold a class's own running state."""
    problems = []
    for module, node in classes():
        place = f"{module.path}:{node.name}"
        for decorator in node.decorator_list:
            if last_name(decorator) != "dataclass":
                continue
            keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
            options = {k.arg: ast.unparse(k.value) for k in keywords}
            public = not node.name.startswith("_") and place not in MUTABLE_DATACLASSES
            if public and options.get("frozen") != "True":
                problems.append(place)
    assert not problems, f"frozen=True, or a reason in MUTABLE_DATACLASSES: {problems}"


def test_classes_are_abstract_or_final() -> None:
    """No class of ours inherits from a concrete class of ours, exceptions apart."""
    concrete = set()
    for module, node in classes():
        abstract = ABSTRACT_BASES & {last_name(base) for base in node.bases}
        if module.path != "errors.py" and not abstract:
            concrete.add(node.name)
    problems = [
        f"{module.path}:{node.name} inherits from {last_name(base)}"
        for module, node in classes()
        for base in node.bases
        if last_name(base) in concrete and not (module.path == "metrics/reader.py")
    ]
    assert not problems, f"wrap it or pass a function instead: {problems}"


def test_dataclass_inheritance_of_metrics_is_flat() -> None:
    """The metric kinds share name and labels through one base, as vLLM's reader shows them."""
    bases = {
        node.name: [last_name(b) for b in node.bases]
        for module, node in classes()
        if module.path == "metrics/reader.py"
    }
    for name in ("Counter", "Gauge", "Vector"):
        assert bases.get(name) == ["Metric"], (name, bases.get(name))


def test_no_paths_of_a_machine() -> None:
    suspicious = re.compile(r"/(?:root|home)/|/tmp/\w")
    bad = []
    for folder in ("src", "docs", "examples", "scripts", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".md", ".toml") and suspicious.search(
                path.read_text("utf-8")
            ):
                bad.append(path.relative_to(ROOT).as_posix())
    assert not bad, f"no machine's paths in the project: {bad}"
