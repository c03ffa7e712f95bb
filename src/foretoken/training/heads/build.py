"""A fresh head for a target, and the task that trains it.

Owns first weights: embeddings, output heads and the vocabulary come from the target where the
format has a place for them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from foretoken.checkpoint import find_model
from foretoken.errors import ConfigError
from foretoken.heads.eagle3 import Eagle3, Eagle3Shape
from foretoken.heads.medusa import Medusa, MedusaShape
from foretoken.heads.mlp import MLPShape, MLPSpeculator
from foretoken.heads.parts import HeadShape
from foretoken.kv.features import FINAL
from foretoken.training.acceptance import greedy_runs
from foretoken.training.corpus import load_corpus
from foretoken.training.crew import Job
from foretoken.training.data import TrainingData
from foretoken.training.distill import SamplePool, begin_with, first_draft, grow_pool, read_target
from foretoken.training.export import copy_tokenizer
from foretoken.training.heads.capture import Captured, CaptureSource, capture
from foretoken.training.heads.settings import HeadSettings
from foretoken.training.heads.tasks import (
    Eagle3Rollout,
    MedusaRollout,
    MLPRollout,
    ParallelRollout,
    Rollout,
    rollout_loss,
    rollout_quality,
)
from foretoken.training.loop import Progress, Trainer, autocast, prepare, run_folder
from foretoken.training.model import Llama
from foretoken.training.settings import Settings


@dataclass(frozen=True, slots=True)
class FreshHead:
    """A network, how it guesses, and what it reads from the target."""

    net: nn.Module
    rollout: Rollout
    points: tuple[int, ...]


def fresh_head(target: Llama, settings: Settings, frequent_ids: Tensor) -> FreshHead:
    """The head that `settings.head` describes.

    Args:
        target: frozen.
        settings: with a head.
        frequent_ids: all token ids, most frequent first, int64 [V].
    """
    head = settings.head
    assert head is not None, "a run of a head"
    makers = {"mlp": _mlp, "medusa": _medusa, "eagle3": _eagle3, "parallel": _parallel}
    return makers[head.kind](target, settings, head, frequent_ids)


def _mlp(target: Llama, _: Settings, head: HeadSettings, __: Tensor) -> FreshHead:
    shape = MLPShape(
        vocab_size=target.shape.vocab_size,
        emb_dim=target.shape.hidden_size,
        inner_dim=head.inner_size,
        n_predict=head.depth,
        tie_weights=True,
        scale_input=True,
    )
    net = MLPSpeculator(shape)
    return FreshHead(net, MLPRollout(net), (FINAL,))


def _medusa(target: Llama, _: Settings, head: HeadSettings, __: Tensor) -> FreshHead:
    shape = MedusaShape(
        hidden_size=target.shape.hidden_size,
        vocab_size=target.shape.vocab_size,
        medusa_num_heads=head.depth,
        medusa_num_layers=head.num_layers,
        rank=head.inner_size,
        share_head=True,
    )
    net = Medusa(shape)
    return FreshHead(net, MedusaRollout(net, target.embed.weight), (FINAL,))


def layer_shape(target: Llama, inner_size: int) -> HeadShape:
    """One decoder layer of the target's widths."""
    shape = target.shape
    return HeadShape(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=inner_size,
        num_hidden_layers=1,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        rms_norm_eps=shape.norm_eps,
        rope_theta=shape.rope_theta,
    )


def _eagle3(target: Llama, _: Settings, head: HeadSettings, frequent_ids: Tensor) -> FreshHead:
    count = head.draft_vocab_size or target.shape.vocab_size
    if count > target.shape.vocab_size:
        allowed = f"at most the target's {target.shape.vocab_size}"
        raise ConfigError("head.draft_vocab_size", count, allowed)
    layers = target.shape.layers
    net = Eagle3(
        Eagle3Shape(
            layer=layer_shape(target, head.inner_size),
            draft_vocab_size=count,
            target_hidden_size=target.shape.hidden_size,
        )
    )
    ids = frequent_ids[:count].sort().values
    with torch.no_grad():
        net.d2t.copy_(ids - torch.arange(count))
        net.lm_head.weight.copy_(target.embed.weight[ids])
        net.norm.weight.copy_(target.norm.weight)
    net.use_embedding(target.embed.weight.detach())
    net.to(target.embed.weight.device)
    return FreshHead(net, Eagle3Rollout(net), (2, layers // 2, layers - 3))


def _parallel(target: Llama, settings: Settings, head: HeadSettings, _: Tensor) -> FreshHead:
    net = first_draft(target, settings)
    if head.start is not None:
        begin_with(net, read_target(find_model(head.start)))
    return FreshHead(net, ParallelRollout(net, head.mask_token_id), (FINAL,))


class HeadTraining:
    """A `Task`: the rollout's loss on captured rows, its agreement on held-out greedy text."""

    def __init__(self, head: FreshHead, settings: Settings, source: CaptureSource) -> None:
        """Train `head` on what `source` gives."""
        assert settings.head is not None, "a run of a head"
        self.head, self.source = head, source
        self.depth_settings, self.tv_share = settings.head, settings.tv_share
        self._held_out: Captured | None = None

    def loss(self, index: int, tokens: int, length: int) -> Tensor:
        """Mean divergence of part `index`, in nats."""
        captured = self.source.batch(index, tokens, length)
        with autocast(self.source.device):
            return rollout_loss(
                self.head.rollout,
                captured,
                self.depth_settings,
                self.source.target.embed.weight.detach(),
                self.tv_share,
            )

    def evaluate(self) -> dict[str, float]:
        """Greedy agreement per depth, and tokens a step, on the target's held-out greedy text."""
        target = self.source.target
        with autocast(self.source.device):
            if self._held_out is None:
                run = greedy_runs(target, self.source.tokenizer)[0]
                self._held_out = capture(target, run.tokens, self.head.points)
            found = rollout_quality(
                self.head.rollout, self._held_out, self.depth_settings.depth, target.logits
            )
        depths = {f"depth_{i + 1}": share for i, share in enumerate(found.agreement)}
        return {"tokens_a_step": found.length, **depths}


def build_head_job(settings: Settings, source: Path, folder: Path) -> Job:
    """A fresh head and its task; the samples are those that `folder` holds by now."""
    target = read_target(source)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    data = TrainingData(load_corpus(), tokenizer, settings.mix, settings.seed)
    pool = SamplePool(data, folder / "samples")
    torch.manual_seed(settings.seed)
    head = fresh_head(target, settings, pool.frequent_ids(target.shape.vocab_size))
    head.net.to(target.embed.weight.device)
    captured = CaptureSource(
        target,
        data,
        pool,
        points=head.points,
        on_policy_share=settings.on_policy_share,
    )
    prepare(target, settings)
    return Job(head.net, HeadTraining(head, settings, captured))


def train_head(settings: Settings, out: Path | None, report: Callable[[str], None]) -> Progress:
    """Train a head of `settings.target` until the budget ends; grows the sample pool first."""
    if settings.target is None:
        raise ConfigError("target", None, "the folder of the target that the head is for")
    source = Path(settings.target).expanduser()
    folder = run_folder(settings, out)
    copy_tokenizer(source, folder)
    grow_pool(settings, source, folder / "samples", report)
    build = partial(build_head_job, settings, source, folder)
    return Trainer(build(), settings, folder, build).run(report)
