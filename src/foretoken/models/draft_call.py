"""What calls into C that draft chains have in common: room for tokens, a rule of where to end early
(native/stop.h), and what became of a plan."""

import ctypes
from array import array
from typing import Any, final

from torch import Tensor

from foretoken.kernels.structures import FtStop, address_of
from foretoken.models.tensors import RolledOut, RolloutPlan


@final
class DraftCall:
    """One plan for one call, which writes here as long as this object lives."""

    def __init__(self, call: Any, plan: RolloutPlan, count: int) -> None:
        """Put where tokens of `count` sequences go, and how they are chosen, into `call`."""
        self._plan, self._count = plan, count
        self._tokens = array("q", bytes(8 * count * plan.steps))
        call.tokens, call.draws, call.stop = address_of(self._tokens), plan.rows, None
        if plan.stop is not None:
            self._sure = array("f", bytes(4 * count * plan.steps))
            self._lengths = array("q", bytes(8 * count))
            self._stop = FtStop(
                least_sure=plan.stop.least_sure,
                least=plan.stop.least,
                sure=address_of(self._sure),
                lengths=address_of(self._lengths),
            )
            call.stop = ctypes.addressof(self._stop)

    def drafted(
        self, done: int, logits_KV: Tensor, *, of_all: bool, stream_BD: Tensor | None = None
    ) -> RolledOut:
        """What the call drafted in `done` steps, less the tokens that the rule ended.

        Args:
            done: what the call returned.
            logits_KV: float32, where it wrote them.
            of_all: whether these are of all steps, B rows each, or of the last one alone.
            stream_BD: see `RolledOut`.
        """
        plan, count = self._plan, self._count
        made, at = self._tokens[: count * done], count * done if of_all else 0
        ids = [made[row::count].tolist() for row in range(count)]
        undecided_BV = None if done == plan.steps else logits_KV[at : at + count]
        going = None
        if plan.stop is not None:
            lengths = self._lengths.tolist()
            ids = [tokens[:length] for tokens, length in zip(ids, lengths, strict=True)]
            going = [row for row, length in enumerate(lengths) if length == done]
            if undecided_BV is not None:
                undecided_BV = undecided_BV[going] if going else None
        return RolledOut(
            ids=ids,
            logits_KV=logits_KV[: count * done] if plan.keeps_logits else None,
            undecided_BV=undecided_BV,
            stream_BD=stream_BD,
            going=going,
        )
