"""The lab runs on a laptop against a server elsewhere: nothing of it loads torch."""

import subprocess
import sys

from tests.guards.sources import ROOT, modules


def test_no_module_of_the_lab_loads_torch() -> None:
    names = [
        "foretoken." + module.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for module in modules()
        if module.path.startswith(("lab/", "cli/lab/"))
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
