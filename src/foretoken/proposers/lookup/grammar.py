"""Free drafts: the tokens about which a request's grammar leaves no choice.

They are certain to be accepted, since the mask of each of their rows allows nothing else.
"""

from typing import ClassVar

from foretoken.models.tensors import Draft
from foretoken.proposers.base import Context, Proposer
from foretoken.runtime.batch import Span
from foretoken.runtime.grammar import Grammars


class ForcedProposer(Proposer):
    """Serves requests with structured outputs, whatever the engine's drafters are."""

    name = "grammar"
    looks_up: ClassVar[bool] = True

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars

    def propose(self, context: Context) -> Draft:
        ids = tuple(self._draft(span) for span in context.spans)
        promises = tuple(float(len(one)) for one in ids)
        return Draft(ids=ids, drafter=self.name, promises=promises)

    def release(self, request_id: str) -> None:
        """The verifier releases the grammar."""

    def _draft(self, span: Span) -> tuple[int, ...]:
        if span.draft_budget == 0:
            return ()
        return self._grammars.forced(span.sequence, span.draft_budget)
