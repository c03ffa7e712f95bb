"""Conditional drops: with how many slots of a row each depth of a parallel rollout goes on.

Depth s keeps `share` ** s of the slots (at least LEAST of them), each among those of the depth
before, so that what a slot attends to is there and deep guesses cost little. Training only: in
evaluation every slot stays.

Source: PARD (arXiv 2504.18583).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LEAST = 0.2


@dataclass(frozen=True, slots=True)
class Drops:
    """The drops of one batch of rows; the same for the same tokens."""

    share: float
    dice: torch.Generator

    @classmethod
    def of(cls, tokens_BT: Tensor, share: float) -> "Drops":
        """Drawn by the rows' own tokens; nothing is dropped with a `share` of 1."""
        return cls(share, torch.Generator().manual_seed(int(tokens_BT.sum())))

    def chosen(self, kept_N: Tensor, length: int, step: int) -> Tensor:
        """Which of the slots of the depth before go on at depth `step`, ascending, int64."""
        if self.share == 1.0:
            return torch.arange(len(kept_N), device=kept_N.device)
        count = round(length * max(self.share**step, min(LEAST, self.share)))
        order = torch.randperm(len(kept_N), generator=self.dice)[: max(1, count)]
        return order.sort().values.to(kept_N.device)
