"""What is kept of a request while it decodes: its class, and how far drafters have read it."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Self, final

import numpy as np

from foretoken.control.acceptance import temperature_bucket
from foretoken.control.adaptive.allocation import Counts
from foretoken.control.adaptive.allocation_inputs import DrafterView
from foretoken.control.adaptive.drafter import DrafterFacts, DrafterState
from foretoken.control.budget import RequestBudget
from foretoken.control.learned.regression import Floats
from foretoken.control.plan import DecodingSequence
from foretoken.types import Request


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

    def has_read(self, facts: DrafterFacts) -> int:
        """Tokens that the drafter has read, those of its last step included."""
        read = self.read.get(facts.name)
        if read is None:
            sequence = self.sequence
            read = self.read[facts.name] = sequence.num_tokens - facts.missing(sequence)
        return read


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Numbers of the sequences of a step, [N]."""

    tokens_N: Counts
    """Prompt and output tokens."""
    outputs_N: Counts
    left_N: Counts
    """Most tokens that they may still write, at least 1."""

    @classmethod
    def of(cls, sequences: Seq[DecodingSequence]) -> Self:
        """Counted now."""
        outputs_N = np.array([one.num_output for one in sequences])
        limits_N = np.array([one.request.max_tokens for one in sequences])
        return cls(
            tokens_N=np.array([one.num_tokens for one in sequences]),
            outputs_N=outputs_N,
            left_N=np.maximum(limits_N - outputs_N, 1),
        )


def view_of(
    drafter: DrafterState,
    tracked: Seq[TrackedRequest],
    counted: Counted,
    caps: RequestBudget,
    worth_s: Floats,
) -> DrafterView:
    """What the drafter may do for these requests, and what it would have to read of them.

    Args:
        drafter: whose view it is.
        tracked: the requests.
        counted: their numbers.
        caps: what users and operators allow.
        worth_s: seconds that reading all of a sequence may take, [N]. Where it takes longer, the
            latest tokens have to do.
    """
    facts = drafter.facts
    budget_N = np.array([caps.budget(one.sequence.request, facts.name) for one in tracked])
    missing_N = np.zeros(len(tracked), np.int64)
    windowed_N = np.zeros(len(tracked), np.bool_)
    if not facts.looks_up:
        read_N = np.array([one.has_read(facts) for one in tracked])
        missing_N = np.maximum(counted.tokens_N - read_N, 0)
        window = facts.window
        if 0 < window < missing_N.max():
            reading_s = drafter.cost.feeding_each(missing_N, float(counted.tokens_N.mean()))
            windowed_N = (missing_N > window) & (reading_s > worth_s)
            missing_N = np.where(windowed_N, window, missing_N)
    return DrafterView(
        name=facts.name,
        max_drafts=facts.max_drafts,
        cost=drafter.cost,
        # A step yields one token more than it has drafts.
        max_drafts_N=np.minimum(budget_N, counted.left_N - 1),
        missing_N=missing_N,
        windowed_N=windowed_N,
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
