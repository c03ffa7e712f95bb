"""Ways to draft tokens: a file or a folder per method, named by the word the user types."""

from foretoken.proposers.base import Context, Proposer, ProposerSettings
from foretoken.proposers.drafter_factory import create_drafters

__all__ = ["Context", "Proposer", "ProposerSettings", "create_drafters"]
