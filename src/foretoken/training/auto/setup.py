"""What a run of `foretoken train auto` is of: prompts, sizes, and the settings of each kind.

Owns which kinds compete for a target, and the numbers of a run that nobody chose by hand. The keys
of each kind's `[head]` are the kind's own (`usual` of its record).
"""

import random
from dataclasses import dataclass, replace
from pathlib import Path

from foretoken.config.auto import expected_gain
from foretoken.config.method_registry import known_methods
from foretoken.errors import ConfigError
from foretoken.training.auto.timetable import Supply
from foretoken.training.data.loaded_target import LoadedTarget
from foretoken.training.data.prompts import PromptSet, read_prompt_set
from foretoken.training.heads.kind import find_kind, require_fit
from foretoken.training.heads.target import TargetParts
from foretoken.training.schedule import Stage
from foretoken.training.settings import (
    DataSettings,
    HeadSettings,
    LlamaShape,
    Settings,
    StateSettings,
)
from foretoken.training.trained_kinds import kinds_of

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
