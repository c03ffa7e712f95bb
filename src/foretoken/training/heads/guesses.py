"""How a head guesses while it is trained: depth after depth, for all slots of a row at once.

Position t's final hidden state gives the target's distribution of token t + 1. From slot t on,
tokens t + 2, t + 3, ... are guessed from the true tokens before each (teacher forcing), but from
the head's own states. `DepthAttention` is attention as drafting sees it; `Drops` are the slots that
are left out at greater depth over masks. Knows no kind of head and no loss.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.layers.rope import RotaryTable
from foretoken.proposers.heads.parts import HeadShape
from foretoken.shape import RopeShape
from foretoken.training.heads.target import Captured
from foretoken.training.losses import Head

LEAST = 0.2
"""The share of slots that a depth keeps at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """A head's guesses of one depth."""

    states_BTD: Tensor
    """What `weight_VD` turns into logits; the row of slot t guesses token t + 2 + depth."""
    weight_VD: Tensor
    added: Head | None = None
    """What is added to the logits: the matrix times hidden states [B, T, r] of its own."""
    ids_V: Tensor | None = None
    """Target ids of the weight's rows; None: all, in order."""
    slots_N: Tensor | None = None
    """The slots that have a row, ascending, int64; None: all."""
    sure_BT: Tensor | None = None
    """How sure the head is that each is accepted, float32 before a sigmoid; None: no opinion."""

    def within(self, rows: int) -> tuple[Tensor, Tensor | slice]:
        """The states of slots below `rows`, and those slots."""
        if self.slots_N is None:
            return self.states_BTD[:, :rows], slice(0, rows)
        count = int((self.slots_N < rows).sum())
        return self.states_BTD[:, :count], self.slots_N[:count]

    def logits(self, rows: int) -> Tensor:
        """Of the first `rows` rows, [B, rows, Vd]."""
        found = F.linear(self.states_BTD[:, :rows], self.weight_VD)
        if self.added is None:
            return found
        return found + F.linear(self.added.hidden[:, :rows], self.added.weight)


class Guesser(ABC):
    """How one kind of head guesses, depth after depth."""

    def begin(self, captured: Captured) -> None:  # noqa: B027
        """Set first weights that depend on what the target's features are like; most have none."""

    @abstractmethod
    def guesses(self, captured: Captured, depth: int) -> Iterator[Guess]:
        """`depth` guesses; of depth s all rows but the last s + 2 count."""


class DepthAttention:
    """One layer's keys and values of all depths so far; call it once per depth, in order.

    Depth 0 are the true slots, causal as usual. A query of slot i at depth s stands at position
    i + s and sees the true slots up to i and, of each earlier depth and its own, only the slot i:
    its own draft. This is EAGLE-3's training-time test (arXiv 2503.01840) and the conditional
    chains of PARD and P-EAGLE, whose later depths may go on with fewer slots.
    """

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._slots_N: Tensor | None = None

    def keep(self, chosen_M: Tensor) -> None:
        """Go on with these of the slots of the depth before, ascending, int64."""
        assert self._keys, "depth 0 has all slots"
        known = self._slots_N
        self._slots_N = chosen_M if known is None else known[chosen_M]
        self._keys[1:] = [key[:, :, chosen_M] for key in self._keys[1:]]
        self._values[1:] = [value[:, :, chosen_M] for value in self._values[1:]]

    def __call__(self, q_BTHh: Tensor, k_BTKh: Tensor, v_BTKh: Tensor) -> Tensor:
        """Mix of the values that each slot of the next depth sees, [B, T, H * h]."""
        group = q_BTHh.shape[2] // k_BTKh.shape[2]
        self._keys.append(k_BTKh.repeat_interleave(group, dim=2).transpose(1, 2))
        self._values.append(v_BTKh.repeat_interleave(group, dim=2).transpose(1, 2))
        q_BHTh = q_BTHh.transpose(1, 2) * q_BTHh.shape[-1] ** -0.5
        length = self._keys[0].shape[2]
        scores = q_BHTh @ self._keys[0].transpose(2, 3)
        slots_T = torch.arange(length, device=scores.device)
        own_N = slots_T if self._slots_N is None else self._slots_N
        unseen = slots_T > own_N[:, None]
        parts = [scores.float().masked_fill(unseen, float("-inf"))]
        for key in self._keys[1:]:
            parts.append((q_BHTh * key).sum(dim=-1, keepdim=True).float())
        weights = torch.softmax(torch.cat(parts, dim=-1), dim=-1).to(v_BTKh.dtype)
        mixed = weights[..., :length] @ self._values[0]
        for depth, value in enumerate(self._values[1:]):
            mixed = mixed + weights[..., length + depth : length + depth + 1] * value
        return mixed.transpose(1, 2).flatten(2)


@dataclass(frozen=True, slots=True)
class Drops:
    """With how many slots of a row each depth goes on; the same for the same tokens.

    Depth s keeps `share` ** s of the slots (at least LEAST of them), each among those of the depth
    before, so that what a slot attends to is there and deep guesses cost little (PARD, arXiv
    2504.18583). Training only: in evaluation every slot stays.
    """

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


def rotary_of(layer: HeadShape, device: torch.device) -> RotaryTable:
    """The rotations of a head's layer, with room for slots of drafts past the last position."""
    return RotaryTable(
        RopeShape(theta=layer.rope_theta, rotary_dim=layer.head_dim),
        max_positions=layer.max_position_embeddings + 16,
        like=torch.empty(0, device=device),
    )


def ahead(tokens_BT: Tensor, places: int) -> Tensor:
    """The token `places` places on; the row's end is filled with its last token."""
    return torch.cat((tokens_BT[:, places:], tokens_BT[:, -1:].expand(-1, places)), dim=1)
