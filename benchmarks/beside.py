"""Processes that spin beside what is measured: a machine that is shared with others.

They are started and ended here, and end by themselves when their life or their parent's is over.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SPIN = """
import os, sys, time
parent, until = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
while time.monotonic() < until and os.getppid() == parent:
    sum(range(100000))
"""


@contextmanager
def spinning(count: int, most_s: float) -> Iterator[None]:
    """`count` busy processes for the block, none for longer than `most_s`.

    Raises:
        SystemExit: one of them ended before the block, so that it measured something else.
    """
    command = [sys.executable, "-c", SPIN, str(os.getpid()), str(most_s)]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
        if any(process.poll() is not None for process in processes):
            raise SystemExit(f"a spinning process ended within {most_s} s")
    finally:
        for process in processes:
            process.kill()
            process.wait()


def share_of_core(spinning: int) -> float:
    """Of a core, for one thread among `spinning` others, if all are treated alike."""
    return min(1.0, len(os.sched_getaffinity(0)) / (spinning + 1))
