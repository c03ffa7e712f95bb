"""What `import foretoken` gives, what it must not cost, and which packages are optional."""

import re
import subprocess
import sys

import pytest

import foretoken
from foretoken.extras import EXTRA_OF
from tests.guards.sources import ROOT, modules
from tests.guards.test_documents import pyproject

HEAVY = ("torch", "transformers", "tokenizers", "numpy", "huggingface_hub", "rich")


def loaded_after(code: str) -> set[str]:
    """The heavy packages that a fresh interpreter has loaded after running `code`."""
    probe = f"{code}\nimport sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    source = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\n{probe}"
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=120
    )
    return set(re.findall(r"'(\w+)'", done.stdout.splitlines()[-1]))


def test_public_names() -> None:
    expected = [
        "LLM",
        "CompletionOutput",
        "DraftingMethod",
        "ModelFamily",
        "RequestOutput",
        "SamplingParams",
        "__version__",
        "register_family",
        "register_method",
    ]
    assert foretoken.__all__ == expected
    assert set(dir(foretoken)) == set(expected)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        _ = foretoken.Llm


def test_public_names_load() -> None:
    from foretoken import LLM, SamplingParams

    assert LLM.__name__ == "LLM"
    assert SamplingParams().temperature == 1.0


def test_import_is_light() -> None:
    assert loaded_after("import foretoken") == set()


@pytest.mark.parametrize(
    "code",
    [
        "import foretoken.config; from foretoken import SamplingParams",
        "from foretoken.cli.app import app",
    ],
    ids=["types and config", "the command line"],
)
def test_what_is_torch_free(code: str) -> None:
    assert not {"torch", "transformers"} & loaded_after(code)


WITHOUT = """
import importlib, sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    \"\"\"As if some packages were not installed, for whoever asks and however.\"\"\"

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in MISSING else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""
FACES = ("server", "replicas", "lab", "training", "cli", "testing", "listening")
"""Parts that may import an extra's packages at the top of a module."""


def without_extras(code: str, *, timeout_s: int = 120) -> "subprocess.CompletedProcess[str]":
    """A fresh interpreter that runs `code` and finds no package of an extra."""
    start = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); MISSING = {set(EXTRA_OF)!r}"
    source = f"{start}\n{WITHOUT}\n{code}"
    command = [sys.executable, "-c", source]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)


def imported_name(requirement: str) -> str:
    """`opentelemetry` of `opentelemetry-sdk>=1.30`: the package's name where it is imported."""
    name = re.split(r"[\[<>=]", requirement)[0].replace("-", "_")
    if name == "pyzmq":
        return "zmq"
    return "opentelemetry" if name.startswith("opentelemetry") else name


def test_the_table_is_that_of_the_project_file() -> None:
    extras = pyproject()["project"]["optional-dependencies"]
    found = {
        imported_name(one): name
        for name in set(EXTRA_OF.values())
        for one in extras[name]
        if not one.startswith("foretoken[")
    }
    assert found == EXTRA_OF


@pytest.mark.slow
def test_the_core_imports_without_extras() -> None:
    names = [
        "foretoken." + module.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for module in modules()
        if module.path.split("/")[0].removesuffix(".py") not in FACES
        and module.path not in ("__init__.py", "__main__.py")
        and not re.fullmatch(r"kernels/triton/(?!__init__|found)\w+\.py", module.path)
    ]
    assert len(names) > 100, names
    done = without_extras(f"[importlib.import_module(name) for name in {names!r}]")
    assert done.returncode == 0, done.stderr


def test_help_needs_no_extra() -> None:
    code = "sys.argv = ['foretoken', 'serve', '--help']\nfrom foretoken.cli import main\nmain()"
    done = without_extras(code)
    assert done.returncode == 0, done.stderr
    assert "--port" in done.stdout


@pytest.mark.parametrize("rooms", [("lab/", "cli/lab/"), ("router/",)])
def test_no_module_of_these_loads_torch(rooms: tuple[str, ...]) -> None:
    names = [
        "foretoken." + module.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for module in modules()
        if module.path.startswith(rooms)
    ]
    assert len(names) > 3, names
    code = (
        f"import sys, importlib; sys.path.insert(0, {str(ROOT / 'src')!r})\n"
        f"[importlib.import_module(name) for name in {names!r}]\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"
