"""Decodes samples again while nothing else runs, counts what comes of it, and ends speculation.

A task of the server's loop. A request that comes ends the audit that runs before the request is
queued; the sample waits for the next idle moment. Where speculation wrote what plain decoding would
not, it is turned off for all requests, as an operator would. Invariant: no audit and no
request are in the engine at the same time.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, final

from foretoken.engine.thread import AsyncEngine, OutputStream
from foretoken.errors import ConfigError, EngineLostError
from foretoken.runtime.rules.base import INVALID, LOSSY
from foretoken.server.auditing.comparing import Compared, Comparison, Promise
from foretoken.server.auditing.evidence import FairTokens
from foretoken.server.auditing.samples import Samples
from foretoken.types import FinishReason, Output, Request, Speculation

logger = logging.getLogger("foretoken")

_QUIET_S = 0.25
"""How long nothing must have run before an audit begins."""
NOT_LOSSLESS = (*LOSSY, *INVALID)
"""Rules whose output is not plain decoding's."""
_TOLD = "speculation is turned off for all requests; PUT /admin/speculation turns it on again"


def auditor_of(engine: AsyncEngine, share: float) -> "Auditor":
    """An auditor of an engine.

    Raises:
        ConfigError: its rule changes the output, so that every audit would fail.
    """
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
        """Decode a `share` of the finished requests again, and hold them to `promise`."""
        self._engine = engine
        self._samples = Samples(share)
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
        """What there is to know, as JSON."""
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

    def opened(self, requests: Sequence[Request]) -> None:
        """Requests that were accepted."""
        self._samples.opened(requests)

    def observe(self, outputs: Sequence[Output]) -> None:
        """Outputs of a step, as `AsyncEngine` gives them to observers."""
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
