"""Decodes samples again while nothing else runs, counts what comes of it, and ends speculation.

A task of the server's loop. A request that comes ends the audit that runs before the request is
queued; the sample waits for the next idle moment. Where speculation wrote what plain decoding would
not, it is turned off for all requests, as an operator would. Invariant: no audit and no
request are in the engine at the same time.
"""

import asyncio
import logging
import math
import random
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, final

from foretoken.engine.thread import AsyncEngine, OutputStream
from foretoken.errors import ConfigError, EngineLostError
from foretoken.runtime.rules.base import DRAWN, INVALID, LOSSY
from foretoken.types import FinishReason, Logprob, Output, Request, SamplingParams, Speculation

logger = logging.getLogger("foretoken")

_QUIET_S = 0.25
"""How long nothing must have run before an audit begins."""
NOT_LOSSLESS = (*LOSSY, *INVALID)
"""Rules whose output is not plain decoding's."""
_TOLD = "speculation is turned off for all requests; PUT /admin/speculation turns it on again"
_STAKES = (0.03, 0.1, 0.2, 0.4)
"""Shares of what he has that he bets, each on either side, on an account of its own."""
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
_PLAIN = Speculation(enabled=False)
_MOST_WAITING = 64


class FinishedRequest(NamedTuple):
    """A request and the tokens that it was answered with."""

    request: Request
    token_ids: tuple[int, ...]


@final
class Samples:
    """A share of the requests that were drafted for, which wait to be decoded again.

    Follows the outputs of chosen requests until they end. Bounded: where audits cannot keep up,
    newer ones are left out and counted.
    """

    def __init__(self, share: float) -> None:
        """Choose a `share` of requests, without regard to what they are."""
        self._share = share
        self._luck = random.Random()
        self._followed: dict[str, tuple[Request, list[int]]] = {}
        self.waiting: deque[FinishedRequest] = deque()
        self.num_left_out = 0
        """Chosen and never compared: too many waited."""

    def opened(self, requests: Sequence[Request]) -> None:
        for request in requests:
            own = request.params.own_policy
            if (own is None or own.enabled) and self._luck.random() < self._share:
                self._followed[request.request_id] = (request, [])

    def observe(self, outputs: Sequence[Output]) -> bool:
        """Outputs of a step; whether a request has ended that is to be decoded again."""
        found = False
        for output in outputs:
            followed = self._followed.get(output.request_id)
            if followed is None:
                continue
            followed[1].extend(output.new_token_ids)
            if output.finish_reason is not None:
                del self._followed[output.request_id]
                found = self._end(FinishedRequest(followed[0], tuple(followed[1])), output) or found
        return found

    def _end(self, sample: FinishedRequest, output: Output) -> bool:
        whole = output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        drafted = output.metrics is not None and any(output.metrics.drafted_per_step)
        if not whole or not drafted:
            return False
        if len(self.waiting) >= _MOST_WAITING:
            self.num_left_out += 1
            return False
        self.waiting.append(sample)
        return True


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
        return self.exact and params.deterministic and self.rule not in DRAWN


@final
class Comparison:
    """One finished request beside plain decoding: the same tokens, or tokens as likely.

    Greedy and seeded requests are decoded again whole, and give the same tokens; where the
    arithmetic depends on the batch, greedy ones may part at a near-tie. Of other requests plain
    decoding draws the next token again at some places of the answer, which are decided without
    regard to the tokens: the differences go to `FairTokens`.
    """

    def __init__(self, decode: Decode, promise: Promise) -> None:
        self._decode = decode
        self._promise = promise
        self._luck = random.Random()
        self._count = 0

    async def compare(self, sample: FinishedRequest) -> Compared:
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


@final
class FairTokens:
    """A running test that may be looked at after every token: are two tokens drawn alike?

    If a token that was given and one that plain decoding draws at the same place come from the same
    distribution, either is as likely to be the likelier one: the difference of their
    log-probabilities is symmetric about 0. A gambler who bets on its sign gains nothing then; what
    he has is a nonnegative martingale, and reaches 1 / error with a chance of at most `error`,
    however long he goes on (Ville's inequality; Waudby-Smith and Ramdas 2020, arXiv 2010.09686).
    """

    def __init__(self, error: float = 1e-4) -> None:
        """Accuse with a chance of at most `error` where there is nothing."""
        self.error = error
        self.num_tokens = 0
        self.mean = 0.0
        """How much likelier the given tokens are, from -1 to 1; 0 is expected."""
        self._logs = [0.0] * (2 * len(_STAKES))

    def add(self, difference: float) -> None:
        """Log-probability of the given token less that of the drawn one."""
        turn = math.tanh(difference)  # bounded and odd: still fair
        self.num_tokens += 1
        self.mean += (turn - self.mean) / self.num_tokens
        for i, stake in enumerate((*_STAKES, *(-stake for stake in _STAKES))):
            self._logs[i] += math.log1p(stake * turn)

    @property
    def evidence(self) -> float:
        """What a gambler who began with 1 has now."""
        most = max(self._logs)
        if most > 600.0:  # beyond what a float holds
            return math.inf
        return sum(math.exp(log) for log in self._logs) / len(self._logs)

    @property
    def failed(self) -> bool:
        """Whether nobody has such luck."""
        return self.evidence >= 1.0 / self.error


def auditor_of(engine: AsyncEngine, share: float) -> "Auditor":
    """An auditor of an engine. Raises ConfigError: its rule changes the output, so that every audit
    would fail."""
    config = engine.engine.parts.config
    speculative = config.user.speculative_config
    rule = "auto" if speculative is None else speculative.rule.rejection_sample_method
    if rule in NOT_LOSSLESS:
        allowed = f"0 beside rejection_sample_method {rule!r}, which changes the output"
        raise ConfigError("--audit-share", share, allowed)
    return Auditor(engine, share, Promise(exact=config.batch_invariant, rule=rule))


class _Interrupted(Exception):
    """The engine is wanted for something else."""


@final
class Auditor:
    """Audits the requests of one engine."""

    def __init__(self, engine: AsyncEngine, share: float, promise: Promise) -> None:
        self._engine = engine
        self._samples = Samples(share)
        self.opened = self._samples.opened
        self.share = share
        self._comparison = Comparison(self._decode, promise)
        self.fair = FairTokens()
        self.counts: Counter[str] = Counter()
        """How comparisons ended, by outcome."""
        self.num_alarms = 0
        self.last_alarm: str | None = None
        self._due = asyncio.Event()
        self._stream: OutputStream | None = None
        self._busy_at = 0.0

    def describe(self) -> dict[str, Any]:
        return {
            "share": self.share,
            "waiting": len(self._samples.waiting),
            "left_out": self._samples.num_left_out,
            "compared": dict(self.counts),
            "drawn_tokens": self.fair.num_tokens,
            "evidence": min(self.fair.evidence, 1e300),
            "alarms": self.num_alarms,
            "last_alarm": self.last_alarm,
        }

    def give_way(self) -> None:
        """End the audit that runs, if one does; a request is about to be queued."""
        self._busy_at = time.monotonic()
        if self._stream is not None:
            self._engine.close(self._stream)

    def observe(self, outputs: Sequence[Output]) -> None:
        if self._samples.observe(outputs):
            self._due.set()

    async def run(self) -> None:
        """Audit for ever; ends with the engine."""
        while True:
            await self._due.wait()
            self._due.clear()
            while self._samples.waiting:
                await self._until_idle()
                try:
                    found = await self._comparison.compare(self._samples.waiting[0])
                except _Interrupted:
                    self.counts["interrupted"] += 1
                    continue
                except EngineLostError:
                    return
                except Exception:
                    logger.exception("an audit failed; the next one goes on")
                    found = None
                self._samples.waiting.popleft()
                await self._count(found)

    async def _until_idle(self) -> None:
        while True:
            if self._engine.num_open:
                self._busy_at = time.monotonic()
            left = self._busy_at + _QUIET_S - time.monotonic()
            if left <= 0:
                return
            await asyncio.sleep(left)

    async def _decode(self, request: Request) -> list[Output]:
        """All outputs of a request that runs alone.

        Raises:
            _Interrupted: it did not run to its end.
        """
        if self._engine.num_open or time.monotonic() - self._busy_at < _QUIET_S:
            raise _Interrupted
        self._stream = self._engine.open([request])
        outputs: list[Output] = []
        try:
            async for batch in self._stream.batches():
                outputs += batch
        finally:
            self._engine.close(self._stream)
            self._stream = None
        ends = [output.finish_reason for output in outputs if output.finish_reason is not None]
        if not ends or ends[-1] is FinishReason.ABORT:
            raise _Interrupted
        if ends[-1] is FinishReason.ERROR:
            raise RuntimeError(outputs[-1].error)
        return outputs

    async def _count(self, found: Compared | None) -> None:
        self.counts["failed" if found is None else found.outcome] += 1
        if found is None:
            return
        for difference in found.differences:
            self.fair.add(difference)
        if found.outcome == "differs":
            await self._alarm(found.said)
        elif self.fair.failed:
            likely = "too likely" if self.fair.mean > 0 else "too unlikely"
            said = f"tokens drawn with speculation are {likely} for plain decoding"
            await self._alarm(f"{said}: {self.fair.num_tokens} tokens compared")

    async def _alarm(self, said: str) -> None:
        """Say it, and turn speculation off; whoever turns it on again begins anew."""
        self.num_alarms += 1
        self.last_alarm = said
        self.fair = FairTokens()
        self._samples.waiting.clear()
        logger.error("audit: not what plain decoding writes: %s; %s", said, _TOLD)
        await self._engine.call(lambda engine: engine.set_speculation(Speculation(enabled=False)))
