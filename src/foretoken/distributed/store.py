"""The store at which the ranks of a process group of PyTorch's find each other, on this host.

Rank 0 opens it, the others reach it by its port. Not every PyTorch has it: import this where a
process group is made.
"""

from datetime import timedelta
from typing import Final

from torch._C._distributed_c10d import TCPStore

HOST: Final = "127.0.0.1"
JOIN: Final = timedelta(seconds=120)
"""Time for all ranks to come."""


def open_store(size: int) -> TCPStore:
    """Rank 0's, on a free port, for so many ranks; waits for nobody."""
    return TCPStore(HOST, 0, size, True, JOIN, wait_for_workers=False)


def reach_store(port: int, size: int) -> TCPStore:
    """Another rank's."""
    return TCPStore(HOST, port, size, False, JOIN)
