"""Ways to draft tokens, one file per method, named by the word the user types."""

from foretoken.proposers.base import Context, Proposer
from foretoken.proposers.registry import create_proposer

__all__ = ["Context", "Proposer", "create_proposer"]
