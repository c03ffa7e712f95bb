"""Loads that leave packed weights behind, and loads that find them.

A builder asks for tensors and makes linear layers in an order that follows from the model's shape.
`RecordingWeightSource` hands it the checkpoint's tensors and writes down what became of them; `CachedWeightSource` hands
it what was written, and matrices without contents, since nothing is made of them any more.
Owns what a file says beside its tensors. Knows files by `packed_file`, and no folders.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor

from foretoken.kernels.linear import Packed
from foretoken.models.checkpoint import Checkpoint
from foretoken.models.packed_file import PackedFile, PackedWriter
from foretoken.ops.linear import KernelLinear, Linear
from foretoken.quant import Weights

_PARTS = ("weight", "scale", "zero")


class WeightSource(Protocol):
    """Where a builder has its tensors from; `Checkpoint` says what each call means."""

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        """A tensor of this shape."""

    def keep(self, name: str, shape: Sequence[int]) -> Tensor:
        """The same, in memory of its own."""

    def matrix(self, module: str, shape: tuple[int, int]) -> Weights:
        """The weights of a linear layer."""

    def table(self, module: str, shape: tuple[int, int]) -> Weights:
        """The embedding table: floats in memory of their own, or what a linear layer is made of."""

    def ignore(self, name: str) -> None:
        """Allow a tensor, or all of a module, that is there and not used."""

    def finish(self) -> None:
        """Nothing may be left over."""


class PackedLayers(Protocol):
    """What became of linear layers in an earlier load, or what becomes of them in this one."""

    def ready(self) -> list[Packed] | None:
        """The next layer's parts, packed; None: it has to be made."""

    def made(self, parts: Sequence[Linear]) -> None:
        """The next layer's parts, as they were made."""


@final
class RecordingWeightSource(WeightSource, PackedLayers):
    """A checkpoint whose load is written to a file as it goes on."""

    def __init__(self, checkpoint: Checkpoint, writer: PackedWriter) -> None:
        """Both end with whoever made them."""
        self._checkpoint, self._writer = checkpoint, writer
        self._tensors: dict[str, int] = {}
        self._linears: list[list[dict[str, Any]]] = []
        self.is_complete = True
        """Whether all layers are of a kind that a file can hold."""

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        """The checkpoint's, written."""
        return self._noted(name, self._checkpoint.take(name, shape))

    def keep(self, name: str, shape: Sequence[int]) -> Tensor:
        """The checkpoint's, written."""
        return self._noted(name, self._checkpoint.keep(name, shape))

    def matrix(self, module: str, shape: tuple[int, int]) -> Weights:
        """The checkpoint's; what is made of it is what will be written."""
        return self._checkpoint.matrix(module, shape)

    def table(self, module: str, shape: tuple[int, int]) -> Weights:
        """The checkpoint's; floats are written, of others what is made of them."""
        found = self._checkpoint.table(module, shape)
        return self._noted(f"{module}.weight", found) if isinstance(found, Tensor) else found

    def ignore(self, name: str) -> None:
        """As the checkpoint does."""
        self._checkpoint.ignore(name)

    def finish(self) -> None:
        """As the checkpoint does."""
        self._checkpoint.finish()

    def ready(self) -> list[Packed] | None:
        """Nothing is."""
        return None

    def made(self, parts: Sequence[Linear]) -> None:
        """Write the packed weights of each."""
        packed = [part.packed for part in parts if isinstance(part, KernelLinear)]
        self.is_complete &= len(packed) == len(parts)
        self._linears.append([self._described(one) for one in packed])

    def about(self) -> dict[str, Any]:
        """What `CachedWeightSource` needs to know beside the tensors."""
        return {"tensors": self._tensors, "linears": self._linears}

    def _noted(self, name: str, tensor: Tensor) -> Tensor:
        self._tensors[name] = self._writer.add(tensor.contiguous())
        return tensor

    def _described(self, packed: Packed) -> dict[str, Any]:
        parts = {name: getattr(packed, name) for name in _PARTS}
        return {
            "weight_type": packed.weight_type,
            "outputs": packed.outputs,
            "inputs": packed.inputs,
            "gated": packed.gated,
            "group": packed.group,
            "kind": packed.kind,
            "unit": packed.unit,
            **{
                name: self._writer.add(part.contiguous())
                for name, part in parts.items()
                if part is not None
            },
        }


@final
class CachedWeightSource(WeightSource, PackedLayers):
    """A load from a file: what was checked when it was written is not checked again."""

    def __init__(self, file: PackedFile) -> None:
        """Begin with the first layer of `file`."""
        self._file, self._at = file, 0

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        """As it was written."""
        tensor = self._file.tensor(self._about["tensors"][name])
        assert tuple(tensor.shape) == tuple(shape), (name, tensor.shape, shape)
        return tensor

    def keep(self, name: str, shape: Sequence[int]) -> Tensor:
        """As it was written; the file is memory of its own."""
        return self.take(name, shape)

    def matrix(self, module: str, shape: tuple[int, int]) -> Weights:
        """Its shape without contents."""
        return torch.empty(shape, device="meta")

    def table(self, module: str, shape: tuple[int, int]) -> Weights:
        """Floats as they were written; else its shape without contents."""
        name = f"{module}.weight"
        return (
            self.take(name, shape) if name in self._about["tensors"] else self.matrix(module, shape)
        )

    def ignore(self, name: str) -> None:
        """Settled when the file was written."""

    def finish(self) -> None:
        """Settled when the file was written."""

    def ready(self) -> list[Packed]:
        """The next layer's parts, where they lie in the file."""
        described = self._about["linears"][self._at]
        self._at += 1
        return [self._packed(one) for one in described]

    def made(self, parts: Sequence[Linear]) -> None:
        """They are known."""

    @property
    def _about(self) -> Mapping[str, Any]:
        return self._file.about

    def _packed(self, described: Mapping[str, Any]) -> Packed:
        tensors = {name: self._file.tensor(described[name]) for name in _PARTS if name in described}
        return Packed(**{**described, **tensors})
