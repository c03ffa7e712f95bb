"""What trained drafters are worth in the engine: all in turns with plain decoding, one client.

Owns the clock of a judgement and how far each drafter drafts in it: as far as acceptance and the
times of its steps say. Plain decoding has an engine of its own, which keeps no hidden states, so
the target is in memory twice. Knows no kind and no verdict.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from foretoken.config.auto import auto_drafters
from foretoken.config.drafter import DrafterConfig
from foretoken.config.published import head_method
from foretoken.config.speculative import SpeculativeConfig
from foretoken.engine.engine import Engine
from foretoken.training.data.answers import answer_all
from foretoken.training.evaluation import (
    MOST_DRAFTS,
    accepted,
    expected_speedups,
    open_engine,
    step_costs,
)
from foretoken.types import SamplingParams, Speculation

OFF = "off"
TEMPERATURES = (0.0, 0.8)
MOST_AT_ONCE = 8

Paces = dict[str, dict[str, list[float]]]
"""Seconds a token by contestant, temperature and prompt."""


def contestant(name: str, folder: Path, method: str) -> DrafterConfig:
    """A drafter in a judgement; `method` is its word where its files do not say."""
    keys = {"model": str(folder), "name": name, "num_speculative_tokens": MOST_DRAFTS}
    if head_method(str(folder)) is None:
        keys["method"] = method
    return DrafterConfig.from_keys(keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What was measured."""

    paces: Paces
    lengths: dict[str, int]
    """Drafts at a time, by contestant."""
    tokens: dict[str, float]
    """Greedy tokens a verification with so many drafts, by contestant."""
    look_ups: tuple[str, ...]
    """Those that need no training."""
    passes: int
    """How often all prompts went through all contestants."""

    def speedups(self, name: str, over: str = OFF) -> list[float]:
        """Speed of `name` over that of another, prompt by prompt, temperatures together."""
        both = (zip(*self.paces[arm].values(), strict=True) for arm in (name, over))
        return [sum(other) / sum(own) for own, other in zip(*both, strict=True)]

    def speedups_at(self, name: str, temperature: str) -> list[float]:
        """Speed of `name` over plain decoding at one temperature, prompt by prompt."""
        pairs = zip(self.paces[name][temperature], self.paces[OFF][temperature], strict=True)
        return [plain / own for own, plain in pairs]

    def best(self, among: Sequence[str]) -> list[str]:
        """The fastest of some first, by the median over prompts."""
        return sorted(among, key=lambda name: median(self.speedups(name)), reverse=True)


def judge(
    target: str,
    contestants: Sequence[DrafterConfig],
    prompts: Sequence[Sequence[int]],
    tokens: int,
    until: Callable[[int], bool],
    *,
    with_others: bool = False,
) -> Judgement:
    """Time all contestants and plain decoding on `prompts`, in turns.

    Args:
        target: the target's name or folder.
        contestants: what was trained.
        prompts: token ids.
        tokens: written after each.
        until: asked after each pass with the number of passes; True ends the judgement.
        with_others: time look-ups and what ships for the target as well.
    """
    others = auto_drafters(target) if with_others else ()
    drafters = (*others, *contestants)
    plain = open_engine(target, None, MOST_AT_ONCE)
    drafting = open_engine(target, SpeculativeConfig(drafters=drafters), MOST_AT_ONCE)
    lengths, found = {}, {}
    for drafter in drafters:
        name, most = drafter.label, drafter.num_speculative_tokens
        lengths[name], found[name] = _length(drafting, name, most, prompts, tokens)
    policies: dict[str, tuple[Engine, Speculation | None]] = {OFF: (plain, None)}
    for name, length in lengths.items():
        policies[name] = drafting, Speculation(drafter=name, num_speculative_tokens=length)
    paces: dict[str, dict[str, list[list[float]]]] = {
        name: {f"{t:g}": [[] for _ in prompts] for t in TEMPERATURES} for name in policies
    }
    done = 0
    while done == 0 or not until(done):
        _pass(policies, prompts, tokens, done, paces)
        done += 1
    settled = {
        name: {t: [median(runs) for runs in by_prompt] for t, by_prompt in of.items()}
        for name, of in paces.items()
    }
    look_ups = tuple(drafter.label for drafter in drafters if drafter.model is None)
    return Judgement(paces=settled, lengths=lengths, tokens=found, look_ups=look_ups, passes=done)


def _params(temperature: float, tokens: int, speculation: Speculation | None) -> SamplingParams:
    return SamplingParams(
        temperature=temperature,
        seed=1,
        max_tokens=tokens,
        ignore_eos=True,
        detokenize=False,
        speculation=speculation,
    )


def _length(
    engine: Engine, name: str, most: int, prompts: Sequence[Sequence[int]], tokens: int
) -> tuple[int, float]:
    """How far this drafter should draft here, and the tokens a verification that it gets then."""
    asked = _params(0.0, tokens, Speculation(drafter=name, num_speculative_tokens=most))
    kept = accepted(answer_all(engine, prompts, asked))
    costs = step_costs(engine, prompts[0], len(kept.by_position), 2, name)
    promised = expected_speedups(kept, costs)
    best = max(promised, key=lambda k: promised[k]) if promised else most
    return best, kept.lengths[min(best, len(kept.lengths)) - 1]


def _pass(
    policies: Mapping[str, tuple[Engine, Speculation | None]],
    prompts: Sequence[Sequence[int]],
    tokens: int,
    number: int,
    paces: Mapping[str, Mapping[str, list[list[float]]]],
) -> None:
    """Each prompt through each contestant once; who goes first rotates."""
    names = list(policies)
    for index, prompt in enumerate(prompts):
        for turn, temperature in enumerate(TEMPERATURES):
            by = (index + turn + number) % len(names)
            for name in (*names[by:], *names[:by]):
                engine, speculation = policies[name]
                began = time.perf_counter()
                [output] = answer_all(engine, [prompt], _params(temperature, tokens, speculation))
                took = time.perf_counter() - began
                paces[name][f"{temperature:g}"][index].append(took / len(output.token_ids))
