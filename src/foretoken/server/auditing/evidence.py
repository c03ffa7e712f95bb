"""A running test that may be looked at after every token: are two tokens drawn alike?

If a token that was given and one that plain decoding draws at the same place come from the same
distribution, either is as likely to be the likelier one: the difference of their log-probabilities
is symmetric about 0. A gambler who bets on its sign gains nothing then; what he has is a
nonnegative martingale, and reaches 1 / error with a chance of at most `error`, however long he goes
on (Ville's inequality; Waudby-Smith and Ramdas 2020, arXiv 2010.09686). Pure.
"""

import math
from typing import final

_STAKES = (0.03, 0.1, 0.2, 0.4)
"""Shares of what he has that he bets, each on either side, on an account of its own."""


@final
class FairTokens:
    """The gambler's accounts."""

    def __init__(self, error: float = 1e-4) -> None:
        """Accuse with a chance of at most `error` where there is nothing."""
        self.error = error
        self.num_tokens = 0
        self._mean = 0.0
        self._logs = [0.0] * (2 * len(_STAKES))

    def add(self, difference: float) -> None:
        """Log-probability of the given token less that of the drawn one."""
        turn = math.tanh(difference)  # bounded and odd: still fair
        self.num_tokens += 1
        self._mean += (turn - self._mean) / self.num_tokens
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
    def mean(self) -> float:
        """How much likelier the given tokens are, from -1 to 1; 0 is expected."""
        return self._mean

    @property
    def failed(self) -> bool:
        """Whether nobody has such luck."""
        return self.evidence >= 1.0 / self.error
