"""The engine in a thread of its own, its outputs as streams of an asyncio loop.

Owns the thread, the queue of commands to it and the streams. Knows no HTTP. Invariants: only the
thread touches the engine; every request that was opened ends exactly once, by the engine or, if
the engine is lost, by `_lose`; a stream holds at most `max_buffered` tokens that nobody has read.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TypeVar, final

from foretoken.engine.engine import Engine
from foretoken.errors import EngineLostError, RankLostError, RequestError
from foretoken.runtime.faults import say_failure
from foretoken.types import FinishReason, Output, Request

logger = logging.getLogger("foretoken")

Result = TypeVar("Result")
Observer = Callable[[Sequence[Output]], None]

_MOST_FAILURES = 3
"""Steps that may fail in a row before the engine counts as lost."""
_LOOK_S = 1.0
"""How often an idle engine looks whether the processes are there that share its model."""


def _failed(request_id: str, error: str) -> Output:
    return Output(request_id=request_id, finish_reason=FinishReason.ERROR, error=error)


@final
class OutputStream:
    """Outputs of a group of requests. Belongs to the loop; only `AsyncEngine` fills it."""

    def __init__(self, requests: Sequence[Request], max_buffered: int) -> None:
        self.requests = tuple(requests)
        self.live = {request.request_id for request in requests}
        """Requests that have not ended."""
        self.overflowed = False
        """Whether it was cut off because nobody read it."""
        self._max_buffered = max_buffered
        self._waiting: deque[Output] = deque()
        self._num_buffered = 0
        self._changed = asyncio.Event()

    async def batches(self, deadline: float | None = None) -> AsyncIterator[list[Output]]:
        """What has come since the last batch, until all requests have ended. Raises TimeoutError:
        nothing came before `deadline` (the loop's time)."""
        while self._waiting or self.live:
            if not self._waiting:
                self._changed.clear()
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
                continue
            batch = list(self._waiting)
            self._waiting.clear()
            self._num_buffered = 0
            yield batch

    def drop(self) -> None:
        """Wait for nothing more."""
        self.live.clear()
        self._changed.set()

    def fail(self, request_id: str, error: str) -> None:
        """End the reading with an error of this request, and wait for nothing more."""
        self._waiting.append(_failed(request_id, error))
        self.drop()

    def put(self, output: Output) -> bool:
        """Add an output; False if too many tokens have not been read."""
        self._waiting.append(output)
        self._num_buffered += len(output.new_token_ids)
        if output.finish_reason is not None:
            self.live.discard(output.request_id)
        self._changed.set()
        return self._num_buffered <= self._max_buffered


@dataclass(frozen=True, slots=True)
class _Command:
    """Something that the engine's thread is asked to do."""

    run: Callable[[], None]
    adds: bool = False
    """It adds requests, which may be done before a step's target has begun."""


@final
class AsyncEngine:
    """Takes requests from a loop, steps in a thread, and gives outputs back to the loop."""

    def __init__(
        self,
        engine: Engine,
        *,
        max_buffered: int = 4096,
        observers: Sequence[Observer] = (),
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        """Take over `engine`.

        Args:
            engine: nobody else may step it.
            max_buffered: a stream with more unread tokens is ended.
            observers: called on the loop with all outputs of a step, the ends of aborted requests
                included.
            on_lost: called on the loop when the thread has died.
        """
        self.engine = engine
        self.observers = list(observers)
        self._on_lost = on_lost
        self.lost: BaseException | None = None
        """What ended the thread, if anything did."""
        self.stepped_at = time.monotonic()
        """When the thread last came round."""
        self._busy_since = self.stepped_at
        """When there was last something to do after there had been nothing."""
        self._max_buffered = max_buffered
        self._streams: dict[str, OutputStream] = {}
        self._closing: set[str] = set()
        """Requests without a stream whose end may still come."""
        self._commands: SimpleQueue[_Command] = SimpleQueue()
        self._held: _Command | None = None
        """Taken from the queue during a step, and to be carried out behind it."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._main, name="foretoken-engine", daemon=True)
        self._stopping = False
        self._num_failures = 0

    @property
    def num_open(self) -> int:
        """Requests that were opened and have not ended."""
        return len(self._streams)

    @property
    def stalled_s(self) -> float:
        """Seconds since the thread last came round, if it has something to do; else 0."""
        if not self._streams:
            return 0.0
        return max(0.0, time.monotonic() - max(self.stepped_at, self._busy_since))

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive() and self.lost is None

    @property
    def stopped_cleanly(self) -> bool:
        """Whether the thread ended because it was told to."""
        return self._stopping and isinstance(self.lost, EngineLostError)

    def start(self) -> None:
        """Start the thread; to be called on the loop that will read the streams."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End all requests and the thread."""
        self._commands.put(_Command(self._stop))
        await asyncio.to_thread(self._thread.join)
        await asyncio.sleep(0)

    def open(self, requests: Sequence[Request]) -> OutputStream:
        """Queue requests of `Engine.make_requests`; the stream gives all of their outputs.

        Raises:
            EngineLostError: the thread has ended.
            RequestError: two have one id, or one is in use; nothing has been queued then.
        """
        if self.lost is not None or self._stopping:
            raise EngineLostError("the engine has stopped")
        self._check_ids([request.request_id for request in requests])
        if not self._streams:
            self._busy_since = time.monotonic()
        stream = OutputStream(requests, self._max_buffered)
        for request in requests:
            self._streams[request.request_id] = stream
        self._commands.put(_Command(lambda: self._add(requests), adds=True))
        return stream

    def _check_ids(self, ids: Sequence[str]) -> None:
        """Whether each output will be of one stream."""
        seen: set[str] = set()
        for request_id in ids:
            if any(request_id in used for used in (self._streams, self._closing, seen)):
                raise RequestError("request_id", request_id, "an id that is not in use")
            seen.add(request_id)

    def close(self, stream: OutputStream) -> None:
        """Abort what has not ended of a stream; its pages are free before the next step."""
        ids = tuple(stream.live)
        stream.drop()
        for request_id in ids:
            self._streams.pop(request_id, None)
        if ids:
            self._closing.update(ids)
            self._commands.put(_Command(lambda: self._abort(ids)))

    def end_all(self) -> None:
        """Abort everything that is open; its readers get the end as an output."""
        ids = tuple(self._streams)
        if ids:
            self._commands.put(_Command(lambda: self._abort(ids)))

    async def call(self, function: Callable[[Engine], Result]) -> Result:
        """Run `function` in the engine's thread between two steps. Raises EngineLostError: the
        thread has ended; Exception: what `function` raised."""
        if self.lost is not None or self._stopping:
            raise EngineLostError("the engine has stopped")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def settle(result: Result | None, error: BaseException | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            try:
                result = function(self.engine)
            except Exception as error:  # noqa: BLE001 - handed to the caller
                loop.call_soon_threadsafe(settle, None, error)
            else:
                loop.call_soon_threadsafe(settle, result, None)

        self._commands.put(_Command(run))
        return await future

    # In the engine's thread.

    def _main(self) -> None:
        try:
            while not self._stopping:
                self._obey()
                self._step()
                self.stepped_at = time.monotonic()
        except BaseException as error:  # nothing may end the thread silently
            logger.exception("the engine is lost")
            self._post(self._lose, error)
        else:
            self._post(self._lose, None)
        finally:
            self.engine.close()

    def _obey(self) -> None:
        """Carry out what is left of the commands; wait for one if there is nothing else to do."""
        # A step notices by itself when a process is lost that it needs; an idle engine has to look.
        look_s = None if self.engine.parts.followers is None else _LOOK_S
        while not self._stopping:
            command, self._held = self._held, None
            if command is None:
                if self._commands.empty() and self.engine.has_unfinished:
                    return
                try:
                    command = self._commands.get(timeout=look_s)
                except Empty:
                    self.engine.check()
                    continue
            command.run()

    def _arrive(self) -> None:
        """Add the requests that wait, up to the first command that needs a step to be over."""
        while self._held is None and not self._commands.empty():
            command = self._commands.get()
            if command.adds:
                command.run()
            else:
                self._held = command

    def _step(self) -> None:
        if self._stopping:
            return
        try:
            outputs = self.engine.step(self._arrive)
            self._num_failures = 0
        except Exception:
            hit = self.engine.cancelled
            self._num_failures += 1
            if not hit or self._num_failures >= _MOST_FAILURES:
                raise
            logger.exception("a step failed; requests %s end", ", ".join(hit))
            outputs = self._fail(hit)
        if outputs:
            self._post(self._deliver, outputs)

    def _fail(self, request_ids: Sequence[str]) -> list[Output]:
        ended = (self.engine.fail(i, "the engine failed while running it") for i in request_ids)
        return [output for output in ended if output is not None]

    def _add(self, requests: Sequence[Request]) -> None:
        for request in requests:
            try:
                self.engine.add_request(request)
            except RequestError as error:
                self._post(self._deliver, [_failed(request.request_id, str(error))])
            except Exception as error:  # noqa: BLE001 - said in the output
                why = say_failure(request.request_id, error)
                self._post(self._deliver, [_failed(request.request_id, why)])

    def _abort(self, request_ids: Sequence[str]) -> None:
        ended = [self.engine.abort(request_id) for request_id in request_ids]
        self._post(self._deliver, [output for output in ended if output is not None])
        self._post(self._closing.difference_update, request_ids)

    def _stop(self) -> None:
        self._stopping = True

    def _post(self, function: Callable[..., None], *args: object) -> None:
        assert self._loop is not None, "start() was called on a loop"
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            logger.warning("the loop was closed before the engine's thread ended")

    # On the loop.

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            ended = output.finish_reason is not None
            find = self._streams.pop if ended else self._streams.get
            stream = find(output.request_id, None)
            if stream is not None:
                self._hand_over(stream, output)
        for observe in self.observers:
            try:
                observe(outputs)
            except Exception:
                logger.exception("an observer of outputs failed")

    def _hand_over(self, stream: OutputStream, output: Output) -> None:
        """Give a stream its output; if that fails, its requests end and the others go on."""
        try:
            full = not stream.put(output)
        except Exception as error:  # noqa: BLE001 - said in the output
            why = say_failure(output.request_id, error)
            self.close(stream)
            stream.fail(output.request_id, why)
            return
        if full and stream.live:
            stream.overflowed = True
            self.close(stream)

    def _lose(self, error: BaseException | None) -> None:
        """End every open request: the engine will not."""
        self.lost = error or EngineLostError("the engine was stopped")
        reason = FinishReason.ABORT if error is None else FinishReason.ERROR
        text = None if error is None else "the engine was lost"
        if isinstance(error, RankLostError):
            text = f"{text}: {error}"
        ids = list(self._streams)
        self._deliver([Output(request_id=i, finish_reason=reason, error=text) for i in ids])
        if error is not None:
            self._on_lost()
