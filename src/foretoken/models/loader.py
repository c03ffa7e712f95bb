"""Reads a Hugging Face checkpoint strictly: every tensor wanted is there, every one there is used.

Knows names, shapes and files; what the tensors mean is the model file's affair, and how quantized
matrices are stored that of `quant.formats`.
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
from foretoken.quant import Weights
from foretoken.quant.arrange import change_rows
from foretoken.quant.finite import check_finite
from foretoken.quant.formats import Format

_DERIVED = (".rotary_emb.inv_freq",)
"""Buffers that old checkpoints carry and that follow from the config."""


class Checkpoint:
    """The tensors of one folder. Use it in a `with` block and call `finish` at the end."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        stored: Format | None = None,
    ) -> None:
        """Open the files; tensors are converted to `dtype` on `device` as they are taken.

        Args:
            folder: of the files.
            dtype: of floating tensors.
            device: of all.
            stored: how matrices are quantized; None: they are floats.

        Raises:
            CheckpointError: no weights, a missing shard, or a truncated or corrupt file.
        """
        self._dtype, self.device, self._stored = dtype, device, stored
        self._files: dict[str, Path] = {}
        self._open = open_files(folder, dtype)
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
            CheckpointError: it is missing, misshapen, not of a floating type, unreadable, or not
                finite in the type that it is converted to.
        """
        return self._checked(name, self.raw(name), shape)

    def matrix(self, module: str, shape: tuple[int, int]) -> Weights:
        """The weights of the linear layer `module`, quantized as they are stored.

        Raises:
            CheckpointError: as for `take`, or its tensors do not fit each other.
        """
        found = None
        if self._stored is not None:
            found = self._stored.matrix(self, module, shape[1])
        if found is None:
            return self.take(f"{module}.weight", shape)
        if isinstance(found, Tensor):
            return self._checked(module, found, shape)
        if tuple(found.values_NK.shape) != shape:
            given = f"{module} {list(found.values_NK.shape)}"
            raise CheckpointError("tensor shape", given, f"{list(shape)} from config.json")
        check_finite(module, found)
        return change_rows(found, lambda rows: rows.to(self.device))

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self._files

    def raw(self, name: str) -> Tensor:
        """The tensor as it is stored, on the device; it counts as used.

        Raises:
            CheckpointError: it is missing or unreadable.
        """
        tensor = self.peek(name)
        self._unused.discard(name)
        return tensor

    def peek(self, name: str) -> Tensor:
        """The same, without counting it as used."""
        path = self._files.get(name)
        if path is None:
            allowed = f"a checkpoint with this tensor; {self._folder} has {len(self._files)}"
            raise CheckpointError("missing tensor", name, allowed)
        try:
            tensor = self._open[path].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(path.name, name, f"a readable tensor ({error})") from error
        moved: Tensor = tensor.to(self.device)
        return moved

    def _checked(self, name: str, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        if tuple(tensor.shape) != tuple(shape):
            given = f"{name} {list(tensor.shape)}"
            raise CheckpointError("tensor shape", given, f"{list(shape)} from config.json")
        if not tensor.is_floating_point():
            given = f"{name} {tensor.dtype}"
            allowed = "a floating type, or a quantization_config that says what it is"
            raise CheckpointError("tensor type", given, allowed)
        converted = tensor.to(self._dtype)
        check_finite(name, converted)
        return converted

    def keep(self, name: str, shape: Sequence[int]) -> Tensor:
        """The same for tensors that stay as they are, in memory of their own.

        What `take` gives may lie in the mapped file, all of which would stay mapped with it.
        """
        stored = self.raw(name)
        tensor = self._checked(name, stored, shape)
        mapped = self.device.type == "cpu" and tensor.data_ptr() == stored.data_ptr()
        return tensor.clone() if mapped else tensor

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
