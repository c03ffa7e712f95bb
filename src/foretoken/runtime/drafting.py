"""The seam where the number of drafts of each sequence is decided.

The decision itself belongs to `foretoken.control`, above this layer; the scheduler is given it
as a function and only clips the answer by what the request, the step and the pages allow.
"""

from dataclasses import dataclass
from typing import Protocol

from foretoken.runtime.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """What else the step does; one object per step, the same for all of its sequences."""

    num_decoding: int
    """Sequences that decode in the step."""
    num_prefilling: int
    """Running sequences with prompt tokens left to compute."""
    num_waiting: int
    """Sequences not admitted yet."""


class DraftBudget(Protocol):
    """How many drafts a decoding sequence may have in this step, at least 0.

    Called for each decoding sequence, in order of service; if all answers of a step are 0, the
    drafter does not run.
    """

    def __call__(self, sequence: Sequence, load: StepLoad, /) -> int:
        """The budget; `sequence` is only to be read."""


def no_drafts(sequence: Sequence, load: StepLoad, /) -> int:
    """Plain decoding."""
    return 0
