"""Ranks that compute a model together: one says what is computed, the others follow.

Rank 0 schedules, samples and verifies; before it runs a step it says which, in one message, and
every rank runs it over its own share of weights, keys and values. Knows no requests. Invariant:
whoever fails in the middle of a step ends the group, since the others wait for its share.
"""

import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, final

import torch

from foretoken.control.cost import RowCost, StepShape
from foretoken.distributed import Group
from foretoken.kv.free_runs import Run
from foretoken.models.tensors import SpanLayout


@final
@dataclass(frozen=True, slots=True)
class Forward:
    """Run these spans; see `Runner.forward`."""

    layouts: Sequence[SpanLayout]
    token_ids: Sequence[Sequence[int]]
    rows: Sequence[int]

    @property
    def num_tokens(self) -> int:
        """How many are computed."""
        return sum(map(len, self.token_ids))


@final
@dataclass(frozen=True, slots=True)
class Move:
    """Copy keys and values from slots to others."""

    source: Sequence[int]
    target: Sequence[int]


@final
@dataclass(frozen=True, slots=True)
class Forget:
    """Give the memory of these pages back: nobody reads what stands there any more."""

    runs: Sequence[Run]


Said = Forward | Move | Forget

_TIMES: Final = 20.0
_MORE_S: Final = 5.0
_FIRST_S: Final = 600.0
"""Nobody knows yet how fast the machine is."""
_LOADING_S: Final = 1800.0
"""Disks are slow, and a rank may find its files in memory that another had to read."""


@final
class Patience:
    """How long ranks wait for each other in a step before one counts as lost: 20 times as long as
    such a step takes, and 5 s. Who died or was stopped is noticed earlier, who hangs is not."""

    def __init__(self) -> None:
        """No step has been seen."""
        self._cost = RowCost()

    def seconds(self, num_tokens: int) -> float:
        """For a step of so many tokens, 0 if it only moves things."""
        if not self._cost.known:
            return _FIRST_S
        expected = self._cost.seconds(StepShape(max(num_tokens, 1)))
        return _TIMES * expected.seconds + _MORE_S

    def passed(self, num_tokens: int, seconds: float) -> None:
        """It took so long."""
        if num_tokens:
            self._cost.observe(StepShape(num_tokens), seconds)


@final
class Leader:
    """Rank 0's side."""

    def __init__(self, group: Group) -> None:
        """Lead the other ranks of `group`, who listen."""
        assert group.rank == 0, group.rank
        self._group, self._patience = group, Patience()

    @contextmanager
    def leading(self, said: Said) -> Iterator[None]:
        """Tell the others; inside, do the same here.

        Raises:
            RankLostError: one of them left, died or was late.
        """
        num_tokens = said.num_tokens if isinstance(said, Forward) else 0
        wait_s = self._group.wait_s = self._patience.seconds(num_tokens)
        began = time.perf_counter()
        # Plain bytes of our own processes; lists of ints are what pickle is quickest at.
        try:
            self._group.broadcast(pickle.dumps((said, wait_s)), idle=True)
            yield
            self._patience.passed(num_tokens, time.perf_counter() - began)
        except BaseException as error:
            self._group.abort(f"a step failed: {type(error).__name__}: {error}")
            raise


def listen(group: Group) -> Iterator[Said]:
    """What rank 0 says, on the others, until the group ends.

    Raises:
        RankLostError: it has ended, by rank 0's word or because a rank is lost.
    """
    while True:
        said, group.wait_s = pickle.loads(group.broadcast(None, idle=True))
        yield said


def wait_for_loading(group: Group) -> None:
    """Until all ranks have come here with their shares of the weights.

    Raises:
        RankLostError: one of them left, died or was late.
    """
    group.swap(torch.empty(0), _LOADING_S)
