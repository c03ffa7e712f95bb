"""A rollout's rule of where to end early, in C's memory (native/stop.h), and what became of it."""

import ctypes
from array import array
from dataclasses import replace
from typing import final

from foretoken.kernels.structures import FtStop
from foretoken.models.tensors import RolledOut, StopRule


@final
class StopCall:
    """One rule for one call."""

    def __init__(self, rule: StopRule, count: int, steps: int) -> None:
        """Room for a call of `count` sequences and so many steps at most."""
        self._sure = array("f", bytes(4 * steps * count))
        self._lengths = array("q", bytes(8 * count))
        self._struct = FtStop(
            least_sure=rule.least_sure,
            least=rule.least,
            sure=self._sure.buffer_info()[0],
            lengths=self._lengths.buffer_info()[0],
        )

    @property
    def address(self) -> int:
        """Address of its ft_stop; valid while this object lives."""
        return ctypes.addressof(self._struct)

    def cut(self, found: RolledOut) -> RolledOut:
        """What the call drafted, less the tokens that the rule ended; logits stay, of those too."""
        lengths, undecided_BV = self._lengths.tolist(), found.undecided_BV
        made = len(found.ids[0])
        going = [row for row, length in enumerate(lengths) if length == made]
        return replace(
            found,
            ids=[ids[:length] for ids, length in zip(found.ids, lengths, strict=True)],
            undecided_BV=undecided_BV[going] if undecided_BV is not None and going else None,
            going=going,
        )
