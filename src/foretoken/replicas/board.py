"""Where replicas listen, as they last told. An actor of its own on Ray, so it imports little."""

import time
from collections.abc import Callable
from typing import final

FORGOTTEN_S = 6.0
"""A replica that has not told for so long is not on the board any more."""


@final
class Board:
    """Addresses by the ids of replicas."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: dict[str, tuple[str, float]] = {}

    def tell(self, replica_id: str, url: str) -> None:
        self._told[replica_id] = (url, self._clock())

    def read(self) -> list[tuple[str, str]]:
        """Ids and addresses of those that told of late."""
        now = self._clock()
        self._told = {k: v for k, v in self._told.items() if now - v[1] < FORGOTTEN_S}
        return [(replica_id, url) for replica_id, (url, _) in self._told.items()]
