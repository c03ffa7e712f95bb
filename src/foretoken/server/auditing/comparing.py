"""One finished request beside plain decoding: the same tokens, or tokens as likely.

Greedy and seeded requests are decoded again whole, and give the same tokens; where the arithmetic
depends on the batch, greedy ones may part at a near-tie. Of other requests plain decoding draws the
next token again at some places of the answer: the differences go to `FairTokens`. Which places is
decided without regard to the tokens. Knows an engine's requests, and nothing of when it is idle.
"""

import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Literal, NamedTuple, final

from foretoken.server.auditing.samples import FinishedRequest
from foretoken.types import Logprob, Output, Request, SamplingParams, Speculation

Outcome = Literal["same", "near_tie", "differs", "drawn", "unsteady"]
Decode = Callable[[Request], Awaitable[list[Output]]]
"""Runs a request to its end when nothing else runs."""

_NEAR_TIE = 0.25
"""Most that rounding moves two log-probabilities against each other, in 16-bit arithmetic."""
_TOPS = 20
_BEYOND = 1.0
"""How much less likely than the last of _TOPS a token counts that is none of them."""
_EVERY = 3
_MOST_DRAWS = 32
"""Places of one answer at which plain decoding draws again."""
_DRAWN = ("standard", "block", "traversal")
"""Rules that keep the distribution of seeded requests, not their tokens."""
_PLAIN = Speculation(enabled=False)


class Compared(NamedTuple):
    """What a comparison found."""

    outcome: Outcome
    said: str = ""
    differences: tuple[float, ...] = ()
    """For `drawn`: log-probability of the given token less that of plain decoding's."""


class Promise(NamedTuple):
    """What an engine says of its output."""

    exact: bool
    """The arithmetic does not depend on the batch: bits are the same."""
    rule: str = "auto"
    """How drafts are accepted, as configured."""

    def has_one_answer(self, params: SamplingParams) -> bool:
        """Whether the tokens of a request are those of plain decoding, rounding apart."""
        if params.greedy:
            return True
        return self.exact and params.deterministic and self.rule not in _DRAWN


@final
class Comparison:
    """Compares samples with plain decoding."""

    def __init__(self, decode: Decode, promise: Promise) -> None:
        """Hold what `decode` finds against `promise`."""
        self._decode = decode
        self._promise = promise
        self._luck = random.Random()
        self._count = 0

    async def compare(self, sample: FinishedRequest) -> Compared:
        """Decode a sample again, as far as it takes."""
        params = sample.request.params
        if self._promise.has_one_answer(params):
            return await self._again(sample)
        return Compared("drawn", "", tuple([d async for d in self._draws(sample)]))

    async def _again(self, sample: FinishedRequest) -> Compared:
        """The whole answer again; a difference must be there twice."""
        found = Compared("same")
        first: list[int] | None = None
        for _ in range(2):
            outputs = await self._decode(self._request(sample.request))
            ids = [token for output in outputs for token in output.new_token_ids]
            if first is not None and ids != first:
                return Compared("unsteady", "plain decoding gave two answers")
            first = ids
            found = self._judge(sample, outputs, ids)
            if found.outcome != "differs":
                return found
        return found

    def _judge(self, sample: FinishedRequest, outputs: list[Output], ids: list[int]) -> Compared:
        given = sample.token_ids
        if tuple(ids) == given:
            return Compared("same")
        pairs = zip(given, ids, strict=False)
        at = next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(given), len(ids)))
        said = f"token {at + 1} of {len(given)} of request {sample.request.request_id}"
        if at >= len(given) or at >= len(ids):
            return Compared("differs", f"{said}: one answer ends there")
        said = f"{said} is {given[at]}, plain decoding gives {ids[at]}"
        if self._promise.exact:
            return Compared("differs", said)
        rows = [row for output in outputs for row in output.logprobs or ()]
        gap = score(ids[at], rows[at]) - score(given[at], rows[at])
        outcome: Outcome = "near_tie" if gap <= _NEAR_TIE else "differs"
        return Compared(outcome, f"{said}, {gap:.3f} likelier")

    async def _draws(self, sample: FinishedRequest) -> AsyncIterator[float]:
        """Differences at every third place from a random one on, without the prompt's token."""
        places = range(1 + self._luck.randrange(_EVERY), len(sample.token_ids), _EVERY)
        for place in places[:_MOST_DRAWS]:
            request = self._request(sample.request, sample.token_ids[:place])
            [output, *_] = await self._decode(request)
            assert output.logprobs is not None, "asked for"
            row = output.logprobs[0]
            drawn = output.new_token_ids[0]
            yield score(sample.token_ids[place], row) - score(drawn, row)

    def _request(self, request: Request, given: tuple[int, ...] | None = None) -> Request:
        """The request without speculation; with `given` tokens, its next token, drawn anew."""
        self._count += 1
        params = replace(
            request.params, speculation=_PLAIN, prediction=None, prompt_logprobs=None, n=1,
            logprobs=_TOPS,
        )  # fmt: skip
        plain = replace(
            request, request_id=f"audit-{self._count}", prediction_ids=(), params=params,
            arrival=time.monotonic(),
        )  # fmt: skip
        if given is None:
            return plain
        written = (*request.resumed_ids, *given)
        return replace(
            plain,
            resumed_ids=written,
            resumed_text="",
            params=replace(params, stop=None, detokenize=False),
            max_tokens=len(written) + 1,
            seed=self._luck.getrandbits(64),
        )


def score(token: int, row: dict[int, Logprob]) -> float:
    """A token's log-probability; those beyond the likeliest few count alike, whoever drew them."""
    best = {i: entry.logprob for i, entry in row.items() if entry.rank <= _TOPS}
    return best.get(token, min(best.values()) - _BEYOND)
