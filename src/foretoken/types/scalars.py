"""What users give, at the doors: NumPy's and torch's scalars become Python's own there, and
dictionaries records of ours."""

import operator
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from foretoken.errors import ParameterError, one_of

Record = TypeVar("Record")


def plain(value: Any) -> Any:
    """A scalar of NumPy or torch, or whatever can be an index, as Python's own number or truth
    value; anything else as it is."""
    if value is None or isinstance(value, int | str):
        return value
    ndim = getattr(value, "ndim", None)
    if ndim == 0 and hasattr(value, "item"):
        return value.item()
    if ndim is None and hasattr(value, "__index__"):
        return operator.index(value)
    return value


def record_of(kind: type[Record], given: object, field: str, beside: str = "") -> Record:
    """What a user wrote as a dictionary, or an object of this class, as such an object; keys whose
    value is None count as left out. `beside`: what else is allowed, which the caller takes. Raises
    ParameterError: something else, or an unknown key."""
    if isinstance(given, kind):
        return given
    known = [one.name for one in fields(kind)]  # type: ignore[arg-type]
    if not isinstance(given, Mapping):
        raise ParameterError(field, given, f"{beside}a dictionary with {', '.join(known)}")
    for key, value in given.items():
        if key not in known and value is not None:
            name = key if isinstance(key, str) else "(a key that is no text)"
            raise ParameterError(f"{field}.{name}", value, one_of(name, known))
    return kind(**{key: value for key, value in given.items() if value is not None})
