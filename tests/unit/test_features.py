"""What drafters read of the target's hidden states."""

import ctypes

import pytest
import torch
from torch import Tensor

from foretoken.kv.features import FINAL, FeatureStore, FeatureView


@pytest.fixture
def store() -> FeatureStore:
    """Points 2, 5, 9 and the last, two values each, of eight slots."""
    store = FeatureStore((2, 5, 9, FINAL), 2, 8, dtype=torch.float32, device=torch.device("cpu"))
    store.slots_SF.copy_(torch.arange(64.0).view(8, 8))
    return store


def columns_of(store: FeatureStore, points: tuple[int, ...]) -> Tensor:
    """By the book: one point after another."""
    return torch.cat([store.slots_SF[:, store.columns[point]] for point in points], dim=-1)


@pytest.mark.parametrize(
    ("points", "beside"),
    [((2, 5, 9, FINAL), True), ((5, 9), True), ((FINAL,), True), ((2, 9), False), ((5, 2), False)],
)
def test_points_that_lie_side_by_side_are_read_where_they_lie(
    store: FeatureStore, points: tuple[int, ...], beside: bool
) -> None:
    view, wanted = FeatureView(store, points), columns_of(store, points)
    assert (view.rows_SF is not None) == beside
    if view.rows_SF is not None:
        assert torch.equal(view.rows_SF, wanted)
        assert view.rows_SF.data_ptr() == store.slots_SF[:, store.columns[points[0]]].data_ptr()
    slots_N = torch.tensor([6, 0, 3])
    for read, rows in ((view.read(slots_N), slots_N), (view.read(slice(2, 5)), slice(2, 5))):
        assert torch.equal(read, wanted[rows])
        assert read.is_contiguous()


@pytest.mark.parametrize("points", [(2, 5, 9, FINAL), (5, 9), (2, 9), (9, 2, FINAL)])
def test_what_a_kernel_gathers_is_what_is_read(
    store: FeatureStore, points: tuple[int, ...]
) -> None:
    """As `ft_gather_features` does, in bytes."""
    view, slot = FeatureView(store, points), 5
    told = view.in_c
    starts = (ctypes.c_int64 * told.num_pieces).from_address(told.pieces)
    row = b"".join(
        ctypes.string_at(told.slots + slot * told.stride + start, told.piece_bytes)
        for start in starts
    )
    assert row == view.read(slice(slot, slot + 1)).numpy().tobytes()
    assert (told.num_pieces == 1) == (view.rows_SF is not None)
    assert view.width == 2 * len(points)
