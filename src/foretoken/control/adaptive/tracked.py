"""What is kept of a request while it decodes: its class, and how far drafters have read it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self, final

import numpy as np

from foretoken.control.acceptance import temperature_bucket
from foretoken.control.adaptive.drafter import DrafterState
from foretoken.control.adaptive.scene import DrafterView
from foretoken.control.budget import RequestBudget
from foretoken.control.learned.regression import Floats
from foretoken.control.plan import DecodingSequence
from foretoken.types import Request

_CATCHING_UP = 32
"""Missing tokens from which on reading them is work of its own."""
_WINDOW = 128
"""The latest tokens, where reading all of them does not pay."""


@final
@dataclass(slots=True)
class TrackedRequest:
    """One request and its sequence."""

    sequence: DecodingSequence
    class_key: str
    num_preemptions: int
    read: dict[str, int] = field(default_factory=dict)
    """Tokens that each drafter has read of it."""

    @classmethod
    def of(cls, sequence: DecodingSequence) -> Self:
        """A sequence that begins to decode."""
        return cls(sequence, class_of(sequence.request), sequence.num_preemptions)

    def refresh(self) -> None:
        """A preempted sequence has new pages: drafters read it again."""
        if self.num_preemptions != self.sequence.num_preemptions:
            self.num_preemptions = self.sequence.num_preemptions
            self.read.clear()

    def missing(self, drafter: DrafterState) -> int:
        """Tokens that the drafter has not read, those of a usual step aside."""
        facts, sequence = drafter.facts, self.sequence
        if facts.looks_up:
            return 0
        read = self.read.get(facts.name)
        if read is None:
            read = self.read[facts.name] = sequence.num_tokens - facts.missing(sequence)
        missed = sequence.num_tokens - read
        return missed if missed >= _CATCHING_UP else 0


def view_of(
    drafter: DrafterState,
    tracked: list[TrackedRequest],
    caps: RequestBudget,
    worth_s: Floats,
    context: float,
) -> DrafterView:
    """What the drafter may do for these requests, and what it would have to read of them.

    Args:
        drafter: whose view it is.
        tracked: the requests.
        caps: what users and operators allow.
        worth_s: seconds that reading all of a sequence may take, [N]. Where it takes longer, the
            latest tokens have to do.
        context: mean tokens of a sequence.
    """
    facts, most, missing, windowed = drafter.facts, [], [], []
    window = min(_WINDOW, facts.max_window)
    for one, worth in zip(tracked, worth_s.tolist(), strict=True):
        request = one.sequence.request
        # A step yields one token more than it has drafts.
        left = request.max_tokens - one.sequence.num_output - 1
        most.append(max(min(caps.allowed(request, facts.name), left), 0))
        missed = one.missing(drafter)
        partly = 0 < window < missed and drafter.cost.feeding(missed, context) > worth
        missing.append(window if partly else missed)
        windowed.append(partly)
    return DrafterView(
        name=facts.name,
        most=facts.most,
        cost=drafter.cost,
        most_N=np.array(most, dtype=np.int64),
        missing_N=np.array(missing, dtype=np.int64),
        windowed_N=np.array(windowed, dtype=np.bool_),
        tree=facts.tree,
        kept=drafter.kept,
    )


def note_read(
    tracked: Mapping[str, TrackedRequest], request_id: str, drafter: str, rows: int | None
) -> None:
    """A drafter has read so many more tokens of a request; None: all that there are."""
    one = tracked.get(request_id)
    if one is None:
        return
    if rows is None:
        one.read[drafter] = one.sequence.num_tokens
    else:
        one.read[drafter] = one.read.get(drafter, 0) + rows


def class_of(request: Request) -> str:
    """Requests of which acceptance and length are learnt together: temperature, tenant, grammar."""
    params = request.params
    grammar = "grammar" if params.structured is not None else "text"
    return f"{temperature_bucket(params.temperature)}/{request.cache_salt or ''}/{grammar}"
