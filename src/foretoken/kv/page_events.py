"""What becomes of pages that others may reuse, as events: stored, given up, all given up.

For routers that want to know which server holds the beginning of a prompt. Written by whoever
changes the prefix cache, taken out by another thread, in the order in which it happened: a page
that is stored again was given up before. Knows no wire format.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TypeAlias, final


@final
@dataclass(frozen=True, slots=True)
class PagesStored:
    """Pages of one prompt that follow each other."""

    names: tuple[bytes, ...]
    parent: bytes | None
    """The name of the page before them; None: they are the first."""
    token_ids: tuple[int, ...]
    """Of all of them together."""
    salt: str | None
    """Within which they may be reused."""


@final
@dataclass(frozen=True, slots=True)
class PageGivenUp:
    """A page whose contents are gone."""

    name: bytes


@final
@dataclass(frozen=True, slots=True)
class AllGivenUp:
    """The cache was emptied."""


PageEvent: TypeAlias = PagesStored | PageGivenUp | AllGivenUp


@final
class PageJournal:
    """Events between the thread that makes them and the one that takes them."""

    def __init__(self) -> None:
        self._events: SimpleQueue[PageEvent] = SimpleQueue()

    def add(self, event: PageEvent) -> None:
        """Something has happened."""
        self._events.put(event)

    def stored(
        self, names: Sequence[bytes], new: Sequence[int], token_ids: Sequence[int], salt: str | None
    ) -> None:
        """Pages of a sequence were stored: those whose places, ascending, are in `new`.

        Args:
            names: of the pages of the sequence from the first on.
            new: places of pages; each run of neighbours is one event.
            token_ids: of those pages, equally many of each.
            salt: of its request.
        """
        runs: list[list[int]] = []
        for place in new:
            if runs and runs[-1][-1] == place - 1:
                runs[-1].append(place)
            else:
                runs.append([place])
        size = len(token_ids) // max(len(names), 1)
        for run in runs:
            first, end = run[0], run[-1] + 1
            self.add(
                PagesStored(
                    names=tuple(names[first:end]),
                    parent=names[first - 1] if first else None,
                    token_ids=tuple(token_ids[first * size : end * size]),
                    salt=salt,
                )
            )

    def take(self, timeout_s: float) -> list[PageEvent]:
        """All events that there are, the oldest first; waits for one up to `timeout_s`."""
        found: list[PageEvent] = []
        try:
            found.append(self._events.get(timeout=timeout_s))
            while True:
                found.append(self._events.get_nowait())
        except Empty:
            return found
