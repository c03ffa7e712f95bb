"""EAGLE-3 on compiled kernels equals the network in PyTorch: passes, trees, greedy chains."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from foretoken.kernels.library import find_library
from foretoken.kv.features import FINAL, FeatureStore, FeatureView
from foretoken.layers.embedding import Embedding
from foretoken.models.rollout import plan_best
from foretoken.models.tensors import SpanLayout
from foretoken.proposers.heads.chain_head import ChainRunner
from foretoken.proposers.heads.eagle3.compiled import compile_eagle3
from foretoken.proposers.heads.eagle3.layers import Eagle3Shape
from foretoken.proposers.heads.eagle3.network import Eagle3
from foretoken.proposers.heads.paged_head import PagedContext
from foretoken.proposers.heads.parts import HeadShape

VOCAB, DRAFTS, HIDDEN, PAGE = 60, 40, 32, 8
LAYER = HeadShape(
    vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
    rms_norm_eps=1e-5, rope_theta=10000.0,
)  # fmt: skip
SHAPE = Eagle3Shape(layer=LAYER, draft_vocab_size=DRAFTS, target_hidden_size=HIDDEN, num_features=1)
SHAPES = {
    "plain": SHAPE,
    "two layers": replace(SHAPE, layer=replace(LAYER, num_hidden_layers=2)),
    "residual normed": replace(SHAPE, norm_before_residual=True),
    "own embedding": replace(SHAPE, own_embedding=True),
}
TABLES = [[3, 1, 4], [7, 2, 9]]
FED = [SpanLayout(start=0, num_tokens=n, page_table=t) for n, t in zip((5, 9), TABLES, strict=True)]


def runners(
    shape: Eagle3Shape, kv_store_dtype: torch.dtype | None = None
) -> tuple[ChainRunner, ChainRunner]:
    torch.manual_seed(2)
    net = Eagle3(shape, mask_token_id=11 if shape.parallel and not shape.anchored else None)
    for parameter in net.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3)
    net.d2t.copy_(torch.arange(DRAFTS) // 2)
    net.use_embedding(Embedding(torch.randn(VOCAB, HIDDEN)))
    # Two points of three, which do not lie side by side.
    points, half, cpu = [0, 7, FINAL], HIDDEN // 2, torch.device("cpu")
    store = FeatureStore(points, half, 80, dtype=torch.float32, device=cpu)
    store.slots_SF.normal_()
    view = FeatureView(store, [0, FINAL])

    context = PagedContext(
        features=view,
        target_logits=nn.Identity(),
        vocab_size=VOCAB,
        num_pages=10,
        page_size=PAGE,
        kv_store_dtype=kv_store_dtype,
    )
    compiled, plain = (ChainRunner(net, context, compile_eagle3) for _ in range(2))
    plain.kernels = None
    return compiled, plain


@pytest.mark.skipif(find_library() is None, reason="no compiled kernels here")
@pytest.mark.parametrize("kv_store_dtype", [None, torch.int8])
@pytest.mark.parametrize("name", SHAPES)
@torch.inference_mode()
def test_the_same_outputs(name: str, kv_store_dtype: torch.dtype | None) -> None:
    compiled, plain = runners(SHAPES[name], kv_store_dtype)
    assert compiled.kernels is not None
    tokens, hidden = torch.randint(VOCAB, (14,)).tolist(), torch.randn(14, HIDDEN)
    outputs = [one.forward(FED, tokens, hidden) for one in (compiled, plain)]
    torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(
        *(one.logits(outputs[1]) for one in (compiled, plain)), rtol=1e-3, atol=1e-4
    )


@pytest.mark.skipif(find_library() is None, reason="no compiled kernels here")
@pytest.mark.parametrize("norms", [False, True])
@torch.inference_mode()
def test_chains_from_the_features_on(norms: bool) -> None:
    """The first pass over true features included; then on from the newest outputs."""
    compiled, plain = runners(replace(SHAPE, norm_before_fc=norms))
    assert compiled.kernels is not None and compiled.kernels.rollout.reads_features != norms
    tokens = torch.randint(VOCAB, (14,)).tolist()
    compiled.features.slots_SF.normal_()
    first = compiled.roll_out(FED, [tokens], plan_best(2, 2), None)
    assert first is not None
    places = [
        SpanLayout(start=n + 1, num_tokens=1, page_table=t)
        for n, t in zip((5, 9), TABLES, strict=True)
    ]
    newest = [ids[-1:] for ids in first.ids]
    rest = compiled.roll_out(places, newest, plan_best(2, 3), first.stream_BD)
    assert rest is not None and rest.undecided_BV is None
    last = plain.forward(FED, tokens, plain.mixed_features(FED))[[4, 13]]
    expected = one_by_one(plain, last, 5)
    assert [[*a, *b] for a, b in zip(first.ids, rest.ids, strict=True)] == expected


def one_by_one(runner: ChainRunner, last: Tensor, count: int) -> list[list[int]]:
    found = [runner.logits(last).argmax(dim=-1).tolist()]
    for step in range(count - 1):
        places = [
            SpanLayout(start=start + step, num_tokens=1, page_table=table)
            for start, table in zip((5, 9), TABLES, strict=True)
        ]
        last = runner.forward(places, found[-1], last)
        found.append(runner.logits(last).argmax(dim=-1).tolist())
    return [list(tokens) for tokens in zip(*found, strict=True)]


@pytest.mark.skipif(find_library() is None, reason="no compiled kernels here")
@torch.inference_mode()
def test_nodes_behind_what_is_known_of_a_tree() -> None:
    """A level fed after another equals both fed at once, and the chain of each branch."""
    compiled, plain = runners(SHAPE)
    table, hidden = [3, 1, 4], torch.randn(8, HIDDEN)
    for one in (compiled, plain):
        one.forward([SpanLayout(start=0, num_tokens=4, page_table=table)], [1, 2, 3, 4], hidden[:4])
    first = SpanLayout(start=4, num_tokens=2, page_table=table, paths=((0,), (1,)))
    second = replace(first, paths=((0, 2), (1, 3)), known=2)
    for one in (compiled, plain):
        one.forward([first], [5, 6], hidden[4:6])
    found = [one.forward([second], [7, 8], hidden[6:]) for one in (compiled, plain)]
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)
    chain = SpanLayout(start=4, num_tokens=2, page_table=table)
    expected = plain.forward([chain], [6, 8], hidden[[5, 7]])[1]
    torch.testing.assert_close(found[0][1], expected, rtol=1e-3, atol=1e-4)
