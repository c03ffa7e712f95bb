"""What steps and drafts of an engine cost: as an earlier process learnt it, or timed now.

How they are timed is in `timing.py`. What is done with costs is the business of
`foretoken.control`; here they are found and kept.
"""

import hashlib
import logging
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from foretoken.config import ResolvedConfig
from foretoken.control.cost import StepShape
from foretoken.control.learned.calibration import (
    MOST_SECONDS,
    PROMISED_SD,
    TIMED_SD,
    calibrate,
    promised,
    step_shapes,
)
from foretoken.control.learned.cost import LearnedCost
from foretoken.control.learned.cost_file import CostFile, CostKey, SavedCosts
from foretoken.control.learned.drafter_cost import DrafterCost
from foretoken.control.learned.keeping import CostKeeper
from foretoken.engine.step_timer import PLAIN, StepTimer, Timed, time_drafter
from foretoken.engine.usual_machine import usual_machine
from foretoken.errors import ConfigError
from foretoken.hardware import Hardware
from foretoken.kernels.build import library_path
from foretoken.kernels.library import describe_kernels
from foretoken.proposers.choose.offers import Member
from foretoken.runtime.runner import Runner

logger = logging.getLogger("foretoken")

VARIABLE = "FORETOKEN_TIMING_SECONDS"

_DRAFTER_SHARE = 0.4
"""Of the time for everything, what drafters get together."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCosts:
    """The two models of time of an engine, and where they are kept."""

    target: LearnedCost
    drafters: Mapping[str, DrafterCost]
    timed: tuple[tuple[StepShape, float], ...]
    source: str
    """`file`, `timed` or `promised`."""
    file: CostFile

    def known(self) -> SavedCosts:
        """What is known by now, for the next process."""
        drafters = {name: cost.to_dict() for name, cost in self.drafters.items()}
        return SavedCosts(target=self.target.to_dict(), drafters=drafters, timed=self.timed)

    def keeper(self) -> CostKeeper | None:
        """Who keeps what is learnt from now on; None: nothing was timed by which a later process
        could tell that it still holds."""
        return CostKeeper(self.file, self.known) if self.timed else None


def seconds_for_timing() -> float:
    """Seconds that timing may take where no earlier process did: FORETOKEN_TIMING_SECONDS, or 3.

    Raises:
        ConfigError: the variable is not a number of seconds.
    """
    given = os.environ.get(VARIABLE, "")
    if not given:
        return MOST_SECONDS
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < math.inf:
        raise ConfigError(VARIABLE, given, "a number of seconds, 0 to time nothing")
    return seconds


def find_costs(
    parts: Timed, *, folder: Path | None = None, most_seconds: float = MOST_SECONDS
) -> EngineCosts:
    """EngineCosts of a fresh engine: from the file if there is one, else timed now and kept.

    A file is not timed against the machine first: no start waits for that, and the first steps show
    how fast the machine is today (`LearnedCost.level`).
    Without time (`most_seconds` 0) and file they are what the data sheet of a usual machine says.
    """
    began = time.perf_counter()
    file = CostFile(key_of(parts.config, parts.runner, parts.members), folder)
    saved = file.read()
    with parts.threads, torch.inference_mode():
        kept = None if saved is None else _restored(saved, file)
        if kept is not None and kept.drafters.keys() == parts.members.keys():
            return kept
        costs = _measured(parts, file, most_seconds)
    if costs.timed:
        costs.file.write(costs.known())
    logger.info("costs of steps timed in %.1f s", time.perf_counter() - began)
    return costs


def key_of(config: ResolvedConfig, runner: Runner, members: Mapping[str, Member]) -> CostKey:
    """What the costs of an engine belong to."""
    cuda = config.device.startswith("cuda")
    device = torch.cuda.get_device_name() if cuda else Hardware.detect().cpu_name
    speculative = config.user.speculative_config
    shape = hashlib.sha256(repr(runner.model.shape).encode()).hexdigest()[:16]
    user = config.user
    types = [config.dtype, user.quantization, user.activations, user.kv_cache_dtype]
    if user.tensor_parallel_size > 1:
        types.append(f"{user.tensor_parallel_size} ranks")
    if user.pipeline_parallel_size > 1:
        types.append(f"{user.pipeline_parallel_size} stages")
    drafters = (sorted((name, one.most) for name, one in members.items()), speculative)
    return CostKey(
        model=shape,
        precision=" ".join(str(kind) for kind in (*types, config.batch_invariant)),
        drafters=hashlib.sha256(repr(drafters).encode()).hexdigest()[:16],
        device=device,
        threads=torch.get_num_threads(),
        kernels=f"{describe_kernels()} {library_path().name} {torch.__version__}",
        page_size=config.page_size,
    )


def _restored(saved: SavedCosts, file: CostFile) -> EngineCosts | None:
    try:
        target = LearnedCost.from_dict(saved.target)
        drafters = {
            name: DrafterCost.from_dict(data, machine=target)
            for name, data in saved.drafters.items()
        }
    except (KeyError, TypeError, ValueError, AssertionError):  # not written by this version
        return None
    return EngineCosts(
        target=target, drafters=drafters, timed=saved.timed, source="file", file=file
    )


def _measured(parts: Timed, file: CostFile, most_seconds: float) -> EngineCosts:
    config, timer = parts.config, StepTimer(parts)
    shapes = step_shapes(
        most_sequences=config.max_num_seqs,
        most_rows=config.max_num_batched_tokens,
        most_context=min(config.max_model_len, parts.pool.capacity),
    )
    timed: list[tuple[StepShape, float]] = []
    if most_seconds > 0.0:
        share = 1.0 - _DRAFTER_SHARE if parts.members else 1.0
        timed = calibrate(timer.measure, shapes, most_seconds=share * most_seconds)
        target = LearnedCost(timed, sd=TIMED_SD, passes_only=True)
    else:
        guess = promised(usual_machine(config, parts.runner), shapes)
        target = LearnedCost(guess, sd=PROMISED_SD, passes_only=True)
    plain_s = target.seconds(PLAIN).seconds
    drafters = {}
    for name, member in parts.members.items():
        each_s = _DRAFTER_SHARE * most_seconds / len(parts.members)
        drafters[name] = time_drafter(parts, member, each_s, plain_s, target)
    source = "timed" if timed else "promised"
    return EngineCosts(
        target=target, drafters=drafters, timed=tuple(timed), source=source, file=file
    )
