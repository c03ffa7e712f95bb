"""Finished requests that are to be decoded again: a share of all that were drafted for.

Follows the outputs of chosen requests until they end. Bounded: where audits cannot keep up, newer
ones are left out and counted. Knows no engine.
"""

import random
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, final

from foretoken.types import FinishReason, Output, Request

_MOST_WAITING = 64


class FinishedRequest(NamedTuple):
    """A request and the tokens that it was answered with."""

    request: Request
    token_ids: tuple[int, ...]


@final
class Samples:
    """What was chosen and waits."""

    def __init__(self, share: float) -> None:
        """Choose a `share` of requests, without regard to what they are."""
        self._share = share
        self._luck = random.Random()
        self._followed: dict[str, tuple[Request, list[int]]] = {}
        self.waiting: deque[FinishedRequest] = deque()
        self.num_left_out = 0
        """Chosen and never compared: too many waited."""

    def opened(self, requests: Sequence[Request]) -> None:
        """Requests that were accepted."""
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
