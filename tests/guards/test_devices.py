"""One border to devices: whoever needs a kernel asks `foretoken.backend`."""

import re

from tests.guards.sources import modules

ASKS_FOR_A_DEVICE = {
    "backend.py": "the border",
    "assembly.py": "how much memory a GPU has free",
    "cli/timed_runs.py": "names the GPU in reports",
    "kernels/triton_found.py": "whether Triton runs, which the border asks",
    "kv/untouched.py": "memory that the system hands out when it is touched",
    "quant/finite.py": "how large a sum PyTorch makes in the calling thread",
    "training/": "trains on PyTorch alone",
}
ASKS_FOR_THE_LIBRARY = {
    "backend.py": "the border",
    "distributed/": "processes wait for each other, whatever computes",
    "kernels/library.py": "its own description of itself",
}


def asking(pattern: str, allowed: dict[str, str]) -> list[str]:
    found = [module.path for module in modules() if re.search(pattern, module.text)]
    return [path for path in found if not path.startswith(tuple(allowed))]


def test_one_place_asks_which_device_there_is() -> None:
    found = asking(r"device\.type\b|\.is_cuda\b|\.is_cpu\b|cuda\.is_available", ASKS_FOR_A_DEVICE)
    assert not found, f"ask backend_for(device) for what depends on the device: {found}"


def test_one_place_looks_for_the_library() -> None:
    found = asking(r"\bfind_library\(", ASKS_FOR_THE_LIBRARY)
    assert not found, f"take the kernel from backend_for(device): {found}"
