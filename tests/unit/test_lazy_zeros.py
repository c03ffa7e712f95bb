"""Memory that is taken when it is written, and given back."""

import sys

import pytest
import torch

from foretoken.hardware import anonymous_memory
from foretoken.kv.free_runs import Run
from foretoken.kv.lazy_zeros import give_back, gives_back, lazy_zeros
from foretoken.kv.store import KVStore
from tests.unit.test_quantize_kv import SHAPE

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not gives_back(CPU), reason="only Linux takes memory back")


def test_rows_that_are_given_back_are_zeros_and_take_no_memory() -> None:
    before = anonymous_memory()
    rows_SX = lazy_zeros((8192, 1024), dtype=torch.float32, device=CPU)
    rows_SX.fill_(3.0)
    full = anonymous_memory()
    give_back(rows_SX, 1024, 8192)
    left = anonymous_memory()
    assert before is not None and full is not None and left is not None
    assert full - before > 30 << 20 and full - left > 26 << 20
    assert (rows_SX[:1024] == 3).all() and (rows_SX[1024:] == 0).all()
    rows_SX[5000] = 1.0
    assert rows_SX[5000].sum() == 1024


def test_what_shares_a_page_of_the_system_stays() -> None:
    rows_SX = lazy_zeros((1000, 24), dtype=torch.float32, device=CPU)
    rows_SX.fill_(3.0)
    give_back(rows_SX, 300, 700)
    assert (rows_SX[:300] == 3).all() and (rows_SX[700:] == 3).all()
    assert (rows_SX[400:600] == 0).all() and rows_SX.isfinite().all()
    give_back(rows_SX, 10, 11)
    assert (rows_SX[10] == 3).all(), "less than a page"


def test_pages_of_a_store() -> None:
    store = KVStore(SHAPE, num_pages=64, page_size=32, dtype=torch.float32, device=CPU)
    width = 2 * SHAPE.num_key_value_heads * SHAPE.head_dim * 4
    assert store.page_bytes == SHAPE.num_hidden_layers * 32 * width
    for layer_SKh in store.layers:
        layer_SKh.fill_(1.0)
    store.give_back([Run(0, 16), Run(60, 4)])
    for layer_SKh in store.layers:
        assert (layer_SKh[16 * 32 : 60 * 32] == 1).all()
        assert (layer_SKh[: 16 * 32] == 0).float().mean() > 0.5


def test_a_gpu_gives_nothing_back() -> None:
    assert not gives_back(torch.device("cuda"))
    assert sys.platform == "linux"
