"""A run of `foretoken train auto`: its prompts, sizes, settings of each kind of drafter, and rates.

Owns which kinds compete for a target, and the numbers of a run that nobody chose by hand. The keys
of each kind's `[head]` are the kind's own (`usual` of its record). Rates are of one machine, target
and set of prompts, measured on a few prompts: the fastest of several counts, since a pause of the
machine can only add. Nothing that is written for them is kept but the answers.
"""

import random
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from foretoken.config.auto import expected_gain
from foretoken.config.method_registry import known_methods
from foretoken.errors import ConfigError
from foretoken.kv.features import FINAL
from foretoken.training.auto.timetable import Rates, Supply
from foretoken.training.data.answers import answer_all, read_answers, write_answers
from foretoken.training.data.loaded_target import LoadedTarget
from foretoken.training.data.prompts import PromptSet, read_prompt_set
from foretoken.training.data.states import keep_states
from foretoken.training.heads.kind import find_kind, require_fit
from foretoken.training.heads.target import TargetParts
from foretoken.training.loop import MIXED, Trainer
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

FEWEST_PROMPTS, MOST_PROMPTS = 24, 100_000
FEWEST_HELD_OUT, MOST_HELD_OUT = 12, 32
LONGEST_ROW, LONGEST_ANSWER = 512, 256
LARGEST_BATCH = 32
MICRO_TOKENS = 1024
DECAY_SHARE = 0.4
MEASUREMENTS = 10
"""Held-out measurements of a whole run, about."""


def read_auto_prompts(source: str, target: LoadedTarget) -> tuple[PromptSet, Supply]:
    """Different prompts in an order of their own, so that held-out ones are like the others.

    Raises:
        ConfigError: as `read_prompt_set`, or too few different prompts.
    """
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
"""Of the prompts that are not held out."""
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
