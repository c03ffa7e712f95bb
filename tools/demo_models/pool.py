"""What runs on a packaged target read: the target, its corpus, the pool of its own samples.

Owns the pool's files in the run's folder and the order of such a run. It knows neither what is
trained nor how. Invariant: the target's weights never change.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.training.llama import Llama, copy_tokenizer, read_llama
from foretoken.training.loop import Job, Progress, Trainer, pick_device, tell_compiling
from foretoken.training.precision import product_type
from foretoken.training.ranks import Ranks
from foretoken.training.run_folder import folder_of, write_provenance
from tools.demo_models.batches import MadeAhead, TrainingData, read_training_data
from tools.demo_models.manifest import corpus_digest
from tools.demo_models.recipe import Recipe
from tools.demo_models.sampling import Sampling, generate

SAMPLE_LENGTH = 513
PROMPT_LENGTHS = (16, 48, 128)
TEMPERATURES = (0.0, 0.8, 1.0)


def read_target(folder: Path) -> Llama:
    """The target in `folder`, an exported model or a run's newest checkpoint, frozen."""
    return read_llama(folder).to(pick_device()).eval().requires_grad_(False)


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

    def grow(self, target: Llama, rows: int) -> None:
        """Sample one more batch, [rows, SAMPLE_LENGTH]."""
        index = len(self._parts)
        temperature = TEMPERATURES[index % len(TEMPERATURES)]
        prompt = PROMPT_LENGTHS[index // len(TEMPERATURES) % len(PROMPT_LENGTHS)]
        batch = self._data.batch(10_000_000 + index, rows * 512, 512)
        prompts = batch.tokens[:, :prompt].to(target.embed_tokens.weight.device)
        torch.manual_seed(index)
        how = Sampling(new_tokens=SAMPLE_LENGTH - prompt, temperature=temperature)
        made = generate(target, prompts, how).cpu().numpy().astype(np.uint16)
        np.save(self._folder / f"samples-{index:05d}.npy", made)
        self._parts.append(made)

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


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a run reads."""

    target: Llama
    data: MadeAhead
    pool: SamplePool


def open_inputs(recipe: Recipe, source: Path, folder: Path) -> Inputs:
    """The target in `source`, and the samples that `folder` holds by now."""
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    data = read_training_data(tokenizer, recipe.mix, recipe.settings.seed)
    ahead = MadeAhead(data, recipe.loaders)
    return Inputs(read_target(source), ahead, SamplePool(data, folder / "samples"))


def grow_pool(recipe: Recipe, source: Path, folder: Path, report: Callable[[str], None]) -> None:
    """Sample from the target until the pool holds what the recipe asks for."""
    given, wanted = open_inputs(recipe, source, folder), recipe.pool_tokens
    target = given.target
    for module in (target.embed_tokens, target.layers, target.norm):  # rotations stay exact
        module.to(product_type(target.embed_tokens.weight.device))
    if given.pool.tokens < wanted:
        rows = f"{recipe.pool_rows} rows of {SAMPLE_LENGTH} tokens at a time"
        report(f"the target writes what is learned from: {wanted} tokens, {rows}")
    while given.pool.tokens < wanted:
        given.pool.grow(target, recipe.pool_rows)
        report(f"sampled {given.pool.tokens} tokens of {wanted}")


def train_on_target(
    recipe: Recipe,
    out: Path | None,
    report: Callable[[str], None],
    build_job: Callable[[Recipe, Path, Path], Job],
    ranks: Ranks,
) -> Progress:
    """Train what `build_job` makes until the budget ends; grows the pool of samples first.

    Raises:
        ConfigError: the recipe names no target.
    """
    settings = recipe.settings
    if settings.target is None:
        raise ConfigError("target", None, "the folder of the target that the drafter is for")
    source = Path(settings.target).expanduser()
    folder = folder_of(settings, out)

    def begin() -> None:
        copy_tokenizer(source, folder)
        grow_pool(recipe, source, folder, report)
        digest = corpus_digest(recipe.mix.packages)
        write_provenance(folder, recipe.as_record(), digest, ranks.size)

    ranks.lead(begin)
    tell_compiling(settings, report)
    return Trainer(build_job(recipe, source, folder), settings, folder, ranks).run(report)
