"""The processes of a group on one host: rank 0 is this one, the others are started here.

They are fresh interpreters that import nothing of the caller's program. Between rank 0 and each of
them lies a socket, their line: it brings the order of what to do, and hangs up when one of the two
dies, however it does. Invariant: after `close`, none that was started here is left.
"""

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Self, final

from foretoken.distributed.group import Group, Rendezvous
from foretoken.distributed.shared_memory import SharedMemoryRendezvous
from foretoken.errors import ForetokenError, RankLostError
from foretoken.kernels.library import find_library

Work = Callable[..., None]
"""What the other ranks do, given the group and what is passed on; a function of a module."""

_GRACE_S: Final = 5.0
"""Time for all processes to end by themselves; then they are killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """What a process is to do, on its way there."""

    rank: int
    rendezvous: Rendezvous
    work: Work
    given: tuple[Any, ...]


def meet(size: int, wait_s: float) -> Rendezvous:
    """How `size` processes of this host exchange tensors soonest: by shared memory where the
    compiled kernels are there, which know how to wait, else by gloo.

    Args:
        size: number of ranks.
        wait_s: seconds that a rank waits for another before it gives the group up.
    """
    if sys.platform == "linux" and find_library() is not None:
        return SharedMemoryRendezvous.make(size, wait_s)
    from foretoken.distributed.gloo import GlooRendezvous  # not every PyTorch has it

    return GlooRendezvous.make(size, wait_s)


class Others(ABC):
    """Where the processes of ranks 1 and up come from."""

    @property
    @abstractmethod
    def process_ids(self) -> list[int]:
        """Theirs, in the order in which they were asked for."""

    @abstractmethod
    def line_to(self, rank: int, descriptors: tuple[int, ...]) -> socket.socket:
        """A line to the process of this rank, which has these descriptors then and calls `obey`.

        Raises:
            RankLostError: it did not come.
        """

    @abstractmethod
    def close(self) -> None:
        """The group has ended, and the lines were closed. Closing twice is fine."""


@final
class Followers:
    """Ranks 1 and up. Use it in a `with` block or call `close`."""

    def __init__(
        self, rendezvous: Rendezvous, work: Work, *given: Any, others: Others | None = None
    ) -> None:
        """Give each of them `work(group, *given)` to do, and join them as rank 0.

        Args:
            rendezvous: how they find each other.
            work: what they do.
            given: what it is given.
            others: where they come from; None: they are started.

        Raises:
            RankLostError: one of them died or did not come.
        """
        self._others = others or Started()
        self._lines: list[socket.socket] = []
        self.group: Group | None = None
        try:
            for rank in range(1, rendezvous.size):
                line = self._others.line_to(rank, rendezvous.descriptors)
                self._lines.append(line)
                order = _Order(rank=rank, rendezvous=rendezvous, work=work, given=given)
                # Whether it has died already is found by whoever joins.
                with suppress(OSError), line.makefile("wb") as file:
                    pickle.dump(order, file)
            lines = {rank: line.fileno() for rank, line in enumerate(self._lines, 1)}
            self.group = rendezvous.join(0, lines)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def joined(self) -> Group:
        """The group, as rank 0."""
        assert self.group is not None, "joined when they were made"
        return self.group

    @property
    def process_ids(self) -> list[int]:
        return self._others.process_ids

    def check(self) -> None:
        """Raise if the group is known to have ended; waits for nobody.

        Raises:
            RankLostError: a rank left, died, was late or gives no sign of life.
        """
        self.joined.check()

    def close(self) -> None:
        """End the group, and see the processes end that were started. Closing twice is fine."""
        if self.group is not None:
            self.group.close()
        for line in self._lines:
            line.close()
        self._lines = []
        self._others.close()


@final
class Started(Others):
    """Processes that this one starts, and sees end."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def process_ids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def line_to(self, rank: int, descriptors: tuple[int, ...]) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-P", "-m", "foretoken.distributed", str(theirs.fileno())],
                    # What this process can import, they can.
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), *descriptors),
                    # A terminal's Ctrl-C is for rank 0, which ends the others.
                    start_new_session=True,
                )
            )
        return ours

    def close(self) -> None:
        """They end by themselves, or are killed."""
        until = time.monotonic() + _GRACE_S
        for process in self._processes:
            # One that was stopped goes on, and finds that the group has ended.
            process.send_signal(signal.SIGCONT)
        for process in self._processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes = []


def follow(descriptor: int) -> int:
    """Be a process that was started: obey the line `descriptor`.

    Returns:
        The exit status. Of what ended it rank 0 is told, and tells it.
    """
    try:
        obey(socket.socket(fileno=descriptor))
    except ForetokenError as error:
        return error.exit_code
    return 0


def obey(line: socket.socket, received: Sequence[int] | None = None) -> None:
    """Take the order from the line, join, work, leave.

    Args:
        line: to rank 0.
        received: the rendezvous' descriptors here; None: they have the numbers of rank 0.

    Raises:
        RankLostError: the group has ended, which is the end of all work, or there never was one.
        ForetokenError: it could not be done; rank 0 was told why.
    """
    try:
        with line.makefile("rb") as file:
            order: _Order = pickle.load(file)
    except EOFError as error:
        raise RankLostError("rank 0 died before it said anything") from error
    rendezvous = order.rendezvous
    if received is not None:
        rendezvous = rendezvous.with_descriptors(tuple(received))
    group = rendezvous.join(order.rank, {0: line.fileno()})
    try:
        order.work(group, *order.given)
    except RankLostError:
        raise  # Rank 0 is told the same.
    except ForetokenError as error:
        group.abort(str(error))
        raise
    except BaseException as error:
        group.abort(f"{type(error).__name__}: {error}")
        raise
    finally:
        group.close()
