"""The rates of one machine, target and set of prompts, measured on a few prompts.

Owns what is timed and how a few steps speak for many: the fastest of several counts, since a pause
of the machine can only add. Nothing that it writes is kept but the answers.
"""

import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from foretoken.kv.features import FINAL
from foretoken.training.auto.setup import MICRO_TOKENS, SettingsOf
from foretoken.training.auto.timetable import Rates
from foretoken.training.data.answers import answer_all, read_answers, write_answers
from foretoken.training.data.loaded_target import LoadedTarget
from foretoken.training.data.prompts import PromptSet
from foretoken.training.data.states import keep_states
from foretoken.training.loop import MIXED, Trainer
from foretoken.training.runs import build_job
from foretoken.training.settings import Settings
from foretoken.types import SamplingParams

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
