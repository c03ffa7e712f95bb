"""A language model of Python sources: how `demo` was made.

Owns the task of next-token prediction and the run's set-up. Export is a separate step, so that a
run can be exported while it goes on.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from foretoken.training.llama import Llama
from foretoken.training.loop import (
    Job,
    Progress,
    Trainer,
    pick_device,
    prepare,
    tell_compiling,
)
from foretoken.training.losses import head_loss
from foretoken.training.precision import autocast
from foretoken.training.ranks import Ranks
from foretoken.training.run_folder import folder_of, write_provenance
from foretoken.training.schedule import Stage
from foretoken.training.settings import LlamaShape
from tools.demo_models.batches import (
    Batch,
    MadeAhead,
    bytes_per_token,
    held_out_rows,
    read_training_data,
)
from tools.demo_models.manifest import corpus_digest, difference, package_difference
from tools.demo_models.recipe import Recipe
from tools.demo_models.tokenizer import save_tokenizer, train_tokenizer
from tools.python_text.stdlib import load_corpus

EVALUATION_ROWS, EVALUATION_LENGTH = 24, 512
NATS_PER_BIT = 0.6931471805599453


def make_tokenizer(folder: Path, shape: LlamaShape) -> None:
    """Train the run's tokenizer on first use and keep it in the run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "tokenizer.json").exists():
        texts = (file.text for file in load_corpus().training)
        save_tokenizer(train_tokenizer(texts, shape.vocab_size), folder, shape.max_positions)


def token_loss(model: Llama, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross entropy in nats of int64 targets [B, T]; targets below 0 do not count."""
    hidden = model.hidden(tokens_BT).flatten(0, 1)
    return head_loss(hidden, model.embed_tokens.weight, targets_BT.flatten())


def held_out_loss(model: Llama, batch: Batch, rows: int = 8) -> float:
    """Mean loss in nats of `batch`, `rows` rows a time."""
    parts = zip(torch.split(batch.tokens, rows), torch.split(batch.targets, rows), strict=True)
    losses = [token_loss(model, tokens, targets) for tokens, targets in parts]
    return float(torch.stack(losses).mean())


class LanguageModelling:
    """Next-token prediction on the training files; bits per byte on the held-out ones."""

    def __init__(self, model: Llama, data: MadeAhead, held_out: Batch, per_token: float) -> None:
        self.model, self.data, self.held_out, self.per_token = model, data, held_out, per_token
        self.device, self.precision = next(model.parameters()).device, "auto"

    def loss(self, index: int, tokens: int, stage: Stage) -> Tensor:
        """Mean cross entropy of part `index`, in nats a token."""
        batch = self.data.batch(index, tokens, stage.length)
        with autocast(self.device, self.precision):
            return token_loss(
                self.model, batch.tokens.to(self.device), batch.targets.to(self.device)
            )

    def evaluate(self) -> dict[str, float]:
        """Held-out nats a token and bits a byte."""
        with autocast(self.device, self.precision):
            held = Batch(*(part.to(self.device) for part in self.held_out))
            nats = held_out_loss(self.model, held)
        return {"nats": nats, "bits_per_byte": nats / NATS_PER_BIT / self.per_token}


def build_lm_job(recipe: Recipe, folder: Path) -> Job:
    """A fresh model and its task; `folder` must hold the tokenizer."""
    settings = recipe.settings
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = read_training_data(tokenizer, recipe.mix, settings.seed)
    data = MadeAhead(text, recipe.loaders)
    torch.manual_seed(settings.seed)
    model = Llama(settings.shape)
    model.to(pick_device())
    held_out = held_out_rows(load_corpus(), tokenizer, EVALUATION_ROWS, EVALUATION_LENGTH)
    task = LanguageModelling(model, data, held_out, bytes_per_token(tokenizer, held_out))
    task.precision = settings.precision
    prepare(model, settings)
    return Job(model, task)


def train_language_model(
    recipe: Recipe, out: Path | None, report: Callable[[str], None], ranks: Ranks
) -> Progress:
    """Train from the run's newest checkpoint, or from nothing, until the budget ends."""
    settings = recipe.settings
    folder = folder_of(settings, out)

    def begin() -> None:
        record, packages = recipe.as_record(), recipe.mix.packages
        make_tokenizer(folder, settings.shape)
        missing = "no manifest is pinned for this version of Python"
        report(str(difference(load_corpus()) or missing))
        if packages:
            report(f"packages: {package_difference(packages) or 'no manifest is pinned'}")
        write_provenance(folder, record, corpus_digest(packages), ranks.size)

    ranks.lead(begin)
    tell_compiling(settings, report)
    return Trainer(build_lm_job(recipe, folder), settings, folder, ranks).run(report)
