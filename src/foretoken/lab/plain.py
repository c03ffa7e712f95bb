"""Dataclasses to plain JSON values and back, and tables. A number that is none is null there.

Knows no particular class. A YAML file and a results file are read, and fail, as settings do.
"""

import dataclasses
import math
import tomllib
from enum import Enum
from importlib import resources
from typing import Any, TypeVar

from foretoken.config.reader import read

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """JSON values of dataclasses, tuples and dicts; infinite and NaN numbers become null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def from_plain(kind: type[T], value: Any, field: str = "") -> T:
    """An instance of `kind` from JSON values; `field` names the place in messages. Raises
    ConfigError: a field is unknown, missing or of another type."""
    built: T = read(kind, value, field or kind.__name__, null_is_nan=True)
    return built


def read_table(package: str, name: str) -> dict[str, Any]:
    """A TOML file that lies in a package."""
    return tomllib.loads(resources.files(package).joinpath(name).read_text("utf-8"))
