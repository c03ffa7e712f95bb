"""Where a speculative step's time goes, each part beside its bare pass and its floor.

    python benchmarks/speculative_step.py --target MODELS/cycle-target --draft MODELS/cycle-draft-80

One target, one draft model, one format of weights for both. Bare passes of the target over 1 to 16
rows and of the draft over 1 and 2 (2: after all drafts were accepted, the last of them has to be
caught up with), k drafts in one call as the engine makes them, then steps of the running engine.
The floor of a pass is the longer of reading its weights, keys and values, and of making its
products, at the limits of the machine in the same seconds (`peer_floor.py`); embedding, sampling
and Python count nothing, and caches hold nothing. Wanted: at most 1.05 of it.
"""

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from common import (
    Goal,
    Ratio,
    announce,
    at_most,
    finish,
    interleave,
    make_parser,
    ratio_of_medians,
    use_threads,
)
from peer_floor import SCHEMES, Limits, LimitsProbe, Work
from runs import build
from speculative_parts import Drafting, Pass, Step, StepTimer

from foretoken.shape import ModelShape

ROWS = (1, 2, 4, 6, 8, 12, 16)
DRAFT_ROWS = (1, 2)
WANTED = 1.05
PARTS = (
    "whole",
    "drafting",
    "draft_call",
    "target",
    "layers",
    "head",
    "verify",
    "rest",
    "schedule",
    "commit",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What one pass reads, and by which share that is the head."""

    parameters: int
    step_bytes: int
    head_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Bare passes over as many rows."""

    ms: float
    layers_ms: float
    head_ms: float
    over_floor: Ratio
    head_over_floor: Ratio
    over_one: Ratio
    """Over a pass of one row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """Drafts in one call."""

    ms: float
    over_floor: Ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Steps of the engine."""

    ms: dict[str, float]
    """By part; `draft_call` is of `drafting`, `layers` and `head` of `target`, `schedule` and
    `commit` of `rest`."""
    tokens: float
    """Kept by a step."""
    fed: float
    """Rows of the draft's first pass."""
    target_over_bare: Ratio
    target_over_floor: Ratio
    drafting_over_bare: Ratio
    drafting_over_floor: Ratio
    over_bare: Ratio
    """The step over the sum of its bare passes."""
    over_floor: Ratio
    """The step over the sum of their floors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Floors:
    """The shortest times of a pair's passes, in seconds."""

    target: Work
    draft: Work
    context: int

    def drafting(self, limits: Limits, fed: float, drafts: int) -> float:
        """One pass over what is fed, one row for each further draft."""
        one = self.draft.pass_s(limits, self.context, 1)
        return self.draft.pass_s(limits, self.context, fed) + (drafts - 1) * one

    def step(self, step: Step, drafts: int) -> float:
        """Drafting, and the target's pass over the drafts and the token before them."""
        checking = self.target.pass_s(step.limits, self.context, drafts + 1)
        return self.drafting(step.limits, step.fed, drafts) + checking


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """All repeats of everything."""

    target: Mapping[int, Sequence[Pass]]
    """By rows, as `draft`."""
    draft: Mapping[int, Sequence[Pass]]
    drafts: Mapping[tuple[int, int], Sequence[Drafting]]
    """By drafts and rows fed."""
    steps: Mapping[int, Sequence[Step]]
    """By drafts."""


def measure(timer: StepTimer, settings: argparse.Namespace) -> Kept:
    """Everything in turns."""
    times = settings.times
    rows = sorted({*settings.rows, *(k + 1 for k in settings.k)})
    arms: dict[Any, Callable[[], Any]] = {}
    arms |= {("target", n): timer.bare(timer.target, n, times) for n in rows}
    arms |= {("draft", n): timer.bare(timer.draft, n, times) for n in DRAFT_ROWS}
    for k in settings.k:
        arms |= {("drafts", (k, n)): timer.drafting(n, k, times) for n in DRAFT_ROWS}
        arms["steps", k] = timer.steps(k, settings.steps)
    found: dict[Any, list[Any]] = interleave(arms, settings.repeats)

    def of(kind: str) -> dict[Any, Any]:
        return {key: kept for (one, key), kept in found.items() if one == kind}

    return Kept(target=of("target"), draft=of("draft"), drafts=of("drafts"), steps=of("steps"))


def passes(kept: Mapping[int, Sequence[Pass]], work: Work, context: int) -> dict[int, Passes]:
    """Bare passes against their floors, by rows."""
    found = {}
    for rows, some in kept.items():
        whole, head = [one.whole for one in some], [one.head for one in some]
        found[rows] = Passes(
            ms=median_ms(whole),
            layers_ms=median_ms([one.layers for one in some]),
            head_ms=median_ms(head),
            over_floor=ratio_of_medians(
                whole, [work.pass_s(one.limits, context, rows) for one in some]
            ),
            head_over_floor=ratio_of_medians(head, [work.head_s(one.limits, rows) for one in some]),
            over_one=ratio_of_medians(whole, [one.whole for one in kept[1]]),
        )
    return found


def engine_steps(kept: Kept, floors: Floors, k: int) -> Steps:
    """The engine's steps with k drafts against bare passes and floors."""
    some, context = kept.steps[k], floors.context
    checking = [one.whole for one in kept.target[k + 1]]
    # Steps fed one row or two to the draft, some this and some that.
    drafting = [
        (2 - step.fed) * one.whole + (step.fed - 1) * two.whole
        for step, one, two in zip(some, kept.drafts[k, 1], kept.drafts[k, 2], strict=True)
    ]
    bare = [sum(both) for both in zip(checking, drafting, strict=True)]
    draft_floor = [floors.drafting(step.limits, step.fed, k) for step in some]
    target_floor = [floors.target.pass_s(step.limits, context, k + 1) for step in some]

    def over(part: str, below: Sequence[float]) -> Ratio:
        return ratio_of_medians([getattr(step, part) for step in some], below)

    return Steps(
        ms={part: median_ms([getattr(step, part) for step in some]) for part in PARTS},
        tokens=statistics.median(step.tokens for step in some),
        fed=statistics.median(step.fed for step in some),
        target_over_bare=over("target", checking),
        target_over_floor=over("target", target_floor),
        drafting_over_bare=over("drafting", drafting),
        drafting_over_floor=over("drafting", draft_floor),
        over_bare=over("whole", bare),
        over_floor=over("whole", [floors.step(step, k) for step in some]),
    )


def median_ms(seconds: Sequence[float]) -> float:
    """Milliseconds."""
    return statistics.median(seconds) * 1e3


def describe(work: Work) -> Model:
    """A model as a pass sees it."""
    return Model(
        parameters=work.shape.parameter_count(),
        step_bytes=round(work.step_bytes()),
        head_bytes=round(work.head_bytes()),
    )


def show_model(name: str, model: Model, found: Mapping[int, Passes]) -> None:
    """A table of bare passes."""
    share = model.head_bytes / model.step_bytes
    print(
        f"\n{name}: {model.parameters / 1e9:.2f} B parameters, a pass reads "
        f"{model.step_bytes / 1e9:.2f} GB, {share:.0%} of it the head's\n"
        f"{'rows':>4} {'ms':>8} {'over its floor':>22} {'over one row':>22} {'layers':>8} "
        f"{'head':>7} {'of the pass':>11}  head over its floor"
    )
    for rows, one in found.items():
        print(
            f"{rows:4} {one.ms:8.2f} {one.over_floor!s:>22} {one.over_one!s:>22} "
            f"{one.layers_ms:8.2f} {one.head_ms:7.2f} {one.head_ms / one.ms:11.0%}  "
            f"{one.head_over_floor}"
        )


def show_drafts(found: Mapping[tuple[int, int], Drafts]) -> None:
    """Drafts in one call."""
    print()
    for (k, fed), one in found.items():
        print(f"{k} drafts in one call, {fed} fed: {one.ms:.2f} ms, over floor {one.over_floor}")


def show_steps(k: int, steps: Steps) -> None:
    """A step's parts."""
    ms = steps.ms

    def part(name: str, of: str = "whole") -> str:
        return f"{ms[name]:.3f} ms ({ms[name] / ms[of]:.1%})"

    others = ms["rest"] - ms["schedule"] - ms["commit"]
    print(
        f"\nk = {k}: a step takes {ms['whole']:.2f} ms, keeps {steps.tokens:.2f} tokens; the draft "
        f"is fed {steps.fed:.2f} rows\n"
        f"  drafting {part('drafting')}, in C {ms['draft_call']:.3f}; over bare "
        f"{steps.drafting_over_bare}, over floor {steps.drafting_over_floor}\n"
        f"  target {part('target')}, layers {ms['layers']:.3f}, head {ms['head']:.3f}; over bare "
        f"{steps.target_over_bare}, over floor {steps.target_over_floor}\n"
        f"  verify {part('verify')}\n"
        f"  rest {part('rest')}: schedule {ms['schedule']:.3f}, commit {ms['commit']:.3f}, "
        f"others {others:.3f}\n"
        f"  step over its bare passes {steps.over_bare}, over their floors {steps.over_floor}"
    )


def report(results: Mapping[str, Any]) -> list[Goal]:
    """Print tables; what should be near its floor."""
    for name in ("target", "draft"):
        show_model(name, results[name], results[f"{name}_passes"])
    show_drafts(results["drafts"])
    goals = []
    for k, steps in results["steps"].items():
        show_steps(k, steps)
        checking = results["target_passes"][k + 1].over_floor.value
        drafts = results["drafts"][k, 1].over_floor.value
        goals += [
            at_most(f"target, {k + 1} rows / floor", checking, WANTED),
            at_most(f"{k} drafts in one call / floor", drafts, WANTED),
            at_most(f"k = {k}: step / bare passes", steps.over_bare.value, WANTED),
            at_most(f"k = {k}: step / floors", steps.over_floor.value, WANTED),
        ]
    print()
    return goals


def compare(kept: Kept, floors: Floors) -> dict[str, Any]:
    """Everything against its floor."""
    drafts = {}
    for (k, fed), some in kept.drafts.items():
        whole = [one.whole for one in some]
        least = [floors.drafting(one.limits, fed, k) for one in some]
        drafts[k, fed] = Drafts(ms=median_ms(whole), over_floor=ratio_of_medians(whole, least))
    every = [one.limits for some in kept.steps.values() for one in some]
    kinds = every[0].products_per_s
    return {
        "read_gb_per_s": statistics.median(one.read_bytes_per_s for one in every) / 1e9,
        "products_g_per_s": {
            kind: statistics.median(one.products_per_s[kind] for one in every) / 1e9
            for kind in kinds
        },
        "target": describe(floors.target),
        "draft": describe(floors.draft),
        "target_passes": passes(kept.target, floors.target, floors.context),
        "draft_passes": passes(kept.draft, floors.draft, floors.context),
        "drafts": drafts,
        "steps": {k: engine_steps(kept, floors, k) for k in kept.steps},
    }


def main() -> None:
    """Measure, report."""
    parser = make_parser(__doc__)
    parser.add_argument("--target", default="demo", help="default: %(default)s")
    parser.add_argument("--draft", default="demo-draft", help="default: %(default)s")
    parser.add_argument("--weights", choices=SCHEMES, default="16 bit", help="of both models")
    parser.add_argument("--k", type=int, nargs="+", default=[3, 5], help="drafts of a step")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="1 among them")
    parser.add_argument("--context", type=int, default=192, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=24, help="of the engine, per timing")
    parser.add_argument("--times", type=int, default=10, help="bare passes per timing")
    parser.set_defaults(repeats=9)
    settings = parser.parse_args()
    if settings.quick:
        settings.repeats, settings.times, settings.steps = 2, 2, 4
        settings.rows, settings.context = [1, 4], 64
    use_threads(settings.threads)
    scheme = SCHEMES[settings.weights]
    config = {"method": "draft_model", "model": settings.draft}
    config |= {"num_speculative_tokens": max(settings.k), "quantization": scheme}
    llm = build(settings.target, config, max_model_len=1024, quantization=scheme)
    timer = StepTimer(llm, settings.context, LimitsProbe(torch.get_num_threads()))

    def work(shape: ModelShape) -> Work:
        return Work(shape=shape, weights=settings.weights)

    shapes = [probe.runner.model.shape for probe in (timer.target, timer.draft)]
    floors = Floors(target=work(shapes[0]), draft=work(shapes[1]), context=settings.context)
    where = announce(settings)
    results = compare(measure(timer, settings), floors)
    finish("speculative_step", where, settings, results, report(results))


if __name__ == "__main__":
    main()
