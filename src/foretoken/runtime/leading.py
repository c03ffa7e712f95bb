"""Ranks that compute models together: one says what is computed, the others follow.

Rank 0 schedules, samples and verifies; before it runs a step of a model it says which, in one
message, and every rank runs it over its own share of weights, keys and values. Models have numbers,
in the order in which they were loaded. Knows no requests. Invariant: whoever fails in the middle of
a step ends the group, since the others wait for its share.
"""

import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import torch

from foretoken.control.cost import RowCost, StepShape
from foretoken.distributed import Group
from foretoken.kv.free_runs import Run
from foretoken.models import LoadOptions
from foretoken.models.tensors import SpanLayout


@final
@dataclass(frozen=True, slots=True)
class LoadShare:
    """Load a share of a model, which has the next number."""

    folder: Path
    options: LoadOptions
    """As of one process; each rank puts its own group in."""
    num_pages: int


@final
@dataclass(frozen=True, slots=True)
class DropShare:
    """Nobody runs the model any more."""


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


Said = LoadShare | DropShare | Forward | Move | Forget

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
class Crew:
    """The other ranks, who listen, as rank 0 sees them."""

    def __init__(self, group: Group) -> None:
        """No model has been loaded."""
        assert group.rank == 0, group.rank
        self.group = group
        self._num_models = 0

    def load(self, said: LoadShare) -> "Leader":
        """Have them load it; rank 0 does so meanwhile.

        Raises:
            RankLostError: one of them left, died or was late.
        """
        number = self._num_models
        self._num_models += 1
        self.group.broadcast(pickle.dumps((number, said, self.group.wait_s)), idle=True)
        return Leader(self.group, number)


@final
class Leader:
    """Rank 0's side of a model."""

    def __init__(self, group: Group, number: int) -> None:
        """Lead the other ranks of `group` where the model of this number is run."""
        self._group, self._number, self._patience = group, number, Patience()

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
            self._group.broadcast(pickle.dumps((self._number, said, wait_s)), idle=True)
            yield
            self._group.finish()
            self._patience.passed(num_tokens, time.perf_counter() - began)
        except BaseException as error:
            self._group.abort(f"a step failed: {type(error).__name__}: {error}")
            raise


def listen(group: Group) -> Iterator[tuple[int, Said]]:
    """What rank 0 says and of which model, on the others, until the group ends.

    Raises:
        RankLostError: it has ended, by rank 0's word or because a rank is lost.
    """
    while True:
        number, said, group.wait_s = pickle.loads(group.broadcast(None, idle=True))
        yield number, said


def wait_for_loading(group: Group, page_bytes: int) -> int:
    """Until all ranks have come here with their shares of the weights.

    Args:
        group: the ranks.
        page_bytes: of a page of the keys and values that this rank has.

    Returns:
        Bytes of a page on all ranks together.

    Raises:
        RankLostError: one of them left, died or was late.
    """
    return sum(int(part) for part in group.swap(torch.tensor(page_bytes), _LOADING_S))
