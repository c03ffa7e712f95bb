"""The language models that drafting methods run: found on disk, then loaded.

With `quantization="auto"` a few draft steps are timed while loading, to see whether int8 weights
pay. What a draft proposes is checked either way, so this choice changes speed and never the output.
"""

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, Self

from torch import Tensor

from foretoken.backend import backend_for
from foretoken.checkpoint import find_model
from foretoken.config import DrafterConfig
from foretoken.config.memory import ModelMemory
from foretoken.config.quantization import AUTO
from foretoken.kv.pool import PagePool
from foretoken.models.rollout import plan_best
from foretoken.models.tensors import RolledOut, RolloutPlan, SpanLayout
from foretoken.proposers.drafting import DraftSampling
from foretoken.proposers.kv_progress import DraftLimits, DraftProgress
from foretoken.proposers.kv_proposer import DraftNetwork, KVProposer
from foretoken.proposers.method import BuildContext
from foretoken.runtime.runner import Runner
from foretoken.runtime.sampler import Sampler
from foretoken.shape import ModelShape

logger = logging.getLogger("foretoken")

_STEPS, _REPEATS = 8, 9


Places = Sequence[SpanLayout]
Tokens = Sequence[Sequence[int]]


class DraftLanguageModel(Protocol):
    """A draft model over its own KV store, as `Runner` is one; logits are over the target's ids."""

    def forward_last(self, layouts: Places, token_ids: Tokens) -> Tensor: ...

    def roll_out(
        self, layouts: Places, token_ids: Tokens, plan: RolloutPlan
    ) -> RolledOut | None: ...

    def logits_at(self, layouts: Places, token_ids: Tokens, rows: Sequence[int]) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOnDisk:
    """The model of a drafter, before it is loaded."""

    config: DrafterConfig
    folder: Path
    shape: ModelShape

    @classmethod
    def find(cls, config: DrafterConfig) -> Self:
        """The model that `config` names. Raises ModelError: it is missing or not supported."""
        assert config.model is not None, "checked by DrafterConfig"
        folder = find_model(config.model, revision=config.revision)
        return cls(config=config, folder=folder, shape=ModelShape.from_config(folder))

    @property
    def memory(self) -> ModelMemory:
        """What it will keep."""
        return ModelMemory(
            shape=self.shape,
            quantization=self.config.quantization,
            kv_cache_dtype=self.config.kv_cache_dtype,
        )

    def load(self, context: BuildContext) -> Runner:
        """Read the weights. Drafts need no invariance: what they propose is checked either way."""
        precision = self.config.precision
        if self.config.quantization != AUTO:
            return context.load_model(self.folder, precision)

        def load(folder: Path, bits: str | None) -> Runner:
            # Floats are not multiplied so, which is no error of a setting for what may be chosen.
            kept = precision.activations if bits else "auto"
            kept_as = replace(precision, quantization=bits, activations=kept)
            return context.load_model(folder, kept_as)

        return load_cheaper(load, self.folder)

    def drafter(
        self,
        network: DraftNetwork,
        loaded: Runner,
        context: BuildContext,
        *,
        pool: PagePool | None = None,
        sampler: Sampler | None = None,
    ) -> KVProposer:
        """The drafter over `network`, which runs what was loaded.

        Args:
            network: chains, and trees where the settings say so.
            loaded: as by `load`.
            context: what the engine gives.
            pool: the pages that its keys and values lie under; None: the target's.
            sampler: over the ids that are drafted; None: the target's.
        """
        config, limit = self.config, self.shape.max_position_embeddings
        progress = DraftProgress(
            (pool or context.pool).generation,
            loaded.page_size,
            DraftLimits(
                max_model_len=min(limit, config.max_model_len or limit),
                max_num_batched_tokens=context.max_num_batched_tokens,
                enters=self.shape.counts_distances,
            ),
            pages=context.draft_pages(config.label, loaded, pool),
        )
        drafting = DraftSampling.of(config, context.verifier, sampler)
        return KVProposer(config.method, network, drafting, progress)


def load_cheaper(load: Callable[[Path, str | None], Runner], folder: Path) -> Runner:
    """The draft model, with int8 weights if its steps are then faster beyond the noise.

    Both are in memory while they are timed, in turns; the loser is dropped. Without compiled
    kernels integer weights are multiplied out and cannot pay, and off the CPU nobody knows yet
    how to time them: nothing is timed.
    """
    whole = load(folder, None)
    why = backend_for(whole.model.embedding.device).why_not_int8
    if why is not None:
        logger.info("draft %s: unrounded weights (auto): %s", folder.name, why)
        return whole
    rounded = load(folder, "int8")
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(_REPEATS + 1):
        for runner, found in zip((whole, rounded), times, strict=True):
            seconds = _time_steps(runner)
            if turn:
                found.append(seconds)
    wins = pays(*times)
    ratio = statistics.median(times[1]) / statistics.median(times[0])
    logger.info(
        "draft %s: %s weights (auto): a draft step takes %.2f of its time with int8",
        folder.name,
        "int8" if wins else "unrounded",
        ratio,
    )
    return rounded if wins else whole


def pays(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether `after` is less in all turns but one in eight, and 3 % less in the median turn.

    With nine turns, equal arms pass in one case of fifty (sign test).
    """
    ratios = sorted(b / a for a, b in zip(before, after, strict=True))
    enough = len(ratios) - len(ratios) // 8
    return ratios[enough - 1] < 1.0 and statistics.median(ratios) < 0.97


def _time_steps(runner: Runner) -> float:
    """Seconds of some greedy draft steps of one sequence, over the first page."""
    steps = min(_STEPS, runner.page_size)
    began = time.perf_counter()
    layout = SpanLayout(start=0, num_tokens=1, page_table=[0])
    if runner.roll_out([layout], [[0]], plan_best(1, steps)) is None:
        for at in range(steps):
            layout = SpanLayout(start=at, num_tokens=1, page_table=[0])
            runner.forward_last([layout], [[0]])
    return time.perf_counter() - began
