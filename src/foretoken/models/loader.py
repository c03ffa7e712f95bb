"""Reads a Hugging Face checkpoint strictly: every tensor wanted is there, every one there is used.

Knows names, shapes and files; what the tensors mean is the model file's affair.
"""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from safetensors import SafetensorError
from torch import Tensor

from foretoken.errors import CheckpointError
from foretoken.models.files import open_files

_DERIVED = (".rotary_emb.inv_freq",)
"""Buffers that old checkpoints carry and that follow from the config."""


class Checkpoint:
    """The tensors of one folder. Use it in a `with` block and call `finish` at the end."""

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        """Open the files; tensors are converted to `dtype` on `device` as they are taken.

        Raises:
            CheckpointError: no weights, a missing shard, or a truncated or corrupt file.
            NotYetError: the weights are GGUF files.
        """
        self._dtype, self.device = dtype, device
        self._files: dict[str, Path] = {}
        self._open = open_files(folder)
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
