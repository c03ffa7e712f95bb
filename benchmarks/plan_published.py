"""What `foretoken lab plan` predicts for published measurements, each predicted without its source.

    python benchmarks/plan_published.py

prints a table (published, predicted, interval, source) and how large the errors are. The points
stand in plan_published.toml; a test reads the same summary.
"""

import json
import math
import statistics
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from foretoken.control.acceptance import ConstantAcceptance
from foretoken.lab.plan.acceptance import assume_acceptance, drafting_of, prior_without
from foretoken.lab.plan.predict import StepCosts, gain_range, mean_cost
from foretoken.lab.plan.setup import ENGINE_COSTS, ENGINES, PlanSettings, Setup, resolve_setup

POINTS = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    number: int
    """Its place in the file."""
    source: str
    where: str
    engine: str
    setup: Setup
    prior: str
    """Name of the source among those of acceptance lengths; empty: it gives none."""
    rows: int
    """Rows verified per request and step."""
    requests: int
    speed_up: float
    length: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A point beside what was predicted for it."""

    point: Point
    low: float
    middle: float
    high: float
    length: float
    """Tokens per verification."""

    @property
    def error(self) -> float:
        """Relative."""
        return abs(self.middle / self.point.speed_up - 1.0)

    @property
    def holds(self) -> bool:
        """Whether the interval holds what was published."""
        return self.low <= self.point.speed_up <= self.high


def read_points(path: Path = POINTS) -> tuple[Point, ...]:
    data = tomllib.loads(path.read_text("utf-8"))
    defaults = data["defaults"]
    rows = [
        defaults | {k: v for k, v in source.items() if k != "points"} | point
        for source in data["sources"]
        for point in source["points"]
    ]
    return tuple(_point(number, values) for number, values in enumerate(rows))


def _point(number: int, values: dict[str, Any]) -> Point:
    engine = values["engine"]
    settings = PlanSettings(
        target=values["target"],
        draft=values.get("draft"),
        method=values.get("method", "draft_model" if values.get("draft") else "auto"),
        engine=engine if engine in ENGINES else "vllm",
        device=values["device"],
        count=values["count"],
        tensor_parallel_size=values.get("tensor_parallel_size", 0),
        quantization=values["quantization"],
        draft_quantization=values["draft_quantization"],
        workload=values["workload"],
        temperature=values["temperature"],
        num_speculative_tokens=values["k"],
        context=values["context"],
        output_tokens=values["context"] // 2,
    )
    setup = replace(resolve_setup(settings), host=ENGINE_COSTS[engine])
    return Point(
        number=number, source=values["name"], where=values["where"], engine=engine, setup=setup,
        prior=values["prior"], rows=values.get("rows", setup.k + 1), requests=values["requests"],
        speed_up=values["speed_up"], length=values.get("length"),
    )  # fmt: skip


_WILD = 0.4
"""No error counts more than this in a fit: some points are of drafters that hardly work."""
_errors: dict[tuple[int, float], float] = {}
FITTED = {
    "vllm": ("draft_s", tuple(i * 0.1e-3 for i in range(16))),
    "llama.cpp": ("reread_share", tuple(i * 0.05 for i in range(21))),
    "mlx": ("reread_share", tuple(i * 0.05 for i in range(21))),
    "vllm-metal": ("reread_share", tuple(i * 0.05 for i in range(21))),
}
"""Engine -> which of its costs rests on published speed-ups, and what it may be."""


def fitted(engine: str, points: Sequence[Point]) -> float:
    """The cost of an engine with which its points come out best; the middle of all allowed ones if
    there are no points."""
    name, allowed = FITTED[engine]
    own = [point for point in points if point.engine == engine]
    if not own:
        return allowed[len(allowed) // 2]
    return min(
        allowed,
        key=lambda value: statistics.fmean(_error(point, name, value) for point in own),
    )


def _error(point: Point, name: str, value: float) -> float:
    """How far a point is from what it would be at this cost of its engine; computed once."""
    place = (point.number, value)
    if place in _errors:
        return _errors[place]
    host = replace(ENGINE_COSTS[point.engine], **{name: value})
    setup = replace(point.setup, host=host)
    if point.length is not None:
        chance = ConstantAcceptance.of_length(point.length, setup.k).alpha
        setup = replace(setup, settings=replace(setup.settings, acceptance=f"{chance:.4f}"))
    tried = predict_point(replace(point, setup=setup))
    _errors[place] = min(_WILD, abs(math.log(tried.middle / point.speed_up)))
    return _errors[place]


def predict_all(points: Sequence[Point]) -> list[Prediction]:
    """Every point, from all sources but its own: acceptance and fitted costs."""
    found = []
    for source in dict.fromkeys(point.where for point in points):
        others = [point for point in points if point.where != source]
        hosts = dict(ENGINE_COSTS)
        for engine in {p.engine for p in points if p.where == source} & FITTED.keys():
            value = {FITTED[engine][0]: fitted(engine, others)}
            hosts[engine] = replace(hosts[engine], **value)
        for point in points:
            if point.where == source:
                setup = replace(point.setup, host=hosts[point.engine])
                found.append(predict_point(replace(point, setup=setup)))
    return found


def predict_point(point: Point) -> Prediction:
    """The prediction from the acceptance lengths of all sources but the point's own."""
    setup, prior = point.setup, prior_without(point.prior)
    own = assume_acceptance(setup, prior)
    if point.rows > setup.k + 1 and not setup.settings.acceptance:
        found = prior.expect(replace(drafting_of(setup), tree=True))
        own = replace(own, low=found.low, middle=found.middle, high=found.high)
    steps = StepCosts(setup)
    verify = steps.verify(point.requests, point.rows)
    cost = mean_cost(own, verify, steps.draft(point.requests, setup.k), setup.k)
    gains = gain_range(own, setup.k, cost)
    return Prediction(
        point=point,
        low=gains.low,
        middle=gains.middle,
        high=gains.high,
        length=own.length(own.middle, setup.k),
    )


def summary(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """How large the errors are, over all points and by kind."""
    lengths = [p for p in predictions if p.point.length]
    losses = [p for p in predictions if p.point.speed_up < 1]
    return {
        "points": len(predictions),
        "sources": len({p.point.where for p in predictions}),
        "with a draft model": sum(p.point.setup.drafts_with == "model" for p in predictions),
        "losses": len(losses),
        "median error": statistics.median(p.error for p in predictions),
        "median error of acceptance lengths": statistics.median(
            abs(p.length / (p.point.length or math.nan) - 1.0) for p in lengths
        ),
        "intervals that hold it": statistics.fmean(p.holds for p in predictions),
        "on the right side of 1": statistics.fmean(
            (p.middle > 1) == (p.point.speed_up > 1) for p in predictions
        ),
        "losses told": statistics.fmean(p.middle < 1 for p in losses),
    }


def table(predictions: Sequence[Prediction]) -> str:
    """The predictions as a table of a document."""
    lines = [
        "| target + drafter, k | engine, device, in flight, work | published | predicted "
        "| interval | length, predicted | source |",
        "|---|---|---|---|---|---|---|",
    ]
    for p in predictions:
        setup, point = p.point.setup, p.point
        drafter = setup.draft.name.split("/")[-1] if setup.draft else setup.method
        length = f"{point.length:.2f}, {p.length:.2f}" if point.length else f"-, {p.length:.2f}"
        lines.append(
            f"| {setup.target.name.split('/')[-1]} ({setup.quantization.name}) + {drafter}, "
            f"{setup.k} | "
            f"{point.engine}, {setup.tp} x {setup.device.name}, {point.requests}, "
            f"{setup.settings.workload} | {point.speed_up:.2f} | {p.middle:.2f} | "
            f"{p.low:.2f} to {p.high:.2f} | {length} | {point.source} |"
        )
    return "\n".join(lines)


def main() -> None:
    predictions = predict_all(read_points())
    print(table(predictions), "\n")
    print(json.dumps(summary(predictions), indent=2))


if __name__ == "__main__":
    main()
