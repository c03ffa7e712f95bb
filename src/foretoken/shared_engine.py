"""One engine, several readers in one thread: whoever steps it, each gets its own outputs.

Owns what nobody has read yet. Knows no prompts and no results. Invariants: every output goes to
the reader whose request it is, in order; a reader that is closed leaves nothing in the engine.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self, final

from foretoken.engine import Engine
from foretoken.errors import ConfigError, EngineLostError
from foretoken.types import Output, Request


@final
class SharedEngine:
    """Steps an engine for its readers. Not thread-safe."""

    def __init__(self, engine: Engine) -> None:
        """Take over `engine`: nobody else may step it."""
        self._engine: Engine | None = engine
        self._readers: dict[str, Reader] = {}
        self._stepping = False
        self._lost = False
        self._left: list[str] = []
        """Requests whose reader was closed in the middle of a step."""

    @property
    def engine(self) -> Engine:
        """The engine.

        Raises:
            ConfigError: it was closed.
        """
        if self._engine is None:
            raise ConfigError("LLM", "closed", "an LLM that has not been closed")
        return self._engine

    def close(self) -> None:
        """Let go of the engine; readers that go on get an error."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None

    def open(self, requests: Iterable[Request]) -> "Reader":
        """Queue requests, all or none of them; whoever asks must close the reader.

        Raises:
            RequestError: one of them can never run.
        """
        reader = Reader(self)
        try:
            for request in requests:
                self.engine.add_request(request)
                self._readers[request.request_id] = reader
                reader.unfinished.add(request.request_id)
        except BaseException:
            reader.close()
            raise
        return reader

    def step(self) -> None:
        """Run one step and hand its outputs to their readers.

        Raises:
            EngineLostError: an earlier step broke off after tokens had been committed.
            Exception: what the step raised; if nothing was committed, other readers can go on.
        """
        engine = self.engine
        assert not self._stepping, "a step inside a step"
        if self._lost or not engine.has_unfinished:
            raise EngineLostError("a step broke off and its outputs are lost: make another LLM")
        self._stepping = True
        try:
            outputs = engine.step()
        except BaseException:
            self._lost = not engine.cancelled
            raise
        finally:
            self._stepping = False
            left, self._left = self._left, []
            for request_id in left:
                engine.abort(request_id)
        for output in outputs:
            reader = self._readers.get(output.request_id)
            if reader is not None:
                reader.waiting.append(output)
            if output.finish_reason is not None:
                self._readers.pop(output.request_id, None)

    def leave(self, request_id: str) -> None:
        """End a request that nobody reads any more; unknown ones are fine."""
        if self._readers.pop(request_id, None) is None or self._engine is None:
            return
        if self._stepping:  # a reader that the garbage collector found
            self._left.append(request_id)
        else:
            self._engine.abort(request_id)


@final
class Reader:
    """The outputs of some requests, as they come. Made by `SharedEngine.open`."""

    def __init__(self, shared: SharedEngine) -> None:
        """Without requests yet."""
        self.unfinished: set[str] = set()
        """Requests whose end has not been read."""
        self.waiting: deque[Output] = deque()
        """Outputs that came in steps of this reader or of others."""
        self._shared = shared

    def __enter__(self) -> Self:
        """The reader itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def __iter__(self) -> Iterator[Output]:
        """Outputs until all requests have ended; steps the engine where none waits."""
        while self.unfinished:
            while not self.waiting:
                self._shared.step()
            output = self.waiting.popleft()
            if output.finish_reason is not None:
                self.unfinished.discard(output.request_id)
            yield output

    def close(self) -> None:
        """Abort what has not ended."""
        for request_id in self.unfinished:
            self._shared.leave(request_id)
        self.unfinished = set()
        self.waiting.clear()
