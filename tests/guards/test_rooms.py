"""What lets a newcomer find things: folders that can be surveyed, names with one meaning, one table
of drafting methods."""

import ast
import re
from collections import Counter, defaultdict
from pathlib import PurePosixPath

from foretoken.config.methods import known_methods
from tests.guards.sources import Module, classes, modules

MOST_FILES_OF_A_FOLDER = 16
FEWEST_LINES = 25
TABLE = "config/methods.py"
WHERE_METHODS_ARE_NAMED = {
    "cli/demo.py": "which of them the demo shows first",
    "config/drafter.py": "what a model without a method is",
    "lab/launch/drafting.py": "what vLLM takes a model without a method for",
    "lab/launch/engines.py": "what engines take a model without a method for",
    "lab/launch/llama_cpp.py": "what is most like a method that llama.cpp has not",
    "lab/launch/openvino.py": "the methods that OpenVINO GenAI has",
    "lab/launch/vllm.py": "under which names vLLM has a method",
    "lab/lint/fit.py": "what a launch without a method means to vLLM",
    "lab/lint/names.py": "what vLLM concludes from the names of drafters",
    "lab/lint/vllm.py": "vLLM's own rules about its methods",
    "lab/records/proxy.py": "a field of OpenAI's completions has the same name",
    "lab/plan/setup.py": "what a plan without a method is",
    "lab/tune/candidates.py": "the look-up that every engine has",
    "shape/gguf_architectures.py": "llama.cpp's names of architectures are the same",
}
"""Files that name a method though they are not its own, with the reason."""


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
