"""Plain decoding: the proposer that never drafts."""

from foretoken.models.tensors import Draft
from foretoken.proposers.base import Context, Proposer


class NoProposer(Proposer):
    """Returns an empty draft, so that the step needs no branch."""

    name = "none"

    def propose(self, context: Context) -> Draft:
        """No drafts."""
        return Draft.empty(len(context.spans))

    def release(self, request_id: str) -> None:
        """Nothing is kept."""
