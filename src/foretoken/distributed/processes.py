"""The processes of a group on one host: rank 0 is this one, the others are started here.

They are fresh interpreters that import nothing of the caller's program. Between rank 0 and each of
them lies a socket, their line: it brings the order of what to do, and hangs up when one of the two
dies, however it does. Invariant: after `close`, none of them is left.
"""

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
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


@final
class Followers:
    """Ranks 1 and up. Use it in a `with` block or call `close`."""

    def __init__(self, rendezvous: Rendezvous, work: Work, *given: Any) -> None:
        """Start them, each with `work(group, *given)`, and join them as rank 0.

        Raises:
            RankLostError: one of them died or did not come.
        """
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lines: list[socket.socket] = []
        self.group: Group | None = None
        try:
            for rank in range(1, rendezvous.size):
                order = _Order(rank=rank, rendezvous=rendezvous, work=work, given=given)
                self._start(order)
            lines = {rank: line.fileno() for rank, line in enumerate(self._lines, 1)}
            self.group = rendezvous.join(0, lines)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        """The followers themselves."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close them."""
        self.close()

    @property
    def joined(self) -> Group:
        """The group, as rank 0."""
        assert self.group is not None, "joined when they were made"
        return self.group

    @property
    def process_ids(self) -> list[int]:
        """Those of ranks 1 and up."""
        return [process.pid for process in self._processes]

    def check(self) -> None:
        """Raise if the group is known to have ended; waits for nobody.

        Raises:
            RankLostError: a rank left, died, was late or gives no sign of life.
        """
        self.joined.check()

    def close(self) -> None:
        """End the group, and see its processes end. Closing twice is fine."""
        if self.group is not None:
            self.group.close()
        for line in self._lines:
            line.close()
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
        self._lines, self._processes = [], []

    def _start(self, order: _Order) -> None:
        ours, theirs = socket.socketpair()
        self._lines.append(ours)
        with theirs:
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-P", "-m", "foretoken.distributed", str(theirs.fileno())],
                    # What this process can import, they can.
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), *order.rendezvous.descriptors),
                    # A terminal's Ctrl-C is for rank 0, which ends the others.
                    start_new_session=True,
                )
            )
        # Whether it has died already is found by whoever joins.
        with suppress(OSError), ours.makefile("wb") as file:
            pickle.dump(order, file)


def follow(descriptor: int) -> int:
    """Be one of those processes: take the order from the line `descriptor`, join, work, leave.

    Returns:
        The exit status.
    """
    line = socket.socket(fileno=descriptor)
    try:
        with line.makefile("rb") as file:
            order: _Order = pickle.load(file)
    except EOFError:
        return RankLostError.exit_code  # Rank 0 died before it said anything.
    try:
        group = order.rendezvous.join(order.rank, {0: descriptor})
    except RankLostError:
        return RankLostError.exit_code
    try:
        order.work(group, *order.given)
    except RankLostError as error:
        return error.exit_code  # Rank 0 is told the same, and tells it.
    except ForetokenError as error:
        group.abort(str(error))
        return error.exit_code
    except BaseException as error:
        group.abort(f"{type(error).__name__}: {error}")
        raise
    finally:
        group.close()
    return 0
