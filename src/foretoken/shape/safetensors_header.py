"""What stands at the beginning of a folder's safetensors files: names and shapes. Torch-free."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foretoken.errors import CheckpointError

_MOST_HEADER = 100 << 20


def headers(folder: Path) -> Iterator[dict[str, Any]]:
    """Name -> type, shape and place, file by file. Raises CheckpointError: a file is cut short."""
    for path in sorted(folder.glob("model*.safetensors")):
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            try:
                header = json.loads(file.read(min(length, _MOST_HEADER)))
            except ValueError as error:
                raise CheckpointError(path.name, str(path), "a complete safetensors") from error
        yield {name: entry for name, entry in header.items() if name != "__metadata__"}


def stored_names(folder: Path) -> set[str]:
    """Names of all tensors. Raises CheckpointError: as `headers`."""
    return {name for header in headers(folder) for name in header}
