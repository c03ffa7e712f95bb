"""Keys and values in int8: what is lost, and that a head's stored bits are its own.

The guarded bugs: a scale shared by neighbours, a zero head divided by zero, a number out of range,
NaN that becomes a number.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretoken.backend import backend_for
from foretoken.checkpoint import packaged_model
from foretoken.hardware import anonymous_memory
from foretoken.kv.features import FeatureStore
from foretoken.kv.lazy_zeros import lazy_zeros
from foretoken.kv.store import KVStore, write
from foretoken.ops.attention import Attention, Geometry, ReferenceAttention, SpanWindow
from foretoken.ops.quantize_kv import dequantize, quantize_kv
from foretoken.shape import ModelShape, RopeShape
from foretoken.shape.memory_formula import KV_SCALE_BYTES, kv_element_bytes


def heads(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Heads of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randn(*shape[:-1], 1, generator=generator).mul(3).exp()
    return (torch.randn(*shape, generator=generator) * sizes).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 5, 8, 64, 80])
def test_half_a_step_is_lost_at_most(size: int, dtype: torch.dtype) -> None:
    kv_TKh = heads(40, 6, size, dtype=dtype)
    kept = quantize_kv(kv_TKh, torch.int8)
    assert kept.shape == (40, 6, size + KV_SCALE_BYTES) and kept.dtype == torch.int8
    step_TK1 = kv_TKh.float().abs().amax(-1, keepdim=True) / 127
    back = dequantize(kept, torch.float32)
    assert ((back - kv_TKh.float()).abs() <= 0.5001 * step_TK1).all()
    assert kept[..., :size].abs().amax(-1).eq(127).all()
    assert torch.equal(dequantize(kept, dtype), back.to(dtype))


def test_rounding_again_changes_nothing() -> None:
    kept = quantize_kv(heads(40, 6, 32), torch.int8)
    assert torch.equal(quantize_kv(dequantize(kept, torch.float32), torch.int8), kept)


def test_a_head_does_not_depend_on_its_neighbours() -> None:
    kv_TKh = heads(30, 4, 24, dtype=torch.bfloat16)
    kept = quantize_kv(kv_TKh, torch.int8)
    for token in range(30):
        for head in range(4):
            alone = quantize_kv(kv_TKh[token : token + 1, head : head + 1], torch.int8)
            assert torch.equal(alone[0, 0], kept[token, head])


def test_ends_of_the_range() -> None:
    tiny = torch.finfo(torch.float32).tiny
    rows = torch.tensor([[0.0, -0.0], [tiny, 0.0], [1e-45, 0.0], [3e38, -3e38], [1.0, -1.0]])
    back = dequantize(quantize_kv(rows[:, None], torch.int8), torch.float32)[:, 0]
    assert torch.equal(back[[0, 2]], torch.zeros(2, 2))
    torch.testing.assert_close(back[[1, 3, 4]], rows[[1, 3, 4]], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows(bad: float) -> None:
    kv_TKh = heads(3, 2, 8)
    kv_TKh[1, 0, 5] = bad
    back = dequantize(quantize_kv(kv_TKh, torch.int8), torch.float32)
    assert back[1, 0].isnan().all()
    assert back[[0, 2]].isfinite().all() and back[1, 1].isfinite().all()


def test_other_types_are_kept_as_they_are() -> None:
    kv_TKh = heads(3, 2, 8, dtype=torch.bfloat16)
    assert quantize_kv(kv_TKh, torch.bfloat16) is kv_TKh
    assert dequantize(kv_TKh, torch.bfloat16) is kv_TKh


def test_a_fresh_store_is_finite_and_as_large_as_the_formula_says() -> None:
    shape = ModelShape.from_config(packaged_model("demo"))
    store = KVStore(shape, num_pages=2, page_size=8, dtype=torch.int8, device=torch.device("cpu"))
    assert dequantize(store.layers[0], torch.float32).eq(0).all()
    per_slot = sum(layer[0].nbytes for layer in store.layers)
    assert per_slot == shape.kv_bytes_per_token(2, "int8")
    assert kv_element_bytes(2, "auto", 64) == 2 and kv_element_bytes(2, "int8", 64) == 1 + 4 / 64


@pytest.mark.skipif(anonymous_memory() is None, reason="this system does not say")
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.int8])
def test_pages_that_nobody_wrote_take_no_memory(kind: torch.dtype) -> None:
    """A cache of 250 MB or more, made and written a little."""
    before = anonymous_memory()
    shape = ModelShape.from_config(packaged_model("demo"))
    cpu = torch.device("cpu")
    store = KVStore(shape, num_pages=2000, page_size=32, dtype=kind, device=cpu)
    features = FeatureStore([0, 1], 192, store.num_slots, dtype=torch.bfloat16, device=cpu)
    store.layers[-1][:64].fill_(3)
    after = anonymous_memory()
    assert before is not None and after is not None
    held = sum(layer.nbytes for layer in store.layers) + features.slots_SF.nbytes
    assert held > 200 << 20 and after - before < 16 << 20
    assert bool((store.layers[-1][:64] == 3).all())
    assert not store.layers[0][::997].any() and not features.slots_SF[::997].any()


@pytest.mark.skipif(anonymous_memory() is None, reason="this system does not say")
def test_many_zeros_are_as_untouched() -> None:
    """Enough for huge pages, of which one at most is taken."""
    before = anonymous_memory()
    zeros = lazy_zeros([1 << 20, 64], dtype=torch.float32, device=torch.device("cpu"))
    zeros[777, 3] = 5.0
    after = anonymous_memory()
    assert before is not None and after is not None and after - before < 8 << 20
    assert zeros[777].sum() == 5 and not zeros[::4099].any()


# A store that keeps some key heads only. The guarded bug: a part that assumes all heads.
CPU = torch.device("cpu")
HEADS, KV_HEADS, SIZE, PAGE = 6, 3, 16, 4
SHAPE = ModelShape(
    model_type="llama",
    vocab_size=10,
    hidden_size=96,
    intermediate_size=8,
    num_hidden_layers=2,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=SIZE,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    rope=RopeShape(theta=1e4, rotary_dim=SIZE),
    tie_word_embeddings=True,
    dtype="float32",
    eos_token_ids=(),
)
WHOLE = Geometry(
    num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=SIZE, page_size=PAGE, dtype=torch.float32,
    device=CPU,
)  # fmt: skip


def store_of(kv_heads: range | None, dtype: torch.dtype) -> KVStore:
    return KVStore(SHAPE, num_pages=8, page_size=PAGE, dtype=dtype, device=CPU, kv_heads=kv_heads)


@pytest.mark.parametrize("kind", ["backend", "reference"])
@pytest.mark.parametrize("kv_store_dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("part", [range(1), range(1, 3), range(2, 3)], ids=str)
def test_a_part_of_the_heads_has_their_bits(
    part: range, kv_store_dtype: torch.dtype, kind: str
) -> None:
    generator = torch.Generator().manual_seed(1)
    kv_TKh = torch.randn(20, 2 * KV_HEADS, SIZE, generator=generator)
    q_THh = torch.randn(20, HEADS, SIZE, generator=generator)
    geometry = replace(WHOLE, kv_store_dtype=kv_store_dtype)
    some = replace(
        geometry,
        num_heads=len(part) * geometry.group,
        num_kv_heads=len(part),
        first_kv_head=part.start,
    )
    assert some.kv_heads == part and geometry.kv_heads == range(KV_HEADS)

    def attention(heads: Geometry) -> Attention:
        if kind == "reference":
            return ReferenceAttention(heads)
        return backend_for(CPU).attention(heads, batch_invariant=True)

    whole, partial = store_of(None, kv_store_dtype), store_of(part, kv_store_dtype)
    kept = [*part, *(KV_HEADS + head for head in part)]
    write(whole.layers[0], slice(4, 24), quantize_kv(kv_TKh, kv_store_dtype))
    write(
        partial.layers[0], slice(4, 24), quantize_kv(kv_TKh[:, kept].contiguous(), kv_store_dtype)
    )
    assert torch.equal(partial.layers[0], whole.layers[0][:, kept])
    # Group-major: query head g * KV + k reads key head k.
    readers = [g * KV_HEADS + head for g in range(geometry.group) for head in part]
    span = [SpanWindow(0, 20, [1, 2, 3, 4, 5])]
    expected = attention(geometry).plan(span)(q_THh, whole.layers[0])
    found = attention(some).plan(span)(q_THh[:, readers].contiguous(), partial.layers[0])
    columns = expected.view(20, HEADS, SIZE)[:, readers].reshape(20, -1)
    assert torch.equal(found, columns)


def test_heads_that_the_model_lacks() -> None:
    with pytest.raises(AssertionError, match="of 3 key heads"):
        store_of(range(2, 4), torch.float32)
