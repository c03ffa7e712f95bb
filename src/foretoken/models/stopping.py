"""A rollout's rule of where to end early, in C's memory (native/stop.h), and what became of it."""

import ctypes
from array import array
from dataclasses import replace
from typing import final

from foretoken.kernels.structures import FtStop
from foretoken.models.tensors import RolledOut, Stopped, StopRule


@final
class StopCall:
    """One rule for one call."""

    def __init__(self, rule: StopRule, count: int, steps: int) -> None:
        """Room for a call of `count` sequences and so many steps at most."""
        self._sure = array("f", bytes(4 * steps * count))
        self._reach = array("f", [1.0]) * count
        self._lengths = array("q", bytes(8 * count))
        # Neither a row nor a pass has a price: what is sure enough pays.
        self._struct = FtStop(
            least_sure=rule.least_sure,
            token=1.0,
            row=0.0,
            usual=1.0,
            least=rule.least,
            sure=self._sure.buffer_info()[0],
            reach=self._reach.buffer_info()[0],
            lengths=self._lengths.buffer_info()[0],
            **{"pass": -1.0},
        )

    @property
    def address(self) -> int:
        """Address of its ft_stop; valid while this object lives."""
        return ctypes.addressof(self._struct)

    def found(self, *, ended: bool) -> Stopped:
        """After the call; `ended` if it ended all sequences."""
        going = [row for row, reach in enumerate(self._reach) if reach > 0.0 and not ended]
        return Stopped(lengths=self._lengths.tolist(), going=going)


def cut(found: RolledOut, stopped: Stopped) -> RolledOut:
    """Less the tokens that a rule ended; logits stay, of those too."""
    undecided_BV = found.undecided_BV
    return replace(
        found,
        ids=[ids[:count] for ids, count in zip(found.ids, stopped.lengths, strict=True)],
        undecided_BV=None if undecided_BV is None else undecided_BV[stopped.going],
        stopped=stopped,
    )
