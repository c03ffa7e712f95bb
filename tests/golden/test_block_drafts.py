"""Drafts of block heads and of P-EAGLE: in one call into C they equal those chosen from PyTorch's
logits, and what they are said to be drawn from is what the equations give."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foretoken.kernels.library import find_library
from foretoken.kv.features import FINAL, FeatureStore, FeatureView
from foretoken.layers.embedding import Embedding
from foretoken.ops.linear import Linear
from foretoken.proposers.chain import ChainDraft, Confidence, draft_chain
from foretoken.proposers.heads.chain_head import ChainRunner
from foretoken.proposers.heads.dflash.network import BlockHead, DFlash
from foretoken.proposers.heads.dflash.runner import BlockRunner, BlockSteps
from foretoken.proposers.heads.dflash.shape import BlockPass, BlockShape, BlockView
from foretoken.proposers.heads.dspark import DSpark, MarkovShape
from foretoken.proposers.heads.eagle3.network import Eagle3
from foretoken.proposers.heads.eagle3.parallel import Masks
from foretoken.proposers.heads.linears import HeadLinears
from foretoken.proposers.heads.paged_head import PagedContext
from foretoken.proposers.heads.parts import HeadShape
from foretoken.proposers.kv_progress import Stretches
from foretoken.runtime.draft_sampler import DraftSampler
from foretoken.runtime.sampler import Sampler
from foretoken.shape import RopeShape
from tests.golden import test_head_kernels as eagle
from tests.gpu_twins import twins
from tests.unit.proposing import make_sequence, make_span

VOCAB, REDUCED, HIDDEN, PAGE, MASK = 60, 40, 32, 8, 59
LAYER = HeadShape(
    vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
    rms_norm_eps=1e-5, rope_theta=10000.0,
)  # fmt: skip
SHAPE = BlockShape(
    layer=LAYER,
    rope=RopeShape(theta=10000.0, rotary_dim=16),
    views=(BlockView(9, causal=True), BlockView()),
    block_size=6,
    first_row=1,
    mask_token_id=MASK,
    target_hidden_size=HIDDEN,
    target_layers=1,
    points=(FINAL,),
    draft_vocab_size=VOCAB,
)
OWN = replace(SHAPE, own_head=True, own_embedding=True)
FEW = replace(SHAPE, own_head=True, draft_vocab_size=REDUCED)
MARKOV = MarkovShape(rank=8, judges=True, judges_by_token=True)
BLIND = MarkovShape(rank=8, judges=True)
HEADS: dict[str, tuple[BlockShape, MarkovShape | None]] = {
    "shared": (SHAPE, None),
    "windows on both sides": (replace(SHAPE, views=(BlockView(9), BlockView(7))), None),
    "reduced": (FEW, None),
    "biases and scales": (
        replace(OWN, attention_bias=True, embedding_scale=2.0, output_multiplier=0.5),
        None,
    ),
    "markov": (replace(OWN, first_row=0), MARKOV),
    "markov of the shared head": (replace(SHAPE, first_row=0), MARKOV),
    "markov of a reduced head": (FEW, MARKOV),
    "blind judgement": (replace(OWN, first_row=0), BLIND),
    "judgement alone": (OWN, MarkovShape(rank=0, judges=True)),
}
PEAGLE = replace(eagle.SHAPE, parallel=True)
PARALLEL = {
    "masks": PEAGLE,
    "anchored": replace(PEAGLE, anchored=True, mask_depths=2),
    "two layers": replace(
        PEAGLE, layer=replace(eagle.LAYER, num_hidden_layers=2), norm_before_residual=True
    ),
}
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"seed": 5, "temperature": 0.9},
    "unseeded": {"temperature": 0.9},
    "filtered": {"temperature": 1.1, "top_k": 9, "top_p": 0.9},
}
TABLES = [[3, 1, 4], [7, 2, 9]]
compiled = pytest.mark.skipif(find_library() is None, reason="no compiled kernels here")


def network(name: str) -> BlockHead:
    torch.manual_seed(2)
    shape, markov = HEADS[name]
    net = DFlash(shape) if markov is None else DSpark(shape, markov)
    for parameter in net.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3)
    if net.is_reduced:
        net.d2t.copy_(torch.arange(REDUCED) // 2)
    net.use_embedding(Embedding(torch.randn(VOCAB, HIDDEN)))
    return net


def runners(
    name: str, kv_store_dtype: torch.dtype | None = None, make: HeadLinears | None = None
) -> list[BlockRunner]:
    # Two points of three, which do not lie side by side.
    points, half, cpu = [0, 7, FINAL], HIDDEN // 2, torch.device("cpu")
    store = FeatureStore(points, half, 80, dtype=torch.float32, device=cpu)
    torch.manual_seed(8)
    store.slots_SF.normal_()
    table_VD = torch.randn(VOCAB, HIDDEN)
    linear: Linear = HeadLinears()(table_VD, top=True)
    context = PagedContext(
        features=FeatureView(store, [0, FINAL]),
        target_logits=lambda x: linear(x).float(),
        vocab_size=VOCAB,
        target_head=linear,
        num_pages=10,
        page_size=PAGE,
        kv_store_dtype=kv_store_dtype,
        make=make,
    )
    found = [BlockRunner(network(name), context) for _ in range(2)]
    found[1].kernels = None
    return found


def both(name: str, kv_store_dtype: torch.dtype | None = None) -> Any:
    """The runners of any head, compiled and not."""
    if name not in PARALLEL:
        return runners(name, kv_store_dtype)
    found = eagle.runners(PARALLEL[name], kv_store_dtype)
    torch.manual_seed(8)
    found[0].features.slots_SF.normal_()
    return found


def steps_of(runner: Any, counts: list[int], params: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Two sequences of 7 and 12 tokens, some of whose places were fed before."""
    tokens = torch.randint(VOCAB, (19,), generator=torch.Generator().manual_seed(4)).tolist()
    spans = []
    for i, part in enumerate((tokens[:7], tokens[7:])):
        sequence = make_sequence(part, request_id=str(i), seed=i, params=params)
        sequence.page_table = TABLES[i]
        spans.append(make_span(sequence, counts[i]))
    stretches = Stretches([2, 8], [6, 11])
    if isinstance(runner, ChainRunner):
        assert isinstance(runner.net, Eagle3)
        return Masks(runner.net).steps(runner, spans, stretches, counts), spans
    return BlockSteps(runner, spans, stretches, counts), spans


def drafted(
    runner: Any, params: str, counts: list[int], rule: Confidence | None = None
) -> tuple[ChainDraft, Any]:
    steps, spans = steps_of(runner, counts, PARAMS[params])
    return draft_chain(steps, DraftSampler(Sampler(VOCAB)), spans, rule), steps


def assert_one_call_drafts_alike(pair: Iterable[Any], params: str) -> None:
    (at_once, steps), (chosen, other) = (drafted(one, params, [4, 4]) for one in pair)
    assert other.ran and not steps.ran, "one call did it all"
    assert at_once.ids == chosen.ids and {len(ids) for ids in at_once.ids} == {4}
    assert (at_once.probs_KV is None) == (chosen.probs_KV is None)
    if at_once.probs_KV is not None and chosen.probs_KV is not None:
        torch.testing.assert_close(at_once.probs_KV, chosen.probs_KV, rtol=1e-3, atol=1e-4)


@compiled
@pytest.mark.parametrize("kv_store_dtype", [None, torch.int8])
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("name", [*HEADS, *PARALLEL])
@torch.inference_mode()
def test_all_drafts_in_one_call(name: str, params: str, kv_store_dtype: torch.dtype | None) -> None:
    assert_one_call_drafts_alike(both(name, kv_store_dtype), params)


@compiled
@pytest.mark.parametrize("params", ["seeded", "greedy"])
@pytest.mark.parametrize("name", ["shared", "reduced", "markov", "blind judgement", "masks"])
@torch.inference_mode()
def test_the_same_ends(name: str, params: str) -> None:
    """Early stops inside the call end chains where they end outside of it."""
    lengths = set()
    for threshold in (0.05, 0.1, 0.2, 0.5, 0.8):
        rule = Confidence(threshold=threshold)
        found = [drafted(one, params, [4, 4], rule)[0].ids for one in both(name)]
        assert found[0] == found[1]
        lengths.add(tuple(len(ids) for ids in found[0]))
    assert len(lengths) > 1, lengths


@pytest.mark.parametrize("name", HEADS)
@torch.inference_mode()
def test_all_drafts_in_one_recording(name: str) -> None:
    """A GPU's launches, by twins of its kernels: once where they are recorded, once played."""
    with twins() as kernels:
        kernels.launched.clear()
        fast, plain = runners(name)
        for params in ("greedy", "seeded", "unseeded", "seeded"):
            assert_one_call_drafts_alike((fast, plain), params)
        (filtered, steps), (chosen, _) = (drafted(one, "filtered", [4, 2]) for one in (fast, plain))
        assert steps.ran and filtered.ids == chosen.ids, "tokens are chosen outside of it"
        assert kernels.launched["attend"] > 0


@pytest.mark.parametrize("name", ["shared", "markov", "blind judgement", "judgement alone"])
@torch.inference_mode()
def test_a_recording_ends_where_single_tokens_end(name: str) -> None:
    lengths = set()
    with twins():
        fast, plain = runners(name)
        for threshold in (0.05, 0.2, 0.5, 0.8):
            rule = Confidence(threshold=threshold)
            found = [drafted(one, "seeded", [4, 4], rule)[0].ids for one in (fast, plain)]
            assert found[0] == found[1]
            lengths.add(tuple(len(ids) for ids in found[0]))
    assert len(lengths) > 1, lengths


@compiled
@pytest.mark.parametrize("name", [*HEADS, "masks"])
@torch.inference_mode()
def test_unequal_numbers_of_drafts(name: str) -> None:
    """The pass is one call all the same; tokens are chosen outside of it."""
    for counts in ([4, 2], [1, 1], [5, 3]):
        (fast, steps), (plain, _) = (drafted(one, "greedy", counts) for one in both(name))
        assert fast.ids == plain.ids and [len(ids) for ids in fast.ids] == counts
        assert name in PARALLEL or steps.ran == (counts[0] != counts[1])


@pytest.mark.parametrize("name", [name for name, (_, markov) in HEADS.items() if markov is None])
@torch.inference_mode()
def test_few_drafts_are_the_first_of_many(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are whole, past the pages of their sequences too, but not past the last position."""
    monkeypatch.setitem(globals(), "TABLES", [[3], [7, 2]])
    for runner in runners(name):
        many, _ = drafted(runner, "greedy", [1, 4])
        few, steps = drafted(runner, "greedy", [1, 1])
        assert few.ids == [ids[:1] for ids in many.ids]
        rows = steps.rows_to_run()
        first, second = rows.blocks
        assert (first.num_tokens, second.num_tokens, len(rows.token_ids)) == (6, 6, 12)
        assert not {*first.page_table[1:], *second.page_table[2:]} & {*range(10)}
        runner.max_positions = 14
        assert [layout.num_tokens for layout in steps.rows_to_run().blocks] == [6, 3]


@torch.inference_mode()
def test_a_part_of_a_block_is_enough_where_drafts_follow_one_another() -> None:
    """As it is past as many blocks of a pass as there are spare pages for."""
    runner = runners("markov")[1]
    assert runner.block(0, 6, 2, [3, 1]).num_tokens == 2
    whole = runners("shared")[1]
    assert [whole.block(at, 6, 1, [3]).num_tokens for at in (63, 64)] == [6, 2]


@compiled
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", ["shared", "markov"])
@torch.inference_mode()
def test_rows_do_not_depend_on_one_another(name: str, quantization: str) -> None:
    """With integer weights, too: outputs of a block have the same bits alone and beside others."""
    runner = runners(name, None, HeadLinears(quantization))[0]
    steps, spans = steps_of(runner, [4, 4], PARAMS["greedy"])
    rows = steps.rows_to_run()
    together = runner.run(rows).clone()
    size = len(rows.token_ids) // 2
    for i, fed in enumerate(rows.context):
        part = slice(i * size, (i + 1) * size)
        alone = runner.run(BlockPass([fed], rows.blocks[i : i + 1], rows.token_ids[part]))
        assert torch.equal(alone, together[part])
    assert len(spans) == 2


def softmax_after(runner: BlockRunner, steps: BlockSteps, ids: list[list[int]]) -> Tensor:
    """What drafts at temperature 0.9 are drawn from by the equations, span after span."""
    net, rows = runner.net, []
    newest = steps.newest
    run = steps.rows_to_run()
    outputs = runner.run(run).clone()
    size = len(run.token_ids) // len(ids)
    for i, drafts in enumerate(ids):
        for at, before in enumerate([newest[i], *drafts[:-1]]):
            row = outputs[i * size + net.shape.first_row + at][None]
            logits = runner.own_logits(row)
            if isinstance(net, DSpark) and net.markov_head is not None:
                short = net.markov_head.markov_w1.weight[before]
                logits = logits + net.markov_head.markov_w2(short[None]).float()
            rows.append((runner.spread(logits)[0] / 0.9).softmax(dim=-1))
    return torch.stack(rows)


@pytest.mark.parametrize("name", HEADS)
@torch.inference_mode()
def test_what_drafts_were_drawn_from(name: str) -> None:
    """Row by row, each after the draft that was drawn before it."""
    for runner in runners(name):
        found, _ = drafted(runner, "unseeded", [4, 4])
        steps, _ = steps_of(runner, [4, 4], PARAMS["unseeded"])
        wanted = softmax_after(runner, steps, found.ids)
        assert found.probs_KV is not None
        torch.testing.assert_close(found.probs_KV, wanted, rtol=1e-3, atol=1e-5)
