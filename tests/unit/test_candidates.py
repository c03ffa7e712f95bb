"""Which candidates a place of a tree gets."""

import pytest
import torch

from foretoken.runtime.candidates import OpenNode, choose_candidates
from foretoken.runtime.draft_sampler import DraftSampler
from foretoken.runtime.rows import Rows
from foretoken.runtime.sampler import Sampler
from tests.unit.proposing import make_sequence

VOCAB = 40


@pytest.mark.parametrize("seed", range(20))
def test_trees_that_grow_by_confidence_couple_with_the_target_where_matching_checks(
    seed: int,
) -> None:
    """Of a drafter that is right about the target the first candidate is the target's token, with
    a seed of the user's or without."""
    sequence = make_sequence([1, 2, 3], seed=seed, params={"temperature": 1.0})
    row = Rows(sequence=sequence)
    logits_NV = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed))
    sampler = Sampler(VOCAB)
    (target,) = sampler.choose(logits_NV, [row]).tolist()
    node = OpenNode(row, 3, 0, fixed=True)
    drafts = DraftSampler(sampler)
    (found,) = choose_candidates(drafts, logits_NV, [node], with_probs=False)
    assert found.ids[0] == target
    assert found.probs_CV is None
    by_rule = DraftSampler(sampler, "standard")
    (best,) = choose_candidates(by_rule, logits_NV, [node], with_probs=False)
    assert best.ids == tuple(logits_NV[0].topk(3).indices.tolist())
