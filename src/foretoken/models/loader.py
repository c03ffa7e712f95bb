"""Reads a Hugging Face checkpoint strictly: every tensor wanted is there, every one there is used.

Knows names, shapes and files; what the tensors mean is the model file's affair.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foretoken.errors import CheckpointError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DERIVED = (".rotary_emb.inv_freq",)
"""Buffers that old checkpoints carry and that follow from the config."""


class Checkpoint:
    """The tensors of one folder. Use it in a `with` block and call `finish` at the end."""

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        """Open the files; tensors are converted to `dtype` on `device` as they are taken.

        Raises:
            CheckpointError: no safetensors file, a missing shard, or a truncated or corrupt file.
        """
        self._dtype, self.device = dtype, device
        self._files: dict[str, Path] = {}
        self._open = {path: _open_file(path) for path in _shards(folder)}
        for path, handle in self._open.items():
            for name in handle.keys():
                if not name.endswith(_DERIVED):
                    self._files[name] = path
        self._unused = set(self._files)
        self._folder = folder

    def __enter__(self) -> Self:
        """The checkpoint itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the files."""
        self._open.clear()

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        """The tensor `name`, which must have this shape.

        Raises:
            CheckpointError: it is missing, misshapen, not of a floating type, or unreadable.
        """
        path = self._files.get(name)
        if path is None:
            allowed = f"a checkpoint with this tensor; {self._folder} has {len(self._files)}"
            raise CheckpointError("missing tensor", name, allowed)
        try:
            tensor = self._open[path].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(path.name, name, f"a readable tensor ({error})") from error
        if tuple(tensor.shape) != tuple(shape):
            given = f"{name} {list(tensor.shape)}"
            raise CheckpointError("tensor shape", given, f"{list(shape)} from config.json")
        if not tensor.is_floating_point():
            given = f"{name} {tensor.dtype}"
            raise CheckpointError("tensor type", given, "a floating type: not yet quantized")
        self._unused.discard(name)
        converted: Tensor = tensor.to(device=self.device, dtype=self._dtype)
        return converted

    def names(self) -> list[str]:
        """Every tensor that is there."""
        return list(self._files)

    def ignore(self, name: str) -> None:
        """Allow a tensor that is there but follows from another one (a tied head)."""
        self._unused.discard(name)

    def finish(self) -> None:
        """All tensors that were wanted have been taken.

        Raises:
            CheckpointError: some are left over.
        """
        if self._unused:
            names = sorted(self._unused)
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
            raise CheckpointError("unused tensors", shown, "only tensors that the model uses")


def _shards(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(_INDEX, str(index), "a JSON with a weight_map") from error
        paths = [folder / str(name) for name in sorted(names)]
        for path in paths:
            if not path.is_file():
                raise CheckpointError("missing shard", path.name, f"the files that {_INDEX} names")
        return paths
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    others = sorted(path.name for path in folder.glob("*.bin"))
    given = f"{folder} with {', '.join(others)}" if others else str(folder)
    raise CheckpointError("weights", given, f"{_SINGLE} or {_INDEX} (.bin is not yet read)")


def _open_file(path: Path) -> "safe_open":
    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(path.name, str(path), f"a complete safetensors ({error})") from error
