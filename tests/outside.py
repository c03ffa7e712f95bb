"""Modules that no package holds, as tests import them."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def module_outside(folder: str, name: str) -> Iterator[ModuleType]:
    """For a fixture: a module of `scripts` or `benchmarks`, whose neighbours it finds meanwhile."""
    place = str(ROOT / folder)
    sys.path.insert(0, place)
    yield import_module(name)
    sys.path.remove(place)
