"""Numbers of other packages at the doors: NumPy's and torch's scalars become Python's own there."""

import operator
from typing import Any


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
