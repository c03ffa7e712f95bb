"""What a format of quantized matrices is: from the tensors of a module to one matrix.

A format knows names and layouts of tensors, not files. Kernels hold 4 bits in groups and 8 bits per
output or in groups; whatever else a format can say is multiplied out, in float32.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from foretoken.errors import CheckpointError
from foretoken.quant.arrange import Weights


class RawTensors(Protocol):
    """Tensors as stored."""

    def has(self, name: str) -> bool:
        """Whether there is one of this name."""

    def raw(self, name: str) -> Tensor:
        """It, in its own type; counts as used. Raises CheckpointError: missing or unreadable."""

    def ignore(self, name: str) -> None:
        """Count it as used."""

    def peek(self, name: str) -> Tensor:
        """The tensor as it is stored, without counting it as used."""


class Format(ABC):
    """How one format stores matrices."""

    @abstractmethod
    def matrix(self, tensors: RawTensors, module: str, inputs: int) -> Weights | None:
        """The matrix of a linear layer.

        Args:
            tensors: of the checkpoint.
            module: its name, without `.weight`.
            inputs: how many the model expects.

        Returns:
            Integers, or floats where no kernel holds them: float32. None: stored as plain floats.

        Raises:
            CheckpointError: tensors are missing or do not fit each other.
        """


def check_shape(name: str, tensor: Tensor, wanted: Sequence[int]) -> Tensor:
    """The tensor, if it has this shape. Raises CheckpointError: it has another."""
    if tuple(tensor.shape) != tuple(wanted):
        given = f"{name} {list(tensor.shape)}"
        raise CheckpointError("tensor shape", given, f"{list(wanted)}, as its neighbours say")
    return tensor


def group_size(name: str, inputs: int, groups: int) -> int:
    """Inputs of a group. Raises CheckpointError: the groups are not equally large."""
    if groups < 1 or inputs % groups:
        raise CheckpointError("groups", f"{name}: {groups} of {inputs} inputs", "a divisor of them")
    return inputs // groups
