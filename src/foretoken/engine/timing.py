"""What steps and drafts of an engine cost: as an earlier process learnt it, or timed now.

Timing runs the real model and the real drafters on pages that nobody uses, which are given back.
What is done with costs is the business of `foretoken.control`; here they are found and kept.
"""

import hashlib
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from foretoken.config import ResolvedConfig
from foretoken.config.memory import ModelMemory
from foretoken.config.resolve import DTYPE_BYTES
from foretoken.control.cost import RooflineCost, StepShape
from foretoken.control.learned.calibration import (
    LONG,
    MOST_SECONDS,
    PROMISED_SD,
    SHORT,
    TIMED_SD,
    calibrate,
    draft_lengths,
    promised,
    step_shapes,
)
from foretoken.control.learned.cost_file import CostFile, CostKeeper, CostKey, SavedCosts
from foretoken.control.learned.drafter_cost import DrafterCost, DraftShape
from foretoken.control.learned.experts_read import ExpertsRead
from foretoken.control.learned.target_step_time import TargetStepTimeModel
from foretoken.control.usual_machine import usual_machine
from foretoken.errors import ConfigError
from foretoken.hardware import Hardware
from foretoken.kernels.build import library_path
from foretoken.kernels.library import describe_kernels
from foretoken.kv.free_runs import Run
from foretoken.kv.lazy_zeros import gives_back
from foretoken.kv.pool import PagePool
from foretoken.models.tensors import SpanLayout
from foretoken.proposers.base import Context
from foretoken.proposers.choose.offers import Member, timed_draft
from foretoken.runtime.batch import Span
from foretoken.runtime.runner import Runner
from foretoken.runtime.sequence import Sequence as RunningSequence
from foretoken.types import Request, SamplingParams

logger = logging.getLogger("foretoken")

VARIABLE = "FORETOKEN_TIMING_SECONDS"

_DRAFTER_SHARE = 0.4
"""Of the time for everything, what drafters get together."""
_PLAIN = StepShape(1, 1, SHORT)
"""The step of one sequence without drafts."""
_MOST_TOKENS = 8192
"""Tokens whose pages are used at once; longer batches share pages."""
_DRAFT_BATCHES = (1, 4, 16)
_DRAFT_CONTEXTS = (SHORT, 512)
_REPEATS = 3
_CACHED_S = 0.02
"""Steps that take less may find their weights in the caches."""
_ONE_PASS = 0.25
"""Share of the time of a first draft that each later one takes at most, where few sequences draft
and all drafts come of one pass."""
_FOREIGN_SHARE = 0.02
"""What a drafter of the user's own is taken to cost, in plain steps; it is not run for a trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """What can be timed: the parts of an engine that has served nothing yet."""

    config: ResolvedConfig
    runner: Runner
    members: Mapping[str, Member]
    pool: PagePool
    threads: AbstractContextManager[None]
    """Whose threads run a step."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCosts:
    """The two models of time of an engine, and where they are kept."""

    target: TargetStepTimeModel
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
    how fast the machine is today (`TargetStepTimeModel.level`).
    Without time (`most_seconds` 0) and file they are what the data sheet of a usual machine says.
    """
    began = time.perf_counter()
    file = CostFile(_key_of(parts.config, parts.runner, parts.members), folder)
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


def _key_of(config: ResolvedConfig, runner: Runner, members: Mapping[str, Member]) -> CostKey:
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
    if config.budget.mapped:
        types.append("experts on the disk")
    drafters = (sorted((name, one.max_drafts) for name, one in members.items()), speculative)
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
        target = TargetStepTimeModel.from_dict(saved.target)
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
    config, timer = parts.config, _StepTimer(parts)
    shapes = step_shapes(
        most_sequences=config.max_num_seqs,
        most_rows=config.max_num_batched_tokens,
        most_context=min(config.max_model_len, parts.pool.capacity),
    )
    timed: list[tuple[StepShape, float]] = []
    mixture = parts.runner.model.shape.experts
    experts = None if mixture is None else ExpertsRead(mixture.count, mixture.used)
    if most_seconds > 0.0:
        share = 1.0 - _DRAFTER_SHARE if parts.members else 1.0
        timed = [
            (shape._replace(experts=timer.experts_read[shape]), seconds)
            for shape, seconds in calibrate(
                timer.measure, shapes, most_seconds=share * most_seconds
            )
        ]
        target = TargetStepTimeModel(timed, sd=TIMED_SD, passes_only=True, experts=experts)
    else:
        if experts is not None:
            shapes += experts.alike(shapes)
        guess = promised(_usual_machine(config, parts.runner), shapes)
        target = TargetStepTimeModel(guess, sd=PROMISED_SD, passes_only=True, experts=experts)
    plain_s = target.seconds(_PLAIN)
    drafters = {}
    for name, member in parts.members.items():
        each_s = _DRAFTER_SHARE * most_seconds / len(parts.members)
        drafters[name] = _time_drafter(parts, member, each_s, plain_s, target)
    source = "timed" if timed else "promised"
    timer.give_back()
    return EngineCosts(
        target=target, drafters=drafters, timed=tuple(timed), source=source, file=file
    )


def _usual_machine(config: ResolvedConfig, runner: Runner) -> RooflineCost:
    """The roofline of the target on a machine as they usually are."""
    kept = ModelMemory(
        shape=runner.model.shape,
        quantization=config.user.quantization,
        kv_cache_dtype=config.user.kv_cache_dtype,
    )
    gpu = config.device.startswith("cuda")
    return usual_machine(
        kept, DTYPE_BYTES[config.dtype], cores=torch.get_num_threads(), gpu=gpu,
        x_bits=config.user.precision.x_bits,
    )  # fmt: skip


@final
class _StepTimer:
    """Runs single steps of the target on pages that nobody uses."""

    def __init__(self, parts: Timed) -> None:
        """Use the runner of `parts`; its pool hands out nothing meanwhile."""
        self._runner = parts.runner
        self._vocab = parts.runner.model.shape.vocab_size
        size = parts.runner.page_size
        self._num_pages = min(parts.pool.num_pages, -(-_MOST_TOKENS // size))
        # The last pages: memory that requests will use first is left as it is, in one piece.
        self._first_page = parts.pool.num_pages - self._num_pages
        self.experts_read: dict[StepShape, float] = {}
        """Of a layer, by the steps that were run; 0: not counted, or there are none."""

    def give_back(self) -> None:
        """Give back the memory of what was written, which nobody counts."""
        if gives_back(self._runner.device):
            self._runner.give_back([Run(self._first_page, self._num_pages)])

    def measure(self, shape: StepShape) -> float:
        """Seconds of one such step, tokens chosen and known here."""
        seconds = self._run(shape)
        # A served step follows one of its kind and finds in the caches what that one left there. A
        # long step reads more than caches hold, whatever was before it.
        return self._run(shape) if seconds < _CACHED_S else seconds

    def _run(self, shape: StepShape) -> float:
        layouts, ids, rows = self._spans(shape)
        began = time.perf_counter()
        output = self._runner.forward(layouts, ids, rows)
        # Choosing and reading the tokens waits for the device, as a step does.
        output.logits_RV.argmax(dim=-1).tolist()
        self.experts_read[shape] = output.experts_read
        return time.perf_counter() - began

    def _spans(self, shape: StepShape) -> tuple[list[SpanLayout], list[list[int]], list[int]]:
        """Layouts, token ids, and which rows want logits: the last ones."""
        size, pages = self._runner.page_size, self._num_pages
        prompts = 1 if shape.prompt_rows else 0
        decoding = shape.sequences - prompts
        lengths = [shape.prompt_rows] * prompts
        more = shape.rows - shape.prompt_rows
        lengths += [more // decoding + (at < more % decoding) for at in range(decoding)]
        layouts, first = [], 0
        for length in lengths:
            start = max(0, round(shape.context - length / 2))
            count = -(-(start + length) // size)
            table = [self._first_page + (first + at) % pages for at in range(count)]
            layouts.append(SpanLayout(start=start, num_tokens=length, page_table=table))
            first += count
        # Routers of a mixture send different tokens to different experts: those of a prompt and of
        # two sequences. Drafts repeat one, so that what a row takes is told from what it reads.
        ids = [
            [
                (7919 * (at if place < prompts else 0) + 104729 * place + length) % self._vocab
                for at in range(length)
            ]
            for place, length in enumerate(lengths)
        ]
        return layouts, ids, list(range(shape.prompt_rows, shape.rows))


def _time_drafter(
    parts: Timed, member: Member, most_seconds: float, plain_s: float, target: TargetStepTimeModel
) -> DrafterCost:
    """Time one drafter in batches of some sizes."""
    if member.check is not None or most_seconds <= 0.0:
        share = _FOREIGN_SHARE * plain_s
        guess = [(DraftShape(n, 1, n, 0.0), share) for n in _DRAFT_BATCHES]
        return DrafterCost(guess, sd=PROMISED_SD, machine=target)
    began = time.perf_counter()
    found: list[tuple[DraftShape, float]] = []
    for num in _DRAFT_BATCHES:
        for context in _DRAFT_CONTEXTS:
            # A batch takes at most four times as long as one of a quarter of the size.
            spent = time.perf_counter() - began
            if found and spent > most_seconds / 4:
                break
            timer = _DraftTimer(parts, member, num, context)
            if timer.fits:
                if not found:
                    timer.warm_up()
                found += timer.run()
    if not found:
        found = [(DraftShape(1, 1, 1, 0.0), _FOREIGN_SHARE * plain_s)]
    found = _with_long_reading(found)
    one_pass = member.proposer.looks_up or _is_flat(found)
    if one_pass:
        found = [(s._replace(passes=1), seconds) for s, seconds in found]
    return DrafterCost(found, sd=TIMED_SD, one_pass=one_pass, machine=target)


def _with_long_reading(found: Sequence[tuple[DraftShape, float]]) -> list[tuple[DraftShape, float]]:
    """The times, of reading only those with the longest context. Where a machine is so slow that
    there was no time for a long one, rows of it are taken to need what those of a short one do:
    otherwise any noise would be put down to the context, and multiplied with it."""
    reading = [one for one in found if one[0].fed_rows]
    longest = max((shape.context for shape, _ in reading), default=0.0)
    kept = [one for one in found if not one[0].fed_rows or one[0].context == longest]
    if longest < _DRAFT_CONTEXTS[-1] / 2:
        kept += [(shape._replace(context=float(LONG)), took) for shape, took in reading]
    return kept


def _is_flat(found: Sequence[tuple[DraftShape, float]]) -> bool:
    """Whether the later drafts of a few sequences take next to nothing: they cost no passes of
    their own. In a large batch their rows take time in any case."""
    caught_up = [(shape, seconds) for shape, seconds in found if not shape.fed_rows]
    fewest = min((shape.sequences for shape, _ in caught_up), default=0)
    few = [(shape, seconds) for shape, seconds in caught_up if shape.sequences == fewest]
    short = {shape.context: seconds for shape, seconds in few if shape.passes == 1}
    shares = sorted(
        (seconds / short[shape.context] - 1.0) / (shape.passes - 1)
        for shape, seconds in few
        if shape.passes > 1 and shape.context in short
    )
    return bool(shares) and shares[len(shares) // 2] < _ONE_PASS


@final
class _DraftTimer:
    """Some sequences of one length, for which one drafter drafts."""

    def __init__(self, parts: Timed, member: Member, num: int, context: int) -> None:
        self._member, self._pool, self._context = member, parts.pool, context
        self._target = _StepTimer(parts)
        self._vocab = parts.runner.model.shape.vocab_size
        self._num = num
        self._room = context + 2 + 2 * _REPEATS + 1 + member.max_drafts
        config = parts.config
        self.fits = (
            num <= config.max_num_seqs
            and self._room <= config.max_model_len
            and num * parts.pool.pages_for(self._room) <= parts.pool.num_available
        )

    def warm_up(self) -> None:
        """Draft once: the first draft of a process is slow because it is the first."""
        with self._sequences() as running:
            self._draft(running, 1)

    def run(self) -> list[tuple[DraftShape, float]]:
        """Times of feeding everything, then of drafts of caught-up sequences."""
        with self._sequences() as running:
            fed, first = self._draft(running, 1)
            times: dict[DraftShape, list[float]] = {}
            for _ in range(_REPEATS):
                for length in draft_lengths(self._member.max_drafts):
                    seconds, shape = self._draft(running, length)
                    times.setdefault(shape, []).append(seconds)
        found = [(shape, min(seconds)) for shape, seconds in times.items()]
        # The first draft of all had the whole context to feed, and one draft to make.
        feeding = fed - dict(found).get(first, fed)
        if feeding > 0.0:
            fed_rows = self._num * self._context
            found.append((DraftShape(0, 0, 0, self._context / 2, fed_rows), feeding))
        return found

    @contextmanager
    def _sequences(self) -> Iterator[list[RunningSequence]]:
        """The sequences, on pages that are given back."""
        each = self._pool.pages_for(self._room)
        low = self._pool.allocate(self._pool.num_available - self._num * each)
        pages = [self._pool.allocate(each) for _ in range(self._num)]
        # Drafters write in memory that the target does not use: were it all used, they would
        # draft nothing, and that would be timed.
        self._pool.release(low)
        running = [self._sequence(at, table) for at, table in enumerate(pages)]
        try:
            yield running
        finally:
            for sequence in running:
                self._member.release(sequence.request.request_id)
            for table in pages:
                self._pool.release(table)

    def _draft(self, running: Sequence[RunningSequence], length: int) -> tuple[float, DraftShape]:
        """Seconds of one draft, and what it was; then a token is committed that no draft had."""
        spans = tuple(
            Span(
                sequence=sequence,
                start=sequence.num_computed,
                length=1,
                draft_budget=length,
                samples=True,
            )
            for sequence in running
        )
        # In a served step the target ran just before, and the caches are full of its weights.
        self._target.measure(_PLAIN)
        began = time.perf_counter()
        draft = self._member.propose(Context(spans))
        seconds = time.perf_counter() - began
        for sequence in running:
            sequence.token_ids.append((31 * sequence.num_tokens + 7) % self._vocab)
            sequence.num_computed += 1
        did = timed_draft(self._member.proposer.name, self._num, draft, seconds)
        depth, rows = max(did.depth, 1), max(did.num_drafts, self._num)
        return seconds, DraftShape(self._num, depth, rows, float(self._context))

    def _sequence(self, number: int, table: list[int]) -> RunningSequence:
        ids = tuple((7919 * at + 31 * number) % self._vocab for at in range(self._context + 1))
        request = Request(
            request_id=f"calibration-{number}",
            prompt_token_ids=ids[:-1],
            params=SamplingParams(temperature=0.0),
            seed=0,
            max_tokens=self._room,
        )
        sequence = RunningSequence.of(request)
        sequence.token_ids.append(ids[-1])
        sequence.num_computed = sequence.num_tokens - 1
        sequence.page_table = table
        return sequence
