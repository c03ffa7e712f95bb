"""Which cases of a test are slow, and so run by `make test-full` alone; which need kernels."""

from collections.abc import Iterable
from typing import Any

import pytest

from foretoken.kernels.library import LEVELS, Library, find_library

needs_kernels = pytest.mark.skipif(find_library() is None, reason="no compiled kernels")


def slow(*values: Any) -> Any:
    """A case of these values, marked."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_but(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """All cases in their order; all but `quick` are marked."""
    found = list(cases)
    assert set(quick) <= set(found), f"got {quick}, of {found}"
    return [case if case in quick else slow(case) for case in found]


KERNEL_LEVELS = ["portable", "best", *map(slow, LEVELS[1:])]
"""Instruction sets to test kernels on: `best` is the machine's best one."""


def level_of(name: str, library: Library | None) -> int:
    """The number of one of `KERNEL_LEVELS`."""
    best = library.level if library is not None else "portable"
    return LEVELS.index(best if name == "best" else name)
