"""What every proposer is: one question per step, one answer, no reach into the engine."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from foretoken.models.tensors import Draft
from foretoken.runtime.batch import Span


@dataclass(frozen=True, slots=True)
class Context:
    """What a proposer may look at. The sequences of the spans are read-only to it."""

    spans: tuple[Span, ...]
    """The step's spans. A span with draft_budget 0 wants no draft; its pages already reserve
    room for draft_budget tokens after the committed ones."""

    @property
    def wanted(self) -> list[int]:
        """Indices of the spans that want a draft."""
        return [i for i, span in enumerate(self.spans) if span.draft_budget > 0]


class Proposer(ABC):
    """Drafts tokens. Whether a token is dropped may depend only on what was known before it."""

    name: str
    """The word the user types."""

    @abstractmethod
    def propose(self, context: Context) -> Draft:
        """At most draft_budget tokens for each span; costs nothing when no span wants any."""

    @abstractmethod
    def release(self, request_id: str) -> None:
        """Forget a request that ended; unknown ids are fine."""
