"""Chains that end early inside the call into C end where those that are drafted one by one do."""

from typing import Any

import pytest
import torch

from foretoken.control.cost import PassCost
from foretoken.control.gain import Gain
from foretoken.kernels.library import find_library
from foretoken.proposers.chain import ChainDraft, draft_chain
from foretoken.proposers.confidence import Confidence
from foretoken.proposers.heads.head_runner import HeadRunner
from foretoken.proposers.heads.paged import RecurrentSteps
from foretoken.proposers.progress import Stretches
from foretoken.runtime.draft_sampler import DraftSampler
from foretoken.runtime.sampler import Sampler
from tests.golden.test_head_kernels import SHAPE, VOCAB, runners
from tests.unit.proposing import make_sequence, make_span

pytestmark = pytest.mark.skipif(find_library() is None, reason="no compiled kernels here")

TABLES = [[3, 1, 4], [7, 2, 9], [0, 5, 6]]


def frozen(row_s: float, pass_s: float) -> Gain:
    """As if it had measured this and a second a token; it learns nothing."""
    gain = Gain()
    gain._token_s, gain._row_s, gain._pass = 1.0, row_s, PassCost(pass_s)
    gain._acceptance.usual_chance = 0.5
    for name in ("begin", "saw", "add_pass", "doubt"):
        setattr(gain, name, lambda *_: None)
    return gain


def draft(
    runner: HeadRunner, count: int, params: dict[str, Any], confidence: Confidence, budget: int
) -> ChainDraft:
    tokens = torch.randint(VOCAB, (30,), generator=torch.Generator().manual_seed(4)).tolist()
    spans = []
    for i in range(count):
        part = tokens[8 * i : 8 * i + 6 + i]
        sequence = make_sequence(part, request_id=str(i), seed=i, params=params)
        sequence.page_table = TABLES[i]
        spans.append(make_span(sequence, budget + i % 2))
    sampler = DraftSampler(Sampler(VOCAB))
    ends = [span.sequence.num_tokens - 1 for span in spans]
    steps = RecurrentSteps(runner, spans, Stretches([0] * count, ends))
    return draft_chain(steps, sampler, spans, confidence)


RULES: dict[str, Any] = {
    "never": lambda: Confidence(threshold=1e-6),
    "unsure": lambda: Confidence(threshold=0.25),
    "at least two": lambda: Confidence(threshold=0.9, least=2),
    "rows are dear": lambda: Confidence(gain=frozen(0.02, 0.0)),
    "passes are dear": lambda: Confidence(gain=frozen(0.0, 0.1)),
    "both": lambda: Confidence(gain=frozen(0.01, 0.05), threshold=0.1),
}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"seed": 3, "temperature": 0.8}, {}])
@torch.inference_mode()
def test_the_same_ends(params: dict[str, Any], count: int) -> None:
    compiled, plain = runners(SHAPE)
    assert compiled.kernels is not None
    compiled.features.slots_SF.normal_()
    lengths = set()
    for name, rule in RULES.items():
        found, expected = (draft(one, count, params, rule(), 5) for one in (compiled, plain))
        assert found.ids == expected.ids, name
        assert (found.probs_KV is None) == (expected.probs_KV is None)
        if found.probs_KV is not None and expected.probs_KV is not None:
            torch.testing.assert_close(found.probs_KV, expected.probs_KV, rtol=1e-3, atol=1e-4)
        lengths.add(tuple(len(ids) for ids in found.ids))
        if name == "at least two":
            assert min(len(ids) for ids in found.ids) >= 2
    assert len(lengths) > 2, lengths
