"""Rounds of streamed requests against one server, and when each of their tokens arrived.

All clients are coroutines of this one process. Bytes are stamped when they come and parsed after
the round, so that a round costs this process little of the cores that the server works on too.
Knows no arms and no bars.
"""

import asyncio
import gc
import json
import re
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, cycle
from typing import Any, TypeAlias

from foretoken.lab.http.timed import Answer, HttpPool, now

Encoded: TypeAlias = Iterator[tuple["Ask", bytes]]
TIMEOUT_S = 900.0
TOKEN = re.compile(rb'"token_ids":\[(\d+)\]')
SOURCED = re.compile(rb'"tokens":\[\{"id":(\d+),.*?"position":(\d+)')


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request; asks with the same key must be answered with the same tokens."""

    key: str
    body: Mapping[str, Any]
    group: str = ""

    def encoded(self, extra: Mapping[str, Any]) -> bytes:
        """The JSON to send, `extra` being what an arm adds to every request."""
        return json.dumps({**self.body, "stream": True, **extra}).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The tokens of one request and their arrivals, seconds on this process's clock."""

    ask: Ask
    sent_s: float
    at_s: tuple[float, ...]
    ids: tuple[int, ...]
    positions: tuple[int, ...] = ()
    """Of each token its number in its step, where the request asked for sources."""

    @property
    def ttft_s(self) -> float:
        return self.at_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per token after the first; None of a single token."""
        more = len(self.at_s) - 1
        return (self.at_s[-1] - self.at_s[0]) / more if more else None

    @property
    def starts(self) -> list[int]:
        """Places of the answer at which steps began."""
        return [place for place, position in enumerate(self.positions) if position == 0]

    @property
    def whole_s(self) -> float:
        """From the request to its last token."""
        return self.at_s[-1] - self.sent_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One arm's turn: the same requests as every other arm's."""

    replies: tuple[Reply, ...]
    began_s: float
    full_until_s: float
    """Until when every client had a request under way."""
    client_share: float
    """Share of a core that this process took."""

    @property
    def tokens_per_s(self) -> float:
        """While every client had a request under way."""
        seen = sum(at <= self.full_until_s for one in self.replies for at in one.at_s)
        return seen / (self.full_until_s - self.began_s)

    @property
    def lasted_s(self) -> float:
        """Until the last token of all."""
        return max(one.at_s[-1] for one in self.replies) - self.began_s

    @property
    def together_per_s(self) -> float:
        """Tokens per second between the last first token and the first last one: decoding only."""
        begin = max(one.at_s[0] for one in self.replies)
        end = min(one.at_s[-1] for one in self.replies)
        seen = sum(begin < at <= end for one in self.replies for at in one.at_s)
        return seen / (end - begin) if end > begin else self.tokens_per_s

    def of_group(self, name: str) -> "Round":
        """Only the replies of one group."""
        kept = tuple(one for one in self.replies if one.ask.group == name)
        return replace(self, replies=kept)


@dataclass(frozen=True, slots=True)
class Crowd:
    """So many clients that take their requests from one list."""

    asks: Sequence[Ask]
    clients: int
    goes_on: bool = False
    """Whether its clients ask the list again, uncounted, until every crowd is through its own: a
    crowd that is served faster would otherwise leave the others alone."""


def read_reply(ask: Ask, answer: Answer) -> Reply:
    """The tokens of a streamed answer; each counts from when its event was there in full.

    Raises:
        SystemExit: the server answered with an error, or its answer broke off.
    """
    body = answer.body
    if answer.status != 200 or answer.broken is not None or b'{"error":' in body:
        raise SystemExit(f"a request failed: {answer.status} {answer.broken} {body[:300]!r}")
    ends = list(accumulate(len(piece) for _, piece in answer.pieces))
    pattern = SOURCED if ask.body.get("token_sources") else TOKEN
    at, ids, positions, end = [], [], [], 0
    for event in body.split(b"\n\n"):
        end += len(event) + 2
        found = pattern.search(event)
        if found is not None:
            at.append(answer.pieces[bisect_left(ends, end)][0])
            ids.append(int(found[1]))
            if pattern is SOURCED:
                positions.append(int(found[2]))
    if not ids:
        raise SystemExit(f"an answer without tokens: {body[:300]!r}")
    return Reply(ask=ask, sent_s=answer.sent_s, at_s=tuple(at), ids=tuple(ids),
                 positions=tuple(positions))  # fmt: skip


def run_round(url: str, crowds: Sequence[Crowd], extra: Mapping[str, Any]) -> Round:
    """Every client asks, one request after the other, until its crowd's list is empty."""
    lists = [[(ask, ask.encoded(extra)) for ask in crowd.asks] for crowd in crowds]
    wanted = sum(map(len, lists))
    answers: list[tuple[Ask, Answer]] = []
    empty: list[float] = []

    async def post(pool: HttpPool, body: bytes) -> Answer:
        return await pool.send("POST", "/v1/completions", body, timeout_s=TIMEOUT_S)

    async def client(pool: HttpPool, queue: Encoded, more: Encoded) -> None:
        for ask, body in queue:
            answers.append((ask, await post(pool, body)))
        empty.append(now())
        for _, body in more:
            if len(answers) == wanted:
                return
            await post(pool, body)

    async def everyone() -> float:
        pool, began = HttpPool(url), now()
        clients = []
        for crowd, asks in zip(crowds, lists, strict=True):
            queue, more = iter(asks), cycle(asks if crowd.goes_on else ())
            clients += [client(pool, queue, more) for _ in range(crowd.clients)]
        await asyncio.gather(*clients)
        await pool.close()
        return began

    gc.collect()
    gc.disable()  # none of ours while a round runs
    try:
        processor, wall = time.process_time(), now()
        began = asyncio.run(everyone())
        share = (time.process_time() - processor) / (now() - wall)
    finally:
        gc.enable()
    replies = tuple(read_reply(ask, answer) for ask, answer in answers)
    return Round(replies=replies, began_s=began, full_until_s=min(empty), client_share=share)
