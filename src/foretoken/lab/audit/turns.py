"""Several servers on one machine, of which one computes at a time.

Servers whose threads wait by spinning take the cores from each other: two of them asked at once on
two cores answered a hundredth as fast as either alone. Requests to one of them go together; those
to another wait until they have ended.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import final


@final
class Turns:
    """Lets any number of requests of one asker through, and never of two."""

    def __init__(self) -> None:
        """It is nobody's turn."""
        self._holder: object | None = None
        self._open = 0
        self._waiting: deque[tuple[object, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def of(self, who: object) -> AsyncIterator[None]:
        """A request of `who`, which begins when it is its turn."""
        # Whoever comes while others wait is not let through: their turn would never come.
        if self._open and (self._holder is not who or self._waiting):
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((who, mine))
            try:
                await mine
            except asyncio.CancelledError:
                if mine.done() and not mine.cancelled():
                    self._end()
                raise
        else:
            self._holder = who
            self._open += 1
        try:
            yield
        finally:
            self._end()

    def _end(self) -> None:
        self._open -= 1
        if self._open:
            return
        waiting = [(who, one) for who, one in self._waiting if not one.done()]
        self._waiting.clear()
        self._holder = waiting[0][0] if waiting else None
        for who, one in waiting:
            if who is self._holder:
                self._open += 1
                one.set_result(None)
            else:
                self._waiting.append((who, one))
