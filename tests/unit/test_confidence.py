"""Chains that stop where their drafter is unsure of the next token."""

import torch
from torch import Tensor

from foretoken.proposers.chain import Confidence, draft_chain
from foretoken.proposers.steps import DraftSteps
from foretoken.runtime.draft_sampler import DraftSampler
from foretoken.runtime.sampler import Sampler
from tests.unit.proposing import make_sequence, make_span

VOCAB = 8


class Flat(DraftSteps):
    """A drafter whose best token has a chance that depends on how many were drafted alone."""

    def __init__(self, chances: list[list[float]]) -> None:
        self.chances, self.passes = chances, 1

    def first(self) -> Tensor:
        return torch.stack([self._row(i, 0) for i in range(len(self.chances))])

    def after(self, active: list[int], drafted: list[list[int]]) -> Tensor:
        self.passes += 1
        rows = [self._row(i, len(tokens)) for i, tokens in zip(active, drafted, strict=True)]
        return torch.stack(rows)

    def _row(self, span: int, count: int) -> Tensor:
        best = self.chances[span][count]
        probs_V = torch.full((VOCAB,), (1 - best) / (VOCAB - 1))
        probs_V[3] = best
        return probs_V.log()


def drafted(
    chances: list[list[float]], how: Confidence, seed: int = 0
) -> tuple[list[list[int]], int]:
    """The drafts of each sequence, and the passes that they took."""
    steps, budget = Flat(chances), len(chances[0])
    spans = [
        make_span(make_sequence([1, 2], request_id=str(i), seed=seed), budget)
        for i in range(len(chances))
    ]
    found = draft_chain(steps, DraftSampler(Sampler(VOCAB)), spans, how)
    return found.ids, steps.passes


def test_chains_end_before_a_token_that_looks_unlikely() -> None:
    chances = [[0.9] * 5, [0.9, 0.2, 0.9, 0.9, 0.9], [0.1] * 5]
    ids, passes = drafted(chances, Confidence(threshold=0.3))
    assert [len(one) for one in ids] == [5, 1, 0] and passes == 5
    ids, passes = drafted(chances[1:], Confidence(threshold=0.3))
    assert [len(one) for one in ids] == [1, 0] and passes == 2, "nobody drafts on"
    ids, _ = drafted(chances, Confidence(threshold=0.3, least=2))
    assert [len(one) for one in ids] == [5, 5, 2], "judged from there on"
    assert [len(one) for one in drafted(chances, Confidence())[0]] == [5, 5, 5]


def test_what_was_drawn_decides_nothing() -> None:
    """Lengths are the same whatever the tokens: the drafter's chances alone, known before them."""
    chances = [[0.9, 0.6, 0.5, 0.4, 0.3]] * 2
    seen, tokens = set(), set()
    for seed in range(12):
        ids, _ = drafted(chances, Confidence(threshold=0.45), seed)
        seen.add(tuple(map(len, ids)))
        tokens.update(ids[0])
    assert len(tokens) > 1
    assert seen == {(3, 3)}
