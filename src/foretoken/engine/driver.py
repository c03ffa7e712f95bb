"""One engine, several readers: whoever steps it, each gets its own outputs.

Owns what nobody has read yet, and whose turn it is where readers are in several threads. Knows no
prompts and no results. Invariants: every output goes to the reader whose request it is, in order; a
reader that is closed leaves nothing in the engine; one thread at a time is in the engine, and
Ctrl-C never breaks off what it does there.
"""

import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, final
from weakref import WeakValueDictionary

from foretoken.engine.engine import Engine
from foretoken.errors import ConfigError, EngineLostError
from foretoken.types import Output, Request


@final
class HeldInterrupt:
    """A block that Ctrl-C does not break off: it comes when the block has ended.

    A second one comes at once, for whoever does not want to wait. Without effect in threads that
    Ctrl-C does not reach, and where it raises nothing.
    """

    def __init__(self) -> None:
        self._before: Any = None
        self._came = False

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            self._before = handler
            signal.signal(signal.SIGINT, self._hold)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """From here on it comes as ever; first of all the one that came meanwhile."""
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            if self._came:
                signal.raise_signal(signal.SIGINT)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._came:
            self._before(number, frame)
        self._came = True


@final
class SharedEngine:
    """Steps an engine for its readers, which may be in several threads."""

    def __init__(self, engine: Engine) -> None:
        """Take over `engine`: nobody else may step it."""
        self._engine: Engine | None = engine
        self._readers = WeakValueDictionary[str, Reader]()
        self._next, self._inside = threading.Lock(), threading.Lock()
        """Held by the thread whose turn is next while it waits, and by the one in the engine."""
        self._owner: int | None = None
        """The thread in the engine."""
        self._lost = False
        self._left: deque[str] = deque()
        """Requests that nobody reads any more and that have not been ended."""

    @property
    def engine(self) -> Engine:
        """The engine. Raises ConfigError: it was closed."""
        if self._engine is None:
            raise ConfigError("LLM", "closed", "an LLM that has not been closed")
        return self._engine

    def close(self) -> None:
        """Let go of the engine; readers that go on get an error."""
        with self._turn():
            if self._engine is not None:
                self._engine.close()
            self._engine = None

    def reader(self) -> "Reader":
        """A reader without requests; whoever asks must close it."""
        return Reader(self)

    def add(self, requests: Iterable[Request], reader: "Reader") -> None:
        """Queue requests; if one is refused, the reader has to be closed. Raises RequestError: one
        of them can never run."""
        with self._turn():
            self._end_orphans()
            for request in requests:
                self.engine.add_request(request)
                self._readers[request.request_id] = reader
                reader.unfinished.add(request.request_id)

    def step(self, reader: "Reader") -> None:
        """Run one step and hand its outputs to their readers, unless another thread's step has
        brought this one something while it waited for its turn.

        Raises:
            EngineLostError: an earlier step broke off after tokens had been committed.
            Exception: what the step raised; if nothing was committed, other readers can go on.
        """
        with self._turn():
            if not reader.waiting:
                self._step(self.engine)

    def leave(self, request_ids: Iterable[str]) -> None:
        """End requests that nobody reads any more; unknown ones are fine.

        The garbage collector may call it anywhere, so it waits for nothing: whoever is in the
        engine ends them before it goes.
        """
        with HeldInterrupt():
            self._left.extend(request_ids)
            if self._inside.acquire(blocking=False):
                try:
                    self._end_left()
                finally:
                    self._inside.release()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Alone in the engine. Threads take turns: whoever comes back waits behind one that waits.
        Raises ConfigError: this thread is in the engine already."""
        if self._owner == threading.get_ident():
            allowed = "calls from outside: what runs inside a step of an LLM cannot use it"
            raise ConfigError("LLM", "a call inside a step of its own", allowed)
        with HeldInterrupt():
            with self._next:
                self._inside.acquire()
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._end_left()
                self._owner = None
                self._inside.release()

    def _step(self, engine: Engine) -> None:
        if self._lost or not engine.has_unfinished:
            raise EngineLostError("a step broke off and its outputs are lost: make another LLM")
        try:
            outputs = engine.step()
        except BaseException:
            self._lost = not engine.cancelled
            raise
        for output in outputs:
            reader = self._readers.get(output.request_id)
            if reader is not None:
                reader.waiting.append(output)
            if output.finish_reason is not None:
                self._readers.pop(output.request_id, None)

    def _end_orphans(self) -> None:
        """End requests whose reader is gone and was not closed: Ctrl-C came instead."""
        known = self.engine.parts.scheduler.sequences
        self._left.extend(i for i in known if i not in self._readers)
        self._end_left()

    def _end_left(self) -> None:
        while self._left:
            request_id = self._left.popleft()
            self._readers.pop(request_id, None)
            if self._engine is not None:
                self._engine.abort(request_id)


@final
class Reader:
    """The outputs of some requests, as they come. Made by `SharedEngine.reader`."""

    def __init__(self, shared: SharedEngine) -> None:
        self.unfinished: set[str] = set()
        """Requests whose end has not been read."""
        self.waiting: deque[Output] = deque()
        """Outputs that came in steps of this reader or of others."""
        self._shared = shared

    def __iter__(self) -> Iterator[Output]:
        """Outputs until all requests have ended; steps the engine where none waits."""
        while self.unfinished:
            while not self.waiting:
                self._shared.step(self)
            output = self.waiting.popleft()
            if output.finish_reason is not None:
                self.unfinished.discard(output.request_id)
            yield output

    def add(self, requests: Iterable[Request]) -> None:
        """Queue requests whose outputs it is to read. Raises RequestError: one of them can never
        run."""
        self._shared.add(requests, self)

    def close(self) -> None:
        """Abort what has not ended."""
        if self.unfinished:
            self._shared.leave(self.unfinished)
        self.unfinished = set()
        self.waiting.clear()
