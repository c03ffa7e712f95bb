"""The processes that fill chat templates: started at need, kept warm, replaced when they end.

Owns the processes, how they are spoken to, and the bounds of a render. One that takes long gets
company, so that others do not wait for it; short ones share a process. Invariants: a process that
is not known to be waiting for an order is never asked again; all end with their owner, killed or
not. Knows no jinja2: see `sandbox.py`.
"""

import logging
import marshal
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any, final

from foretoken.errors import ForetokenError

logger = logging.getLogger("foretoken")

ORDER = struct.Struct("!dQ")
"""Before every order: seconds of processor time for it, and the bytes that follow."""
ANSWER = struct.Struct("!??Q")
"""Before every answer: whether it says why there is no text, whether its process takes no more
orders, and the bytes that follow."""
MOST_CHARACTERS = 32 << 20
"""Of a text: no context holds as many."""
MOST_RENDERS = 8
"""Renders at once."""
_MOST_KEPT = 2
"""Processes that stay when there is nothing to do."""
_PATIENCE_S = 0.25
"""How long a render waits for a process before it has one more started."""
_LOOK_S = 0.05
"""How often it is asked whether a text that takes long is still wanted."""
_MOST_WAITED_S = 30.0
"""Seconds by the clock that a render may take, on a machine busy with other things."""
_KEPT_VARIABLES = ("LD_LIBRARY_PATH", "PYTHONHOME", "TZ")
"""What a process has of the environment, which may hold keys."""


def most_seconds(num_bytes: int) -> float:
    """Seconds of processor time for an order of so many bytes: a thousand times what a small one
    takes, and several times what a long conversation does."""
    return 1.0 + num_bytes / (1 << 20)


def order_of(source: str, given: Mapping[str, Any] | None) -> bytes:
    """An order: fill the template `source` with what is `given`, plain JSON values; None: say which
    variables it reads and does not set, one a line. Raises ValueError: it is nested too deeply."""
    order: Any = (source, given)
    return marshal.dumps(order)


def always() -> bool:
    """Whether a text is wanted that somebody waits for to the end."""
    return True


@final
class Renderers:
    """Fills templates; used by any number of threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._idle: list[_Process] = []
        self._num_busy = 0

    def warm_up(self) -> None:
        """Have a process started, and do not wait for it. Raises ForetokenError: no process can be
        started."""
        with self._changed:
            if not self._idle and self._num_busy < MOST_RENDERS:
                self._idle.append(_Process())

    def ask(self, order: bytes, wanted: Callable[[], bool] = always) -> str:
        """The text that answers an order.

        Args:
            order: as `order_of` makes it.
            wanted: asked now and then; when it says no, the render is ended.

        Raises:
            ValueError: it was refused, or is not done within its bounds; the text says why.
            ForetokenError: no process can be started, or the text is not wanted any more.
        """
        # What ends a process need not be the order: an operator, a signal to the whole group, a
        # machine without memory. So one that ended without a reason is tried once more.
        for _ in range(2):
            process = self._taken(wanted)
            answer = None
            try:
                answer = process.ask(order, wanted)
            finally:
                self._give_back(process, usable=answer is not None and not process.is_done)
            if answer is not None:
                refused, text = answer
                if refused:
                    raise ValueError(text)
                return text
            logger.warning("a process for chat templates ended with %s", process.exit_code)
            if process.was_too_slow:
                most = most_seconds(len(order))
                raise ValueError(f"what the template takes at most {most:.0f} s of a processor for")
        raise ValueError("what the template can be filled with: its process ended, twice")

    def _taken(self, wanted: Callable[[], bool]) -> "_Process":
        """A process that waits for an order; a new one if none is free in a moment."""
        with self._changed:
            patient = self._num_busy > 0
            while True:
                while self._idle:
                    process = self._idle.pop()
                    if process.is_ours and process.exit_code is None:
                        self._num_busy += 1
                        return process
                    process.end()
                if not patient and self._num_busy < MOST_RENDERS:
                    break
                patient = self._changed.wait(_PATIENCE_S)
                if not wanted():
                    raise _unwanted()
            self._num_busy += 1
        try:
            return _Process()
        except BaseException:
            with self._changed:
                self._num_busy -= 1
            raise

    def _give_back(self, process: "_Process", *, usable: bool) -> None:
        """Take a process back; in place of one that is of no use the next is started at once."""
        kept = usable and len(self._idle) < _MOST_KEPT
        if not kept:
            process.end()
        with self._changed:
            self._num_busy -= 1
            if kept:
                self._idle.append(process)
            self._changed.notify()
        if not usable:
            with suppress(ForetokenError):  # who needs it will try again, and say so
                self.warm_up()


@final
class _Process:
    """One process and the line to it. Used by one thread at a time."""

    def __init__(self) -> None:
        """Start it. Raises ForetokenError: that is not possible."""
        self._owner = os.getpid()
        self._slow = False
        self.is_done = False
        """Whether it takes no more orders."""
        kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        kept["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, "-P", "-m", "foretoken.text.sandbox"]
        nowhere = subprocess.DEVNULL
        with ExitStack() as opened:
            try:
                self._link, theirs = (opened.enter_context(end) for end in socket.socketpair())
                self._child: subprocess.Popen[bytes] = subprocess.Popen(
                    command, stdin=theirs.fileno(), stdout=nowhere, stderr=nowhere, env=kept
                )
            except OSError as error:
                raise ForetokenError(f"no process to fill chat templates in: {error}") from error
            opened.pop_all()
            theirs.close()
        self.end = weakref.finalize(self, _end, self._child, self._link, self._owner)
        """End it, whatever it does; a second time is fine."""

    @property
    def is_ours(self) -> bool:
        """Whether this process started it, and not the one that this is a fork of."""
        return self._owner == os.getpid()

    @property
    def exit_code(self) -> int | None:
        """How it ended; None while it runs."""
        return self._child.poll()

    @property
    def was_too_slow(self) -> bool:
        """Whether it ended, or had to be ended, because an order took too long."""
        return self._slow or self.exit_code == -signal.SIGPROF

    def ask(self, order: bytes, wanted: Callable[[], bool]) -> tuple[bool, str] | None:
        """Whether an order was refused, and the text; None if there is no answer to be had. Raises
        ForetokenError: it is not wanted any more."""
        until = time.monotonic() + _MOST_WAITED_S
        try:
            self._link.settimeout(_MOST_WAITED_S)
            self._link.sendall(ORDER.pack(most_seconds(len(order)), len(order)))
            self._link.sendall(order)
            self._link.settimeout(_LOOK_S)
            refused, self.is_done, length = ANSWER.unpack(self._receive(ANSWER.size, until, wanted))
            if length > 4 * MOST_CHARACTERS:
                return None
            text = self._receive(length, until, wanted).decode("utf-8", "surrogatepass")
        except TimeoutError:
            self._slow = True
            return None
        except (ConnectionError, UnicodeDecodeError):
            return None
        return refused, text

    def _receive(self, count: int, until: float, wanted: Callable[[], bool]) -> bytearray:
        found = bytearray(count)
        rest = memoryview(found)
        while rest:
            try:
                got = self._link.recv_into(rest)
            except TimeoutError:
                if not wanted():
                    raise _unwanted() from None
                if time.monotonic() > until:
                    raise
                continue
            if not got:
                raise ConnectionResetError("it has ended")
            rest = rest[got:]
        return found


def _unwanted() -> ForetokenError:
    return ForetokenError("nobody waits for this text any more")


def _end(child: "subprocess.Popen[bytes]", link: socket.socket, owner: int) -> None:
    link.close()
    if os.getpid() == owner:
        child.kill()
        child.wait()
