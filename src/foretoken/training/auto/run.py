"""`foretoken train auto` from end to end: rates, answers, candidates, the winner, what it is worth.

Owns that order, and `journal.jsonl`: one line a finished part of the work, written once it is on
disk, with the second of the run at which it ended. A part that has a line is not done again; what a
killed run was in the middle of goes on from its own files. The time of a run is that of the clock
while a process of it lives, pauses included; what lies between the last line before a kill and the
next start does not count. Owns, too, which kinds compete for a target, and the numbers of a run
that nobody chose by hand; the keys of each kind's `[head]` are the kind's own (`usual` of its
record). The times are the timetable's, from rates of this machine, target and set of prompts.
"""

import gc
import json
import random
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, final

import torch

from foretoken.checkpoint import find_model
from foretoken.config.auto import expected_gain
from foretoken.config.method_registry import known_methods
from foretoken.errors import ConfigError
from foretoken.kv.features import FINAL
from foretoken.training import run_folder
from foretoken.training.auto.judging import Judgement, contestant, judge
from foretoken.training.auto.timetable import LEAST_STEPS, Rates, Supply, Timetable, plan
from foretoken.training.data.answers import answer_all, read_answers, write_answers
from foretoken.training.data.loaded_target import LoadedTarget
from foretoken.training.data.prompts import PromptSet, read_prompt_set
from foretoken.training.data.states import keep_states, read_parts, read_plan
from foretoken.training.heads.export import export_run
from foretoken.training.heads.kind import find_kind, require_fit
from foretoken.training.heads.target import TargetParts
from foretoken.training.loop import MIXED, Progress, Trainer
from foretoken.training.run_folder import append_lines, make, read_lines
from foretoken.training.runs import build_job
from foretoken.training.schedule import Stage
from foretoken.training.settings import (
    DataSettings,
    HeadSettings,
    LlamaShape,
    Settings,
    StateSettings,
)
from foretoken.training.trained_kinds import kinds_of
from foretoken.types import SamplingParams

FILE = "journal.jsonl"
BEAT = "beat"
BEAT_S = 20.0
"""Between lines that only say how late it is; a killed run forgets at most so much time."""

Facts = dict[str, Any]


@final
class RunJournal:
    """The journal of one run's folder; `seconds` is how much of its time is used up."""

    def __init__(self, folder: Path, now: Callable[[], float] = time.monotonic) -> None:
        """Open the journal in `folder`, or begin one; `now` is a clock in seconds. Raises
        ConfigError: a line is broken."""
        make(folder)
        self._path, self._now = folder / FILE, now
        self._lines = _read(self._path)
        self._before = float(self._lines[-1]["at"]) if self._lines else 0.0
        self._began = now()
        self._last = self._before

    @property
    def seconds(self) -> float:
        """Time of the run that is used up."""
        return self._before + self._now() - self._began

    def find(self, part: str) -> Any | None:
        """What a finished part came to; None: it is not finished."""
        return next((line["found"] for line in self._lines if line["part"] == part), None)

    def once(self, part: str, work: Callable[[], Facts]) -> Facts:
        """What `part` came to: as it is written down, or by doing the `work` now."""
        known: Facts | None = self.find(part)
        if known is not None:
            return known
        found: Facts = json.loads(json.dumps(work()))
        self._write(part, found)
        return found

    def beat(self) -> None:
        """Write down how late it is, if nothing has been written for a while."""
        if self.seconds - self._last >= BEAT_S:
            self._write(BEAT, {})

    def _write(self, part: str, found: Facts) -> None:
        line: Facts = {"part": part, "at": round(self.seconds, 3), "found": found}
        append_lines(self._path, [json.dumps(line)], "start again to go on")
        self._lines.append(line)
        self._last = line["at"]


def _read(path: Path) -> list[Facts]:
    found = []
    for number, line in enumerate(read_lines(path), start=1):
        try:
            record = json.loads(line)
            found.append({name: record[name] for name in ("part", "at", "found")})
        except (ValueError, KeyError, TypeError) as error:
            allowed = "a line that a run wrote; name another --out for a new run"
            raise ConfigError(f"{path} line {number}", line[:120], allowed) from error
    return found


FEWEST_PROMPTS, MOST_PROMPTS = 24, 100_000
FEWEST_HELD_OUT, MOST_HELD_OUT = 12, 32
LONGEST_ROW, LONGEST_ANSWER = 512, 256
LARGEST_BATCH = 32
MICRO_TOKENS = 1024
DECAY_SHARE = 0.4
MEASUREMENTS = 10
"""Held-out measurements of a whole run, about."""


def read_auto_prompts(source: str, target: LoadedTarget) -> tuple[PromptSet, Supply]:
    """Different prompts in an order of their own, so that held-out ones are like the others. Raises
    ConfigError: as `read_prompt_set`, or too few different prompts."""
    longest = target.max_length
    answer_tokens = min(LONGEST_ANSWER, longest // 4)
    settings = DataSettings(prompts=source, most_prompts=MOST_PROMPTS, held_out=1)
    found = read_prompt_set(settings, target.engine.parts.tokenizer, longest // 2)
    ids = list(dict.fromkeys(found.ids))
    if len(ids) < FEWEST_PROMPTS:
        given = f"{source} with {len(ids)} different prompts"
        raise ConfigError("PROMPTS", given, f"{FEWEST_PROMPTS} or more, hundreds if you can")
    random.Random(0).shuffle(ids)
    held_out = min(max(FEWEST_HELD_OUT, len(ids) // 20), MOST_HELD_OUT) // 2 * 2
    batch = min(LARGEST_BATCH, max(1, (len(ids) - held_out) // 8))
    row = min(LONGEST_ROW, 1 << (longest // 2).bit_length() - 1)
    sizes = Supply(
        held_out=held_out,
        batch=batch,
        most_prompts=len(ids),
        answer_tokens=answer_tokens,
        row_length=row,
    )
    return replace(found, ids=tuple(ids)), sizes


def competing(target: TargetParts, make: "SettingsOf") -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The kinds that this target can have, the most promising first, and why others are out."""
    fitting, out = [], []
    methods = sorted(known_methods(), key=expected_gain, reverse=True)
    for kind in (trained.kind for method in methods for trained in kinds_of(method)):
        if find_kind(kind).usual is None:
            out.append(f"{kind} (needs a model to begin with)")
            continue
        try:
            require_fit(target, make(target, kind, 1, MICRO_TOKENS))
        except ConfigError as error:
            out.append(f"{kind} ({error})")
        else:
            fitting.append(kind)
    return tuple(fitting), tuple(out)


def method_word(kind: str) -> str:
    """The method in `speculative_config` that drafts with what a run of this kind made."""
    for method in known_methods():
        for trained in kinds_of(method):
            if trained.kind == kind:
                return trained.command if trained.command in method.aliases else method.name
    raise AssertionError(f"{kind} is no kind")


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsOf:
    """Settings of a run of any kind, on data that all share."""

    target: str
    prompts: str
    sizes: Supply
    states: Path

    @property
    def data(self) -> DataSettings:
        """The table `[data]` of every run."""
        return DataSettings(
            prompts=self.prompts,
            answer_tokens=self.sizes.answer_tokens,
            held_out=self.sizes.held_out,
            batch=self.sizes.batch,
        )

    def __call__(self, parts: TargetParts, kind: str, steps: int, batch_tokens: int) -> Settings:
        """Settings for `steps` steps of `batch_tokens` tokens."""
        usual, row = find_kind(kind).usual, self.sizes.row_length
        assert usual is not None, f"{kind} competes"
        batch = max(row, batch_tokens)
        return Settings(
            name=kind,
            shape=LlamaShape(),
            head=HeadSettings(kind=kind, **usual(parts)),
            data=self.data,
            states=StateSettings(folder=str(self.states)),
            stages=(Stage(until=1.0, length=row),),
            target=self.target,
            max_steps=max(1, steps),
            batch_tokens=batch,
            micro_tokens=min(batch, max(row, MICRO_TOKENS)),
            warmup_steps=20,
            decay_share=DECAY_SHARE,
            weight_decay=0.0,
            evaluate_steps=max(1, steps // MEASUREMENTS),
            checkpoint_minutes=1.0,
            compile=False,
        )


SHARE = 0.02
"""Of the prompts that are not held out, those on which rates are measured. The fastest of several
measurements counts, since a pause of the machine can only add; nothing is kept but the answers."""
STEPS = 3
PLAIN_TOKENS = 48
FOLDER = "probe"


class Probe(NamedTuple):
    """What is measured: these kinds of drafters for this target, on these prompts, in `folder`."""

    target: LoadedTarget
    settings_of: SettingsOf
    prompts: PromptSet
    folder: Path
    report: Callable[[str], None]

    def rates(self, kinds: Sequence[str], load_s: float) -> Rates:
        """All rates; `load_s` is what opening the target took."""
        data = self.settings_of.data
        batches = -(-SHARE * (len(self.prompts.ids) - data.held_out) // data.batch)
        count = min(len(self.prompts.ids), data.held_out + int(max(1, batches)) * data.batch)
        shutil.rmtree(self.folder / FOLDER, ignore_errors=True)
        answer_s = self._answering(count)
        tokens = [len(ids) for ids in read_answers(self.folder)[data.held_out :]]
        prompt_tokens = sum(tokens) / len(tokens)
        keep_states(self.target, self._settings(kinds[0]), self.folder, None, lambda _: None, kinds)
        found = Rates(
            prompt_s=answer_s + prompt_tokens * self._state_s(),
            prompt_tokens=prompt_tokens,
            train_s={kind: self._training(kind) for kind in kinds},
            load_s=2 * load_s,
            token_s=self._plain(),
        )
        shutil.rmtree(self.folder / FOLDER)
        return found

    def _settings(self, kind: str) -> Settings:
        inside = replace(self.settings_of, states=self.folder / FOLDER)
        return inside(self.target.parts, kind, 1, MICRO_TOKENS)

    def _answering(self, count: int) -> float:
        """Seconds an answer; answers of an earlier start are no news, then some are given again."""
        settings = self.settings_of.data
        known = len(read_answers(self.folder))
        some = replace(self.prompts, ids=self.prompts.ids[:count])
        began = time.monotonic()
        write_answers(self.target.engine, some, settings, self.folder, lambda _: None)
        if known < count:
            return (time.monotonic() - began) / (count - known)
        asked = self.prompts.ids[: settings.batch]
        params = SamplingParams(max_tokens=settings.answer_tokens, seed=0, detokenize=False)
        began = time.monotonic()
        answer_all(self.target.engine, asked, params)
        return (time.monotonic() - began) / len(asked)

    def _state_s(self) -> float:
        length = self.settings_of.sizes.row_length
        row = torch.randint(self.target.parts.vocab_size, (1, length))
        took = []
        for _ in range(STEPS):
            began = time.monotonic()
            self.target.capture(row, (FINAL,))
            took.append(time.monotonic() - began)
        return min(took) / length

    def _training(self, kind: str) -> float:
        settings = self._settings(kind)
        job = build_job(settings, self.folder)
        trainer = Trainer(job, settings, self.folder / FOLDER / kind)
        took = []
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", MIXED)
            for _ in range(STEPS):
                before = trainer.progress.seconds
                trainer.step()
                took.append(trainer.progress.seconds - before)
        found = min(took) / settings.batch_tokens
        self.report(f"  {kind}: {1 / found:,.0f} tokens of training a second")
        return found

    def _plain(self) -> float:
        """Seconds a token of one answer alone."""
        params = SamplingParams(
            temperature=0.0, max_tokens=PLAIN_TOKENS, ignore_eos=True, detokenize=False
        )
        took = []
        for _ in range(STEPS):
            began = time.monotonic()
            answer_all(self.target.engine, self.prompts.ids[:1], params)
            took.append(time.monotonic() - began)
        return min(took) / PLAIN_TOKENS


DRAFTER, REPORT, STATES = "drafter", "report.json", "states"
TRAINED = "trained"
"""What the winner is called in the last judgement."""
DISK_SHARE = 0.5
"""Of the free disk, what hidden states may take."""
MOST_PASSES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What a user asked for. Raises ConfigError: no time."""

    target: str
    """Folder, packaged name or hub id."""
    prompts: str
    """A file or data set of prompts, as `[data]` has it."""
    hours: float
    out: Path

    def __post_init__(self) -> None:
        if not 0 < self.hours < float("inf"):
            raise ConfigError("--hours", self.hours, "a number above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoOutcome:
    """What a run came to."""

    kind: str
    folder: Path
    """Where the drafter is."""
    steps: int
    trained_s: float
    """Time of its steps."""
    judgement: Judgement
    """On held-out prompts that decided nothing before; the drafter's name there is TRAINED."""
    ranking: tuple[tuple[str, float], ...]
    """Median speed-up over plain decoding of each candidate when it was last judged, with little
    training; the winner first."""

    @property
    def config(self) -> dict[str, Any]:
        """The `speculative_config` that drafts with it as it was judged."""
        return {
            "method": method_word(self.kind),
            "model": str(self.folder),
            "num_speculative_tokens": self.judgement.lengths[TRAINED],
        }


@final
class AutoRun:
    """One run, begun or gone on with."""

    def __init__(
        self,
        asked: Assignment,
        report: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the journal in the run's folder; `now` is a clock in seconds. Raises ConfigError:
        the folder is of another target or other prompts."""
        self._asked, self._report = asked, report
        self._journal = RunJournal(asked.out, now)
        self._total_s = 3600 * asked.hours
        given = {"target": asked.target, "prompts": asked.prompts}
        begun = self._journal.once("begun", lambda: given)
        if begun != given:
            allowed = f"{begun['target']} and {begun['prompts']}, or another --out for a new run"
            raise ConfigError(f"--out {asked.out}", f"{asked.target}, {asked.prompts}", allowed)

    def run(self) -> AutoOutcome:
        """Do what is not done yet.

        Raises:
            ConfigError: prompts that cannot be read, or too few.
            ModelError: the target cannot be run, or not by a family of our own.
            TrainingError: a run cannot go on, or the disk is full.
        """
        if self._journal.find("worth") is not None:
            self._say("this run is finished; name another --out for a new one")
        make, table, held_out = self._prepared()
        gc.collect()  # the target has gone, and opens again where drafters are judged
        ranking = self._candidates(make, table, held_out[::2])
        return self._winner(make, table, ranking, held_out[1::2])

    def _prepared(self) -> tuple[SettingsOf, Timetable, Sequence[Sequence[int]]]:
        """What to do, with answers and hidden states on disk, and the held-out prompts."""
        opened = time.monotonic()
        target = LoadedTarget(find_model(self._asked.target))
        load_s = time.monotonic() - opened
        prompts, sizes = read_auto_prompts(self._asked.prompts, target)
        make = SettingsOf(
            target=self._asked.target,
            prompts=self._asked.prompts,
            sizes=sizes,
            states=self._asked.out / STATES,
        )
        rates = self._rates(Probe(target, make, prompts, self._asked.out, self._say), load_s)
        table = self._timetable(target, rates, sizes)
        self._journal.once("data", lambda: self._data(target, make, prompts, table))
        return make, table, prompts.ids[: sizes.held_out]

    def _say(self, text: str) -> None:
        """A line with the time of the run before it."""
        self._journal.beat()
        self._report(f"[{_clock(self._journal.seconds)} of {_clock(self._total_s)}] {text}")

    def _rates(self, probe: Probe, load_s: float) -> Rates:
        kinds, out = competing(probe.target.parts, probe.settings_of)
        if not kinds:
            raise ConfigError("MODEL", self._asked.target, f"one of our drafters fits ({out})")
        if self._journal.find("rates") is None:
            if out:
                self._say(f"left out: {'; '.join(out)}")
            self._say("measuring rates on a few prompts")
        return Rates(**self._journal.once("rates", lambda: asdict(probe.rates(kinds, load_s))))

    def _timetable(self, target: LoadedTarget, rates: Rates, found: Supply) -> Timetable:
        known = self._journal.find("timetable")
        if known is None:
            points = {p for kind in rates.train_s for p in find_kind(kind).points(target.parts)}
            token_bytes = (len(points) + 1) * target.parts.hidden_size * target.dtype.itemsize
            free = DISK_SHARE * shutil.disk_usage(self._asked.out).free
            room = int(free / (token_bytes * rates.prompt_tokens))
            most = min(found.most_prompts, max(room, found.held_out + 1))
            supply = replace(found, most_prompts=most)
            made = plan(self._total_s, self._journal.seconds, rates, supply)
            known = self._journal.once("timetable", lambda: asdict(made))
            least = min(made.winner_steps.values())
            self._say(
                f"plan: {made.prompts} prompts of {found.most_prompts}; "
                f"candidates: {', '.join(made.steps)}; "
                f"steps of {made.batch_tokens} tokens, about {least:,} or more for the winner, "
                f"until {_clock(made.train_until)}"
            )
            if least < LEAST_STEPS * 10:
                self._say("that is little training; more --hours would say more")
        return Timetable(**{**known, "rungs": tuple(known["rungs"])})

    def _data(
        self, target: LoadedTarget, make: SettingsOf, prompts: PromptSet, table: Timetable
    ) -> Facts:
        """Answers and hidden states that all candidates share."""
        if read_plan(make.states) is None:  # else they were answered before a kill
            self._answers(target, make, prompts, table)
        kinds = list(table.steps)
        settings = make(target.parts, kinds[0], 1, table.batch_tokens)
        keep_states(target, settings, self._asked.out, None, self._say, kinds)
        return {"prompts": len(read_answers(self._asked.out))}

    def _answers(
        self, target: LoadedTarget, make: SettingsOf, prompts: PromptSet, table: Timetable
    ) -> None:
        step = max(1, table.prompts // 16 // make.data.batch) * make.data.batch
        for end in (*range(make.data.held_out + step, table.prompts, step), table.prompts):
            some = replace(prompts, ids=prompts.ids[:end])
            write_answers(target.engine, some, make.data, self._asked.out, lambda _: None)
            self._say(f"answered {end} prompts of {table.prompts}")
            if self._journal.seconds > self._total_s / 2:
                self._say("answers took longer than planned: going on with those that there are")
                return

    def _settings(self, make: SettingsOf, table: Timetable, kind: str) -> Settings:
        parts = read_parts(self._asked.out / STATES, torch.device("cpu"))
        return make(parts, kind, table.winner_steps[kind], table.batch_tokens)

    def _candidates(
        self, make: SettingsOf, table: Timetable, prompts: Sequence[Sequence[int]]
    ) -> list[tuple[str, float]]:
        """All that were judged, the best first: those that went on before those that did not."""
        alive = list(table.steps)
        ranking, out = [(alive[0], 0.0)], list[tuple[str, float]]()
        for rung, count in enumerate(table.rungs):
            alive, out = alive[:count], (ranking[count:] if rung else []) + out
            for kind in alive:
                self._journal.once(
                    f"rung {rung} {kind}", partial(self._rung, make, table, kind, rung)
                )
            judged = partial(self._judged, alive, table, prompts)
            found = self._journal.once(f"judged {rung}", judged)
            ranking = [(kind, speed) for kind, speed in found["ranking"]]
            alive = [kind for kind, _ in ranking]
        return ranking + out

    def _rung(self, make: SettingsOf, table: Timetable, kind: str, rung: int) -> Facts:
        """Train a candidate as far as it may go before it is judged."""
        goal = table.steps[kind] * (rung + 1)
        self._say(f"candidate {kind}: up to step {goal}")

        def pauses(progress: Progress) -> bool:
            self._journal.beat()
            return progress.step >= goal or self._journal.seconds >= table.train_until

        settings, run = self._settings(make, table, kind), self._asked.out / kind
        trainer = Trainer(build_job(settings, self._asked.out), settings, run)
        done = trainer.run(lambda _: None, pauses)
        export_run(run, run / DRAFTER, verifier=self._asked.target)
        return {"steps": done.step, "seconds": done.seconds, **done.history[-1]}

    def _judged(
        self, kinds: Sequence[str], table: Timetable, prompts: Sequence[Sequence[int]]
    ) -> Facts:
        found = judge(
            self._asked.target,
            [contestant(k, self._asked.out / k / DRAFTER, method_word(k)) for k in kinds],
            prompts[: table.judged_prompts],
            table.judged_tokens,
            until=lambda passes: True,
        )
        ranking = [(kind, median(found.speedups(kind))) for kind in found.best(kinds)]
        shown = ", ".join(f"{kind} {speed:.2f}x" for kind, speed in ranking)
        self._say(f"judged in the engine, over plain decoding: {shown}")
        return {"ranking": ranking, "judgement": asdict(found)}

    def _winner(
        self,
        make: SettingsOf,
        table: Timetable,
        ranking: Sequence[tuple[str, float]],
        prompts: Sequence[Sequence[int]],
    ) -> AutoOutcome:
        kind = ranking[0][0]
        done = self._journal.once("winner", lambda: self._finish(make, table, kind))
        folder = self._asked.out / DRAFTER
        found = self._journal.once("worth", lambda: asdict(self._worth(kind, table, prompts)))
        outcome = AutoOutcome(
            kind=kind,
            folder=folder,
            steps=done["steps"],
            trained_s=done["seconds"],
            judgement=Judgement(**{**found, "look_ups": tuple(found["look_ups"])}),
            ranking=tuple(ranking),
        )
        text = json.dumps({**asdict(outcome), "folder": str(folder), "config": outcome.config})
        run_folder.write_whole(self._asked.out / REPORT, lambda part: part.write_text(text + "\n"))
        return outcome

    def _finish(self, make: SettingsOf, table: Timetable, kind: str) -> Facts:
        """Train the winner until it is time to measure it, and write it."""
        self._say(f"training {kind} until {_clock(table.train_until)}")
        settings, run = self._settings(make, table, kind), self._asked.out / kind
        state = run_folder.load_newest(run)
        before = 0.0 if state is None else float(state["progress"]["seconds"])
        began = self._journal.seconds
        left = max(1e-9, table.train_until - began)
        done_before = before / (before + left)

        def length(step: int, seconds: float) -> float:
            """The run ends at a moment, whatever its steps take."""
            gone = (self._journal.seconds - began) / left
            return min(1.0, done_before + (1.0 - done_before) * gone)

        trainer = Trainer(build_job(settings, self._asked.out), settings, run, length=length)

        def beat(_: Progress) -> bool:
            self._journal.beat()
            return False

        done = trainer.run(self._say, beat)
        export_run(run, self._asked.out / DRAFTER, verifier=self._asked.target)
        return {"steps": done.step, "seconds": done.seconds}

    def _worth(self, kind: str, table: Timetable, prompts: Sequence[Sequence[int]]) -> Judgement:
        self._say("measuring the drafter beside plain decoding and what needs no training")
        began = self._journal.seconds

        def until(passes: int) -> bool:
            a_pass = (self._journal.seconds - began) / passes
            return passes >= MOST_PASSES or self._journal.seconds + a_pass > self._total_s

        return judge(
            self._asked.target,
            [contestant(TRAINED, self._asked.out / DRAFTER, method_word(kind))],
            prompts[: table.judged_prompts],
            table.judged_tokens,
            until,
            with_others=True,
        )


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
