"""From the best allocation to the plan of a step: who has to catch up first, which budgets hold."""

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from foretoken.control.allocation import Allocation, DraftOption
from foretoken.control.budget import RequestBudget
from foretoken.control.plan import DecodingSequence, Feed, StepForecast
from foretoken.control.scene import DrafterView

_CHUNK = 256
"""Tokens that drafters read at once while they catch up and others wait."""
_ALL = 1 << 30


class CaughtUp(NamedTuple):
    """An allocation without the sequences that drafters have to read first."""

    lengths: list[int]
    drafters: list[str]
    feeds: list[Feed]
    missing: dict[str, int]
    """Tokens that each drafter reads in the step."""


def catch_up(
    found: Allocation, options: Seq[DraftOption], views: Seq[DrafterView], *, alone: bool
) -> CaughtUp:
    """Set aside the sequences whose reading would keep others waiting: they are read in chunks.

    `alone`: there are no others, so that everything is read at once.
    """
    by_name = {view.name: view for view in views}
    caught = CaughtUp(found.drafts_N.tolist(), [], [], {})
    left = _ALL if alone else _CHUNK
    for place, chosen in enumerate(found.drafter_N.tolist()):
        name = options[chosen].name if chosen >= 0 else ""
        missed = int(by_name[name].missing_N[place]) if name else 0
        rows = min(missed, left)
        left -= rows
        if missed:
            caught.missing[name] = caught.missing.get(name, 0) + rows
        if rows < missed:
            caught.lengths[place] = 0
            if rows:
                caught.feeds.append(Feed(place, name, rows))
            name = ""
        caught.drafters.append(name)
    return caught


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
    most_N = np.array(lengths)
    for view in lookups:
        most_N = np.maximum(most_N, np.minimum(view.most_N, free_rows))
    found: list[int] = most_N.tolist()
    for place, sequence in enumerate(sequences):
        request = sequence.request
        if request.prediction_ids or request.params.structured is not None:
            found[place] = max(found[place], min(caps.wanted(request)[0], free_rows))
    return tuple(found)


def surplus(
    found: Allocation, options: Seq[DraftOption], forecast: StepForecast
) -> tuple[float, ...]:
    """Tokens that the drafts of each sequence bring beyond what they cost at the step's price."""
    values = []
    for place, chosen in enumerate(found.drafter_N.tolist()):
        length = int(found.drafts_N[place])
        if chosen < 0 or not length:
            values.append(0.0)
            continue
        option = options[chosen]
        cost = forecast.price * (forecast.row_s + option.slot_s) * length
        values.append(float(option.survival_NK[place, :length].sum()) - cost)
    return tuple(values)
