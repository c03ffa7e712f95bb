"""The lab runs on a laptop against a server elsewhere, a router beside replicas: nothing of them
loads torch."""

import subprocess
import sys

import pytest

from tests.guards.sources import ROOT, modules


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
