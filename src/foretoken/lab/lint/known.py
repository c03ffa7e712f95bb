"""What each engine knows, from the TOML files beside this one, and how a check is declared."""

import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from foretoken.lab.findings import Finding
from foretoken.lab.lint.launches import Launch

_FILES = {"vllm": "vllm.toml", "llama.cpp": "llama_cpp.toml"}


@cache
def engine_table(engine: str) -> dict[str, Any]:
    """The data of `engine`; empty for one without a file."""
    if engine not in _FILES:
        return {}
    file = resources.files("foretoken.lab.lint").joinpath(_FILES[engine])
    return tomllib.loads(file.read_text("utf-8"))


@dataclass(frozen=True, slots=True)
class LaunchCheck:
    """A named check of one launch, and the engines it is for."""

    name: str
    engines: tuple[str, ...]
    run: Callable[[Launch], Iterator[Finding]]


def number(value: object) -> int | None:
    """`value` as an integer, if it is one."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    try:
        return int(str(value))
    except ValueError:
        return None
