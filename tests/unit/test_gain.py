"""Chains that stop where one more draft costs more than it saves."""

from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.control.gain import Gain
from foretoken.control.plan import DraftOutcome, DraftPrice
from foretoken.proposers.chain import ChainSteps, draft_chain
from foretoken.proposers.confidence import Confidence
from foretoken.runtime.draft_sampler import DraftSampler
from foretoken.runtime.sampler import Sampler
from foretoken.types import StepStats
from tests.unit.proposing import make_sequence, make_span

VOCAB = 8


def step(
    accepted: int = 0,
    *,
    promised: int = 0,
    output: int | None = None,
    seconds: float = 1.0,
    drafting_s: float = 0.0,
) -> tuple[list[DraftOutcome], StepStats]:
    """One sequence's step; the drafter was sure of each of the `promised` drafts."""
    outcome = DraftOutcome("r", "head", promised, accepted, float(promised))
    stats = StepStats(
        num_sequences=1,
        num_tokens=1 + promised,
        num_drafts=min(promised, 1),
        num_draft_tokens=promised,
        num_accepted_tokens=accepted,
        num_accepted_tokens_per_pos=(1,) * accepted,
        num_output_tokens=1 + accepted if output is None else output,
        num_waiting=0,
        drafting_s=drafting_s,
        verifying_s=seconds,
        total_s=seconds + drafting_s,
        num_sampled=1,
    )
    return [outcome] if promised else [], stats


def learnt(*, row_s: float, pass_s: float, times: int = 60) -> Gain:
    """One that saw steps of 1 s, more with drafts, of which all were accepted."""
    gain = Gain()
    for index in range(times):
        drafts = index % 4
        gain.begin(1)
        gain.add_pass(pass_s)
        # Drafting takes long, so that a token is worth a plain step.
        seen = step(drafts, promised=drafts, seconds=1.0 + row_s * drafts, drafting_s=drafts * 10.0)
        gain.observe(*seen, "head")
    gain.begin(1)
    return gain


def test_a_row_pays_if_its_chance_is_above_its_share_of_a_step() -> None:
    gain = learnt(row_s=0.25, pass_s=0.0)
    assert gain.price.pays(0.28) and not gain.price.pays(0.22)
    assert learnt(row_s=0.02, pass_s=0.0).price.pays(0.05)


def test_a_pass_pays_if_the_drafts_of_all_sequences_do() -> None:
    gain = learnt(row_s=0.1, pass_s=0.3)
    assert 0.28 < gain.price.pass_s < 0.5


def test_a_token_is_worth_what_it_takes_now() -> None:
    """Where drafts make tokens cheaper, the next one saves less."""
    gain = Gain()
    for _ in range(80):
        gain.begin(1)
        gain.observe(*step(output=4), "head")
    gain.begin(1)
    row = 0.04  # before rows are known
    assert gain.price.pays(4 * row * 1.1) and not gain.price.pays(4 * row * 0.9)


def test_promises_that_are_not_kept_count_less() -> None:
    kept, broken = Gain(), Gain()
    for gain, accepted in ((kept, 2), (broken, 0)):
        for _ in range(80):
            gain.begin(1)
            gain.observe(*step(accepted, promised=2, output=1), "head")
        gain.begin(1)
    assert kept.price.pays(0.2) and not broken.price.pays(0.2)
    for _ in range(200):  # nothing is drafted any more, and what is known of drafts grows old
        broken.observe(*step(), "head")
        broken.begin(1)
    assert broken.price.pays(0.2)


def test_a_pass_that_never_pays_is_timed_again() -> None:
    """One that took long once, on a busy machine, does not end drafting for ever."""
    gain = learnt(row_s=0.01, pass_s=50.0)
    for _ in range(1000):
        if gain.price.pass_s < 0.5:
            break
        gain.doubt()
    else:
        pytest.fail("no pass was tried again")


class Flat(ChainSteps):
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


def lengths(gain: Gain, chances: list[list[float]], least: int = 0) -> tuple[list[int], int]:
    steps, budget = Flat(chances), len(chances[0])
    spans = [
        make_span(make_sequence([1, 2], request_id=str(i)), budget) for i in range(len(chances))
    ]
    found = draft_chain(
        steps, DraftSampler(Sampler(VOCAB)), spans, Confidence(gain=gain, least=least)
    )
    return [len(ids) for ids in found.ids], steps.passes


def test_chains_end_where_their_chances_multiply_to_too_little() -> None:
    gain = learnt(row_s=0.3, pass_s=1e-6)
    chances = [[0.9] * 5, [0.9, 0.2, 0.9, 0.9, 0.9], [0.1] * 5]
    found, passes = lengths(gain, chances)
    assert found[1:] == [1, 0] and 1 < found[0] <= 5 and passes == found[0]
    assert lengths(gain, chances, least=2)[0][1:] == [2, 2]


def test_dear_passes_are_not_run() -> None:
    """What the last pass gave is used, what another one would give is not worth it."""
    found, passes = lengths(learnt(row_s=0.01, pass_s=2.0), [[0.9] * 5])
    assert (found, passes) == ([1], 1)
    found, passes = lengths(learnt(row_s=0.01, pass_s=0.2), [[0.9] * 5])
    assert found[0] == passes > 1


def test_what_was_drawn_decides_nothing() -> None:
    """Lengths are the same whatever the tokens: the drafter's chances alone, known before them."""
    chances = [[0.9, 0.6, 0.5, 0.4, 0.3]] * 2
    seen, tokens = set(), set()
    for seed in range(12):
        sequences = [make_sequence([1, 2], request_id=str(i), seed=seed) for i in range(2)]
        spans = [make_span(sequence, 5) for sequence in sequences]
        gain = learnt(row_s=0.2, pass_s=0.0)
        gain.add_pass = lambda seconds: None  # type: ignore[method-assign]
        drafted = draft_chain(
            Flat(chances), DraftSampler(Sampler(VOCAB)), spans, Confidence(gain=gain)
        )
        seen.add(tuple(len(ids) for ids in drafted.ids))
        tokens.update(drafted.ids[0])
    assert len(tokens) > 1
    assert len(seen) == 1 and 0 < min(seen)[0] < 5, seen


def at_price(price: DraftPrice, chances: list[list[float]], how: Confidence) -> tuple[Any, int]:
    steps, budget = Flat(chances), len(chances[0])
    spans = [
        make_span(make_sequence([1, 2], request_id=str(i)), budget) for i in range(len(chances))
    ]
    found = draft_chain(steps, DraftSampler(Sampler(VOCAB)), spans, how, price)
    return found, steps.passes


def test_the_plan_s_price_ends_drafts_without_measuring_anything() -> None:
    chances = [[0.9] * 5, [0.9, 0.2, 0.9, 0.9, 0.9]]
    found, _ = at_price(DraftPrice(1.0, 0.3, 0.9, 0.0), chances, Confidence())
    assert [len(ids) for ids in found.ids] == [5, 1]
    assert found.promises == pytest.approx([sum(0.9**i for i in range(1, 6)), 0.9])
    found, passes = at_price(DraftPrice(1.0, 0.01, 0.9, 1.7), chances, Confidence())
    assert passes == 1, "a second pass would save 0.8 and 0.8"
    gain = learnt(row_s=0.3, pass_s=1e-6)
    before = gain.price
    at_price(DraftPrice(1.0, 0.0, 1.0, 0.0), chances, Confidence(gain=gain))
    assert gain.price == before
