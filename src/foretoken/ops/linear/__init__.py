"""Linear layers whose result for a row does not depend on how many rows there are.

`PlainLinear` is the reference twin. `KernelLinear` has that property by construction; oneDNN's
`PackedLinear` is kept inside a measured class of numbers of rows by `InvariantLinear`.
"""

from foretoken.ops.linear.base import Linear, PlainLinear
from foretoken.ops.linear.kernel import KernelLinear
from foretoken.ops.linear.packed import PackedLinear, can_pack
from foretoken.ops.linear.probe import InvariantLinear, RowClass, RowProbe

__all__ = [
    "InvariantLinear",
    "KernelLinear",
    "Linear",
    "PackedLinear",
    "PlainLinear",
    "RowClass",
    "RowProbe",
    "can_pack",
]
