"""One case of `peers.py`: every engine at its best, all loaded at once and asked in turns.

Owns the choice of arms and what is kept of their turns. Knows nothing of goals.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from common import in_turn
from peer_asking import Asking, Timing, measure
from peer_cases import CASES, OURS, OURS_8, Case, Setting, describe, mode_of
from peer_floor import LimitsProbe, Work, between
from peer_load import Loader
from peer_search import NothingWorks, Search
from peer_settings import Found, SettingsFile
from peer_setup import WorkerEnded
from peer_table import DECODE, FIRST, Measured
from prompts import load_prompts

from foretoken.shape.model import ModelShape

PAUSE_S = 0.5
FAR = 0.5
"""A peer whose best setting came to less than this share of the fastest peer's is not asked again:
it cannot become the fastest one, and slow engines would take most of the time."""
WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One engine in one setting."""

    engine: str
    setting: Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """Every arm's turns, and engines that have none, each with its reason."""

    arms: dict[str, Arm]
    timings: dict[str, list[Timing]]
    versions: dict[str, dict[str, str]]
    missing: dict[str, str]


class Tuner:
    """Best settings, from the file or searched now."""

    def __init__(
        self, engines: Sequence[str], loader: Loader, file: SettingsFile, probe: LimitsProbe
    ) -> None:
        """Of engines that are installed."""
        self._loader, self._file, self._probe = loader, file, probe
        self._versions = {engine: loader.versions(engine) for engine in engines}

    def found(self, engine: str, name: str) -> Found | None:
        """What an earlier search came to."""
        return self._file.get(engine, name, self._versions[engine])

    def tune(self, engine: str, name: str, asking: Asking) -> Found:
        """The best setting of an engine for a case, searched if it is not known."""
        known = self.found(engine, name)
        if known is not None:
            return known
        print(f"{name}: searching the best setting of {engine}", flush=True)
        case, versions = CASES[name], self._versions[engine]
        search = Search(engine, case, asking, self._loader, self._probe)
        taken = self._file.of_kind(engine, case.kind, versions)
        best: Setting = {}
        try:
            best = search.run(taken)
        except NothingWorks as error:
            print(f"  {error}", flush=True)
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        found = Found(best=best, versions=versions, tokens=asking.tokens, when=when,
                      tried=search.tried)  # fmt: skip
        self._file.put(engine, name, found)
        return found


def far_behind(speeds: Mapping[str, float]) -> dict[str, str]:
    """Peers that a search has found much slower than the fastest one, with the reason."""
    if not speeds:
        return {}
    best = max(speeds, key=lambda name: speeds[name])
    return {
        name: f"{speed / speeds[best]:.2f} of {best}'s speed when it was tuned: not asked again"
        for name, speed in speeds.items()
        if speed < FAR * speeds[best]
    }


def choose_arms(names: Sequence[str], found: Mapping[tuple[str, str], Found]) -> CaseResult:
    """Arms of cases of equal work, no setting twice; results of searches by engine and case."""
    arms: dict[str, Arm] = {}
    missing: dict[str, str] = {}
    for name in names:
        own = {engine: one for (engine, case), one in found.items() if case == name}
        missing |= {e: "works in no setting that was tried" for e, f in own.items() if not f.best}
        able = {engine: one for engine, one in own.items() if one.best}
        peers = {e: f.speed for e, f in able.items() if e not in (OURS, OURS_8)}
        slow = far_behind(peers)
        missing |= slow
        for engine, one in able.items():
            if engine not in slow:
                _add(arms, engine, one.best)
        if CASES[name].draft and OURS in able:
            for engine in peers.keys() - slow.keys():
                precision = able[engine].best.get("draft", "16 bit")
                _add(arms, OURS, {**able[OURS].best, "draft": precision})
    missing = {engine: why for engine, why in missing.items() if engine not in arms}
    return CaseResult(arms=arms, timings={}, versions={}, missing=missing)


def _add(arms: dict[str, Arm], engine: str, setting: Setting) -> None:
    """An arm, unless there is one with the same engine and setting."""
    if Arm(engine=engine, setting=setting) in arms.values():
        return
    name = engine
    if engine in arms:
        first = arms[engine].setting
        more = {key: value for key, value in setting.items() if first.get(key) != value}
        name = f"{engine} ({describe(more)})"
    arms[name] = Arm(engine=engine, setting=setting)


def compare(
    case: Case, chosen: CaseResult, asking: Asking, loader: Loader, probe: LimitsProbe, turns: int
) -> CaseResult:
    """Load all arms and ask them in turns; an engine that ends is left out with the reason."""
    missing = dict(chosen.missing)
    timings: dict[str, list[Timing]] = {}
    with ExitStack() as stack:
        workers = {}
        for name, arm in chosen.arms.items():
            try:
                worker = stack.enter_context(loader.load(arm.engine, case, arm.setting))
                measure(worker, case, replace(asking, count=1, tokens=WARM_UP_TOKENS), probe.now())
            except WorkerEnded as error:
                missing[name] = str(error)
                continue
            workers[name], timings[name] = worker, []
        for turn in range(turns):
            for name in in_turn(list(workers), turn):
                time.sleep(PAUSE_S)
                before = probe.now()
                timing = measure(workers[name], case, asking, before)
                limits = between(before, probe.now())
                timings[name].append(replace(timing, limits=limits))
        versions = {name: worker.versions for name, worker in workers.items()}
    arms = {name: arm for name, arm in chosen.arms.items() if name in workers}
    return CaseResult(arms=arms, timings=timings, versions=versions, missing=missing)


def measured(
    case: Case, result: CaseResult, metric: str, asking: Asking, shape: ModelShape
) -> dict[str, Measured]:
    """Each engine's best arm by a metric, with the floor of its mode beside its seconds."""
    found: dict[str, Measured] = {}
    for name, arm in result.arms.items():
        one = _measured(case, arm, result.timings[name], metric, asking, shape)
        before = found.get(arm.engine)
        better = before is None or statistics.median(one.seconds) < statistics.median(
            before.seconds
        )
        # Ours is what its own search chose; a peer with two arms is judged by the faster one.
        if before is None or (better and arm.engine not in (OURS, OURS_8)):
            found[arm.engine] = one
    return found


def _measured(
    case: Case, arm: Arm, timings: Sequence[Timing], metric: str, asking: Asking, shape: ModelShape
) -> Measured:
    mode = mode_of(arm.engine, case.weights, arm.setting)
    work = Work(shape=shape, weights=case.weights, eight_bit_activations=mode.startswith("8"))
    first, tokens = case.prompt_tokens, asking.tokens
    floors: list[float] = []
    if metric == FIRST:
        seconds = [timing.prefill_s for timing in timings]
        shown, unit = statistics.median(seconds), "s"
        floors = [work.prompt_s(t.limits, first) for t in timings]
    else:
        assert metric == DECODE, metric
        new = (tokens - 1) * asking.count * case.batch
        seconds = [timing.decode_s / new for timing in timings]
        shown, unit = 1.0 / statistics.median(seconds), "tokens/s"
        if case.method is None and case.batch == 1:
            floors = [work.decode_s(t.limits, first, first + tokens) for t in timings]
    read = statistics.median(t.limits.read_bytes_per_s for t in timings) / 1e9
    return Measured(
        seconds=tuple(seconds),
        shown=shown,
        unit=unit,
        read_gb_per_s=read,
        note=f"{mode}; {describe(arm.setting)}",
        right=all(timing.right for timing in timings),
        floor_s=tuple(floors) if all(floors) else (),
    )


def asking_for(case: Case, models: Any, *, prompts: int, tokens: int | None) -> Asking:
    """As the table asks; `tokens` in place of the case's own."""
    given = min(tokens or case.tokens, case.tokens)
    return Asking(prompts=load_prompts(models, case.prompts), count=prompts, tokens=given)


def searching_for(case: Case, models: Any, tokens: int) -> Asking:
    """As a search asks: once, few tokens, prompts cut where nothing depends on them."""
    given = 2 if case.prefill else tokens
    prompts = load_prompts(models, case.prompts)
    return Asking(prompts=prompts, count=1, tokens=given, shortened=True)
