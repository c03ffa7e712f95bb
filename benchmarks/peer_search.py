"""Finds the setting in which an engine is fastest at a case.

One axis after the other: every value is tried once, for few tokens, and the fastest stays. Then the
two best settings, if they are close, are asked in turns and the faster one is taken, so that a
lucky moment does not decide. A setting that writes a wrong text or does not start is never taken.
"""

import statistics
from contextlib import ExitStack

from common import in_turn
from peer_asking import Asking, Timing, measure
from peer_cases import FLEXIBLE, Axes, Case, Setting, axes, describe, taken_over
from peer_floor import Limits, LimitsProbe
from peer_load import Loader
from peer_settings import Trial
from peer_setup import Worker, WorkerEnded

WARM_UP_TOKENS = 4
FINAL_TURNS = 3
CLOSE = 0.85
"""Of the best speed: what a lucky moment might hide."""


class NothingWorks(Exception):
    """An engine has no setting in which it does a case."""


class Search:
    """The search of one engine for one case."""

    def __init__(
        self, engine: str, case: Case, asking: Asking, loader: Loader, probe: LimitsProbe
    ) -> None:
        """Nothing is loaded yet."""
        self._engine, self._case, self._asking = engine, case, asking
        self._loader, self._probe = loader, probe
        self._axes: Axes = axes(engine, case)
        self._worker: Worker | None = None
        self._loaded: Setting = {}
        self.tried: list[Trial] = []

    def run(self, known: Setting) -> Setting:
        """The fastest setting; what is searched once is taken from `known` where it is there.

        Raises:
            NothingWorks: an engine that starts in no setting, or writes wrong texts in all.
        """
        taken = taken_over(self._case, self._axes, known)
        best = {name: taken.get(name, values[0]) for name, values in self._axes.items()}
        try:
            self._try(best)
            for name in self._axes:
                if name not in taken:
                    best = self._along(name, best)
        finally:
            self._drop()
        return self._final()

    def _along(self, name: str, best: Setting) -> Setting:
        """The best setting that differs from `best` in one axis only, `best` included."""
        line = [{**best, name: value} for value in self._axes[name]]
        for setting in line:
            if all(trial.setting != setting for trial in self.tried):
                self._try(setting)
        trials = [trial for trial in self.tried if trial.setting in line]
        return max(trials, key=lambda trial: trial.tokens_per_s).setting

    def _try(self, setting: Setting) -> None:
        """Measure once, in the engine that is loaded if it can do that."""
        limits = self._probe.now()
        read = limits.read_bytes_per_s / 1e9
        try:
            worker = self._ready(setting)
            timing = self._ask(worker, setting, limits)
            speed, note = self._speed(timing), "" if timing.right else "wrong text"
        except WorkerEnded as error:
            self._drop()
            speed, note = 0.0, str(error)
        trial = Trial(setting=setting, tokens_per_s=0.0 if note else speed, read_gb_per_s=read,
                      note=note)  # fmt: skip
        self.tried.append(trial)
        shown = f"{1 / speed:6.1f} s" if self._case.prefill and speed else f"{speed:6.1f} tokens/s"
        figures = f"{shown}, {read:.1f} GB/s"
        print(f"  {self._engine}: {figures}, {describe(setting)} {note}", flush=True)

    def _speed(self, timing: Timing) -> float:
        """Higher is better: first tokens/s if the case is judged by them, else decode tokens/s."""
        if self._case.prefill:
            return 1.0 / timing.prefill_s
        count = self._asking.count * self._case.batch
        return (self._asking.tokens - 1) * count / timing.decode_s

    def _ask(self, worker: Worker, setting: Setting, limits: Limits) -> Timing:
        k = int(setting["k"]) if "k" in setting and self._engine in FLEXIBLE else None
        return measure(worker, self._case, self._asking, limits, k)

    def _ready(self, setting: Setting) -> Worker:
        """An engine that can do `setting`, asked once already."""
        wanted = setting
        if "k" in setting and self._engine in FLEXIBLE:
            wanted = {**setting, "k": max(int(k) for k in self._axes["k"])}
        if self._worker is None or self._loaded != wanted:
            self._drop()
            self._worker = self._loader.load(self._engine, self._case, wanted)
            self._loaded = wanted
            self._worker.ask([self._asking.prompts.ids[0]], WARM_UP_TOKENS)
        return self._worker

    def _drop(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._worker = None

    def _final(self) -> Setting:
        """The better one of the two best, in turns where one trial each could not tell."""
        able = sorted((t for t in self.tried if t.tokens_per_s), key=lambda t: -t.tokens_per_s)
        if not able:
            raise NothingWorks(f"{self._engine} works in no setting; PEERS_VERBOSE=1 shows why")
        if len(able) == 1 or able[1].tokens_per_s < CLOSE * able[0].tokens_per_s:
            return able[0].setting
        speeds: list[list[float]] = [[], []]
        with ExitStack() as stack:
            pair = [(trial.setting, stack.enter_context(
                self._loader.load(self._engine, self._case, trial.setting)))
                for trial in able[:2]]  # fmt: skip
            for _, worker in pair:
                worker.ask([self._asking.prompts.ids[0]], WARM_UP_TOKENS)
            for turn in range(FINAL_TURNS):
                for place in in_turn((0, 1), turn):
                    setting, worker = pair[place]
                    timing = self._ask(worker, setting, self._probe.now())
                    speeds[place].append(self._speed(timing))
        medians = [statistics.median(found) for found in speeds]
        return pair[medians.index(max(medians))][0]
