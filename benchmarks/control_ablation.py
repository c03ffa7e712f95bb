"""Which of control's mechanisms still matter? Each is switched off in turn. Simulated.

    python benchmarks/control_ablation.py
    python benchmarks/control_ablation.py --without guard "plain trials"

Plays fixed cases on the virtual clock of `benchmarks.simulate`, as `control_simulated.py` does: the
packaged pair on two cores, a 1.5B with its 0.5B, and several drafters beside each other; requests
that are alike, that differ, that change in the middle, with long prompts. For each mechanism one
row: control without it over control with it, by case, the geometric mean over starts. Below 1 the
mechanism helps. What costs less than 1 % in every case may go; what only saves processor time
(deciding takes none here) is judged elsewhere. Nothing is timed.
"""

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final
from unittest import mock

import control_simulated as packaged
from common import announce, finish, make_parser

from benchmarks.simulate.machine import SimulatedDrafter, SimulatedMachine, TableCost
from benchmarks.simulate.serving import ServingLimits, simulate
from benchmarks.simulate.traffic import DraftChance, RequestClass, Traffic
from foretoken.control.cost import CostModel, StepShape, StepTime

STARTS, STEPS = 4, 2500
MS = 1e-3


@final
@dataclass(frozen=True, slots=True)
class _Passes(CostModel):
    """Passes of a drafter: something for the first row and for each other, another for reading."""

    first_s: float
    row_s: float
    read_s: float

    def seconds(self, shape: StepShape) -> StepTime:
        reads = shape.rows > shape.sequences
        return StepTime(self.first_s + (self.read_s if reads else self.row_s) * (shape.rows - 1))


def _rows(*known: tuple[int, float]) -> TableCost:
    return TableCost(tuple((rows, MS * ms) for rows, ms in known))


PUBLISHED_PASSES = _rows(
        (1, 28.0), (2, 31.0), (3, 36.0), (4, 43.0), (5, 52.0), (6, 60.0), (8, 80.0), (12, 115.0),
        (16, 150.0), (24, 200.0), (32, 260.0), (64, 480.0), (128, 900.0), (512, 3400.0),
)  # fmt: skip
PUBLISHED = SimulatedMachine(
    target=PUBLISHED_PASSES,
    drafters=(
        SimulatedDrafter(name="draft", most=5, passes=_Passes(10 * MS, 1 * MS, 2.5 * MS),
                         call_s=0.4 * MS, sequence_s=0.02 * MS, max_window=4096),
    ),
    host_s=0.3 * MS,
    cold_drafting=1.05,
    cold_target=1.02,
)  # fmt: skip
"""Steps of Qwen2.5-Coder 1.5B with its 0.5B, Q4_K_M, on two cores of a Zen 4."""
SEVERAL = replace(
    packaged.MACHINE,
    drafters=(
        packaged.DRAFTER,
        SimulatedDrafter(name="head", most=5, passes=_Passes(0.5 * MS, 0.05 * MS, 0.02 * MS),
                         call_s=0.2 * MS, sequence_s=0.02 * MS, reads_features=True),
        SimulatedDrafter(name="lookup", most=10, looks_up=True, reads=False, passes=_Passes(1e-7, 0.0, 0.0),
                         call_s=0.05 * MS, sequence_s=0.005 * MS),
    ),
)  # fmt: skip
"""The packaged target with a draft model, a head that reads features, and look-ups."""


def _alike(**chances: float) -> RequestClass:
    return RequestClass(chances={k: DraftChance(chance=v) for k, v in chances.items()}, output=100)


def _law(**law: Any) -> RequestClass:
    prompt = law.pop("prompt", 64)
    return RequestClass(chances={"draft": DraftChance(**law)}, prompt=prompt, output=100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is served, by what, to how many at once."""

    name: str
    machine: SimulatedMachine
    clients: int
    classes: tuple[RequestClass, ...]
    spread: float = 0.4
    steps: float = 1.0
    """Times the usual length."""


_MIX = (
    replace(_law(chance=0.85), name="easy", share=0.5, salt="a"),
    replace(_law(chance=0.2), name="hard", share=0.5, salt="b"),
)
_KINDS = (
    replace(_alike(draft=0.5, head=0.75, lookup=0.2), name="text", share=0.6, salt="a"),
    replace(_alike(draft=0.5, head=0.4, lookup=0.9), name="edit", share=0.4, salt="b"),
)
CASES = (
    Case(name="1 alike", machine=packaged.MACHINE, clients=1, classes=(_law(chance=0.6),)),
    Case(name="4 alike", machine=packaged.MACHINE, clients=4, classes=(_law(chance=0.55),)),
    Case(name="8 alike", machine=packaged.MACHINE, clients=8, classes=(_law(chance=0.65),)),
    Case(name="8 mistimed", machine=packaged.MACHINE, clients=8, classes=(_law(chance=0.65),), spread=0.8),
    Case(name="8 poor", machine=packaged.MACHINE, clients=8, classes=(_law(chance=0.3),)),
    Case(name="8 differ", machine=packaged.MACHINE, clients=8, classes=(_law(chance=0.6, spread=1.0),)),
    Case(name="8 drift", machine=packaged.MACHINE, clients=8,
         classes=(_law(chance=0.9, later=((40, 0.05), (80, 0.9))),)),
    Case(name="8 two classes", machine=packaged.MACHINE, clients=8, classes=_MIX),
    Case(name="8 several", machine=SEVERAL, clients=8, classes=_KINDS),
    Case(name="1 several", machine=SEVERAL, clients=1, classes=_KINDS),
    Case(name="32 alike", machine=packaged.MACHINE, clients=32, classes=(_law(chance=0.55),), steps=0.5),
    Case(name="pair 1", machine=PUBLISHED, clients=1, classes=(_law(chance=0.85, spread=1.0),)),
    Case(name="pair 1 poor", machine=PUBLISHED, clients=1, classes=(_law(chance=0.3),)),
    Case(name="pair 4", machine=PUBLISHED, clients=4, classes=(_law(chance=0.85, spread=1.0),)),
    Case(name="pair 12", machine=PUBLISHED, clients=12, classes=(_law(chance=0.85, spread=1.0),), steps=0.5),
    Case(name="pair 4 long", machine=PUBLISHED, clients=4,
         classes=(_law(chance=0.85, spread=0.5, prompt=600),)),
)  # fmt: skip

A, L, INF = "foretoken.control.adaptive.", "foretoken.control.learned.", float("inf")


def _never(*_: Any, **__: Any) -> None:
    """In place of what finds something or notes something down."""


def _no(*_: Any, **__: Any) -> bool:
    return False


def _yes(*_: Any, **__: Any) -> bool:
    return True


def _found(_scene: Any, _step: Any, _options: Any, found: Any) -> Any:
    return found


def _property(value: Any) -> property:
    return property(lambda _: value)


def _free(_ledger: Any, _gained: Any, tokens_N: Any, *_: Any) -> Any:
    return 1e9 + 0.0 * tokens_N


def _own_left(_lengths: Any, _keys: Any, written_N: Any, most_N: Any) -> Any:
    return most_N.astype(float)


MECHANISMS: dict[str, dict[str, Any]] = {
    "margin": {A + "drafter.MARGIN": 0.0, A + "drafter._BEGINNING": 0.0},
    "larger margin to begin": {A + "drafter._BEGINNING": 0.02},
    "guard": {A + "guard.Ledger.left": _free},
    "guard's benefit of the doubt": {A + "scene._BENEFIT": 1.0},
    "guard at once": {A + "scene._AT_ONCE": 1.0},
    "without bad luck": {A + "scene.Scene._without_bad_luck": _found},
    "believed to gain": {A + "planning._BELIEVED": 0.0},
    "plan ends when spent": {A + "made.MadePlan.is_spent": _property(False)},
    "luck": {A + "luck.Luck.is_bad": _property(False)},
    "plan ends when surprised": {A + "controller._SURPRISING": 0.0},
    "held back for others": {A + "planner._POOR": -1.0},
    "returns": {A + "scene.RETURNS": 1.0, A + "joining.RETURNS": 1.0},
    "reading in chunks": {A + "planning._CHUNK_SHARE": 1e6},
    "reading first": {A + "planning.CATCHING_UP": 1 << 20, A + "made.CATCHING_UP": 1 << 20,
                      A + "joining.CATCHING_UP": 1 << 20},
    "newcomers join": {A + "joining.Newcomers._reading_pays": _yes},
    "windows": {A + "drafter._WINDOW": 0},
    "how long it lasts": {A + "drafter._LASTS_LEARNT": 0.0},
    "kept ratio": {A + "drafter.DrafterState.kept": _property(1.0)},
    "hopes": {A + "drafter._HOPES_MOST": 0},
    "trials": {A + "exploring.TRIAL_SHARE": 0.0, A + "exploring._CREDIT": 0.0},
    "full trials": {A + "exploring._FULL_EVERY": 1 << 40},
    "trials of what cannot pay": {A + "exploring._SAVED": INF},
    "no trial of what cannot pay": {A + "exploring._HOPE": 1.0 - 1e-9, A + "exploring._SAVED": 0.0},
    "trials again at once": {A + "exploring._SURPRISING": INF},
    "several in a trial": {A + "exploring._SEVERAL": 1},
    "trials told from known": {A + "exploring._KNOWN": 1 << 40},
    "looks alone": {A + "exploring._ALONE_STEPS": 1},
    "plain trials": {A + "exploring._PLAIN_SHARE": 0.0},
    "other lengths": {A + "exploring.Lengths.pick": _never},
    "rarer and rarer trials": {A + "drafter._SPACING_MOST": 4},
    "resting": {A + "drafter._RESTS_AFTER": 1 << 40},
    "deciding's share": {A + "deciding_share.DecidingShare.of_drafts": _property(0.0)},
    "plan for whoever is new": {A + "controller._FEW": 0},
    "plan of who was alone": {A + "made.FirstPlan.of": _never},
    "less at rest": {A + "controller._AT_REST": 1.0},
    "after departures": {A + "step_times.Departures.settled": _yes},
    "means of steps": {A + "step_times._CHANGED": 0.0},
    "class forgets at rest": {L + "acceptance.LearnedAcceptance.rest": _never},
    "requests fade": {L + "acceptance.LearnedAcceptance.fade": _never},
    "request's change": {L + "acceptance._LIMIT": INF},
    "class's change": {L + "acceptance._ALARMED_REQUESTS": 1 << 40},
    "class's rise": {L + "acceptance._RISE_LIMIT": INF},
    "spread of a class": {L + "spread._PRIOR_REQUESTS": 1e9},
    "pooled prior": {L + "classes._POOLED_WEIGHT": 1e9},
    "level of the machine": {L + "regression.Learner._follow": _never},
    "outliers": {L + "regression._OUTLIER": 1e9},
    "smooth costs": {L + "regression._SMOOTH_SD": 1e9},
    "unexpected is learnt faster": {L + "regression._UNEXPECTED": 1e9},
    "passes only": {L + "cost._HOST_SHARE": 1e-6},
    "lengths of answers": {L + "lengths.OutputLengths.remaining": _own_left},
    "learning all steps": {A + "controller._APART": 0},
}  # fmt: skip
"""What each patches, to be without it."""


def play(case: Case, seed: int, steps: int, without: str | None) -> float:
    """Tokens per second of control after a start that was timed wrong, without a mechanism, or
    ("") with all; None: of plain decoding."""
    tokens = int(case.clients * case.steps * steps)
    traffic = Traffic(
        classes=case.classes, requests=tokens // 40 + 8 * case.clients, clients=case.clients,
        seed=seed,
    )  # fmt: skip
    limits = ServingLimits(noise=packaged.NOISE, wander=packaged.WANDER, most_tokens=tokens)
    arm: Any = packaged.FixedArm(0)
    if without is not None:
        passes = PUBLISHED_PASSES if case.machine == PUBLISHED else packaged.PASSES
        arm = packaged.MistimedControl(spread=case.spread, seed=seed, passes=passes)
    with ExitStack() as stack:
        for target, value in MECHANISMS.get(without or "", {}).items():
            stack.enter_context(mock.patch(target, value))
        return simulate(case.machine, arm, traffic, limits, seed=seed).tokens_per_s


def of_case(
    pool: ProcessPoolExecutor, case: Case, starts: int, steps: int, without: str | None
) -> float:
    """The geometric mean over starts."""
    one = partial(play, case, steps=steps, without=without)
    logs = [math.log(ratio) for ratio in pool.map(one, range(starts))]
    return math.exp(sum(logs) / len(logs))


def main() -> None:
    parser = make_parser(__doc__)
    parser.set_defaults(repeats=STARTS)
    parser.add_argument("--steps", type=int, default=STEPS, help="of plain decoding, each run")
    parser.add_argument("--without", nargs="+", default=list(MECHANISMS), metavar="MECHANISM")
    parser.add_argument("--cases", nargs="+", default=[case.name for case in CASES])
    given = parser.parse_args()
    if given.quick:
        given.repeats, given.steps, given.without = 1, 60, given.without[:2]
    where = announce(given, timed=False)
    cases = [case for case in CASES if case.name in given.cases]
    print("| without | " + " | ".join(case.name for case in cases) + " | least | most |")
    print("|---|" + (len(cases) + 2) * "---:|")
    found: dict[str, list[float]] = {}
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        measure: Callable[[str | None], Sequence[float]] = lambda without: [  # noqa: E731
            of_case(pool, case, given.repeats, given.steps, without) for case in cases
        ]
        off, whole = measure(None), measure("")
        over_off = [one / plain for one, plain in zip(whole, off, strict=True)]
        cells = " | ".join(f"{one:.3f}" for one in over_off)
        print(f"| nothing (over off) | {cells} | | |", flush=True)
        for without in given.without:
            ratios = [
                one / all_of_it for one, all_of_it in zip(measure(without), whole, strict=True)
            ]
            found[without] = ratios
            cells = " | ".join(f"{one:.3f}" for one in ratios)
            print(f"| {without} | {cells} | {min(ratios):.3f} | {max(ratios):.3f} |", flush=True)
    result = {"cases": [case.name for case in cases], "over_off": over_off, "without": found}
    finish("control_ablation", where, given, result, [])


if __name__ == "__main__":
    main()
