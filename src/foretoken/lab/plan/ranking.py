"""Every way of drafting on one setup, and on other kinds of work."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from foretoken.config.methods import DraftingMethod, MethodPlan
from foretoken.lab.launch.engines import refusal
from foretoken.lab.plan.memory_plan import draft_load
from foretoken.lab.plan.predict import LoadPrediction, PlannedSpeed, predict, predict_at
from foretoken.lab.plan.setup import Setup, planned_methods, usual_drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodOutlook:
    """One method on this setup."""

    method: str
    available: bool
    refused: str
    """Why the engine does not draft so; empty if it does."""
    needs: str
    memory_bytes: float
    prediction: PlannedSpeed


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOutlook:
    """All methods on one kind of work."""

    workload: str
    loads: tuple[LoadPrediction, ...]
    """Of each method at the usual load, in the order of `method_outlooks`."""


def method_outlooks(setup: Setup) -> tuple[MethodOutlook, ...]:
    """Every method that makes sense for this target, the asked one with its own k."""
    found = []
    for method, own in _ways(setup):
        refused, plan = refusal(setup.settings.engine, method), _plan_of(method)
        found.append(
            MethodOutlook(
                method=method.name,
                available=not (refused or (method.drafts_with == "head" and method.own_file)),
                refused=refused,
                needs=plan.needs,
                memory_bytes=draft_load(own).weight_bytes,
                prediction=predict(own),
            )
        )
    return tuple(found)


def workload_outlook(setup: Setup, workload: str) -> WorkloadOutlook:
    """The same methods with requests of another kind."""
    other = replace(setup, settings=replace(setup.settings, workload=workload))
    loads = tuple(predict_at(own, setup.usual) for _, own in _ways(other))
    return WorkloadOutlook(workload=workload, loads=loads)


def _ways(setup: Setup) -> Iterator[tuple[DraftingMethod, Setup]]:
    """Every method that makes sense, and the setup with it in place of the asked one."""
    for method in _that_make_sense(setup):
        asked = method.name == setup.method
        k = setup.k if asked else usual_drafts(method)
        if asked:
            yield method, replace(setup, k=k)
        else:
            yield method, with_method(setup, method.name, k)


def with_method(setup: Setup, method: str, k: int) -> Setup:
    """The same models with another method, of which no acceptance was given."""
    settings = replace(setup.settings, acceptance="", rate="")
    return replace(setup, method=method, k=k, settings=settings)


def _that_make_sense(setup: Setup) -> list[DraftingMethod]:
    order = ("text", "head", "model")
    methods = sorted(
        planned_methods().values(),
        key=lambda method: (not method.own_file, order.index(method.drafts_with)),
    )
    return [
        method
        for method in methods
        if (method.drafts_with != "model" or setup.draft is not None)
        and (method.own_file or setup.target.mtp_layers > 0)
    ]


def _plan_of(method: DraftingMethod) -> MethodPlan:
    assert method.plan is not None, method.name
    return method.plan
