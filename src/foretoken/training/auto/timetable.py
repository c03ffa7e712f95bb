"""Who trains how long: the timetable of `foretoken train auto`, from rates that were measured.

Pure arithmetic; times are in seconds, steps are optimizer steps. Each candidate gets the same time,
at most a tenth of all training; the best third gets as much again; the best of those gets the rest
(successive halving, Jamieson and Talwalkar 2016, with two rungs). What has to happen after the last
step, measuring the winner and writing it, is set aside first.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FIRST_SHARE = 0.10
"""Of all training time, what a candidate gets before it is judged; at most."""
EXPLORED = 0.35
"""Of all training time, what all candidates together get before they are judged; at most."""
DATA_SHARE = 0.20
"""Of the time that is left, what the target may take for answers; at most."""
JUDGED_SHARE = 0.12
"""Of the time that is left, what one judgement may take before it is made smaller."""
JUDGING_SHARE = 0.25
"""Of the time that is left, what all judgements of candidates may take together."""
LEAST_STEPS = 30
"""Steps after which candidates can be told apart at all."""
WANTED_STEPS = 400
"""Steps that the winner should have; batches are smaller where there would be fewer."""
BATCHES = (8192, 4096, 2048, 1024)
RESERVE = 1.3
"""What is set aside for the end is so many times what it is expected to take."""
FEWEST_JUDGED = 6
"""Prompts of a judgement: fewer have no 95 % interval."""
TEMPERATURES = 2
COST_TOKENS = 400
"""Tokens that are written to find how far a drafter should draft."""
LAST_ARMS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What was measured on a few prompts, in seconds."""

    prompt_s: float
    """The target's answer to one prompt, and its hidden states."""
    prompt_tokens: float
    """Tokens of a prompt with its answer."""
    train_s: Mapping[str, float]
    """Training on one token, by kind of drafter, the most promising first."""
    load_s: float
    """Opening the target for a judgement."""
    token_s: float
    """A token of one answer without drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """What there is to train on."""

    held_out: int
    """Prompts that are only measured on; half of them judge candidates, half the winner."""
    batch: int
    """Prompts that are answered at once."""
    most_prompts: int
    """Prompts that there are, and whose hidden states the disk has room for."""
    answer_tokens: int
    row_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timetable:
    """What is done, in order; moments are seconds since the run began."""

    prompts: int
    """How many the target answers, the held-out ones included."""
    batch_tokens: int
    judged_prompts: int
    """Prompts of a judgement,"""
    judged_tokens: int
    """and tokens written to each."""
    steps: Mapping[str, int]
    """Steps of each candidate that takes part, on the first rung."""
    rungs: tuple[int, ...]
    """How many candidates train on each rung; none where there is one candidate."""
    winner_steps: Mapping[str, int]
    """Steps that each would have in all as the winner."""
    train_until: float
    """When the winner's last step ends."""


def plan(total_s: float, used_s: float, rates: Rates, supply: Supply) -> Timetable:
    """The timetable with as many candidates as time allows, one at least.

    Args:
        total_s: all the time of the run.
        used_s: of it, what is used up by now.
        rates: of the kinds in the order of their promise.
        supply: what there is to train on.
    """
    order = tuple(rates.train_s)
    assert order, "nothing to train"
    for count in range(len(order), 0, -1):
        found = _with(order[:count], total_s, used_s, rates, supply)
        if found is not None:
            return found
    raise AssertionError("one candidate always fits")


def rungs_of(candidates: int) -> tuple[int, ...]:
    """How many train on each rung: all, then the best third where that is two or more."""
    if candidates < 2:
        return ()
    third = math.ceil(candidates / 3)
    return (candidates, third) if third > 1 else (candidates,)


def _with(
    kinds: Sequence[str], total_s: float, used_s: float, rates: Rates, supply: Supply
) -> Timetable | None:
    """The timetable with these candidates; None where they have too little time."""
    left_s = total_s - used_s
    prompts, tokens = _judged(left_s, rates, supply)
    rungs = rungs_of(len(kinds))
    judging_s = sum(judgement_s(n, prompts, tokens, rates) for n in rungs)
    end_s = RESERVE * (rates.load_s + judgement_s(LAST_ARMS - 1, prompts, tokens, rates))
    rest_s = max(0.0, left_s - judging_s - end_s)
    answered = _answered(rest_s, kinds, rates, supply)
    train_s = max(0.0, rest_s - answered * rates.prompt_s)
    first_s = min(FIRST_SHARE, EXPLORED / len(kinds)) * train_s
    winner_s = train_s - sum(n * first_s for n in rungs) + len(rungs) * first_s
    slowest = max(rates.train_s[kind] for kind in kinds)
    batch = _batch(winner_s / slowest, supply.row_length)
    steps = {kind: int(first_s / (batch * rates.train_s[kind])) for kind in kinds}
    if rungs and (min(steps.values()) < LEAST_STEPS or judging_s > JUDGING_SHARE * left_s):
        return None
    return Timetable(
        prompts=answered,
        batch_tokens=batch,
        judged_prompts=prompts,
        judged_tokens=tokens,
        steps=steps,
        rungs=rungs,
        winner_steps={
            kind: max(1, int(winner_s / (batch * rates.train_s[kind]))) for kind in kinds
        },
        train_until=max(used_s, total_s - end_s),
    )


def judgement_s(candidates: int, prompts: int, tokens: int, rates: Rates) -> float:
    """Time of a judgement: the target opens, each drafter finds its length, and all take turns with
    plain decoding once."""
    written = prompts * tokens
    one = written + COST_TOKENS + TEMPERATURES * written
    return rates.load_s + rates.token_s * (candidates * one + TEMPERATURES * written)


def _judged(left_s: float, rates: Rates, supply: Supply) -> tuple[int, int]:
    """Prompts of a judgement and tokens of each: fewer where they would take too long."""
    prompts, tokens = max(1, supply.held_out // 2), min(96, supply.answer_tokens)
    limit = JUDGED_SHARE * left_s
    while judgement_s(LAST_ARMS, prompts, tokens, rates) > limit and prompts > FEWEST_JUDGED:
        prompts -= 1
    while judgement_s(LAST_ARMS, prompts, tokens, rates) > limit and tokens > 24:
        tokens -= 8
    return prompts, tokens


def _answered(rest_s: float, kinds: Sequence[str], rates: Rates, supply: Supply) -> int:
    """Prompts to answer: no more than the fastest candidate could read once, as time and disk
    allow, in whole batches."""
    fastest = min(rates.train_s[kind] for kind in kinds)
    readable = rest_s / (fastest * rates.prompt_tokens)
    payable = DATA_SHARE * rest_s / rates.prompt_s
    batches = max(1, math.ceil(min(readable, payable) / supply.batch))
    return min(supply.most_prompts, supply.held_out + batches * supply.batch)


def _batch(tokens: float, row_length: int) -> int:
    """Tokens of a step: the most with which `tokens` are enough steps; whole rows."""
    fitting = [size for size in BATCHES if tokens / size >= WANTED_STEPS]
    return max(row_length, min(fitting[0] if fitting else BATCHES[-1], 16 * row_length))
