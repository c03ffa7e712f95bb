"""How many drafts will be kept, by one chance for all of them or by what was promised of them.

The lab's planner takes one chance for all drafts (`ConstantAcceptance`). Look-ups are weighed by
what came of what they promised (`PromisedAcceptance`). Knows neither tokens nor seconds. Invariant:
what is asked about drafts is known before any of them is drawn.
"""

from bisect import bisect_right
from typing import final

TEMPERATURE_EDGES = (0.0, 0.2, 0.5, 0.7, 1.0)
"""Upper edges of the temperature buckets by which acceptance is learnt and reported."""
RECENT_KEEPS = 0.97
"""What a draft's weight is multiplied by at each later one."""
_TRUST = 0.7
"""Before it is known: accepted tokens per promised one."""
_PRIOR = 6.0
"""How many promised tokens that guess weighs."""
_RANGE = 10.0
"""A sequence is at most this much better or worse than usual."""
_SIZES = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Upper edges of the sizes of promises that are told apart."""


def temperature_bucket(temperature: float) -> str:
    """The upper edge of the bucket that a temperature is in, as a label; `inf` above the last."""
    edge = next((edge for edge in TEMPERATURE_EDGES if temperature <= edge), float("inf"))
    return f"{edge:g}"


@final
class ConstantAcceptance:
    """Every draft is accepted with the same chance, given that all before it were.

    Leviathan et al. (2022), section 3.
    """

    def __init__(self, alpha: float) -> None:
        """The chance; asserts that it is one."""
        assert 0.0 <= alpha <= 1.0, alpha
        self.alpha = alpha

    def length(self, k: int) -> float:
        """Tokens per verification of k drafts, the recovered or bonus token included."""
        if self.alpha >= 1.0:
            return k + 1.0
        return float((1.0 - self.alpha ** (k + 1)) / (1.0 - self.alpha))

    def rate(self, k: int) -> float:
        """Accepted over drafted tokens. It falls with k although the draft is as good as before."""
        return (self.length(k) - 1.0) / k if k else 0.0

    @classmethod
    def of_length(cls, length: float, k: int) -> "ConstantAcceptance":
        """The chance that gives `length` tokens per verification at k, by bisection."""
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if cls(middle).length(k) < length else (low, middle)
        return cls((low + high) / 2)


@final
class KeptRatio:
    """Faded accepted tokens per expected one, near what is usual while little is known."""

    __slots__ = ("_accepted", "_expected")

    def __init__(self) -> None:
        self._accepted = 0.0
        self._expected = 0.0

    def observe(self, expected: float, accepted: float) -> None:
        """One draft's outcome."""
        self._expected = RECENT_KEEPS * self._expected + expected
        self._accepted = RECENT_KEEPS * self._accepted + accepted

    def value(self, usual: float) -> float:
        """Accepted per expected token."""
        return (self._accepted + _PRIOR * usual) / (self._expected + _PRIOR)


@final
class PromisedAcceptance:
    """What drafters promise, times what became of promises of that size and of that request."""

    def __init__(self) -> None:
        self._by_drafter: dict[str, list[KeptRatio]] = {}
        self._by_request: dict[str, dict[str, KeptRatio]] = {}

    def begin(self, request_id: str) -> None:
        """Learn of this request from now on, until it is released."""
        self._by_request.setdefault(request_id, {})

    def release(self, request_id: str) -> None:
        """Forget a request that ended; unknown ids are fine."""
        self._by_request.pop(request_id, None)

    def expected(self, request_id: str, drafter: str, promise: float, num_drafts: int) -> float:
        """How many of `num_drafts` drafts will be accepted, of which the drafter promises so many:
        the sum of their survival."""
        tokens = promise * self._usual(drafter, promise).value(_TRUST)
        own = self._by_request.get(request_id, {}).get(drafter)
        if own is not None:
            tokens *= min(max(own.value(1.0), 1 / _RANGE), _RANGE)
        return min(tokens, float(num_drafts))

    def observe(self, request_id: str, drafter: str, promise: float, accepted: int) -> None:
        """One draft's outcome; nothing is learnt of requests that were not begun."""
        ratios = self._by_request.get(request_id)
        if ratios is None:
            return
        own, usual = ratios.setdefault(drafter, KeptRatio()), self._usual(drafter, promise)
        # A request is compared with what is usual, so that a size that is rarely kept by anyone
        # does not count against the request as well.
        own.observe(promise * usual.value(_TRUST), accepted)
        usual.observe(promise, accepted)

    def _usual(self, drafter: str, promise: float) -> KeptRatio:
        by_size = self._by_drafter.get(drafter)
        if by_size is None:
            by_size = self._by_drafter[drafter] = [KeptRatio() for _ in range(len(_SIZES) + 1)]
        return by_size[bisect_right(_SIZES, promise)]
