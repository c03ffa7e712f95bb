"""Integer weights and the schemes that name them. Knows neither files nor kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.shape.stored import GROUPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How a matrix is quantized; activations keep their type."""

    name: str
    bits: int
    group: int
    """Inputs that share a scale; 0: all inputs of an output."""
    asymmetric: bool = False
    """Whether a group has a zero point of its own."""

    def fitted(self, inputs: int) -> "Scheme":
        """This scheme, or its nearest relative for matrices with so many inputs.

        Groups have to divide them: a smaller group, and where none does, int8.
        """
        if not self.group or inputs % self.group == 0:
            return self
        for group in GROUPS:
            if group < self.group and inputs % group == 0:
                return Scheme(
                    name=self.name, bits=self.bits, group=group, asymmetric=self.asymmetric
                )
        return _SCHEMES["int8"]

    def for_head(self) -> "Scheme":
        """The scheme of the output head: never below 8 bits, where one step picks a token."""
        return _SCHEMES["int8"] if self.bits < 8 else self


_LEAST_HALF, _MOST_HALF = 2.0**-20, 65504.0
"""Between these a scale of 4-bit weights is rounded to float16: kernels then read half the bytes of
it. Below, where float16 has few bits left, it stays as it is; so a group's weights do not depend on
what other groups are."""

_SCHEMES = {
    "int8": Scheme(name="int8", bits=8, group=0),
    "int4": Scheme(name="int4", bits=4, group=32),
}


def scheme_of(name: str) -> Scheme:
    """The scheme of a name of `config.quantization.QUANTIZATIONS`."""
    return _SCHEMES[name]


def short_scale(scale: Tensor) -> Tensor:
    """The nearest scale, float32, that float16 holds too; see `_LEAST_HALF` for which."""
    size = scale.abs()
    fits = (size >= _LEAST_HALF) & (size <= _MOST_HALF)
    return torch.where(fits, scale.half().float(), scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntWeights:
    """A matrix [N, K] as (value - zero) * scale."""

    bits: int
    values_NK: Tensor
    """8 bits: int8. 4 bits: uint8, 0 to 15."""
    scale_NG: Tensor
    """float32; G = 1: per output, else K / G inputs share one."""
    zero_NG: Tensor | None = None
    """float32; None: 8 of 4 bits, 0 of 8. Kernels of the CPU know them of 4 bits alone."""

    @property
    def group(self) -> int:
        """Inputs that share a scale; 0: all."""
        groups = self.scale_NG.shape[1]
        return 0 if groups == 1 else self.values_NK.shape[1] // groups

    def __post_init__(self) -> None:
        """Check that scales and zero points fit."""
        outputs, inputs = self.values_NK.shape
        groups = self.scale_NG.shape
        assert groups[0] == outputs and inputs % groups[1] == 0, (self.values_NK.shape, groups)
        assert self.zero_NG is None or self.zero_NG.shape == groups, (self.zero_NG, groups)

    @property
    def shape(self) -> torch.Size:
        """[N, K]."""
        return self.values_NK.shape

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The matrix they stand for, computed in float32."""
        values = self.values_NK.float().unflatten(1, (self.scale_NG.shape[1], -1))
        if self.bits == 4 or self.zero_NG is not None:
            values -= 8.0 if self.zero_NG is None else self.zero_NG[..., None]
        matrix: Tensor = values.mul_(self.scale_NG[..., None]).flatten(1).to(dtype)
        return matrix
