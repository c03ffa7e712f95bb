"""Several processes that compute one model together: who they are, and what they hand round."""

from foretoken.distributed.group import Group, Rendezvous, Share

__all__ = ["Group", "Rendezvous", "Share"]
