"""Weight files of a folder: safetensors, or PyTorch's pickled ones read without running code; GGUF.

Knows files and names; what tensors must be there is the loader's affair.
"""

import json
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foretoken.errors import CheckpointError
from foretoken.quant.formats import GgufFile

_SAFETENSORS, _PICKLED = "model.safetensors", "pytorch_model.bin"


class WeightFile(Protocol):
    """Tensors by name."""

    def keys(self) -> Iterable[str]:
        """Names."""

    def get_tensor(self, name: str) -> Tensor:
        """One of them."""


class _Pickled:
    """A .bin file: loaded with PyTorch's restricted unpickler, mapped where the format allows."""

    def __init__(self, path: Path) -> None:
        try:
            content = _unpickle(path)
        except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
            reason = str(error).partition("\n")[0]
            allowed = f"tensors only, in a complete file ({reason or type(error).__name__})"
            raise CheckpointError(path.name, str(path), allowed) from error
        others = [n for n, value in content.items() if not isinstance(value, Tensor)]
        if others:
            raise CheckpointError(path.name, others[0], "tensors only")
        self._tensors: dict[str, Tensor] = content

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name]


def _unpickle(path: Path) -> dict[str, Tensor]:
    with path.open("rb") as file:
        zipped = file.read(2) == b"PK"
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    if not isinstance(content, dict):
        raise CheckpointError(path.name, type(content).__name__, "a dict of tensors")
    return content


def open_files(folder: Path, dtype: torch.dtype = torch.float32) -> dict[Path, WeightFile]:
    """The files that hold the folder's weights; safetensors where there are both kinds.

    Args:
        folder: of the files, or a GGUF file.
        dtype: of matrices that are multiplied out of a GGUF file; others stay as they are stored.

    Raises:
        CheckpointError: no weights, a missing shard, a truncated or corrupt file, or a pickle
            that holds more than tensors.
    """
    if folder.suffix == ".gguf":
        return {folder: GgufFile(folder, dtype)}
    for name in (_SAFETENSORS, _PICKLED):
        paths = _shards(folder, name)
        if paths:
            return {path: _open(path) for path in paths}
    allowed = f"{_SAFETENSORS} or {_PICKLED}, whole or with an index of shards; or a GGUF file"
    raise CheckpointError("weights", str(folder), allowed)


def _shards(folder: Path, name: str) -> list[Path]:
    index = folder / f"{name}.index.json"
    if not index.is_file():
        return [folder / name] if (folder / name).is_file() else []
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(index.name, str(index), "a JSON with a weight_map") from error
    paths = [folder / str(shard) for shard in sorted(names)]
    for path in paths:
        if not path.is_file():
            raise CheckpointError("missing shard", path.name, f"the files that {index.name} names")
    return paths


def _open(path: Path) -> WeightFile:
    if path.suffix == ".bin":
        return _Pickled(path)
    try:
        opened: WeightFile = safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(path.name, str(path), f"a complete safetensors ({error})") from error
    return opened
