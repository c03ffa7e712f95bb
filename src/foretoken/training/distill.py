"""Draft models distilled from a target.

Owns the draft's first weights, the pool of the target's own samples, and the distillation task.
It does not know how the draft is used. Invariant: the target's weights never change.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.training.acceptance import GreedyRun, greedy_runs, measure
from foretoken.training.corpus import load_corpus
from foretoken.training.crew import Job
from foretoken.training.data import TrainingData
from foretoken.training.distill_loss import Head, distillation_loss
from foretoken.training.export import copy_tokenizer, read_checkpoint, read_exported
from foretoken.training.loop import Progress, Trainer, autocast, pick_device, prepare, run_folder
from foretoken.training.model import Block, Llama
from foretoken.training.sampling import Sampling, generate
from foretoken.training.settings import Settings

SAMPLE_ROWS, SAMPLE_LENGTH = 96, 513
PROMPT_LENGTHS = (16, 48, 128)
TEMPERATURES = (0.0, 0.8, 1.0)


def read_target(folder: Path) -> Llama:
    """The target in `folder`, an exported model or a run's newest checkpoint, frozen."""
    model = read_exported(folder) if (folder / "config.json").exists() else read_checkpoint(folder)
    return model.to(pick_device()).eval().requires_grad_(False)


def first_draft(target: Llama, settings: Settings) -> Llama:
    """A draft that starts with the target's embedding, last norm and last layers."""
    draft = Llama(settings.shape)
    for field in ("vocab_size", "hidden_size", "heads", "kv_heads", "ffn_size"):
        wanted, given = getattr(target.shape, field), getattr(settings.shape, field)
        if wanted != given:
            raise ConfigError(f"shape.{field}", given, f"the target's {wanted}")
    draft.embed.load_state_dict(target.embed.state_dict())
    draft.norm.load_state_dict(target.norm.state_dict())
    for index, block in enumerate(draft.blocks):
        source = target.blocks[target.shape.layers - len(draft.blocks) + index]
        block.load_state_dict(source.state_dict())
    return draft.to(target.embed.weight.device)


@torch.no_grad()
def begin_with(draft: Llama, start: Llama) -> None:
    """Give `draft` the weights of a shallower one; its further layers begin as the identity.

    Raises:
        ConfigError: the shapes differ in more than the number of layers.
    """
    known, wanted = start.shape.layers, draft.shape.layers
    if known > wanted or replace(start.shape, layers=wanted) != draft.shape:
        raise ConfigError("head.start", start.shape, f"{draft.shape}, or fewer layers")
    draft.embed.load_state_dict(start.embed.state_dict())
    draft.norm.load_state_dict(start.norm.state_dict())
    for block, source in zip(draft.blocks, start.blocks, strict=False):
        block.load_state_dict(source.state_dict())
    for block in draft.blocks[known:]:
        assert isinstance(block, Block), type(block)
        block.out.weight.zero_()
        block.down.weight.zero_()


class SamplePool:
    """The target's own continuations of training text, kept in the run's folder as they come."""

    def __init__(self, data: TrainingData, folder: Path) -> None:
        self._data, self._folder = data, folder
        folder.mkdir(parents=True, exist_ok=True)
        self._parts = [np.load(path) for path in sorted(folder.glob("samples-*.npy"))]

    @property
    def tokens(self) -> int:
        """How many tokens there are."""
        return sum(part.size for part in self._parts)

    def grow(self, target: Llama) -> None:
        """Sample one more batch of rows, [SAMPLE_ROWS, SAMPLE_LENGTH]."""
        index = len(self._parts)
        temperature = TEMPERATURES[index % len(TEMPERATURES)]
        prompt = PROMPT_LENGTHS[index // len(TEMPERATURES) % len(PROMPT_LENGTHS)]
        batch = self._data.batch(10_000_000 + index, SAMPLE_ROWS * 512, 512)
        prompts = batch.tokens[:, :prompt].to(target.embed.weight.device)
        torch.manual_seed(index)
        how = Sampling(new_tokens=SAMPLE_LENGTH - prompt, temperature=temperature)
        rows = generate(target, prompts, how).cpu().numpy().astype(np.uint16)
        np.save(self._folder / f"samples-{index:05d}.npy", rows)
        self._parts.append(rows)

    def frequent_ids(self, vocab_size: int) -> Tensor:
        """All token ids, those that occur most often in the samples first, int64 [V]."""
        counts = np.zeros(vocab_size, dtype=np.int64)
        for part in self._parts:
            counts += np.bincount(part.ravel(), minlength=vocab_size)
        return torch.from_numpy(np.argsort(-counts, kind="stable"))

    def rows(self, count: int, length: int, seed: int) -> Tensor:
        """`count` random rows of `length` tokens, int64."""
        rng = random.Random(seed)
        chosen = []
        for _ in range(count):
            part = rng.choice(self._parts)
            chosen.append(np.resize(part[rng.randrange(len(part))], length))
        return torch.from_numpy(np.stack(chosen).astype(np.int64))


class Distillation:
    """Match the target's distributions on training text and on the target's own samples."""

    def __init__(self, draft: Llama, target: Llama, data: TrainingData, pool: SamplePool) -> None:
        self.draft, self.target, self.data, self.pool = draft, target, data, pool
        self.device = target.embed.weight.device
        self.on_policy_share, self.tv_share = 0.5, 0.5
        self.runs: list[GreedyRun] = []

    def _tokens(self, index: int, tokens: int, length: int) -> Tensor:
        share = self.on_policy_share if length < SAMPLE_LENGTH else 0.0
        own = round(tokens // length * share)
        rest = self.data.batch(index, tokens - own * length, length).tokens
        return rest if own == 0 else torch.cat((self.pool.rows(own, length, index), rest))

    def loss(self, index: int, tokens: int, length: int) -> Tensor:
        """Mean divergence of part `index`, in nats."""
        rows = self._tokens(index, tokens, length).to(self.device)
        with autocast(self.device):
            with torch.no_grad():
                wanted = self.target(rows).hidden.flatten(0, 1)
            hidden = self.draft(rows).hidden.flatten(0, 1)
            return distillation_loss(
                Head(hidden, self.draft.embed.weight),
                Head(wanted, self.target.embed.weight),
                self.tv_share,
            )

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


def build_job(settings: Settings, source: Path, folder: Path) -> Job:
    """A fresh draft and its task; the samples are those that `folder` holds by now."""
    target = read_target(source)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    data = TrainingData(load_corpus(), tokenizer, settings.mix, settings.seed)
    pool = SamplePool(data, folder / "samples")
    torch.manual_seed(settings.seed)
    draft = first_draft(target, settings)
    task = Distillation(draft, target, data, pool)
    task.tv_share = settings.tv_share
    task.on_policy_share = settings.on_policy_share if pool.tokens else 0.0
    prepare(draft, settings)
    prepare(target, settings)
    return Job(draft, task)


def grow_pool(
    settings: Settings, source: Path, folder: Path, report: Callable[[str], None]
) -> None:
    """Sample from the target until the pool holds what the settings ask for."""
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    pool = SamplePool(TrainingData(load_corpus(), tokenizer, settings.mix, settings.seed), folder)
    target = read_target(source).to(torch.bfloat16)
    while pool.tokens < settings.pool_tokens:
        pool.grow(target)
        report(f"sampled {pool.tokens} tokens of {settings.pool_tokens}")


def train_draft(settings: Settings, out: Path | None, report: Callable[[str], None]) -> Progress:
    """Distil a draft from `settings.target` until the budget ends; grows the sample pool first."""
    if settings.target is None:
        raise ConfigError("target", None, "the folder of the target to distil from")
    source = Path(settings.target).expanduser()
    folder = run_folder(settings, out)
    copy_tokenizer(source, folder)
    grow_pool(settings, source, folder / "samples", report)
    build = partial(build_job, settings, source, folder)
    return Trainer(build(), settings, folder, build).run(report)
