"""What a head's run optimizes: the target's distribution at every depth of its guesses.

The loss is the mean over depths of the divergence between the head's distribution and the target's
for the same token, or of the cross entropy of the row's own token, weighted by
depth_decay ** depth. A `RowSource` gives the rows; it is the target's answers, or anything else.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.training.heads.guesses import Guess, Guesser
from foretoken.training.heads.kind import FreshHead
from foretoken.training.heads.target import Captured
from foretoken.training.losses import Head, distance, head_loss
from foretoken.training.precision import autocast
from foretoken.training.schedule import Stage
from foretoken.training.settings import HeadSettings, Settings


class RowSource(Protocol):
    """What a head learns from, and is measured on."""

    head_VD: Tensor
    """The target's output head."""
    device: torch.device

    def batch(self, index: int, tokens: int, stage: Stage) -> Captured:
        """Part `index`: `tokens` tokens in rows as `stage` says; the same for the same part."""
        ...

    def held_out(self) -> Captured:
        """The target's own greedy text after held-out prompts."""
        ...

    def logits(self, states: Tensor) -> Tensor:
        """The target's logits of its hidden states."""
        ...


class HeadTraining:
    """A `Task`: the loss of a head's guesses on rows, its agreement on held-out greedy text."""

    def __init__(self, head: FreshHead, settings: Settings, source: RowSource) -> None:
        self.head, self.source = head, source
        self.depth_settings, self.tv_share = settings.of_head, settings.tv_share
        self._precision = settings.precision
        first = settings.stages[0]
        head.guesser.begin(source.batch(0, max(settings.micro_tokens, first.length), first))
        self._held_out: Captured | None = None

    def loss(self, index: int, tokens: int, stage: Stage) -> Tensor:
        """Mean divergence, or cross entropy if `stage` says so, of part `index`, in nats."""
        captured = replace(self.source.batch(index, tokens, stage), part=index)
        with autocast(self.source.device, self._precision):
            if stage.loss == "tokens":
                return token_loss(self.head.guesser, captured, self.depth_settings)
            return divergence_loss(
                self.head.guesser,
                captured,
                self.depth_settings,
                self.source.head_VD,
                self.tv_share,
            )

    def evaluate(self) -> dict[str, float]:
        """Greedy agreement per depth, and tokens a step, on the target's held-out greedy text."""
        with autocast(self.source.device, self._precision):
            if self._held_out is None:
                self._held_out = self.source.held_out()
            found = guess_quality(
                self.head.guesser, self._held_out, self.depth_settings.depth, self.source.logits
            )
        depths = {f"depth_{i + 1}": share for i, share in enumerate(found.agreement)}
        return {"tokens_a_step": found.length, **depths}


def divergence_loss(
    guesser: Guesser,
    captured: Captured,
    settings: HeadSettings,
    target_head_VD: Tensor,
    tv_share: float,
) -> Tensor:
    """The mean divergence over depths, in nats.

    A head that judges its guesses learns the chance that each is accepted beside it, by the cross
    entropy of that judgement.
    """
    length = captured.tokens_BT.shape[1]

    def divergence(guess: Guess, depth: int) -> Tensor:
        whole = guess.ids_V is None or guess.sure_BT is not None
        wanted = target_head_VD if whole else target_head_VD[guess.ids_V]
        states_BND, slots = guess.within(length - 1 - depth)
        count, added = states_BND.shape[1], None
        if guess.added is not None:
            added = Head(guess.added.hidden[:, :count].flatten(0, 1), guess.added.weight)
        found = distance(
            Head(states_BND.flatten(0, 1), guess.weight_VD),
            Head(captured.final_BTD[:, 1 + depth :][:, slots].flatten(0, 1), wanted),
            tv_share,
            added=added,
            ids_V=guess.ids_V if whole else None,
        )
        if guess.sure_BT is None:
            return found.loss
        sure_R = guess.sure_BT[:, :count].flatten()
        return found.loss + F.binary_cross_entropy_with_logits(sure_R, found.overlap)

    return _over_depths(guesser, captured, settings, divergence)


def token_loss(guesser: Guesser, captured: Captured, settings: HeadSettings) -> Tensor:
    """The mean cross entropy of the rows' own tokens over depths, in nats.

    Tokens that the head cannot draft do not count. So Medusa heads and MLP speculators were
    trained by their authors, the latter on text first and on the target's answers then.
    """
    tokens_BT = captured.tokens_BT
    length = tokens_BT.shape[1]

    def cross_entropy(guess: Guess, depth: int) -> Tensor:
        assert guess.added is None, "a head that adds to its logits learns distributions"
        states_BND, slots = guess.within(length - 2 - depth)
        wanted = tokens_BT[:, 2 + depth :][:, slots].flatten()
        return head_loss(states_BND.flatten(0, 1), guess.weight_VD, _columns(wanted, guess.ids_V))

    return _over_depths(guesser, captured, settings, cross_entropy)


def _columns(tokens_R: Tensor, ids_V: Tensor | None) -> Tensor:
    """Where tokens stand among ascending `ids_V`; -1 for those that do not."""
    if ids_V is None:
        return tokens_R
    place_R = torch.searchsorted(ids_V, tokens_R).clamp_(max=len(ids_V) - 1)
    return torch.where(ids_V[place_R] == tokens_R, place_R, -1)


def _over_depths(
    guesser: Guesser,
    captured: Captured,
    settings: HeadSettings,
    loss: Callable[[Guess, int], Tensor],
) -> Tensor:
    total, weights = captured.final_BTD.new_zeros((), dtype=torch.float32), 0.0
    for depth, guess in enumerate(guesser.guesses(captured, settings.depth)):
        weight = settings.depth_decay**depth
        total, weights = total + weight * loss(guess, depth), weights + weight
    return total / weights


@dataclass(frozen=True, slots=True, kw_only=True)
class GuessQuality:
    """How often greedy guesses agree with the target's best token."""

    agreement: tuple[float, ...]
    """Per depth, given that every depth before agreed."""
    length: float
    """Tokens a verification that follow from it, the bonus token included."""


@torch.no_grad()
def guess_quality(
    guesser: Guesser, captured: Captured, depth: int, target_logits: Callable[[Tensor], Tensor]
) -> GuessQuality:
    """Measure greedy agreement on captured greedy text, depth by depth."""
    length = captured.tokens_BT.shape[1]
    best_BT = target_logits(captured.final_BTD).argmax(dim=-1)
    alive = torch.ones(captured.tokens_BT.shape, dtype=torch.bool, device=best_BT.device)
    shares, survival, total = [], 1.0, 1.0
    for step, guess in enumerate(guesser.guesses(captured, depth)):
        rows = length - 1 - step
        assert guess.slots_N is None or len(guess.slots_N) == length, "measured on all slots"
        drafted = guess.logits(rows).argmax(dim=-1)
        if guess.ids_V is not None:
            drafted = guess.ids_V[drafted]
        agree = drafted == best_BT[:, 1 + step :]
        before = alive[:, :rows]
        shares.append(float((agree & before).sum() / before.sum().clamp(min=1)))
        alive = before & agree
        survival *= shares[-1]
        total += survival
    return GuessQuality(agreement=tuple(shares), length=total)
