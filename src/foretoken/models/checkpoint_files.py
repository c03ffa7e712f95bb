"""Tensors of a checkpoint by name: one or many safetensors files, checked strictly.

Every problem is a CheckpointError that names the tensor and the file. Invariant: a tensor that was
never asked for is an error at the end, so a misread config cannot go unnoticed.
"""

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foretoken.errors import CheckpointError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_IGNORED_SUFFIX = "rotary_emb.inv_freq"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class CheckpointFiles:
    """The open checkpoint in `folder`; use as a context manager."""

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        """Open every file; tensors are converted to `dtype` and moved to `device` when taken."""
        self._dtype = dtype
        self._device = device
        self._files: dict[str, Any] = {}
        self._where = _locate(folder)
        for name in sorted(set(self._where.values())):
            self._files[name] = _open(folder / name)
        self._check_index()
        self._untaken = {n for n in self._where if not n.endswith(_IGNORED_SUFFIX)}

    def __enter__(self) -> Self:
        """Nothing more to open."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the files."""
        self._files.clear()

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name in self._where

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor `name`, of exactly `shape`.

        Raises:
            CheckpointError: it is not there, has another shape, or is not a float tensor.
        """
        if name not in self._where:
            raise CheckpointError(name, "no such tensor", f"a tensor of shape {list(shape)}")
        file_name = self._where[name]
        found = list(self._files[file_name].get_slice(name).get_shape())
        if found != list(shape):
            raise CheckpointError(f"{name} in {file_name}", found, f"shape {list(shape)}")
        try:
            tensor: Tensor = self._files[file_name].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{name} in {file_name}", str(error), "readable data") from error
        if tensor.dtype not in _FLOATS:
            allowed = "float32, bfloat16 or float16"
            raise CheckpointError(f"{name} in {file_name}", str(tensor.dtype), allowed)
        self._untaken.discard(name)
        return tensor.to(self._device, self._dtype)

    def ignore(self, name: str) -> None:
        """Accept that `name` may be there without being used."""
        self._untaken.discard(name)

    def check_all_taken(self) -> None:
        """Raise CheckpointError if a tensor was not used."""
        if self._untaken:
            name = min(self._untaken)
            more = f" and {len(self._untaken) - 1} more" if len(self._untaken) > 1 else ""
            allowed = f"only tensors that the model has (not {name}{more})"
            raise CheckpointError(f"{name} in {self._where[name]}", "an unused tensor", allowed)

    def _check_index(self) -> None:
        """The index names tensors that their files have."""
        present = {name: set(file.keys()) for name, file in self._files.items()}
        for tensor, file_name in self._where.items():
            if tensor not in present[file_name]:
                raise CheckpointError(f"{tensor} in {file_name}", "missing", f"as {_INDEX} says")
        for file_name, tensors in present.items():
            for tensor in tensors - self._where.keys():
                raise CheckpointError(f"{tensor} in {file_name}", "not listed", f"as in {_INDEX}")


def _locate(folder: Path) -> dict[str, str]:
    """File name of each tensor."""
    if (folder / _INDEX).is_file():
        try:
            where = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(_INDEX, str(error), "JSON with a weight_map") from error
        return {str(tensor): str(file_name) for tensor, file_name in where.items()}
    names = [path.name for path in sorted(folder.glob("*.safetensors"))]
    if _SINGLE in names or len(names) == 1:
        name = _SINGLE if _SINGLE in names else names[0]
        return dict.fromkeys(_open(folder / name).keys(), name)
    given: object = names
    if not names:
        other = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".gguf"))
        given = other or "no weights"
    allowed = f"{_SINGLE}, or several files with {_INDEX}; convert other formats to safetensors"
    raise CheckpointError(f"weights in {folder.name}", given, allowed)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise CheckpointError(path.name, "no such file", f"the file that {_INDEX} names") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(path.name, str(error), "a whole safetensors file") from error
