"""Signs of life of the ranks of a group: each counts up while it lives, and rank 0 looks.

Who dies hangs up; who is stopped, or loops without end, does not, and may be missed by nobody while
there is nothing to do. Owns a thread of its own in each process; knows no turns.
"""

import os
import select
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final, final

from foretoken.errors import RankLostError
from foretoken.kernels.structures import FtSeat

_BEAT_S: Final = 0.5
_LOOKS: Final = 10
"""Without a beat in so many looks in a row a rank is lost. Looks are counted, not seconds: where
all processes stood still together, as under a paused machine, there were no looks either."""
SILENT_S: Final = _BEAT_S * _LOOKS
"""Seconds that they take."""
_LEAVING_S: Final = 5.0
"""Time for a rank to leave by itself once the group has ended."""


@final
class Listening:
    """Who has fallen silent, by the beats of all ranks at one look after another."""

    def __init__(self, size: int) -> None:
        self._seen, self._silent = [0] * size, [0] * size

    def look(self, beats: Sequence[int]) -> list[int]:
        """Ranks that are lost from this look on. Who has never beaten is not there yet."""
        for rank, now in enumerate(beats):
            quiet = bool(now) and now == self._seen[rank]
            self._silent[rank] = self._silent[rank] + 1 if quiet else 0
        self._seen = list(beats)
        return [rank for rank, looks in enumerate(self._silent) if looks == _LOOKS]


@final
class Heart:
    """The beat of one rank, and on rank 0 the ear for the others'."""

    def __init__(
        self,
        seats: Sequence[FtSeat],
        rank: int,
        lines: Mapping[int, int],
        *,
        died: Callable[[int], None],
        still: Callable[[int], None],
        ended: Callable[[], None],
    ) -> None:
        """Begin to beat.

        Args:
            seats: of all ranks, in memory that they share.
            rank: of this process.
            lines: as for `Rendezvous.join`.
            died: is told, in a thread of the heart's own, which rank's line has hung up.
            still: is told so which rank does not beat any more; rank 0's is.
            ended: is called so when the group has ended.
        """
        self._seats, self._rank, self._lines = seats, rank, lines
        self._died, self._still, self._ended = died, still, ended
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._live, name="foretoken-heart", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Beat no more, and let go of the memory. Stopping twice is fine."""
        self._stopping.set()
        self._thread.join()
        self._seats = ()

    def _live(self) -> None:
        hung_up = select.poll()
        for line in self._lines.values():
            hung_up.register(line, select.POLLIN)
        ranks = {line: rank for rank, line in self._lines.items()}
        first, heard = self._seats[0], Listening(len(self._seats))
        while not first.ended[0]:
            self._seats[self._rank].beats[0] += 1
            for lost in heard.look([seat.beats[0] for seat in self._seats]):
                if self._rank == 0:
                    self._still(lost)
            for line, _ in hung_up.poll(0):
                self._died(ranks[line])
            if self._stopping.wait(_BEAT_S):
                return
        self._ended()
        # Whoever waits for others has been told. Whoever computes on is of no use to anybody, and
        # there may be no rank 0 to end it.
        if self._rank and not self._stopping.wait(_LEAVING_S):
            os._exit(RankLostError.exit_code)
