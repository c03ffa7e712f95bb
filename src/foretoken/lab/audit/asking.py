"""Requests to one server, and everything that it answered; prompts to ask it about.

An `Asker` sends bodies within a limit of open requests and keeps every reply, for checks that only
read. Answers that several checks want are asked for once. `OneAtATime` lets one server of a machine
compute at a time: servers whose threads wait by spinning take the cores from each other, and two
that were asked at once on two cores answered a hundredth as fast as either alone.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, final

from foretoken.lab.audit.replies import Reply, read_reply
from foretoken.lab.http.timed import Answer, TransportError

_PATHS = {False: "/v1/completions", True: "/v1/chat/completions"}
TOPS = 5
"""Likeliest tokens that greedy answers are asked for."""


class Pool(Protocol):
    """What sends a request."""

    async def send(self, method: str, path: str, body: bytes = b"", *, timeout_s: float) -> Answer:
        """Send it and wait for the whole answer."""


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt that checks ask about."""

    number: int
    prompt: str
    max_tokens: int


def cases_of(texts: Sequence[str], count: int, max_tokens: int, start: int = 0) -> list[Case]:
    """`count` cases from number `start` on; prompts that come again are cut shorter each time."""
    found = []
    for number in range(start, start + count):
        round_, place = divmod(number, len(texts))
        text = texts[place]
        found.append(Case(number, text[: max(8, int(len(text) * 0.85**round_))], max_tokens))
    return found


@final
class OneAtATime:
    """Lets any number of requests of one asker through, and never of two."""

    def __init__(self) -> None:
        """It is nobody's turn."""
        self._holder: object | None = None
        self._open = 0
        self._ended = asyncio.Condition()

    @asynccontextmanager
    async def of(self, who: object) -> AsyncIterator[None]:
        """A request of `who`, which begins when it is its turn."""
        async with self._ended:
            await self._ended.wait_for(lambda: not self._open or self._holder is who)
            self._holder, self._open = who, self._open + 1
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                async with self._ended:
                    self._ended.notify_all()


class Asker:
    """One server, or one manner of asking it."""

    def __init__(
        self,
        pool: Pool,
        model: str | None,
        *,
        extra_body: Mapping[str, Any] | None = None,
        concurrency: int = 8,
        timeout_s: float = 300.0,
        turns: OneAtATime | None = None,
    ) -> None:
        """Ask `pool` for `model`, with `extra_body` in every request; only when it is its turn."""
        self.replies: list[Reply] = []
        """All of them, in the order in which they came."""
        self.num_asked = 0
        self._pool, self._timeout_s = pool, timeout_s
        self._fixed = {"model": model, **(extra_body or {})}
        self._gate = asyncio.Semaphore(concurrency)
        self._turns = turns
        self._greedy: dict[tuple[int, bool, bool], asyncio.Task[Reply]] = {}

    async def ask(
        self, body: Mapping[str, Any], *, chat: bool = False, stream: bool = False
    ) -> Reply:
        """The reply to one request."""
        whole = {**self._fixed, **body}
        if stream:
            whole |= {"stream": True, "stream_options": {"include_usage": True}}
        self.num_asked += 1
        turn = nullcontext() if self._turns is None else self._turns.of(self)
        async with turn, self._gate:
            try:
                answer = await self._pool.send(
                    "POST", _PATHS[chat], json.dumps(whole).encode(), timeout_s=self._timeout_s
                )
                reply = read_reply(whole, answer)
            except TransportError as error:
                reply = Reply(body=whole, error=str(error))
        self.replies.append(reply)
        return reply

    async def greedy(self, case: Case, again: bool = False, stream: bool = False) -> Reply:
        """The likeliest continuation of a case; `again`: asked anew."""
        key = (case.number, again, stream)
        if key not in self._greedy:
            self._greedy[key] = asyncio.create_task(self._ask_greedy(case, stream))
        return await self._greedy[key]

    async def _ask_greedy(self, case: Case, stream: bool) -> Reply:
        """With log-probabilities, if the server takes such a request."""
        body = {"prompt": case.prompt, "max_tokens": case.max_tokens, "temperature": 0.0}
        reply = await self.ask({**body, "logprobs": TOPS}, stream=stream)
        return reply if reply.refused is None else await self.ask(body, stream=stream)
