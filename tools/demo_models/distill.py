"""Draft models distilled from the packaged target.

Owns the draft's first weights and the distillation task. It does not know how the draft is used.
Invariant: the target's weights never change.
"""

from pathlib import Path

import torch
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.training.llama import Llama
from foretoken.training.loop import Job, prepare
from foretoken.training.losses import Head, distance
from foretoken.training.precision import autocast
from foretoken.training.schedule import Stage
from tools.demo_models.acceptance import GreedyRun, greedy_runs, measure
from tools.demo_models.batches import MadeAhead
from tools.demo_models.pool import SAMPLE_LENGTH, SamplePool, open_inputs
from tools.demo_models.recipe import Recipe


def begin_with_last_layers(draft: Llama, target: Llama) -> None:
    """Give `draft` the target's embedding, last norm and last layers.

    Raises:
        ConfigError: a size of the draft differs from the target's.
    """
    for field in ("vocab_size", "hidden_size", "heads", "kv_heads", "ffn_size"):
        wanted, given = getattr(target.shape, field), getattr(draft.shape, field)
        if wanted != given:
            raise ConfigError(f"shape.{field}", given, f"the target's {wanted}")
    draft.embed_tokens.load_state_dict(target.embed_tokens.state_dict())
    draft.norm.load_state_dict(target.norm.state_dict())
    last = target.layers[target.shape.layers - draft.shape.layers :]
    draft.layers.load_state_dict(last.state_dict())


class Distillation:
    """Match the target's distributions on training text and on the target's own samples."""

    def __init__(self, draft: Llama, target: Llama, data: MadeAhead, pool: SamplePool) -> None:
        self.draft, self.target, self.data, self.pool = draft, target, data, pool
        self.device = target.embed_tokens.weight.device
        self.on_policy_share, self.tv_share, self.precision = 0.5, 0.5, "auto"
        self.runs: list[GreedyRun] = []

    def _tokens(self, index: int, tokens: int, length: int) -> Tensor:
        share = self.on_policy_share if length < SAMPLE_LENGTH else 0.0
        own = round(tokens // length * share)
        rest = self.data.batch(index, tokens - own * length, length).tokens
        return rest if own == 0 else torch.cat((self.pool.rows(own, length, index), rest))

    def loss(self, index: int, tokens: int, stage: Stage) -> Tensor:
        """Mean divergence of part `index`, in nats."""
        rows = self._tokens(index, tokens, stage.length).to(self.device)
        with autocast(self.device, self.precision):
            with torch.no_grad():
                wanted = self.target.hidden(rows).flatten(0, 1)
            hidden = self.draft.hidden(rows).flatten(0, 1)
            return distance(
                Head(hidden, self.draft.embed_tokens.weight),
                Head(wanted, self.target.embed_tokens.weight),
                self.tv_share,
            ).loss

    def evaluate(self) -> dict[str, float]:
        """Agreement and acceptance length on the target's greedy text."""
        self.runs = self.runs or greedy_runs(self.target, self.data.tokenizer)
        plain, edits = (measure(self.draft, run) for run in self.runs)
        return {
            "agreement": plain.agreement,
            "tokens_a_step": plain.length,
            "overlap": plain.overlap,
            "edit_tokens_a_step": edits.length,
        }


def build_draft_job(recipe: Recipe, source: Path, folder: Path) -> Job:
    """A draft that begins with what the target has, and its task.

    The samples are those that `folder` holds by now.
    """
    settings, given = recipe.settings, open_inputs(recipe, source, folder)
    torch.manual_seed(settings.seed)
    draft = Llama(settings.shape)
    begin_with_last_layers(draft, given.target)
    draft.to(given.target.embed_tokens.weight.device)
    task = Distillation(draft, given.target, given.data, given.pool)
    task.tv_share, task.precision = settings.tv_share, settings.precision
    task.on_policy_share = recipe.on_policy_share if given.pool.tokens else 0.0
    prepare(draft, settings)
    prepare(given.target, settings)
    return Job(draft, task)
