"""All layers in one call into C, and a model that several processes share, give the bits of the
same layers part by part."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.distributed import Share
from foretoken.distributed.processes import Followers, meet
from foretoken.kernels.library import find_library
from foretoken.kv.features import FINAL
from foretoken.kv.store import KVStore
from foretoken.models.decoder import Decoder
from foretoken.runtime.runner import Runner
from tests.golden.families import BASE, MIXTURES, OWN, VOCAB, write_checkpoint
from tests.golden.scenario import PAGE, cut, forward, leave_garbage, open_runner, tables
from tests.golden.shared_forwards import Forwards, compute, compute_on_all, follow

WIDE = {
    "hidden_size": 96, "intermediate_size": 224, "num_attention_heads": 12,
    "num_key_value_heads": 4, "head_dim": 32,
}  # fmt: skip
SHARED: dict[str, tuple[str, dict[str, Any]]] = {
    **OWN,
    "llama wide": ("Llama", WIDE),
    "llama wide, tied, biases": (
        "Llama",
        {**WIDE, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama wide, two key heads": (
        "Llama",
        {**WIDE, "num_key_value_heads": 2, "attention_bias": True},
    ),
    **{case: MIXTURES[case] for case in ("qwen2_moe", "gpt_oss", "glm4_moe", "afmoe")},
}
SIZES = (2, 3)
COPIED = [
    (2, "llama one key head, odd sizes"), (3, "llama one key head, odd sizes"),
    (4, "llama wide, two key heads"), (4, "qwen3 wide heads"), (4, "mistral window"),
    (4, "gemma2"),
]  # fmt: skip
"""Fewer key heads than ranks: each is on several, which share its query heads, evenly or not."""


def _key_heads(case: str) -> int:
    found: int = {**BASE, **SHARED[case][1]}["num_key_value_heads"]
    return found


def _cases(size: int, names: Any) -> list[str]:
    shared = [name for name in names if "olmo" not in name]  # one norm over all heads
    return [name for name in shared if _key_heads(name) >= size]


def _pairs(names: Any) -> list[tuple[int, str]]:
    return [(size, case) for size in SIZES for case in _cases(size, names)]


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[int, Followers]]:
    """One group of each size for all tests: processes take seconds to start."""
    if find_library() is None:
        pytest.skip("no compiled kernels: other sums may depend on the size of a matrix")
    found = dict[int, Followers]()
    yield found
    for followers in found.values():
        followers.close()


def _compare(groups: dict[int, Followers], size: int, what: Forwards) -> tuple[KVStore, KVStore]:
    """The same logits; keys and values of rank 0, and of one process alone."""
    if size not in groups:
        groups[size] = Followers(meet(size, 120.0), follow)
    wanted, whole = compute(None, replace(what, by_layers=False))
    found, store = compute_on_all(groups[size].joined, what)
    assert torch.equal(found, wanted)
    return store, whole


def _agree(groups: dict[int, Followers], size: int, what: Forwards) -> None:
    store, whole = _compare(groups, size, what)
    heads = store.kv_heads
    assert len(heads) == max(1, len(whole.kv_heads) // size)
    for part_SKh, whole_SKh in zip(store.layers, whole.layers, strict=True):
        keys_SKh, values_SKh = whole_SKh.chunk(2, dim=1)
        own = slice(heads.start, heads.stop)
        assert torch.equal(part_SKh, torch.cat([keys_SKh[:, own], values_SKh[:, own]], dim=1))
        assert part_SKh.count_nonzero() > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("size", "case"), [*_pairs(SHARED), *COPIED])
def test_bits_are_those_of_one_process(
    groups: dict[int, Followers], size: int, case: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, *SHARED[case])
    _agree(groups, size, Forwards(tmp_path, dtype, VOCAB))


@pytest.mark.slow
@pytest.mark.parametrize("numbers", ["int8", "int4", "int8 keys"])
@pytest.mark.parametrize(
    ("size", "case"), [*_pairs(["llama wide", "llama wide, tied, biases"]), COPIED[2]]
)
def test_so_are_those_of_rounded_models(
    groups: dict[int, Followers], size: int, case: str, numbers: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, *SHARED[case])
    keys = torch.int8 if numbers == "int8 keys" else None
    rounded = None if numbers == "int8 keys" else numbers
    for dtype in (torch.float32, torch.bfloat16):
        _agree(groups, size, Forwards(tmp_path, dtype, VOCAB, keys, rounded))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", SHARED)
def test_so_are_those_of_layers_on_several(
    groups: dict[int, Followers], case: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, SHARED[case][0], {**SHARED[case][1], "num_hidden_layers": 3})
    store, whole = _compare(groups, 2, Forwards(tmp_path, dtype, VOCAB, by_layers=True))
    [first_SKh] = store.layers
    assert torch.equal(first_SKh, whole.layers[0]) and len(whole.layers) == 3


def test_shares_are_whole_and_even() -> None:
    for size in (1, 2, 3, 5):
        for total in range(size, 40):
            parts = [Share(rank, size).of(total) for rank in range(size)]
            assert [item for part in parts for item in part] == list(range(total))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_ranks_that_share_a_key_head_share_its_queries() -> None:
    for key_heads, copies, queries in ((1, 2, 2), (1, 3, 5), (2, 2, 3), (3, 4, 7), (4, 1, 1)):
        shares = [Share(rank, key_heads * copies) for rank in range(key_heads * copies)]
        found = [
            (key, query)
            for share in shares
            for key in share.key_heads(key_heads)
            for query in share.queries(key_heads, queries)
        ]
        assert found == [(key, query) for key in range(key_heads) for query in range(queries)]
        assert all(len(share.queries(key_heads, queries)) >= queries // copies for share in shares)


# A model that several processes share over PyTorch's operations gives the logits of one, nearly.
# Sums of those operations may depend on the size of a matrix, so bits are not compared. The
# guarded bugs are those of test_shared_layers, and parts that NCCL would gather in another order.
EVEN = {"vocab_size": VOCAB + 1}
"""What NCCL gathers has one size on all ranks."""
CASES = [
    ("llama biases", {}, False),
    ("llama one key head, odd sizes", {}, False),
    ("qwen3 biases and window", {}, False),
    ("gemma2", {}, False),
    ("llama grouped tied", EVEN, True),
    ("qwen2 upper window tied", EVEN, True),
    ("phi3 window", EVEN, True),
    ("gemma2", EVEN, True),
    ("qwen3 wide heads", {**EVEN, "num_key_value_heads": 1}, True),
]


@pytest.fixture(scope="module")
def followers() -> Iterator[Followers]:
    with Followers(meet(2, 120.0), follow) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize(("case", "changes", "on_device"), CASES)
def test_logits_are_close_to_those_of_one_process(
    followers: Followers, case: str, changes: dict[str, int], on_device: bool, tmp_path: Path
) -> None:
    family, settings = OWN[case]
    write_checkpoint(tmp_path, family, {**settings, **changes})
    what = Forwards(tmp_path, torch.float32, VOCAB, on_torch=True, on_device=on_device)
    wanted, _ = compute(None, what)
    found, store = compute_on_all(followers.joined, what)
    assert len(store.kv_heads) == 1 or case == "phi3 window"
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_close_are_those_of_layers_on_several(followers: Followers, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, *OWN["mistral window"])
    what = Forwards(tmp_path, torch.float32, VOCAB, by_layers=True, on_torch=True)
    wanted, _ = compute(None, what)
    found, _ = compute_on_all(followers.joined, what)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


# All layers in one call into C give the bits of the same layers part by part. The guarded bugs: a
# pointer to another layer's tensor or store, a missed norm, residual or bias, a kind of layer
# taken for another, features kept before or after the wrong layer.
LENGTH = 75
KINDS = [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.int8)]


@pytest.mark.parametrize(("dtype", "kv_store_dtype"), KINDS, ids=str)
@pytest.mark.parametrize(
    "case",
    [*OWN, "afmoe", "hunyuan_v1_moe", *(case for case in MIXTURES if "gemma4 " in case)],
)
def test_bits_are_those_of_the_parts(
    case: str, dtype: torch.dtype, kv_store_dtype: torch.dtype | None, tmp_path: Path
) -> None:
    if find_library() is None:
        pytest.skip("no kernels here")
    write_checkpoint(tmp_path, *{**OWN, **MIXTURES}[case])
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
        shape, num_pages=4, page_size=PAGE, dtype=torch.float32, device=torch.device("cpu"),
        kv_heads=range(1),
    )  # fmt: skip
    with pytest.raises(AssertionError, match=r"range\(0, 1\), range\(0, 2\)"):
        model.compiled.stores_of(partial)
