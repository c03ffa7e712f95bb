"""The rows of a run: its tokens laid end to end and cut, with the target's hidden states.

Owns the cuts, the order in which rows are seen, and which rows a part of a step has. Invariants: a
row's tokens depend on its number and length alone, so what was computed for a row stays true; an
epoch has every row once, in an order of its own; the rows of a part do not depend on where hidden
states come from, so that stored ones give the losses of computed ones.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.training.data.answers import read_answers
from foretoken.training.data.loaded_target import LoadedTarget
from foretoken.training.data.prompts import read_text
from foretoken.training.heads.target import Captured
from foretoken.training.schedule import Stage
from foretoken.training.settings import Settings

ANSWERS, TEXT, HELD_OUT = "answers", "text", "held-out"
HELD_OUT_ROWS = 8


def count_rows(tokens: int, length: int) -> int:
    """How many rows of `length` cover `tokens` tokens; one at least."""
    return max(1, -(-tokens // length))


class PackedRows:
    """Rows of some tokens; the last one ends with the last token."""

    def __init__(self, tokens: NDArray[Any], seed: int) -> None:
        """Cut `tokens`, integers of any type, of which there must be at least one."""
        assert len(tokens), "nothing to cut"
        self._tokens = tokens
        self._seed = seed
        self._epoch: tuple[tuple[int, int], NDArray[np.int64]] | None = None

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]], seed: int) -> Self:
        """Rows of `sequences` laid end to end."""
        return cls(np.concatenate([np.asarray(ids, dtype=np.int64) for ids in sequences]), seed)

    @property
    def tokens(self) -> int:
        """How many there are."""
        return len(self._tokens)

    def rows(self, numbers: Sequence[int], length: int) -> Tensor:
        """The rows of these numbers, int64 [B, length]; data shorter than a row repeats."""
        last = max(0, len(self._tokens) - length)
        starts = [min(number * length, last) for number in numbers]
        cut = [np.resize(self._tokens[start : start + length], length) for start in starts]
        return torch.from_numpy(np.stack(cut).astype(np.int64))

    def order(self, index: int, count: int, length: int) -> list[int]:
        """The numbers of the `count` rows of part `index`, the same for the same part."""
        per_epoch = count_rows(len(self._tokens), length)
        found = []
        for place in range(index * count, (index + 1) * count):
            epoch, within = divmod(place, per_epoch)
            found.append(int(self._order(epoch, length, per_epoch)[within]))
        return found

    def _order(self, epoch: int, length: int, per_epoch: int) -> NDArray[np.int64]:
        if self._epoch is None or self._epoch[0] != (epoch, length):
            dice = np.random.default_rng((self._seed, epoch, length))
            self._epoch = (epoch, length), dice.permutation(per_epoch)
        return self._epoch[1]

    def frequent_ids(self, vocab_size: int) -> Tensor:
        """All token ids, those that occur most often first, int64 [V]."""
        counts = np.bincount(self._tokens, minlength=vocab_size)
        return torch.from_numpy(np.argsort(-counts, kind="stable"))


class States(Protocol):
    """Where hidden states come from."""

    def captured(self, name: str, numbers: Sequence[int], length: int) -> Captured:
        """Rows of the set `name` by their numbers, `length` tokens each."""
        ...


class OnlineStates:
    """Read by the target whenever they are asked for."""

    def __init__(
        self, target: LoadedTarget, rows: Mapping[str, PackedRows], points: tuple[int, ...]
    ) -> None:
        self._target, self._rows, self._points = target, rows, points

    def captured(self, name: str, numbers: Sequence[int], length: int) -> Captured:
        """One pass of the target over each row."""
        return self._target.capture(self._rows[name].rows(numbers, length), self._points)


class RunRows:
    """A `RowSource` of rows in the order of their epochs."""

    def __init__(
        self,
        states: States,
        rows: Mapping[str, PackedRows],
        head_VD: Tensor,
        settings: Settings,
    ) -> None:
        self._states, self._rows = states, rows
        self._length = settings.stages[-1].length
        self.head_VD = head_VD
        self.device = head_VD.device

    def batch(self, index: int, tokens: int, stage: Stage) -> Captured:
        """Part `index`: `tokens` tokens in rows as `stage` says."""
        name = stage.rows or ANSWERS
        numbers = self._rows[name].order(index, tokens // stage.length, stage.length)
        return self._states.captured(name, numbers, stage.length)

    def held_out(self) -> Captured:
        """Greedy answers to held-out prompts."""
        count = held_out_rows(self._rows[HELD_OUT].tokens, self._length)
        return self._states.captured(HELD_OUT, range(count), self._length)

    def logits(self, states: Tensor) -> Tensor:
        """The target's own."""
        return torch.nn.functional.linear(states.float(), self.head_VD)


def held_out_rows(tokens: int, length: int) -> int:
    """How many rows of `length` are measured on, of `tokens` tokens."""
    return min(HELD_OUT_ROWS, count_rows(tokens, length))


def packed_rows(settings: Settings, folder: Path) -> dict[str, PackedRows]:
    """The rows that `folder` has by now, by the name of their set."""
    answers, held = read_answers(folder), settings.of_data.held_out
    found = {
        ANSWERS: PackedRows.of(answers[held:], settings.seed),
        HELD_OUT: PackedRows.of(answers[:held], settings.seed),
    }
    if settings.of_data.text is not None:
        found[TEXT] = PackedRows(read_text(folder), settings.seed)
    return found
