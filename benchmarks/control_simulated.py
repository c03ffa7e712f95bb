"""Does control find the best length where what it was told of the machine is wrong? Simulated.

    python benchmarks/control_simulated.py
    python benchmarks/control_simulated.py --in-flight 2 8 32 --chance 0.7 --spread 0.4

Serves requests that come and go on the virtual clock of `benchmarks.simulate`: no drafts, each
fixed length, and control, by the real scheduler. Steps take what the packaged pair takes behind
`foretoken serve` on two cores of a Zen 4. Control begins with timings of those steps that are
wrong by chance: of the whole machine (by half of `--spread`), of rows, of drafting and of reading,
each by a factor for all of a start, and each shape by 5 % of its own. What it is told of steps is
noisy and wanders by a tenth; noise and answers are the same for all arms. The first quarter of the
tokens does not count. One row for each case: medians over starts, and the least of all. The cases
are those of benchmarks/LOG.md, or one for each `--in-flight`. Nothing is timed: any machine gives
the same numbers but for the rounding of its linear algebra, and it may be busy.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import repeat
from random import Random
from statistics import median
from typing import final

from common import announce, finish, make_parser

from benchmarks.simulate.arms import FixedArm, Missing, SimulatedArm, begin_control
from benchmarks.simulate.compare import ratio_after
from benchmarks.simulate.machine import SimulatedDrafter, SimulatedMachine, TableCost
from benchmarks.simulate.serving import ServingLimits, SimulatedRun, simulate
from benchmarks.simulate.traffic import DraftChance, RecordedRequest, RequestClass, Traffic
from foretoken.control.adaptive.controller import AdaptiveControl
from foretoken.control.cost import CostModel, StepShape
from foretoken.control.learned.calibration import TIMED_SD, draft_lengths, step_shapes
from foretoken.control.learned.drafter_cost import DrafterCost, DraftShape
from foretoken.control.learned.target_step_time import TargetStepTimeModel

FIXED = (1, 2)
"""Lengths that control is held against, beside none."""
STARTS, STEPS = 12, 6000
"""Of each case; runs are as long as so many plain steps."""
PROMPT, SHORTEST, LONGEST = 32, 60, 140
"""Tokens of prompts and of answers."""
NOISE, WANDER = 0.08, 0.1
"""Of steps and of the machine, as `ServingLimits` has them."""
SHAPE_ERROR = 0.05
"""Of each timing at the start, beside what is wrong with all of a part."""
USUAL_CHANCE = 0.6
"""Of a first draft, as control believes before any."""
MS = 1e-3
HEAD = (
    "| in flight | right with | differ by | timed wrong by | best over off | control over off | "
    "control over the best, median (least) | steps with drafts |\n|" + 8 * "---:|"
)

PASSES = TableCost(
    tuple(
        (rows, MS * ms)
        for rows, ms in (
            (1, 2.0), (2, 2.2), (4, 2.8), (8, 3.6), (12, 3.8), (16, 4.0), (24, 5.0), (32, 5.9),
            (40, 6.8), (64, 9.6), (96, 13.5), (128, 17.5), (256, 33.0), (512, 64.0),
        )
    )
)  # fmt: skip
"""Bare passes of the packaged target by rows."""


@final
@dataclass(frozen=True, slots=True)
class _TargetSteps(CostModel):
    """A step of the target around its pass: something for each sequence, and for checking."""

    sequence_s: float = 0.03 * MS
    check_s: float = 0.15 * MS

    def seconds(self, shape: StepShape) -> float:
        checking = self.check_s if shape.rows > shape.sequences else 0.0
        return PASSES.seconds(shape) + self.sequence_s * shape.sequences + checking


@final
@dataclass(frozen=True, slots=True)
class _DraftPasses(CostModel):
    """A pass of the draft model, and its reading: more rows than sequences."""

    def seconds(self, shape: StepShape) -> float:
        if shape.rows > shape.sequences:
            return MS * (0.5 + 0.012 * shape.rows)
        return MS * (0.3 + 0.03 * shape.rows)


DRAFTER = SimulatedDrafter(
    name="draft", max_drafts=4, passes=_DraftPasses(), call_s=0.25 * MS, sequence_s=0.02 * MS
)
MACHINE = SimulatedMachine(
    target=_TargetSteps(),
    drafters=(DRAFTER,),
    host_s=0.3 * MS,
    cold_drafting=1.5,
    cold_target=1.15,
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MistimedControl:
    """Control of an engine whose timings at the start were wrong."""

    spread: float
    seed: int
    name: str = "control"
    passes: CostModel = PASSES
    """Of the target, by rows: what a start times."""

    def build(self, machine: SimulatedMachine, missing: Missing) -> AdaptiveControl:
        """What a start times, times what is wrong in this one."""
        chance = Random(self.seed)
        whole = chance.lognormvariate(0.0, self.spread / 2)
        rows, drafting, reading = (chance.lognormvariate(0.0, self.spread) for _ in range(3))
        one_s = self.passes.seconds(StepShape(1))

        def timed(seconds: float) -> float:
            return whole * seconds * chance.lognormvariate(0.0, SHAPE_ERROR)

        target = TargetStepTimeModel(
            [
                (shape, timed(one_s + rows * (self.passes.seconds(shape) - one_s)))
                for shape in step_shapes(most_sequences=64, most_rows=2048, most_context=2048)
            ],
            sd=TIMED_SD,
            passes_only=True,
        )
        costs = {}
        for one in machine.drafters:
            known = [
                (
                    shape,
                    timed(
                        drafting * one.drafting_s([shape.passes] * shape.sequences, shape.context)
                        + reading * one.reading_s(shape.fed_rows, shape.context)
                    ),
                )
                for shape in _draft_shapes(one)
            ]
            costs[one.name] = DrafterCost(known, sd=TIMED_SD, machine=target)
        return begin_control(machine, missing, target, costs, USUAL_CHANCE)


def _draft_shapes(one: SimulatedDrafter) -> list[DraftShape]:
    shapes = [
        DraftShape(num, depth, num * depth, float(PROMPT), fed)
        for num in (1, 4, 16)
        for depth in draft_lengths(one.max_drafts)
        for fed in (0, 64)
    ]
    return [*shapes, DraftShape(0, 0, 0, float(PROMPT), 64)]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is simulated for one row."""

    in_flight: int
    chance: float = 0.55
    """Of a draft, if all before it were right."""
    differ: float = 0.0
    """Standard deviation between requests of the logarithm of the odds of that."""
    spread: float = 0.4
    """Of the logarithm of each part's timing at the start."""
    steps: int = STEPS
    """Each request in flight gives as many tokens as so many plain steps."""

    def traffic(self, seed: int) -> Traffic:
        """Short prompts, answers of different lengths."""
        law = DraftChance(chance=self.chance, spread=self.differ)
        lengths = Random(seed)
        count = 2 * self.in_flight * self.steps // (SHORTEST + LONGEST) + 2 * self.in_flight
        recorded = tuple(
            RecordedRequest(None, PROMPT, lengths.randint(SHORTEST, LONGEST))
            for _ in range(count + count // 4)
        )
        return Traffic(
            classes=(RequestClass(chances={DRAFTER.name: law}),),
            requests=len(recorded),
            clients=self.in_flight,
            recorded=recorded,
            seed=seed,
        )


CASES = (
    Case(in_flight=8),
    Case(in_flight=8, spread=0.8),
    Case(in_flight=4),
    Case(in_flight=16),
    Case(in_flight=8, chance=0.3),
    Case(in_flight=8, differ=0.8),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Throughput of one start."""

    best: float
    """The better of off and the fixed lengths, over off."""
    control: float
    """Control over off."""
    drafting: float
    """Share of control's steps that drafted."""

    @property
    def of_best(self) -> float:
        """Control over the best."""
        return self.control / self.best


def play(case: Case, seed: int) -> Start:
    """All arms serve the same requests after one start."""
    tokens = case.in_flight * case.steps
    traffic = case.traffic(seed)
    limits = ServingLimits(noise=NOISE, wander=WANDER, most_tokens=tokens)

    def run(arm: SimulatedArm) -> SimulatedRun:
        return simulate(MACHINE, arm, traffic, limits, seed=seed)

    off, *fixed = (run(FixedArm(k)) for k in (0, *FIXED))
    control = run(MistimedControl(spread=case.spread, seed=seed))
    over_off = [ratio_after(one, off, tokens // 4) for one in (*fixed, control)]
    return Start(best=max(1.0, *over_off[:-1]), control=over_off[-1], drafting=control.drafting)


def named(case: Case) -> str:
    """The cells of a row that say what is simulated."""
    return f"| {case.in_flight} | {case.chance:g} | {case.differ:g} | {case.spread:g} |"


def row(case: Case, starts: Sequence[Start]) -> str:
    shares = [one.of_best for one in starts]
    return (
        f"{named(case)} {median(one.best for one in starts):.3f} | "
        f"{median(one.control for one in starts):.3f} | "
        f"{median(shares):.3f} ({min(shares):.3f}) | {median(one.drafting for one in starts):.0%} |"
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.set_defaults(repeats=STARTS)
    parser.add_argument("--steps", type=int, default=STEPS, help="of plain decoding, each run")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[], metavar="N")
    parser.add_argument("--chance", type=float, default=0.55, help="of a draft, with --in-flight")
    parser.add_argument("--differ", type=float, default=0.0, help="spread of its odds by request")
    parser.add_argument("--spread", type=float, default=0.4, help="of timings at the start")
    given = parser.parse_args()
    if given.quick:
        given.repeats, given.steps = 1, 120
    law = {"chance": given.chance, "differ": given.differ, "spread": given.spread}
    cases = [Case(in_flight=num, **law) for num in given.in_flight] or CASES
    where = announce(given, timed=False)
    print(HEAD)
    results = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for case in (replace(case, steps=given.steps) for case in cases):
            starts = list(pool.map(play, repeat(case), range(given.repeats)))
            print(row(case, starts), flush=True)
            results.append({"case": asdict(case), "starts": [asdict(one) for one in starts]})
    finish("control_simulated", where, given, {"cases": results}, [])


if __name__ == "__main__":
    main()
