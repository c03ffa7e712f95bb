"""Batches of a target's answers, or of text, with its hidden states, computed as used or stored.

Owns which rows a part of a step has. Invariant: that does not depend on where hidden states come
from, so that stored ones give the losses of computed ones.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from foretoken.training.data.answers import read_answers
from foretoken.training.data.rows import PackedRows, count_rows
from foretoken.training.data.target import OwnTarget
from foretoken.training.data.text import read_text
from foretoken.training.heads.target import Captured
from foretoken.training.schedule import Stage
from foretoken.training.settings import Settings

ANSWERS, TEXT, HELD_OUT = "answers", "text", "held-out"
HELD_OUT_ROWS = 8


class States(Protocol):
    """Where hidden states come from."""

    def captured(self, name: str, numbers: Sequence[int], length: int) -> Captured:
        """Rows of the set `name` by their numbers, `length` tokens each."""
        ...


class OnlineStates:
    """Read by the target whenever they are asked for."""

    def __init__(
        self, target: OwnTarget, rows: Mapping[str, PackedRows], points: tuple[int, ...]
    ) -> None:
        """Read hidden states at `points`."""
        self._target, self._rows, self._points = target, rows, points

    def captured(self, name: str, numbers: Sequence[int], length: int) -> Captured:
        """One pass of the target over each row."""
        return self._target.capture(self._rows[name].rows(numbers, length), self._points)


class OwnSource:
    """A `Source` of rows in the order of their epochs."""

    def __init__(
        self,
        states: States,
        rows: Mapping[str, PackedRows],
        head_VD: Tensor,
        settings: Settings,
    ) -> None:
        """Take hidden states of `rows` from `states`; `head_VD` is the target's output head."""
        self._states, self._rows = states, rows
        self._length = settings.stages[-1].length
        self.head_VD = head_VD
        self.device = head_VD.device

    def batch(self, index: int, tokens: int, stage: Stage) -> Captured:
        """Part `index`: `tokens` tokens in rows as `stage` says."""
        name = rows_of(stage)
        numbers = self._rows[name].order(index, tokens // stage.length, stage.length)
        return self._states.captured(name, numbers, stage.length)

    def held_out(self) -> Captured:
        """Greedy answers to held-out prompts."""
        count = held_out_rows(self._rows[HELD_OUT].tokens, self._length)
        return self._states.captured(HELD_OUT, range(count), self._length)

    def logits(self, states: Tensor) -> Tensor:
        """The target's own."""
        return torch.nn.functional.linear(states.float(), self.head_VD)


def rows_of(stage: Stage) -> str:
    """The name of the set that a stage reads."""
    return stage.rows or ANSWERS


def held_out_rows(tokens: int, length: int) -> int:
    """How many rows of `length` are measured on, of `tokens` tokens."""
    return min(HELD_OUT_ROWS, count_rows(tokens, length))


def packed_rows(settings: Settings, folder: Path) -> dict[str, PackedRows]:
    """The rows that `folder` has by now, by the name of their set."""
    assert settings.data is not None, "a run on data of one's own"
    answers, held = read_answers(folder), settings.data.held_out
    found = {
        ANSWERS: PackedRows.of(answers[held:], settings.seed),
        HELD_OUT: PackedRows.of(answers[:held], settings.seed),
    }
    if settings.data.text is not None:
        found[TEXT] = PackedRows(read_text(folder), settings.seed)
    return found
