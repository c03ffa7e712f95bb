"""The block types of GGUF files whose bits are kept: sizes in the file and in the kernels.

Torch-free. `kernels/native/ggml.h` says how they lie once they are packed, and has the names of
fronts and forms.
"""

from typing import Final, NamedTuple

STEP: Final = 32
"""Inputs whose numbers lie together: the smallest block, and a multiple of every group."""
BITS4, BITS5, BITS6, IQ4, FP4, SHORT4 = range(6)
HALVES, BYTES, POWERS = range(3)
MINIMA: Final = 4
_FRONT_BYTES: Final = {BITS5: 20, BITS6: 24}
"""Of a step's values, of one output; else 16."""


class BlockKind(NamedTuple):
    """A type of blocks: how many inputs and bytes one has, and how it is kept."""

    number: int
    """ggml's."""
    inputs: int
    num_bytes: int
    front: int
    form: int

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return 16 if self.front in (BITS6, SHORT4) else 32

    @property
    def step_bytes(self) -> int:
        """Bytes of the values of 32 inputs of one output."""
        return _FRONT_BYTES.get(self.front, 16)

    @property
    def number_bytes(self) -> int:
        """Bytes of the scales and minima of 32 inputs of one output."""
        each = 2 if self.form & 3 == HALVES else 1
        return each * (2 if self.form & MINIMA else 1) * STEP // self.group

    @property
    def upper_bytes(self) -> int:
        """Bytes of what bytes are multiplied with, of one output."""
        if self.form & 3 != BYTES:
            return 0
        return 4 if self.form & MINIMA else 2

    @property
    def bytes_each(self) -> float:
        """Bytes that a weight takes as it is kept."""
        return (self.step_bytes + self.number_bytes) / STEP + self.upper_bytes / self.inputs


BLOCK_KINDS: Final = {
    "Q4_1": BlockKind(3, 32, 20, BITS4, HALVES | MINIMA),
    "Q5_0": BlockKind(6, 32, 22, BITS5, HALVES),
    "Q5_1": BlockKind(7, 32, 24, BITS5, HALVES | MINIMA),
    "Q2_K": BlockKind(10, 256, 84, SHORT4, BYTES | MINIMA),
    "Q3_K": BlockKind(11, 256, 110, SHORT4, BYTES),
    "Q4_K": BlockKind(12, 256, 144, BITS4, BYTES | MINIMA),
    "Q5_K": BlockKind(13, 256, 176, BITS5, BYTES | MINIMA),
    "Q6_K": BlockKind(14, 256, 210, BITS6, BYTES),
    "IQ4_NL": BlockKind(20, 32, 18, IQ4, HALVES),
    "IQ4_XS": BlockKind(23, 256, 136, IQ4, BYTES),
    "MXFP4": BlockKind(39, 32, 17, FP4, POWERS),
}
