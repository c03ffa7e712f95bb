"""A fresh head for a target, and the task that trains it.

Owns first weights: embeddings, output heads and the vocabulary come from the target where the
format has a place for them.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from foretoken.checkpoint import find_model
from foretoken.errors import ConfigError
from foretoken.kv.features import FINAL
from foretoken.proposers.heads.eagle import Eagle
from foretoken.proposers.heads.eagle3.layers import Eagle3Shape
from foretoken.proposers.heads.eagle3.network import Eagle3
from foretoken.proposers.heads.medusa import Medusa, MedusaShape
from foretoken.proposers.heads.mlp import MLPShape, MLPSpeculator
from foretoken.proposers.heads.parts import HeadShape
from foretoken.training.heads.draft import DraftRollout, draft_net, require_draft_fits
from foretoken.training.heads.pard import ParallelRollout
from foretoken.training.heads.peagle import PEagleRollout, begin_with_eagle3
from foretoken.training.heads.rollout import (
    Eagle3Rollout,
    EagleRollout,
    MedusaRollout,
    MLPRollout,
    Rollout,
    rollout_loss,
    rollout_quality,
    token_loss,
)
from foretoken.training.heads.settings import HeadSettings
from foretoken.training.heads.target import Captured, TargetParts
from foretoken.training.loop import autocast, prepare
from foretoken.training.schedule import Stage
from foretoken.training.settings import Settings


@dataclass(frozen=True, slots=True)
class FreshHead:
    """A network, how it guesses, and what it reads from the target."""

    net: nn.Module
    rollout: Rollout
    points: tuple[int, ...]


def fresh_head(target: TargetParts, settings: Settings, frequent_ids: Tensor) -> FreshHead:
    """The head that `settings.head` describes.

    Args:
        target: frozen.
        settings: with a head.
        frequent_ids: all token ids, most frequent first, int64 [V].
    """
    head = settings.head
    assert head is not None, "a run of a head"
    require_fit(target, settings)
    makers = {
        "eagle": _eagle,
        "eagle3": _eagle3,
        "peagle": _peagle,
        "mlp": _mlp,
        "medusa": _medusa,
        "parallel": _parallel,
        "draft": _draft,
    }
    return makers[head.kind](target, settings, head, frequent_ids)


def head_points(target: TargetParts, head: HeadSettings) -> tuple[int, ...]:
    """Where a head of this kind reads hidden states.

    Raises:
        ConfigError: the target has too few layers.
    """
    return eagle3_points(target) if head.kind in ("eagle3", "peagle") else (FINAL,)


def require_fit(target: TargetParts, settings: Settings) -> None:
    """Raise ConfigError for a head that this target cannot have, before anything is done for it."""
    head = settings.head
    assert head is not None, "a run of a head"
    head_points(target, head)
    if head.kind in ("parallel", "draft"):
        require_draft_fits(target, settings, head.depth)
    below = f"below the target's {target.vocab_size}"
    if head.kind in ("parallel", "peagle") and head.mask_token_id >= target.vocab_size:
        raise ConfigError("head.mask_token_id", head.mask_token_id, below)
    if (head.draft_vocab_size or 0) > target.vocab_size:
        allowed = f"at most the target's {target.vocab_size}"
        raise ConfigError("head.draft_vocab_size", head.draft_vocab_size, allowed)


def _mlp(target: TargetParts, _: Settings, head: HeadSettings, __: Tensor) -> FreshHead:
    shape = MLPShape(
        vocab_size=target.vocab_size,
        emb_dim=target.hidden_size,
        inner_dim=head.inner_size,
        n_predict=head.depth,
        tie_weights=True,
        scale_input=True,
    )
    net = MLPSpeculator(shape)
    return FreshHead(net, MLPRollout(net), (FINAL,))


def _medusa(target: TargetParts, _: Settings, head: HeadSettings, __: Tensor) -> FreshHead:
    shape = MedusaShape(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        medusa_num_heads=head.depth,
        medusa_num_layers=head.num_layers,
        rank=head.inner_size,
        share_head=True,
    )
    net = Medusa(shape)
    return FreshHead(net, MedusaRollout(net, target.head_VD), (FINAL,))


def layer_shape(target: TargetParts, inner_size: int, layers: int = 1) -> HeadShape:
    """Decoder layers of the target's widths."""
    return HeadShape(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=inner_size,
        num_hidden_layers=layers,
        num_attention_heads=target.heads,
        num_key_value_heads=target.kv_heads,
        head_dim=target.head_dim,
        max_position_embeddings=target.max_positions,
        rms_norm_eps=target.norm_eps,
        rope_theta=target.rope_theta,
    )


def _eagle(target: TargetParts, _: Settings, head: HeadSettings, __: Tensor) -> FreshHead:
    net = Eagle(layer_shape(target, head.inner_size), fc_bias=False)
    net.use_embedding(target.embedding_VD)
    net.to(target.embedding_VD.device)
    return FreshHead(net, EagleRollout(net, target.head_VD), (FINAL,))


def _eagle3(
    target: TargetParts, _: Settings, head: HeadSettings, frequent_ids: Tensor
) -> FreshHead:
    net = _eagle3_net(target, head, frequent_ids)
    return FreshHead(net, Eagle3Rollout(net), eagle3_points(target))


def _peagle(
    target: TargetParts, _: Settings, head: HeadSettings, frequent_ids: Tensor
) -> FreshHead:
    net, points = _eagle3_net(target, head, frequent_ids), eagle3_points(target)
    if head.start is not None:
        facts = layer_shape(target, head.inner_size, target.layers)
        begin_with_eagle3(net, find_model(head.start), facts, points)
    return FreshHead(net, PEagleRollout(net, head.mask_token_id, head.keep_share), points)


def eagle3_points(target: TargetParts) -> tuple[int, ...]:
    """The layers whose inputs EAGLE-3 reads: the published default."""
    layers = target.layers
    points = (2, layers // 2, layers - 3)
    if len(set(points)) < 3 or min(points) < 0:
        raise ConfigError("target", f"{layers} layers", "a target of 7 layers or more for eagle3")
    return points


def _eagle3_net(target: TargetParts, head: HeadSettings, frequent_ids: Tensor) -> Eagle3:
    count = head.draft_vocab_size or target.vocab_size
    parallel = head.kind == "peagle"
    net = Eagle3(
        Eagle3Shape(
            layer=layer_shape(target, head.inner_size, head.num_layers if parallel else 1),
            draft_vocab_size=count,
            target_hidden_size=target.hidden_size,
            parallel=parallel,
            anchored=parallel and head.anchored,
            mask_depths=max(1, head.depth - 1) if parallel and head.anchored else 1,
        )
    )
    ids = frequent_ids[:count].sort().values
    with torch.no_grad():
        net.d2t.copy_(ids - torch.arange(count))
        net.lm_head.weight.copy_(target.head_VD[ids])
        if target.norm_D is not None:
            net.norm.weight.copy_(target.norm_D)
    net.use_embedding(target.embedding_VD)
    net.to(target.embedding_VD.device)
    return net


def _parallel(target: TargetParts, settings: Settings, head: HeadSettings, _: Tensor) -> FreshHead:
    net = draft_net(target, settings, head)
    return FreshHead(net, ParallelRollout(net, head.mask_token_id, head.keep_share), (FINAL,))


def _draft(target: TargetParts, settings: Settings, head: HeadSettings, _: Tensor) -> FreshHead:
    net = draft_net(target, settings, head)
    prepare(net, settings)
    return FreshHead(net, DraftRollout(net), (FINAL,))


class Source(Protocol):
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
    """A `Task`: the rollout's loss on captured rows, its agreement on held-out greedy text."""

    def __init__(self, head: FreshHead, settings: Settings, source: Source) -> None:
        """Train `head` on what `source` gives."""
        assert settings.head is not None, "a run of a head"
        self.head, self.source = head, source
        self.depth_settings, self.tv_share = settings.head, settings.tv_share
        self._precision = settings.precision
        first = settings.stages[0]
        head.rollout.begin(source.batch(0, max(settings.micro_tokens, first.length), first))
        self._held_out: Captured | None = None

    def loss(self, index: int, tokens: int, stage: Stage) -> Tensor:
        """Mean divergence, or cross entropy if `stage` says so, of part `index`, in nats."""
        captured = self.source.batch(index, tokens, stage)
        with autocast(self.source.device, self._precision):
            if stage.loss == "tokens":
                return token_loss(self.head.rollout, captured, self.depth_settings)
            return rollout_loss(
                self.head.rollout,
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
            found = rollout_quality(
                self.head.rollout, self._held_out, self.depth_settings.depth, self.source.logits
            )
        depths = {f"depth_{i + 1}": share for i, share in enumerate(found.agreement)}
        return {"tokens_a_step": found.length, **depths}
