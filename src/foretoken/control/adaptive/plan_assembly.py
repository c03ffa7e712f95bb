"""From the best allocation to the plan of a step: who has to catch up first, which budgets hold."""

import sys
from collections import Counter
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from foretoken.control.adaptive.allocation import Allocation, DraftOption, accepted_drafts
from foretoken.control.adaptive.allocation_inputs import AllocationInputs, DrafterView
from foretoken.control.budget import RequestBudget
from foretoken.control.cost import StepShape
from foretoken.control.learned.drafter_cost import READ_TOGETHER, DrafterCost
from foretoken.control.plan import DecodingSequence, Feed, StepForecast, StepLoad

CATCHING_UP = 32
"""Missing tokens from which on reading them is work of its own."""


class Waiting(NamedTuple):
    """A sequence of which a drafter first has to read more."""

    drafter: str
    rows: int
    """Tokens that are left after this step; 0: it is for the next plan to say."""


class FirstReading(NamedTuple):
    """What drafters read of the sequences that they are to draft for."""

    feeds: list[Feed]
    waiting: dict[int, Waiting]
    """Sequences that cannot draft in this step."""
    missing: Counter[str]
    """Tokens that each drafter reads."""


def read_first(
    found: Allocation,
    options: Seq[DraftOption],
    views: Seq[DrafterView],
    inputs: AllocationInputs,
    *,
    alone: bool,
) -> FirstReading:
    """Who has to be read before the plan `found` can be carried out: in chunks, so that nobody
    waits for long. `alone`: nobody waits."""
    by_name = {view.name: view for view in views}
    reading = FirstReading([], {}, Counter())
    left = sys.maxsize
    for place, chosen in enumerate(found.drafter_N.tolist()):
        if chosen < 0:
            continue
        view = by_name[options[chosen].name]
        missed = int(view.missing_N[place])
        if missed < CATCHING_UP:
            reading.missing[view.name] += missed
            continue
        if left == sys.maxsize and not alone:
            left = chunk_rows(view.cost, inputs.context, inputs.plain_s)
        # A window is read whole or not at all: the next would be another one.
        windowed = bool(view.windowed_N[place])
        rows = (missed if left else 0) if windowed else min(missed, left)
        left = max(left - rows, 0)
        reading.missing[view.name] += rows
        if rows < missed:
            reading.waiting[place] = Waiting(view.name, 0 if windowed else missed - rows)
        if rows and (windowed or not alone):
            reading.feeds.append(Feed(place, view.name, rows, missed if windowed else None))
    return reading


def chunk_rows(cost: DrafterCost, context: float, plain_s: float) -> int:
    """Tokens that a drafter reads in half a plain step, for which others may wait."""
    one, two = cost.feeding(READ_TOGETHER, context), cost.feeding(2 * READ_TOGETHER, context)
    row_s = max((two - one) / READ_TOGETHER, 1e-9)
    return max(int(0.5 * plain_s / row_s), READ_TOGETHER)


def budgets(
    sequences: Seq[DecodingSequence],
    lengths: Seq[int],
    lookups: Seq[DrafterView],
    caps: RequestBudget,
    free_rows: int,
) -> tuple[int, ...]:
    """Most drafts of each sequence, those that are looked up or certain included."""
    if not free_rows:
        return tuple(lengths)
    budget_N = np.array(lengths)
    for view in lookups:
        budget_N = np.maximum(budget_N, np.minimum(view.max_drafts_N, free_rows))
    found: list[int] = budget_N.tolist()
    for place, sequence in enumerate(sequences):
        request = sequence.request
        if request.brings_drafts:
            found[place] = max(found[place], min(caps.budget(request), free_rows))
    return tuple(found)


def surplus(
    found: Allocation, options: Seq[DraftOption], forecast: StepForecast
) -> tuple[float, ...]:
    """Tokens that the drafts of each sequence bring beyond what they cost at the step's price."""
    accepted_N = accepted_drafts(found, options)
    chosen = zip(accepted_N.tolist(), found.drafter_N.tolist(), strict=True)
    values = []
    for place, (accepted, index) in enumerate(chosen):
        slot_s = options[index].slot_s if index >= 0 else 0.0
        cost = forecast.price * (forecast.row_s + slot_s) * int(found.lengths_N[place])
        values.append(accepted - cost)
    return tuple(values)


def step_shape(count: int, load: StepLoad, context: float) -> StepShape:
    """The step of this load without drafts, in which `count` sequences decode."""
    return StepShape(
        rows=count + load.num_prompt_tokens,
        sequences=count + load.num_prefilling,
        context=context,
        prompt_rows=load.num_prompt_tokens,
    )


def chance_of_none(found: Allocation, options: Seq[DraftOption]) -> float:
    """That the first draft of every sequence is rejected."""
    chance = 1.0
    for place, chosen in enumerate(found.drafter_N.tolist()):
        if chosen >= 0:
            chance *= 1.0 - float(options[chosen].survival_NK[place, 0])
    return min(max(chance, 0.01), 0.99)
