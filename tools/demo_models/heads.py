"""Heads for the packaged target: their rows, and the task that trains on them.

Owns the mix of the target's own samples and training text, and the pass through the frozen target,
which keeps nothing. Invariant: hidden states are those that serving keeps in its feature store, in
the same order (see `foretoken.kv.features`).
"""

from pathlib import Path

import torch
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.kv.features import FINAL
from foretoken.training.heads.kind import fresh_head
from foretoken.training.heads.target import Captured, TargetParts
from foretoken.training.heads.task import HeadTraining
from foretoken.training.llama import Llama
from foretoken.training.loop import Job, prepare
from foretoken.training.precision import autocast
from foretoken.training.schedule import Stage
from tools.demo_models.acceptance import greedy_runs
from tools.demo_models.batches import MadeAhead
from tools.demo_models.distill import begin_with_last_layers
from tools.demo_models.pool import SAMPLE_LENGTH, SamplePool, open_inputs
from tools.demo_models.recipe import Recipe


@torch.no_grad()
def capture(target: Llama, tokens_BT: Tensor, points: tuple[int, ...]) -> Captured:
    """Run the frozen target over rows and keep its hidden states at `points`."""
    kept = target(tokens_BT, use_cache=False, output_hidden_states=True).hidden_states
    features = torch.cat([kept[point] for point in points], dim=-1)
    return Captured(tokens_BT=tokens_BT, features_BTF=features, final_BTD=kept[FINAL])


class CaptureSource:
    """Batches of captured rows, the same for the same part number."""

    def __init__(
        self,
        target: Llama,
        data: MadeAhead,
        pool: SamplePool,
        *,
        points: tuple[int, ...],
        on_policy_share: float,
        precision: str = "auto",
    ) -> None:
        """Read hidden states at `points`; `on_policy_share` of the rows are the target's own."""
        self._target, self._data, self._pool = target, data, pool
        self._points, self._precision = points, precision
        self._share = on_policy_share if pool.tokens else 0.0
        self.head_VD = target.embed_tokens.weight.detach()
        self.device = self.head_VD.device

    def batch(self, index: int, tokens: int, stage: Stage) -> Captured:
        """Part `index`: `tokens` tokens in rows as `stage` says."""
        length = stage.length
        mixed = self._share if length < SAMPLE_LENGTH else 0.0
        share = {"text": 0.0, "answers": 1.0}.get(stage.rows or "", mixed)
        own = round(tokens // length * share)
        parts = [] if own == 0 else [self._pool.rows(own, length, index)]
        if tokens > own * length:
            parts.append(self._data.batch(index, tokens - own * length, length).tokens)
        rows = torch.cat(parts)
        with autocast(self.device, self._precision):
            return capture(self._target, rows.to(self.device), self._points)

    def held_out(self) -> Captured:
        """The target's greedy text after held-out functions."""
        run = greedy_runs(self._target, self._data.tokenizer)[0]
        return capture(self._target, run.tokens, self._points)

    def logits(self, states: Tensor) -> Tensor:
        """The target's logits of its final hidden states."""
        return self._target.logits(states)


def require_answers(stages: tuple[Stage, ...], pool: SamplePool) -> None:
    """Raise ConfigError for a stage of answers that the target's samples cannot fill."""
    for stage in stages:
        if stage.rows == "answers" and not pool.tokens:
            raise ConfigError("stages.rows", stage.rows, "text, or pool_tokens above 0")
        if stage.rows == "answers" and stage.length >= SAMPLE_LENGTH:
            allowed = f"below {SAMPLE_LENGTH}, the length of the target's samples"
            raise ConfigError("stages.length", stage.length, allowed)


def parts_of(target: Llama) -> TargetParts:
    """What a fresh head takes from a frozen target of the training code's layout."""
    shape, table = target.shape, target.embed_tokens.weight.detach()
    return TargetParts(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_positions=shape.max_positions,
        norm_eps=shape.norm_eps,
        rope_theta=shape.rope_theta,
        embedding_VD=table,
        head_VD=table,
        norm_D=target.norm.weight.detach(),
    )


def build_head_job(recipe: Recipe, source: Path, folder: Path) -> Job:
    """A fresh head and its task; the samples are those that `folder` holds by now."""
    settings, given = recipe.settings, open_inputs(recipe, source, folder)
    assert settings.head is not None, "a run of a head"
    require_answers(settings.stages, given.pool)
    target = given.target
    torch.manual_seed(settings.seed)
    frequent = given.pool.frequent_ids(target.shape.vocab_size)
    head = fresh_head(parts_of(target), settings, frequent)
    if isinstance(head.net, Llama) and settings.head.start is None:
        begin_with_last_layers(head.net, target)
    head.net.to(target.embed_tokens.weight.device)
    captured = CaptureSource(
        target,
        given.data,
        given.pool,
        points=head.points,
        on_policy_share=recipe.on_policy_share,
        precision=settings.precision,
    )
    prepare(target, settings)
    return Job(head.net, HeadTraining(head, settings, captured))
