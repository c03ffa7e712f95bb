"""Which cores a process and all the threads that it will start may use, in words of Linux.

Memory follows: a page lies on the node whose core writes it first. Knows nothing of models or
engines, which take as many threads as they find cores (`foretoken.hardware.usable_cores`).
"""

import os
import re
from contextlib import suppress
from pathlib import Path

from foretoken.errors import ConfigError

NODES = Path("/sys/devices/system/node")
THREADS = Path("/proc/self/task")
FIELD = "--cpus"
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_MOST_CORES = 1 << 14


def cores_of(text: str) -> frozenset[int]:
    """The cores that a text names.

    Args:
        text: numbers and ranges as Linux writes them, `0-7,16-23`; or `numa:1`, all of a node.

    Raises:
        ConfigError: it names none, or a node that this machine does not have.
    """
    word, _, node = text.partition(":")
    if word == "numa":
        nodes = numa_nodes()
        if not node.isdigit() or int(node) not in nodes:
            raise ConfigError(FIELD, text, f"numa: and one of {', '.join(map(str, sorted(nodes)))}")
        return nodes[int(node)]
    return _listed(text)


def numa_nodes() -> dict[int, frozenset[int]]:
    """The cores of every node that has any; one node of all cores where the system names none."""
    files = {int(file.parent.name[4:]): file for file in NODES.glob("node[0-9]*/cpulist")}
    found = {node: file.read_text().strip() for node, file in files.items()}
    nodes = {node: _listed(text) for node, text in found.items() if text}
    return nodes or {0: frozenset(range(os.cpu_count() or 1))}


def usable_nodes() -> dict[int, frozenset[int]]:
    """Of the cores that this process may use, those of each node that has any."""
    nodes = numa_nodes()
    if not hasattr(os, "sched_getaffinity"):
        return nodes
    found = {node: cores & os.sched_getaffinity(0) for node, cores in nodes.items()}
    return {node: cores for node, cores in found.items() if cores}


def keeps_to_one_node() -> bool:
    """Whether this machine has several nodes, and this process the cores of one alone."""
    return len(numa_nodes()) > 1 and len(usable_nodes()) == 1


def keep_to(cores: frozenset[int]) -> None:
    """Bind the process: the threads that it has, and all that they will start.

    What was written to memory before stays where it is, so call it before there is much.

    Raises:
        ConfigError: this system cannot, or the process may use none of the cores.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError(FIELD, sorted(cores), "left out: only Linux binds processes")
    allowed = os.sched_getaffinity(0)
    missing = sorted(cores - allowed)
    if missing:
        raise ConfigError(FIELD, missing, f"cores among those allowed here: {sorted(allowed)}")
    for thread in THREADS.iterdir():
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), cores)


def _listed(text: str) -> frozenset[int]:
    found: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < _MOST_CORES:
            raise ConfigError(FIELD, text, "cores such as 0-7,16-23, or a node such as numa:0")
        found.update(range(first, last + 1))
    return frozenset(found)
