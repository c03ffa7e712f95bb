"""Which replicas are known to hold which beginnings of prompts.

Told by the router of what it sent where, and by replicas of what they stored and gave up. A guess,
therefore: a replica may have forgotten since. Bounded for each replica by the pages that one holds;
the pages that were used longest ago go first, and of a prompt the last before the first. Replicas
that are not there have no pages. Knows names of pages alone, neither tokens nor salts.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import final


@final
class PrefixIndex:
    """Page names by replica."""

    def __init__(self, most_pages: int) -> None:
        """Remember up to `most_pages` (at least 1) of each replica: as many as its KV has."""
        assert most_pages > 0, most_pages
        self._most = most_pages
        self._held: dict[str, OrderedDict[bytes, None]] = {}

    def __len__(self) -> int:
        """Pages that are known, of all replicas together."""
        return sum(len(held) for held in self._held.values())

    @property
    def replicas(self) -> frozenset[str]:
        return frozenset(self._held)

    def add(self, replica_id: str) -> None:
        """A replica is there; it holds nothing yet that would be known."""
        self._held.setdefault(replica_id, OrderedDict())

    def drop(self, replica_id: str) -> None:
        """The replica is gone, and with it all that it held. What is said of it later is unheard,
        such as the end of an answer that was on its way."""
        self._held.pop(replica_id, None)

    def store(self, replica_id: str, names: Sequence[bytes]) -> None:
        """The replica holds these pages of one prompt, in their order, or is about to."""
        held = self._held.get(replica_id)
        if held is None:
            return
        # The first page is touched last: whatever is forgotten, it is the end of a prompt, and a
        # page never stays without those before it, through which alone it can be found.
        for name in reversed(names[: self._most]):
            held[name] = None
            held.move_to_end(name)
        while len(held) > self._most:
            held.popitem(last=False)

    def remove(self, replica_id: str, names: Iterable[bytes]) -> None:
        held = self._held.get(replica_id)
        if held is not None:
            for name in names:
                held.pop(name, None)

    def known(self, names: Sequence[bytes]) -> dict[str, int]:
        """How many of these pages, from the first on, each replica holds; those with none are left
        out."""
        found = {}
        for replica_id, held in self._held.items():
            pages = 0
            for name in names:
                if name not in held:
                    break
                pages += 1
            if pages:
                found[replica_id] = pages
        return found
