"""What engines refuse, their defaults, and values that they have no more: in `engines.toml`."""

import tomllib
from functools import cache
from importlib import resources
from typing import Any, NamedTuple


@cache
def engine_table(engine: str) -> dict[str, Any]:
    """What `engine` refuses, its defaults and words; empty for one that nothing is known of."""
    file = resources.files("foretoken.lab.lint").joinpath("engines.toml")
    found: dict[str, Any] = tomllib.loads(file.read_text("utf-8")).get(engine, {})
    return found


class GoneValue(NamedTuple):
    """What became of a value of an option or key."""

    now: str = ""
    """The value that stands for it; empty: the option goes."""
    remedy: str = ""
    """What to say where `now` is not all."""


def gone_value(engine: str, option: str, value: object) -> GoneValue | None:
    """What became of one value; None: it is there still, or never was."""
    values = engine_table(engine).get("removed_values", {}).get(option, {})
    found = values.get(value) if isinstance(value, str) else None
    return None if found is None else GoneValue(**found)
