"""The losses of head networks: the target's distribution at every depth of a rollout.

Each loss is the mean over depths of the divergence between the head's distribution and the
target's for the same token, or of the cross entropy of the row's own token, weighted by
depth_decay ** depth. Position t's final hidden state
gives the target's distribution of token t + 1; a rollout from slot t guesses tokens t + 2, t + 3,
... from true tokens before each (teacher forcing), but from its own states.

Sources: EAGLE (arXiv 2401.15077), EAGLE-3 (2503.01840), Medusa (2401.10774), MLP speculators
(2404.19124); the divergence is that of `foretoken.training.losses`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.layers.rope import RotaryTable
from foretoken.proposers.heads.eagle import Eagle
from foretoken.proposers.heads.eagle3.network import Eagle3
from foretoken.proposers.heads.medusa import Medusa
from foretoken.proposers.heads.mlp import MLPSpeculator
from foretoken.proposers.heads.parts import HeadShape
from foretoken.shape import RopeShape
from foretoken.training.heads.depth_attention import DepthAttention
from foretoken.training.heads.settings import HeadSettings
from foretoken.training.heads.target import Captured
from foretoken.training.losses import Head, distillation_loss, head_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """A head's guesses of one depth."""

    states_BTD: Tensor
    """What `weight_VD` turns into logits; the row of slot t guesses token t + 2 + depth."""
    weight_VD: Tensor
    ids_V: Tensor | None = None
    """Target ids of the weight's rows; None: all, in order."""
    slots_N: Tensor | None = None
    """The slots that have a row, ascending, int64; None: all."""

    def within(self, rows: int) -> tuple[Tensor, Tensor | slice]:
        """The states of slots below `rows`, and those slots."""
        if self.slots_N is None:
            return self.states_BTD[:, :rows], slice(0, rows)
        count = int((self.slots_N < rows).sum())
        return self.states_BTD[:, :count], self.slots_N[:count]


class Rollout(ABC):
    """How one kind of head guesses, depth after depth."""

    def begin(self, captured: Captured) -> None:  # noqa: B027
        """Set first weights that depend on what the target's features are like; most have none."""

    @abstractmethod
    def guesses(self, captured: Captured, depth: int) -> Iterator[Guess]:
        """`depth` guesses; of depth s all rows but the last s + 2 count."""


class MLPRollout(Rollout):
    """Stages from the final hidden state, each given the true token."""

    def __init__(self, net: MLPSpeculator) -> None:
        """Train `net`."""
        self.net = net

    def guesses(self, captured: Captured, depth: int) -> Iterator[Guess]:
        """One stage a depth."""
        state = self.net.start(captured.final_BTD)
        for stage in range(depth):
            state = self.net.advance(stage, state, ahead(captured.tokens_BT, stage + 1))
            own = 0 if self.net.shape.tie_weights else stage
            head = self.net.head[own]
            assert isinstance(head, nn.Linear), type(head)
            yield Guess(states_BTD=state, weight_VD=head.weight)


class MedusaRollout(Rollout):
    """Independent heads on the final hidden state, over the target's own output head."""

    def __init__(self, net: Medusa, target_head_VD: Tensor) -> None:
        """Train `net`, whose shape must share the target's head."""
        assert net.shape.share_head, "a head of its own is not trained here"
        self.net, self._head = net, target_head_VD.detach()

    def guesses(self, captured: Captured, depth: int) -> Iterator[Guess]:
        """One head a depth."""
        states = self.net.states(captured.final_BTD, depth)
        for k in range(depth):
            yield Guess(states_BTD=states[..., k, :], weight_VD=self._head)


class Eagle3Rollout(Rollout):
    """The training-time test: each depth continues from the head's own output."""

    def __init__(self, net: Eagle3) -> None:
        """Train `net`, whose embedding must be in place."""
        self.net = net
        layer = net.shape.layer
        self._rotary = rotary_of(layer, net.fc.weight.device)
        whole = net.shape.draft_vocab_size == layer.vocab_size
        self._ids = None if whole else net.target_ids

    def guesses(self, captured: Captured, depth: int) -> Iterator[Guess]:
        """One pass over all slots a depth."""
        net = self.net
        for hidden in _recur(net, self._rotary, captured, depth):
            normed = hidden if net.shape.norm_output else net.norm(hidden)
            yield Guess(states_BTD=normed, weight_VD=net.lm_head.weight, ids_V=self._ids)


class EagleRollout(Rollout):
    """EAGLE 1 and 2: each depth continues from the head's own guess at the feature.

    The target's own output head turns guesses into logits. The divergence at several depths takes
    the place of the papers' regression on features.
    """

    def __init__(self, net: Eagle, target_head_VD: Tensor) -> None:
        """Train `net`, whose embedding must be in place."""
        self.net, self._head = net, target_head_VD.detach()
        self._rotary = rotary_of(net.shape, net.fc.weight.device)

    def guesses(self, captured: Captured, depth: int) -> Iterator[Guess]:
        """One pass over all slots a depth."""
        for hidden in _recur(self.net, self._rotary, captured, depth):
            yield Guess(states_BTD=hidden, weight_VD=self._head)


def rotary_of(layer: HeadShape, device: torch.device) -> RotaryTable:
    """The rotations of a head's layer, with room for slots of drafts past the last position."""
    return RotaryTable(
        RopeShape(theta=layer.rope_theta, rotary_dim=layer.head_dim),
        max_positions=layer.max_position_embeddings + 16,
        like=torch.empty(0, device=device),
    )


def _recur(
    net: Eagle | Eagle3, rotary: RotaryTable, captured: Captured, depth: int
) -> Iterator[Tensor]:
    """Outputs [B, T, D] of `depth` passes, the first from true features, each from the last's."""
    attends = [DepthAttention() for _ in net.layers]
    hidden = net.mix(captured.features_BTF)
    slots = torch.arange(hidden.shape[1], device=hidden.device)
    for step in range(depth):
        tokens = ahead(captured.tokens_BT, step + 1)
        hidden = net(tokens, hidden, rotary.at(slots + step), attends)
        yield hidden


def ahead(tokens_BT: Tensor, places: int) -> Tensor:
    """The token `places` places on; the row's end is filled with its last token."""
    return torch.cat((tokens_BT[:, places:], tokens_BT[:, -1:].expand(-1, places)), dim=1)


def rollout_loss(
    rollout: Rollout,
    captured: Captured,
    settings: HeadSettings,
    target_head_VD: Tensor,
    tv_share: float,
) -> Tensor:
    """The mean divergence over depths, in nats."""
    length = captured.tokens_BT.shape[1]

    def divergence(guess: Guess, depth: int) -> Tensor:
        wanted = target_head_VD if guess.ids_V is None else target_head_VD[guess.ids_V]
        states_BND, slots = guess.within(length - 1 - depth)
        return distillation_loss(
            Head(states_BND.flatten(0, 1), guess.weight_VD),
            Head(captured.final_BTD[:, 1 + depth :][:, slots].flatten(0, 1), wanted),
            tv_share,
        )

    return _over_depths(rollout, captured, settings, divergence)


def token_loss(rollout: Rollout, captured: Captured, settings: HeadSettings) -> Tensor:
    """The mean cross entropy of the rows' own tokens over depths, in nats.

    Tokens that the head cannot draft do not count. So Medusa heads and MLP speculators were
    trained by their authors, the latter on text first and on the target's answers then.
    """
    tokens_BT = captured.tokens_BT
    length = tokens_BT.shape[1]

    def cross_entropy(guess: Guess, depth: int) -> Tensor:
        states_BND, slots = guess.within(length - 2 - depth)
        wanted = tokens_BT[:, 2 + depth :][:, slots].flatten()
        return head_loss(states_BND.flatten(0, 1), guess.weight_VD, _columns(wanted, guess.ids_V))

    return _over_depths(rollout, captured, settings, cross_entropy)


def _columns(tokens_R: Tensor, ids_V: Tensor | None) -> Tensor:
    """Where tokens stand among ascending `ids_V`; -1 for those that do not."""
    if ids_V is None:
        return tokens_R
    place_R = torch.searchsorted(ids_V, tokens_R).clamp_(max=len(ids_V) - 1)
    return torch.where(ids_V[place_R] == tokens_R, place_R, -1)


def _over_depths(
    rollout: Rollout,
    captured: Captured,
    settings: HeadSettings,
    loss: Callable[[Guess, int], Tensor],
) -> Tensor:
    """The weighted mean of a loss of each depth's guess."""
    total, weights = captured.final_BTD.new_zeros((), dtype=torch.float32), 0.0
    for depth, guess in enumerate(rollout.guesses(captured, settings.depth)):
        weight = settings.depth_decay**depth
        total, weights = total + weight * loss(guess, depth), weights + weight
    return total / weights


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutQuality:
    """How often greedy guesses agree with the target's best token."""

    agreement: tuple[float, ...]
    """Per depth, given that every depth before agreed."""
    length: float
    """Tokens a verification that follow from it, the bonus token included."""


@torch.no_grad()
def rollout_quality(
    rollout: Rollout, captured: Captured, depth: int, target_logits: Callable[[Tensor], Tensor]
) -> RolloutQuality:
    """Measure greedy agreement on captured greedy text, depth by depth."""
    length = captured.tokens_BT.shape[1]
    best_BT = target_logits(captured.final_BTD).argmax(dim=-1)
    alive = torch.ones(captured.tokens_BT.shape, dtype=torch.bool, device=best_BT.device)
    shares, survival, total = [], 1.0, 1.0
    for step, guess in enumerate(rollout.guesses(captured, depth)):
        rows = length - 1 - step
        assert guess.slots_N is None or len(guess.slots_N) == length, "measured on all slots"
        drafted = F.linear(guess.states_BTD[:, :rows], guess.weight_VD).argmax(dim=-1)
        if guess.ids_V is not None:
            drafted = guess.ids_V[drafted]
        agree = drafted == best_BT[:, 1 + step :]
        before = alive[:, :rows]
        shares.append(float((agree & before).sum() / before.sum().clamp(min=1)))
        alive = before & agree
        survival *= shares[-1]
        total += survival
    return RolloutQuality(agreement=tuple(shares), length=total)
