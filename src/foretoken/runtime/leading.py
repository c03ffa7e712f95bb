"""Ranks that compute a model together: one says what is computed, the others follow.

Rank 0 schedules, samples and verifies; before it runs a step it says which, in one message, and
every rank runs it over its own share of weights, keys and values. Knows no requests. Invariant:
whoever fails in the middle of a step ends the group, since the others wait for its share.
"""

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, final

import torch

from foretoken.distributed import Group
from foretoken.models.tensors import SpanLayout


@final
@dataclass(frozen=True, slots=True)
class Forward:
    """Run these spans; see `Runner.forward`."""

    layouts: Sequence[SpanLayout]
    token_ids: Sequence[Sequence[int]]
    rows: Sequence[int]


@final
@dataclass(frozen=True, slots=True)
class Move:
    """Copy keys and values from slots to others."""

    source: Sequence[int]
    target: Sequence[int]


Said = Forward | Move

_LOADING_S: Final = 1800.0
"""Disks are slow, and a rank may find its files in memory that another had to read."""


@final
class Leader:
    """Rank 0's side."""

    def __init__(self, group: Group) -> None:
        """Lead the other ranks of `group`, who listen."""
        assert group.rank == 0, group.rank
        self._group = group

    @contextmanager
    def leading(self, said: Said) -> Iterator[None]:
        """Tell the others; inside, do the same here.

        Raises:
            RankLostError: one of them left, died or was late.
        """
        # Plain bytes of our own processes; lists of ints are what pickle is quickest at.
        try:
            self._group.broadcast(pickle.dumps(said), idle=True)
            yield
        except BaseException as error:
            self._group.abort(f"a step failed: {type(error).__name__}: {error}")
            raise


def listen(group: Group) -> Iterator[Any]:
    """What rank 0 says, on the others, until the group ends.

    Raises:
        RankLostError: it has ended, by rank 0's word or because a rank is lost.
    """
    while True:
        yield pickle.loads(group.broadcast(None, idle=True))


def wait_for_loading(group: Group) -> None:
    """Until all ranks have come here with their shares of the weights.

    Raises:
        RankLostError: one of them left, died or was late.
    """
    group.swap(torch.empty(0), _LOADING_S)
