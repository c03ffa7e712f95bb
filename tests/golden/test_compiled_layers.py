"""All layers in one call into C give the bits of the same layers part by part.

The guarded bugs: a pointer to another layer's tensor or store, a missed norm, residual or bias, a
kind of layer taken for another, features kept before or after the wrong layer.
"""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foretoken.kernels.library import find_library
from foretoken.kv.features import FINAL
from foretoken.kv.store import KVStore
from foretoken.models.decoder import Decoder
from foretoken.runtime.runner import Runner
from tests.golden.families import OWN, VOCAB, write_checkpoint
from tests.golden.scenario import PAGE, cut, forward, leave_garbage, open_runner, tables

LENGTH = 75
KINDS = [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.int8)]


@pytest.mark.parametrize(("dtype", "kv_store_dtype"), KINDS, ids=str)
@pytest.mark.parametrize("case", OWN)
def test_bits_are_those_of_the_parts(
    case: str, dtype: torch.dtype, kv_store_dtype: torch.dtype | None, tmp_path: Path
) -> None:
    if find_library() is None:
        pytest.skip("no kernels here")
    write_checkpoint(tmp_path, *OWN[case])
    runner = open_runner(tmp_path, dtype=dtype, batch_invariant=True, kv_store_dtype=kv_store_dtype)
    model, store = runner.model, runner.store
    assert isinstance(model, Decoder) and model.compiled is not None
    parts = replace(model, compiled=None)
    draw = random.Random(case)
    ids = [draw.randrange(VOCAB) for _ in range(LENGTH)]
    last = model.shape.num_hidden_layers - 1
    for together in (True, False):
        first, second = tables(draw, [LENGTH, LENGTH], together=together)
        stores, kept, logits = [], [], []
        for one in (Runner(made, store, [last, FINAL]) for made in (model, parts)):
            leave_garbage(one)
            rows, at = [], 0
            for count in cut(random.Random(3), LENGTH, [1, 1, 5, 33]):
                spans = [(ids, at, at + count, pages) for pages in (first, second)]
                rows.append(forward(one, spans if count != 5 else spans[:1]))
                at += count
            logits.append(torch.cat(rows))
            stores.append([layer.clone() for layer in one.store.layers])
            assert one.features is not None
            kept.append(one.features.slots_SF)
        assert torch.equal(*logits)
        assert torch.equal(*kept) and kept[0].count_nonzero() > 0
        for compiled_SKh, parts_SKh in zip(*stores, strict=True):
            assert torch.equal(compiled_SKh, parts_SKh)


def test_a_store_of_other_heads_is_refused(tmp_path: Path) -> None:
    """Layers and store each know which of the model's key heads they own."""
    if find_library() is None:
        pytest.skip("no kernels here")
    write_checkpoint(tmp_path, *OWN["llama grouped tied"])
    runner = open_runner(tmp_path)
    model, shape = runner.model, runner.model.shape
    assert isinstance(model, Decoder) and model.compiled is not None
    assert model.compiled.kv_heads == range(shape.num_key_value_heads)
    partial = KVStore(
        shape,
        num_pages=4,
        page_size=PAGE,
        dtype=torch.float32,
        device=torch.device("cpu"),
        kv_heads=range(1),
    )
    with pytest.raises(AssertionError, match=r"range\(0, 1\), range\(0, 2\)"):
        model.compiled.stores_of(partial)
