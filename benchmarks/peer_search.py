"""Asks an engine, and finds the setting in which it is fastest at a case.

One axis after the other: every value is tried once, for few tokens, and the fastest stays. Then the
two best settings, if they are close, are asked in turns and the faster one is taken, so that a
lucky moment does not decide. A setting that writes a wrong text or does not start is never taken.
Long prompts are judged by their first token. What was found is kept in a file, which another
machine or another version does not use.
"""

import json
import statistics
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from bandwidth import ReadProbe
from engines import Place, PreparationError, Worker, WorkerEnded
from peer_cases import CASES, FLEXIBLE, SEARCH_TOKENS, Case, Setting, axes, describe, taken_over
from workers.run import Job

from foretoken.lab.stats.repeats import in_turn

WARM_UP_TOKENS = 4
FINAL_TURNS = 3
CLOSE = 0.85
"""Of the best speed: what a lucky moment might hide."""
TAIL = 16
"""Tokens of a prompt that a search keeps, where what stands before changes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One engine, one turn."""

    decode_s: float
    """From the first token to the last."""
    prefill_s: float
    right: bool
    """Whether every token was the one that the model must write."""
    read_gb_per_s: float
    """What memory gave at that moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search came to: the best setting, {} if none works, and its speed."""

    best: Setting
    speed: float
    """Decode tokens/s, or prompts/s for long ones."""
    versions: dict[str, str]
    tried: list[list[Any]]
    """Setting, speed, and what was wrong, of every trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CyclePrompts:
    """Token ids of prompts of one kind, and how the cycle models must continue each."""

    ids: list[list[int]]
    answers: list[list[int]]


def load_prompts(models: Path, kind: str) -> CyclePrompts:
    """Prompts of kind `fresh` or `echo` from the folder of the models."""
    prompts = json.loads((models / "prompts.json").read_text())
    return CyclePrompts(ids=prompts[kind], answers=prompts[f"{kind}_answers"])


@dataclass(frozen=True, slots=True)
class Peers:
    """What every case needs."""

    place: Place
    probe: ReadProbe
    prompts: CyclePrompts

    def load(self, engine: str, case: Case, setting: Setting) -> Worker:
        """The engine, ready for a case.

        Raises:
            WorkerEnded: it cannot be set up like this.
        """
        target = self.place.model(engine, "cycle-target", case.weights, setting)
        draft = None
        if case.draft:
            precision = str(setting.get("draft", "16 bit"))
            draft = str(self.place.model(engine, case.draft, precision, setting))
        job = Job(str(target), draft, case.context, case.weights, case.batch, setting)
        return self.place.load(engine, job)

    def measure(
        self, worker: Worker, case: Case, tokens: int, k: int | None = None, *, cut: bool = False
    ) -> Timing:
        """All prompts of a case once, of short ones only the ends if they may be `cut`.

        llama.cpp keeps back the end of a stream whose bytes are no text: half of it has to come.

        Raises:
            WorkerEnded: it stopped.
        """
        read, right = self.probe.gb_per_s(), True
        prompts = []
        for ids in islice(cycle(self.prompts.ids), case.batch):
            filling = (ids * (case.prompt_tokens // len(ids) + 1))[: case.prompt_tokens - len(ids)]
            prompts.append(ids[-TAIL:] if cut and not case.is_long else [*filling, *ids])
        answer = worker.ask(prompts, tokens, k)
        for ids, expected in zip(answer.token_ids, cycle(self.prompts.answers), strict=False):
            least = tokens // 2 if worker.engine == "llama-cpp" else tokens
            right = right and len(ids) >= least and ids == expected[:tokens][: len(ids)]
        return Timing(decode_s=answer.seconds - answer.first_s, prefill_s=answer.first_s,
                      right=right, read_gb_per_s=read)  # fmt: skip


class Search:
    """The search of one engine for one case."""

    def __init__(self, peers: Peers, engine: str, case: Case, tokens: int) -> None:
        self._peers, self._engine, self._case = peers, engine, case
        self._axes = axes(engine, case)
        self._tokens = 2 if case.is_long else tokens
        self._worker: Worker | None = None
        self._loaded: Setting = {}
        self.tried: list[tuple[Setting, float, str]] = []

    def run(self, known: Setting) -> tuple[Setting, float]:
        """The fastest setting and its speed; what is searched once is taken from `known` where it
        is there. Nothing and 0 if none works; PEERS_VERBOSE=1 shows why."""
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
            if all(tried != setting for tried, _, _ in self.tried):
                self._try(setting)
        return max((one for one in self.tried if one[0] in line), key=lambda one: one[1])[0]

    def _try(self, setting: Setting) -> None:
        """Measure once, in the engine that is loaded if it can do that."""
        speed, note = 0.0, ""
        try:
            timing = self._ask(self._ready(setting), setting)
            speed, note = self._speed(timing), "" if timing.right else "wrong text"
        except (WorkerEnded, PreparationError) as error:
            self._drop()
            note = str(error)
        self.tried.append((setting, 0.0 if note else speed, note))
        shown = f"{1 / speed:6.1f} s" if self._case.is_long and speed else f"{speed:6.1f} tokens/s"
        print(f"  {self._engine}: {shown}, {describe(setting)} {note}", flush=True)

    def _speed(self, timing: Timing) -> float:
        """Higher is better."""
        if self._case.is_long:
            return 1.0 / timing.prefill_s
        return (self._tokens - 1) * self._case.batch / timing.decode_s

    def _ask(self, worker: Worker, setting: Setting) -> Timing:
        k = int(setting["k"]) if "k" in setting and self._engine in FLEXIBLE else None
        return self._peers.measure(worker, self._case, self._tokens, k, cut=True)

    def _ready(self, setting: Setting) -> Worker:
        """An engine that can do `setting`, asked once already."""
        wanted = setting
        if "k" in setting and self._engine in FLEXIBLE:
            wanted = {**setting, "k": max(int(k) for k in self._axes["k"])}
        if self._worker is None or self._loaded != wanted:
            self._drop()
            self._worker, self._loaded = self._start(wanted), wanted
        return self._worker

    def _start(self, setting: Setting) -> Worker:
        worker = self._peers.load(self._engine, self._case, setting)
        worker.ask([self._peers.prompts.ids[0]], WARM_UP_TOKENS)
        return worker

    def _drop(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._worker = None

    def _final(self) -> tuple[Setting, float]:
        """The better one of the two best, in turns where one trial each could not tell."""
        able = sorted((one for one in self.tried if one[1]), key=lambda one: -one[1])
        if not able:
            return {}, 0.0
        if len(able) == 1 or able[1][1] < CLOSE * able[0][1]:
            return able[0][0], able[0][1]
        pair = [one[0] for one in able[:2]]
        speeds: list[list[float]] = [[], []]
        with ExitStack() as stack:
            workers = [stack.enter_context(self._start(setting)) for setting in pair]
            for turn in range(FINAL_TURNS):
                for place in in_turn((0, 1), turn):
                    timing = self._ask(workers[place], pair[place])
                    speeds[place].append(self._speed(timing))
        medians = [statistics.median(found) for found in speeds]
        return pair[medians.index(max(medians))], able[0][1]


class SettingsFile:
    """Searches that were made on one machine with one set of models."""

    def __init__(self, path: Path, machine: dict[str, Any]) -> None:
        """Read what is there; `machine` is what searches depend on.

        Raises:
            SystemExit: it was found on another machine or with other models.
        """
        self._path, self._machine = path, machine
        self._entries: dict[str, Found] = {}
        if path.is_file():
            document = json.loads(path.read_text())
            if document["machine"] != machine:
                raise SystemExit(f"{path} was found on {document['machine']}, this is {machine}: "
                                 "name another file with --settings")  # fmt: skip
            self._entries = {key: Found(**one) for key, one in document["entries"].items()}

    def get(self, engine: str, name: str, versions: dict[str, str]) -> Found | None:
        """What was found for a case with the same versions."""
        found = self._entries.get(f"{engine} | {name}")
        return found if found and found.versions == versions else None

    def put(self, engine: str, name: str, found: Found) -> None:
        """Add or replace an entry and write the file."""
        self._entries[f"{engine} | {name}"] = found
        entries = {key: asdict(entry) for key, entry in self._entries.items()}
        self._path.write_text(json.dumps({"machine": self._machine, "entries": entries}, indent=1))

    def first_like(self, engine: str, case: Case, versions: dict[str, str]) -> Setting:
        """The setting of the first case with, or without, drafts that was searched, or none."""
        for name, other in CASES.items():
            found = self.get(engine, name, versions)
            if bool(other.draft) == bool(case.draft) and found:
                return found.best
        return {}


def tune(peers: Peers, file: SettingsFile, engine: str, name: str, *, again: bool = False,
         tokens: int = SEARCH_TOKENS) -> Found:  # fmt: skip
    """The best setting of an engine for a case, searched if it is not known, or `again`."""
    versions = peers.place.versions(engine)
    known = file.get(engine, name, versions)
    if known is not None and not again:
        return known
    print(f"{name}: searching the best setting of {engine}", flush=True)
    search = Search(peers, engine, CASES[name], tokens)
    best, speed = search.run(file.first_like(engine, CASES[name], versions))
    tried = [list(one) for one in search.tried]
    found = Found(best=best, speed=speed, versions=versions, tried=tried)
    file.put(engine, name, found)
    return found
