"""What stands at the beginning of a folder's safetensors files: names and shapes. Torch-free."""

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foretoken.errors import CheckpointError

_MOST_HEADER = 100 << 20
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def headers(folder: Path) -> Iterator[dict[str, Any]]:
    """Name -> type, shape and place, file by file. Raises CheckpointError: a file is cut short."""
    for path in sorted(folder.glob("model*.safetensors")):
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            try:
                header = json.loads(file.read(min(length, _MOST_HEADER)))
            except (ValueError, RecursionError) as error:
                raise CheckpointError(path.name, str(path), "a complete safetensors") from error
        if not isinstance(header, dict):
            raise CheckpointError(path.name, header, "an object of tensors, in its header")
        header.pop("__metadata__", None)
        for name, entry in header.items():
            sizes = entry.get("shape") if isinstance(entry, dict) else None
            if not isinstance(sizes, list) or not all(isinstance(size, int) for size in sizes):
                raise CheckpointError(path.name, f"{name}: {entry}", "a shape of each tensor")
        yield header


def stored_dtype(folder: Path) -> str | None:
    """The type that most of the stored floats have; None: there are none of 16 or 32 bits. Raises
    CheckpointError: as `headers`."""
    counts = dict.fromkeys(_DTYPES, 0)
    for header in headers(folder):
        for entry in header.values():
            if entry.get("dtype") in counts:
                counts[entry["dtype"]] += math.prod(entry["shape"])
    most = max(counts, key=lambda name: counts[name])
    return _DTYPES[most] if counts[most] else None


def stored_names(folder: Path) -> set[str]:
    """Names of all tensors. Raises CheckpointError: as `headers`."""
    return {name for header in headers(folder) for name in header}
