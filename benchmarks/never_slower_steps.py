"""A server that writes its steps down, and the models of time that are learnt from them.

    FORETOKEN_STEPS=FILE python -m never_slower_steps serve ...

Runs the command line as it is, with one observer more. Each row of the file, which is written when
the server ends, is a step: when it ended, its shape, what it took, and what drafters did in it.
"""

import json
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import common  # noqa: F401  (it makes the packages beside it known)

from benchmarks.simulate.machine import SimulatedMachine, machine_of_models
from foretoken.cli import main
from foretoken.control.cost import StepShape
from foretoken.control.learned.drafter_cost import DrafterCost, DraftShape
from foretoken.control.learned.target_step_time import TargetStepTimeModel
from foretoken.engine import wiring
from foretoken.engine.engine import EngineParts
from foretoken.runtime.batch import Batch, Verification
from foretoken.types import StepStats

VARIABLE = "FORETOKEN_STEPS"
PRIOR_SD = 0.4
"""How well a bare pass of the model, timed at the start, tells what a served step takes."""


class WatchedStep(NamedTuple):
    at_s: float
    shape: StepShape
    seconds: float
    """Without what drafters took."""
    drafts: list[tuple[str, DraftShape, float]]


def steps_of(path: Path) -> Iterator[WatchedStep]:
    """What a server wrote down."""
    for at_s, shape, seconds, drafts in json.loads(path.read_text()):
        each = [(name, DraftShape(*drafted), took) for name, drafted, took in drafts]
        yield WatchedStep(at_s, StepShape(*shape), seconds, each)


def learn(steps: Sequence[WatchedStep], kept: Path) -> SimulatedMachine:
    """The engine's own models of time after these steps, from what was timed at the start."""
    saved = json.loads(kept.read_text())
    timed = [(StepShape(*shape), seconds) for *shape, seconds in saved["timed"]]
    target = TargetStepTimeModel(timed, sd=PRIOR_SD)
    drafters = {
        name: DrafterCost.from_dict(data, machine=target)
        for name, data in saved["drafters"].items()
    }
    # In no order: what is learnt is the mean of the whole run, not its end.
    mixed = list(steps)
    random.Random(0).shuffle(mixed)
    for step in mixed:
        target.observe(step.shape, step.seconds)
        for name, shape, seconds in step.drafts:
            drafters[name].observe(shape, seconds)
    return machine_of_models(target, drafters)


def _observer(rows: list[Any]) -> Callable[[Batch, Verification, StepStats], None]:
    def observe(batch: Batch, verification: Verification, stats: StepStats) -> None:
        spans = batch.spans
        context = sum(span.start + span.length for span in spans) / len(spans)
        shape = StepShape(stats.num_tokens, len(spans), context, stats.num_prefilled)
        # In its first step after the prompt a sequence has all of it read by its drafter.
        starts = [(span.start, len(span.sequence.request.prompt_token_ids)) for span in spans]
        fed = sum(start for start, prompt in starts if start == prompt)
        drafts = []
        for name, sequences, depth, num_drafts, took in stats.drafters:
            drafted = DraftShape(sequences, depth, num_drafts, context, fed)
            drafts += [(name, drafted, took)] if depth else []
        seconds = stats.total_s - sum(one.seconds for one in stats.drafters)
        rows.append((time.perf_counter(), shape, seconds, drafts))

    return observe


def _serve() -> None:
    rows: list[Any] = []

    def watched(**parts: Any) -> EngineParts:
        observers = (*parts.pop("observers"), _observer(rows))
        return EngineParts(observers=observers, **parts)

    vars(wiring)["EngineParts"] = watched
    try:
        main()
    finally:
        Path(os.environ[VARIABLE]).write_text(json.dumps(rows))


if __name__ == "__main__":
    _serve()
