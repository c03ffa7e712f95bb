"""P-EAGLE's drafts in one call into C equal those chosen from the logits of PyTorch's pass."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from foretoken.kernels.library import find_library
from foretoken.proposers.chain import draft_chain
from foretoken.proposers.confidence import Confidence
from foretoken.proposers.heads.eagle3.peagle import MaskedDrafts, ParallelSteps
from foretoken.proposers.heads.eagle3.serving import Eagle3
from foretoken.proposers.heads.head_runner import HeadRunner
from foretoken.proposers.progress import Stretches
from foretoken.runtime.draft_sampler import DraftSampler
from foretoken.runtime.sampler import Sampler
from tests.golden.test_head_kernels import SHAPE, VOCAB, runners
from tests.unit.proposing import make_sequence, make_span

pytestmark = pytest.mark.skipif(find_library() is None, reason="no compiled kernels here")

PARALLEL = replace(SHAPE, parallel=True)
SHAPES = {
    "masks": PARALLEL,
    "anchored": replace(PARALLEL, anchored=True, mask_depths=2),
    "two layers": replace(
        PARALLEL, layer=replace(SHAPE.layer, num_hidden_layers=2), norm_before_residual=True
    ),
}
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"seed": 5, "temperature": 0.9},
    "unseeded": {"temperature": 0.9},
    "filtered": {"temperature": 1.1, "top_k": 9, "top_p": 0.9},
}
TABLES = [[3, 1, 4], [7, 2, 9]]


def steps_of(
    runner: HeadRunner, counts: list[int], params: dict[str, Any]
) -> tuple[ParallelSteps, list[Any]]:
    """Two sequences of 7 and 12 tokens, some of whose slots were fed before."""
    tokens = torch.randint(VOCAB, (19,), generator=torch.Generator().manual_seed(4)).tolist()
    spans = []
    for i, part in enumerate((tokens[:7], tokens[7:])):
        sequence = make_sequence(part, request_id=str(i), seed=i, params=params)
        sequence.page_table = TABLES[i]
        spans.append(make_span(sequence, counts[i]))
    assert isinstance(runner.net, Eagle3)
    return MaskedDrafts(runner.net)(runner, spans, Stretches([2, 8], [6, 11])), spans


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("name", SHAPES)
@torch.inference_mode()
def test_all_drafts_in_one_call(name: str, params: str) -> None:
    found = []
    for runner in runners(SHAPES[name]):
        torch.manual_seed(8)
        runner.features.slots_SF.normal_()
        sampler = DraftSampler(Sampler(VOCAB))
        steps, spans = steps_of(runner, [4, 4], PARAMS[params])
        found.append(draft_chain(steps, sampler, spans))
        assert steps.ran == (runner.kernels is None), "which of the two ways"
    at_once, chosen = found
    assert at_once.ids == chosen.ids and {len(ids) for ids in at_once.ids} == {4}
    assert (at_once.probs_KV is None) == (chosen.probs_KV is None)
    if at_once.probs_KV is not None:
        torch.testing.assert_close(at_once.probs_KV, chosen.probs_KV, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["greedy", "seeded"])
@torch.inference_mode()
def test_the_same_ends(name: str) -> None:
    """Early stops inside the call end chains where they end outside of it."""
    lengths = set()
    for threshold in (0.05, 0.1, 0.2, 0.4):
        found = []
        for runner in runners(PARALLEL):
            torch.manual_seed(8)
            runner.features.slots_SF.normal_()
            sampler = DraftSampler(Sampler(VOCAB))
            steps, spans = steps_of(runner, [4, 4], PARAMS[name])
            rule = Confidence(threshold=threshold)
            found.append(draft_chain(steps, sampler, spans, rule).ids)
            assert steps.ran == (runner.kernels is None)
        assert found[0] == found[1]
        lengths.add(tuple(len(ids) for ids in found[0]))
    assert len(lengths) > 1, lengths


@pytest.mark.parametrize("counts", [[4, 2], [1, 1]])
@torch.inference_mode()
def test_other_numbers_of_drafts(counts: list[int]) -> None:
    """Unequal ones go the other way; one draft needs no mask."""
    found = []
    for runner in runners(PARALLEL):
        torch.manual_seed(8)
        runner.features.slots_SF.normal_()
        sampler = DraftSampler(Sampler(VOCAB))
        steps, spans = steps_of(runner, counts, PARAMS["greedy"])
        found.append(draft_chain(steps, sampler, spans).ids)
    assert found[0] == found[1] and [len(ids) for ids in found[0]] == counts
