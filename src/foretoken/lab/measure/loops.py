"""Runs what measures in an event loop that SIGTERM ends as Ctrl-C does: at an await.

An exception raised wherever a signal comes is lost where nothing may raise, as around a fork, and
a server that is just being started would be left behind.
"""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


def run_to_end(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`; what `main` started is stopped before this returns or raises.

    In the main thread SIGTERM has the running loop cancel `main` and nothing else: tasks that
    asyncio has for starting a process have to end by themselves, or its end is never noticed.

    Raises:
        KeyboardInterrupt: it was told to end by SIGTERM or SIGINT.
    """
    told = False

    async def watched() -> T:
        task = asyncio.current_task()
        assert task is not None

        def end() -> None:
            nonlocal told
            told = True
            task.cancel()

        with _told_by_sigterm(end):
            return await main

    try:
        return asyncio.run(watched())
    except asyncio.CancelledError:
        if told:
            raise KeyboardInterrupt from None
        raise


@contextmanager
def _told_by_sigterm(end: Callable[[], None]) -> Iterator[None]:
    """Have the running loop call `end` at SIGTERM; who handled it before does so again after."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGTERM)
    try:
        loop.add_signal_handler(signal.SIGTERM, end)
    except NotImplementedError:  # on Windows
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        if before is not None:
            signal.signal(signal.SIGTERM, before)
