"""What heads learn from: token rows with the target's hidden states, computed on the fly.

Owns the mix of the target's own samples and training text, and the pass through the frozen
target. Invariant: hidden states are those that serving keeps in its feature store, in the same
order (see `foretoken.kv.features`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.kv.features import FINAL
from foretoken.training.acceptance import greedy_runs
from foretoken.training.data import TrainingData
from foretoken.training.loop import autocast
from foretoken.training.model import Llama
from foretoken.training.pool import SAMPLE_LENGTH, SamplePool
from foretoken.training.schedule import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """One batch; B rows of T tokens."""

    tokens_BT: Tensor
    """int64."""
    features_BTF: Tensor
    """Hidden states at the points a head wants, side by side."""
    final_BTD: Tensor
    """After the target's last norm: position t's row gives the distribution of token t + 1."""


@torch.no_grad()
def capture(target: Llama, tokens_BT: Tensor, points: tuple[int, ...]) -> Captured:
    """Run the frozen target over rows and keep its hidden states at `points`."""
    rope = target.rope(0, tokens_BT.shape[1])
    hidden, kept = target.embed(tokens_BT), {}
    for index, block in enumerate(target.blocks):
        if index in points:
            kept[index] = hidden
        hidden, _ = block(hidden, rope)
    kept[FINAL] = final = target.norm(hidden)
    features = torch.cat([kept[point] for point in points], dim=-1)
    return Captured(tokens_BT=tokens_BT, features_BTF=features, final_BTD=final)


class CaptureSource:
    """Batches of captured rows, the same for the same part number."""

    def __init__(
        self,
        target: Llama,
        data: TrainingData,
        pool: SamplePool,
        *,
        points: tuple[int, ...],
        on_policy_share: float,
        precision: str = "bfloat16",
    ) -> None:
        """Read hidden states at `points`; `on_policy_share` of the rows are the target's own."""
        self._target, self._data, self._pool = target, data, pool
        self._points, self._precision = points, precision
        self._share = on_policy_share if pool.tokens else 0.0
        self.head_VD = target.embed.weight.detach()
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
