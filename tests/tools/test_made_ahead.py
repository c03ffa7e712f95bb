"""Batches that other processes make are those that would be made when asked for, in their order."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from tools.demo_models.ahead import MadeAhead
from tools.demo_models.batches import Batch, TrainingData


class _Numbered:
    """Rows that say what was asked for."""

    tokenizer = SimpleNamespace()

    def batch(self, index: int, tokens: int, length: int) -> Batch:
        rows = torch.full((tokens // length, length), index)
        return Batch(rows, rows + 1)


@pytest.mark.slow
@pytest.mark.parametrize("loaders", [0, 1, 3])
def test_parts_come_in_their_order(loaders: int) -> None:
    """Over a change of the rows' length, and after a jump backwards and one ahead."""
    ahead = MadeAhead(cast(TrainingData, _Numbered()), loaders)
    asked = [(index, 8, 4) for index in (0, *range(9))]
    asked += [(index, 8, 2) for index in (9, 10, 11, 3, 4, 70)]
    for index, tokens, length in asked:
        found, wanted = ahead.batch(index, tokens, length), _Numbered().batch(index, tokens, length)
        assert torch.equal(found.tokens, wanted.tokens)
        assert torch.equal(found.targets, wanted.targets)
