"""A store that keeps some key heads only. The guarded bug: a part that assumes all heads."""

from dataclasses import replace

import pytest
import torch

from foretoken.backend import backend_for
from foretoken.kv.store import KVStore, write
from foretoken.ops.attention import Attention, Geometry, ReferenceAttention, SpanWindow
from foretoken.ops.stored_kv import stored
from foretoken.shape import ModelShape, RopeShape

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
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=SIZE,
    page_size=PAGE,
    dtype=torch.float32,
    device=CPU,
)


def store_of(kv_heads: range | None, dtype: torch.dtype) -> KVStore:
    return KVStore(SHAPE, num_pages=8, page_size=PAGE, dtype=dtype, device=CPU, kv_heads=kv_heads)


@pytest.mark.parametrize("kind", ["backend", "reference"])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("part", [range(1), range(1, 3), range(2, 3)], ids=str)
def test_a_part_of_the_heads_has_their_bits(part: range, kv_dtype: torch.dtype, kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    kv_TKh = torch.randn(20, 2 * KV_HEADS, SIZE, generator=generator)
    q_THh = torch.randn(20, HEADS, SIZE, generator=generator)
    geometry = replace(WHOLE, kv_dtype=kv_dtype)
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

    whole, partial = store_of(None, kv_dtype), store_of(part, kv_dtype)
    kept = [*part, *(KV_HEADS + head for head in part)]
    write(whole.layers[0], slice(4, 24), stored(kv_TKh, kv_dtype))
    write(partial.layers[0], slice(4, 24), stored(kv_TKh[:, kept].contiguous(), kv_dtype))
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
