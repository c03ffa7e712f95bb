"""Ranks that compute a model together: one says what is computed, the others follow.

Rank 0 schedules, samples and verifies; before it runs a step of the model it says so, in one
message, and every rank runs it over its own share of weights, keys and values. Knows no requests.
Invariant: whoever fails in the middle of a step ends the group, since the others wait for its
share.
"""

import pickle
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import torch

from foretoken.distributed import Group
from foretoken.kv.free_runs import Run
from foretoken.models import LoadOptions
from foretoken.models.tensors import SpanLayout


@final
@dataclass(frozen=True, slots=True)
class LoadShare:
    """Load a share of the model."""

    folder: Path
    options: LoadOptions
    """As of one process; each rank puts its own group in."""
    num_pages: int


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
    windowed: bool | None = None
    """Of layers with a window alone, or of the others alone; None: of all."""


Said = LoadShare | Forward | Move | Forget

_TIMES: Final = 20.0
_MORE_S: Final = 5.0
_FIRST_S: Final = 600.0
"""Nobody knows yet how fast the machine is."""
_LAST: Final = 64
"""Steps that are remembered."""
_FEW: Final = 64
"""Tokens up to which steps take about as long as each other, since they read the same weights."""
_LOADING_S: Final = 1800.0
"""Disks are slow, and a rank may find its files in memory that another had to read."""


@final
class Patience:
    """How long ranks wait for each other in a step before one counts as lost: 20 times as long as
    the slowest of the last steps, and 5 s. Who died or was stopped is noticed earlier, who hangs is
    not."""

    def __init__(self) -> None:
        self._token_s: deque[float] = deque(maxlen=_LAST)

    def seconds(self, num_tokens: int) -> float:
        """For a step of so many tokens, 0 if it only moves things."""
        if not self._token_s:
            return _FIRST_S
        return _TIMES * max(self._token_s) * max(num_tokens, _FEW) + _MORE_S

    def passed(self, num_tokens: int, seconds: float) -> None:
        """It took so long."""
        if num_tokens:
            self._token_s.append(seconds / max(num_tokens, _FEW))


@final
class Leader:
    """Rank 0's side: has the other ranks, who listen, do what it does."""

    def __init__(self, group: Group) -> None:
        """Lead the other ranks of `group`, who have loaded nothing."""
        assert group.rank == 0, group.rank
        self.group = group
        self._patience = Patience()

    def load(self, said: LoadShare) -> None:
        """Have them load the model; rank 0 does so meanwhile. Raises RankLostError: one of them
        left, died or was late."""
        self.group.broadcast(pickle.dumps((said, self.group.wait_s)), idle=True)

    @contextmanager
    def leading(self, said: Said) -> Iterator[None]:
        """Tell the others; inside, do the same here. Raises RankLostError: one of them left, died
        or was late."""
        num_tokens = said.num_tokens if isinstance(said, Forward) else 0
        wait_s = self.group.wait_s = self._patience.seconds(num_tokens)
        began = time.perf_counter()
        # Plain bytes of our own processes; lists of ints are what pickle is quickest at.
        try:
            self.group.broadcast(pickle.dumps((said, wait_s)), idle=True)
            yield
            self.group.finish()
            self._patience.passed(num_tokens, time.perf_counter() - began)
        except BaseException as error:
            self.group.abort(f"a step failed: {type(error).__name__}: {error}")
            raise


def listen(group: Group) -> Iterator[Said]:
    """What rank 0 says, on the others, until the group ends. Raises RankLostError: it has ended, by
    rank 0's word or because a rank is lost."""
    while True:
        said, group.wait_s = pickle.loads(group.broadcast(None, idle=True))
        yield said


def wait_for_loading(group: Group, page_bytes: Sequence[int]) -> list[int]:
    """Until all ranks have come here with their shares of the weights.

    Args:
        group: the ranks.
        page_bytes: of a page of the keys and values that this rank has, of one kind and another.

    Returns:
        The same on all ranks together.

    Raises:
        RankLostError: one of them left, died or was late.
    """
    parts = [part.tolist() for part in group.swap(torch.tensor(page_bytes), _LOADING_S)]
    return [sum(kind) for kind in zip(*parts, strict=True)]
