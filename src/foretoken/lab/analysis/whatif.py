"""Other draft lengths, gates and look-up methods, replayed on what a run recorded.

Each recorded step tells of target positions: its accepted drafts would be accepted again, and the
one after them was rejected. Only the bonus token after a draft that was accepted whole is not known
to match or not. A draft's guess is taken to depend on the text before it alone, which is so for
draft models and n-grams at temperature 0; anything else is an estimate, and labelled so, as is
every look-up method.

Look-up methods are replayed on recorded texts word by word and sign by sign, for tokens are not
recorded. A step looks the end of the text up in what was written before, drafts what followed
there, and keeps what the recorded text goes on with.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from foretoken.control.cost import LineCost, StepShape
from foretoken.errors import ConfigError, one_of
from foretoken.lab.measure.bench import load_items
from foretoken.lab.measure.experiment import WorkloadConfig
from foretoken.lab.plain import from_plain
from foretoken.lab.records.results import AbSummary, RequestRecord
from foretoken.lab.simulate.machine import SimulatedDrafter, SimulatedMachine

PIECE = re.compile(r"\s*(?:\w{1,6}|[^\w\s])|\s+")
"""About a token: some letters with the space before them, or one sign."""
METHODS = ("ngram", "suffix")
"""The look-up methods that can be replayed on texts."""
LONGEST = 8
MOST_ANSWERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """One recorded answer."""

    prompt: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LookedUp:
    """How a method would have done."""

    tokens_per_step: float
    acceptance_rate: float
    draft_share: float
    """Steps that found something to draft."""


class _WordIndex:
    """What followed every run of `shortest` to `longest` pieces last, in all texts it was shown."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._ends: dict[tuple[str, ...], tuple[list[str], int]] = {}

    def append(self, pieces: list[str], piece: str) -> None:
        """`piece` follows `pieces`; the runs before it are known from now on."""
        end = len(pieces)
        for length in self._lengths:
            if end >= length:
                self._ends[tuple(pieces[end - length :])] = (pieces, end)
        pieces.append(piece)

    def find(self, pieces: list[str]) -> tuple[list[str], int, int]:
        """Text and place after the longest known run at the end, and its length (0: none)."""
        end = len(pieces)
        for length in self._lengths:
            if length <= end:
                found = self._ends.get(tuple(pieces[end - length :]))
                if found is not None:
                    return *found, length
        return [], 0, 0


def look_up(answers: Sequence[Written], k: int, method: str) -> LookedUp:
    """Replay one method at `k` drafts per step.

    `ngram` looks for the last 5 to 2 pieces in the request's own text; `suffix` for up to LONGEST
    in every request's so far, and drafts no more than it matched. The first MOST_ANSWERS count.
    """
    assert method in METHODS, method
    steps = drafting = drafted = accepted = written = 0
    shared = _WordIndex(1, LONGEST)
    for answer in answers[:MOST_ANSWERS]:
        index = shared if method == "suffix" else _WordIndex(2, 5)
        known: list[str] = []
        for piece in PIECE.findall(answer.prompt):
            index.append(known, piece)
        text = PIECE.findall(answer.text)
        at = 0
        while at < len(text):
            source, place, matched = index.find(known)
            most = min(k, len(text) - at - 1, matched if method == "suffix" else k)
            draft = source[place : place + most] if matched else []
            good = 0
            while good < len(draft) and draft[good] == text[at + good]:
                good += 1
            steps, drafting = steps + 1, drafting + bool(draft)
            drafted, accepted = drafted + len(draft), accepted + good
            for piece in text[at : at + good + 1]:
                index.append(known, piece)
            at += good + 1
        written += len(text)
    return LookedUp(
        tokens_per_step=written / steps if steps else 1.0,
        acceptance_rate=accepted / drafted if drafted else 0.0,
        draft_share=drafting / steps if steps else 0.0,
    )


MATCH, MISS, OPEN = 1, 0, -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A rule that leaves drafts out: after `misses` empty-handed steps, `pause` plain ones."""

    misses: int = 0
    """0: never."""
    pause: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """One replayed setting."""

    k: int
    gate: Gate
    method: str = "recorded"
    """The run's own drafter, or a look-up (see `lookups`)."""
    tokens_per_step: float
    least: float
    """If no open position matched."""
    most: float
    """If all did."""
    acceptance_rate: float
    draft_share: float
    """Steps that carried a draft."""
    speedup: float | None
    """Over plain decoding, with the costs given; None without them."""
    label: Literal["exact", "estimate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What steps take in which each of some sequences has k drafts."""

    machine: SimulatedMachine
    """Its first drafter made the drafts."""
    sequences: int = 1
    context: float = 256.0
    """Tokens of each sequence."""

    @classmethod
    def in_plain_steps(cls, verify_per_draft: float, draft: float) -> "Costs":
        """As `lab fit` says them: what each draft adds to a verification, and a draft step."""
        drafter = SimulatedDrafter(name="recorded", passes=LineCost(draft), reads=False)
        target = LineCost(row_s=verify_per_draft)
        return cls(machine=SimulatedMachine(target=target, drafters=(drafter,)))

    def over_plain(self, k: int, *, drafts_are_free: bool = False) -> float:
        """A step with k drafts of each sequence, in steps without."""
        num, machine = self.sequences, self.machine
        plain_s = machine.target_s(StepShape(num, num, self.context), num)
        seconds = machine.target_s(StepShape(num * (1 + k), num, self.context), num)
        if machine.drafters and not drafts_are_free:
            seconds += machine.drafters[0].drafting_s([k] * num, self.context)
        return seconds / plain_s


def streams_of(records: Sequence[RequestRecord]) -> tuple[list[list[int]], bool]:
    """Per request, its target positions as MATCH, MISS or OPEN; and whether depth cannot matter.

    Raises:
        ConfigError: no record has per-step counts.
    """
    streams, greedy = [], True
    for record in records:
        found = record.acceptance
        if found is None or not found.per_step_accepted:
            continue
        drafted = found.per_step_drafted or (max(found.per_step_accepted),) * len(
            found.per_step_accepted
        )
        streams.append(_stream(found.per_step_accepted, drafted))
        greedy = greedy and record.temperature == 0.0 and found.exact
    if not streams:
        allowed = "a candidate started with --per-request-spec-decode-metrics detailed"
        raise ConfigError("RUN", "no accept stream", allowed)
    return streams, greedy


def _stream(accepted: Sequence[int], drafted: Sequence[int]) -> list[int]:
    stream: list[int] = []
    for good, tried in zip(accepted, drafted, strict=True):
        stream += [MATCH] * good
        stream.append(MISS if good < tried else OPEN)
    return stream


def replay(
    streams: Sequence[Sequence[int]], k: int, gate: Gate, *, open_chance: float, seed: int = 0
) -> tuple[float, float, float]:
    """Tokens per step, acceptance rate, and share of steps with a draft."""
    rng = np.random.default_rng(seed)
    tokens = steps = drafted = accepted = drafting = 0
    for stream in streams:
        known = [
            value == MATCH or (value == OPEN and rng.random() < open_chance) for value in stream
        ]
        position = misses = paused = 0
        while position < len(known):
            budget = 0 if paused else min(k, len(known) - position - 1)
            good = 0
            while good < budget and known[position + good]:
                good += 1
            steps += 1
            drafting += budget > 0
            drafted, accepted = drafted + budget, accepted + good
            position += good + 1
            paused = max(0, paused - 1)
            misses = misses + 1 if budget and good == 0 else 0
            if gate.misses and misses >= gate.misses:
                misses, paused = 0, gate.pause
        tokens += len(known)
    rate = accepted / drafted if drafted else 0.0
    return tokens / steps, rate, drafting / steps


def what_if(
    records: Sequence[RequestRecord],
    ks: Sequence[int],
    gates: Sequence[Gate] = (Gate(),),
    *,
    costs: Costs | None = None,
    depth_free: bool = False,
) -> tuple[WhatIf, ...]:
    """Every k with every gate; `depth_free` says that guesses do not depend on draft depth."""
    streams, greedy = streams_of(records)
    flat = [value for stream in streams for value in stream]
    matched, missed = flat.count(MATCH), flat.count(MISS)
    chance = matched / (matched + missed) if matched + missed else 0.0
    found = []
    for k in ks:
        for gate in gates:
            low, middle, high = (
                replay(streams, k, gate, open_chance=c) for c in (0.0, chance, 1.0)
            )
            sure = high[0] - low[0] < 1e-9 and greedy and depth_free
            found.append(
                WhatIf(
                    k=k,
                    gate=gate,
                    tokens_per_step=middle[0],
                    least=min(low[0], high[0]),
                    most=max(low[0], high[0]),
                    acceptance_rate=middle[1],
                    draft_share=middle[2],
                    speedup=_speedup(k, middle, costs),
                    label="exact" if sure else "estimate",
                )
            )
    return tuple(found)


def what_if_looked_up(
    summary: AbSummary,
    records: Sequence[RequestRecord],
    ks: Sequence[int],
    methods: Sequence[str],
    *,
    costs: Costs | None = None,
) -> tuple[WhatIf, ...]:
    """Look-up methods on the recorded texts, a prompt counted once; estimates, and drafts are free.

    Raises:
        ConfigError: an unknown method, no texts, or the prompts are gone.
    """
    for method in methods:
        if method not in METHODS:
            raise ConfigError("--method", method, one_of(method, METHODS))
    answers = _written(summary, records)
    found = []
    for method in methods:
        for k in ks:
            seen = look_up(answers, k, method)
            outcome = seen.tokens_per_step, seen.acceptance_rate, seen.draft_share
            found.append(
                WhatIf(
                    k=k,
                    gate=Gate(),
                    method=method,
                    tokens_per_step=outcome[0],
                    least=outcome[0],
                    most=outcome[0],
                    acceptance_rate=outcome[1],
                    draft_share=outcome[2],
                    speedup=_speedup(k, outcome, costs, drafts_are_free=True),
                    label="estimate",
                )
            )
    return tuple(found)


def _written(summary: AbSummary, records: Sequence[RequestRecord]) -> list[Written]:
    texts = {record.index: record.text for record in records if record.text}
    if not texts:
        allowed = "an A/B that `foretoken lab ab --set keep_text=true` measured"
        raise ConfigError("RUN", "no texts", allowed)
    items = load_items(from_plain(WorkloadConfig, summary.config["workload"], "workload"))[0]
    prompts: dict[str, str] = {}
    for index, text in texts.items():
        item = items[index % len(items)]
        said = "\n".join(str(message.get("content", "")) for message in item.messages)
        prompts.setdefault(item.prompt or said, text)
    return [Written(prompt=prompt, text=text) for prompt, text in prompts.items()]


def _speedup(
    k: int,
    outcome: tuple[float, float, float],
    costs: Costs | None,
    *,
    drafts_are_free: bool = False,
) -> float | None:
    if costs is None:
        return None
    tokens, _, drafting = outcome
    return tokens / (1 + drafting * (costs.over_plain(k, drafts_are_free=drafts_are_free) - 1))
