"""MLP speculators and Medusa as one call into C draft what the networks in PyTorch draft."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from foretoken.config import DrafterConfig
from foretoken.kv.features import FINAL, FeatureStore, FeatureView
from foretoken.ops.linear import KernelLinear
from foretoken.proposers.base import Context
from foretoken.proposers.drafting import DraftSampling
from foretoken.proposers.heads.base import HeadServingContext
from foretoken.proposers.heads.linears import HeadLinears, serve_linears
from foretoken.proposers.heads.medusa import Medusa, MedusaShape
from foretoken.proposers.heads.mlp import MLPShape, MLPSpeculator
from foretoken.proposers.heads.stateless_head import StatelessHead, StatelessProposer
from foretoken.runtime.batch import Span
from foretoken.runtime.draft_sampler import DraftSampler
from foretoken.runtime.sampler import Sampler
from foretoken.runtime.sequence import Sequence
from foretoken.types import Request, SamplingParams
from tests.marks import needs_kernels

VOCAB, HIDDEN, PAGE, SLOTS = 211, 48, 8, 64
MLP = MLPShape(vocab_size=VOCAB, emb_dim=HIDDEN, inner_dim=32, n_predict=4)
MEDUSA = MedusaShape(hidden_size=HIDDEN, vocab_size=VOCAB, medusa_num_heads=4)
SHAPES: dict[str, MLPShape | MedusaShape] = {
    "mlp": MLP,
    "mlp tied": replace(MLP, tie_weights=True, scale_input=True, inner_dim=64),
    "medusa": replace(MEDUSA, medusa_num_layers=2),
    "medusa shared": replace(MEDUSA, share_head=True, rank=16),
}
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"seed": 5, "top_p": 0.9},
    "unseeded": {},
}
pytestmark = needs_kernels


def make_head(shape: MLPShape | MedusaShape, dtype: torch.dtype) -> StatelessHead:
    """A random head whose linear maps serve."""
    torch.manual_seed(3)
    net: MLPSpeculator | Medusa
    net = MLPSpeculator(shape) if isinstance(shape, MLPShape) else Medusa(shape)
    for parameter in net.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    net = net.to(dtype).eval().requires_grad_(False)
    top = HeadLinears()(torch.randn(VOCAB, HIDDEN).to(dtype), top=True)
    assert isinstance(top, KernelLinear)
    serve_linears(net, net.tops)
    if isinstance(net, Medusa) and net.shape.share_head:
        net.shared_logits, net._shared_linear = top, top
    return net


def spans_of(kinds: list[str], trial: int, budget: int) -> tuple[Span, ...]:
    spans = []
    for row, kind in enumerate(kinds):
        prompt = list(range(3 + trial, 6 + 3 * trial + row))
        request = Request(
            request_id=f"{trial} {row}",
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(**{"temperature": 0.8, **PARAMS[kind]}),
            seed=100 * trial + row,
            max_tokens=9,
        )
        sequence = Sequence(request=request, token_ids=prompt, num_prompt=len(prompt))
        sequence.page_table = [5 - row, row, 6]
        start = len(prompt) - 1
        spans.append(
            Span(sequence=sequence, start=start, length=1, draft_budget=budget, samples=True)
        )
    return tuple(spans)


def proposers(head: StatelessHead, view: FeatureView) -> list[StatelessProposer]:
    engine: Any = SimpleNamespace(target=SimpleNamespace(page_size=PAGE))
    site = HeadServingContext(
        config=DrafterConfig(method=head.method, model="random"),
        engine=engine,
        view=view,
        drafting=DraftSampling(DraftSampler(Sampler(VOCAB))),
        linears=HeadLinears(),
    )
    assert view.rows_SF is not None
    call = head.compiled(view.rows_SF)
    assert call is not None
    return [StatelessProposer(head, site, call), StatelessProposer(head, site, None)]


@pytest.mark.parametrize("kinds", [["greedy"], ["seeded", "greedy"], ["unseeded", "unseeded"]])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("points", [[FINAL], [3, FINAL]])
def test_the_same_drafts(points: list[int], name: str, kinds: list[str]) -> None:
    """Tokens and distributions, whether the features lie alone or beside others."""
    torch.manual_seed(1)
    cpu = torch.device("cpu")
    store = FeatureStore(points, HIDDEN, SLOTS, dtype=torch.float32, device=cpu)
    store.slots_SF.normal_()
    view = FeatureView(store, [FINAL])
    at_once, one_by_one = proposers(make_head(SHAPES[name], torch.float32), view)
    for trial in range(4):
        context = Context(spans_of(kinds, trial, budget=trial + 2))
        found, expected = at_once.propose(context), one_by_one.propose(context)
        assert found.ids == expected.ids, (trial, kinds)
        assert [len(ids) for ids in found.ids] == [min(trial + 2, 4)] * len(kinds)
        assert (found.probs_KV is None) == (expected.probs_KV is None)
        if found.probs_KV is not None and expected.probs_KV is not None:
            torch.testing.assert_close(found.probs_KV, expected.probs_KV, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", SHAPES)
@torch.inference_mode()
def test_the_roundings_of_bfloat16(name: str) -> None:
    """The first token's distribution is the network's, up to a step of bfloat16 in its state."""
    torch.manual_seed(1)
    cpu = torch.device("cpu")
    store = FeatureStore([FINAL], HIDDEN, SLOTS, dtype=torch.bfloat16, device=cpu)
    store.slots_SF.normal_()
    view = FeatureView(store, [FINAL])
    at_once, one_by_one = proposers(make_head(SHAPES[name], torch.bfloat16), view)
    context = Context(spans_of(["unseeded", "unseeded"], 0, budget=2))
    found, expected = at_once.propose(context).probs_KV, one_by_one.propose(context).probs_KV
    assert found is not None and expected is not None
    torch.testing.assert_close(found[::2], expected[::2], rtol=0.2, atol=2e-3)
