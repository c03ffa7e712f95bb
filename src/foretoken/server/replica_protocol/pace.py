"""How long a request that came now would wait, estimated from requests that have come and gone.

Belongs to the loop: it is told of requests and of outputs, and asks the engine nothing, so that a
long step does not keep the front waiting. Its numbers only have to compare replicas.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from foretoken.types import Output, Request

_KEPT = 0.9
"""Of what was seen before, at each new observation."""


@dataclass(slots=True)
class _Ratio:
    """Seconds over something, where what is older counts less."""

    seconds: float = 0.0
    count: float = 0.0

    def add(self, seconds: float, count: float) -> None:
        self.seconds = _KEPT * self.seconds + seconds
        self.count = _KEPT * self.count + count

    @property
    def each(self) -> float:
        return self.seconds / self.count if self.count else 0.0


class Paces(NamedTuple):
    """How fast a replica has been of late; 0 where it has not seen enough to tell."""

    step_s: float
    """Seconds from one step that gave somebody a token to the next."""
    prefill_token_s: float
    """Seconds to compute one token of a prompt."""
    request_s: float
    """Seconds of a whole request."""


class Backlog(NamedTuple):
    """What a request that came now would have to wait for."""

    open: int
    """Requests that have not ended."""
    unread_tokens: int
    """Prompt tokens of those that have no token yet."""
    turns: float
    """How many whole requests it would wait for: those too many, over those that run at once."""

    def without(self, ended: int) -> "Backlog":
        """What is left where so many of the requests have ended since, like the others in size."""
        left = max(self.open - ended, 0)
        share = left / self.open if self.open else 0.0
        return Backlog(left, round(share * self.unread_tokens), share * self.turns)

    def seconds(self, paces: Paces) -> float:
        """Until it would be begun."""
        if not self.open:
            return 0.0
        reading_s = self.unread_tokens * paces.prefill_token_s
        return paces.step_s + reading_s + self.turns * paces.request_s


@final
class ServerPace:
    """Seconds of steps, prompts and whole requests, as they were of late."""

    def __init__(self, most_running: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Of an engine that runs up to `most_running` requests at once."""
        self._most = most_running
        self._clock = clock
        self._open: dict[str, Request] = {}
        self._unread: dict[str, int] = {}
        """Tokens of requests that have no new token yet."""
        self._step = _Ratio()
        self._prompt = _Ratio()
        self._request = _Ratio()
        self._last_at: float | None = None
        """When outputs came last, if something was left to do."""

    @property
    def paces(self) -> Paces:
        return Paces(self._step.each, self._prompt.each, self._request.each)

    @property
    def backlog(self) -> Backlog:
        turns = max(len(self._open) + 1 - self._most, 0) / self._most
        return Backlog(len(self._open), sum(self._unread.values()), turns)

    def opened(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._open[request.request_id] = request
            tokens = len(request.prompt_token_ids) + len(request.resumed_ids)
            self._unread[request.request_id] = tokens

    def observe(self, outputs: Sequence[Output]) -> None:
        now = self._clock()
        if self._last_at is not None and any(output.new_token_ids for output in outputs):
            self._step.add(now - self._last_at, 1.0)
        for output in outputs:
            if output.new_token_ids:
                self._unread.pop(output.request_id, None)
            if output.finish_reason is not None:
                self._end(output)
        self._last_at = now if self._open else None

    def _end(self, output: Output) -> None:
        self._unread.pop(output.request_id, None)
        request, times = self._open.pop(output.request_id, None), output.metrics
        if request is None or times is None:
            return
        read = len(request.prompt_token_ids) + len(request.resumed_ids) - times.num_cached_tokens
        if times.first_token_s > times.queued_s:
            self._prompt.add(times.first_token_s - times.queued_s, max(read, 1))
        if times.finished_s > times.queued_s:
            self._request.add(times.finished_s - times.queued_s, 1.0)
