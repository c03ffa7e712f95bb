"""The package index that `make` asks for PyTorch; nothing means pip's own. Standard library only.

PyPI's builds for Linux bring 5 GB of CUDA. Where Linux shows no NVIDIA device, PyTorch's index has
a build of 0.2 GB. Whoever gave pip other sources of packages has decided already. This is a choice
made once, from what is there; a download that fails is an error, never a reason for another choice.
"""

import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

CPU = "https://download.pytorch.org/whl/cpu"
_SOURCES = ("index-url", "find-links", "no-index")


def index_for(system: str, has_nvidia: bool, pip_settings: Iterable[str]) -> str:
    """CPU or nothing, from lines such as `global.index-url='...'` of `pip config list`."""
    names = [line.partition("=")[0] for line in pip_settings]
    configured = any(name.endswith(_SOURCES) for name in names)
    return CPU if system == "Linux" and not has_nvidia and not configured else ""


def has_nvidia() -> bool:
    """Whether a driver shows a device, or its tool is installed."""
    return bool(
        shutil.which("nvidia-smi") or any(Path("/dev").glob("nvidia[0-9]*")) or _under_windows()
    )


def _under_windows() -> bool:
    return Path("/usr/lib/wsl/lib/libcuda.so.1").exists()


def pip_settings(python: str) -> list[str]:
    """What `pip config list` of this interpreter says, environment variables among it."""
    command = [python, "-m", "pip", "config", "list"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


if __name__ == "__main__":
    print(index_for(platform.system(), has_nvidia(), pip_settings(sys.executable)))
