"""History-dependent processing, draft sampling and the edges of the sampler."""

import math

import pytest
import torch

from foretoken.runtime.draft_sampler import DraftSampler
from foretoken.runtime.rows import Rows
from foretoken.runtime.sampler import Sampler
from foretoken.runtime.sequence import Sequence
from foretoken.types import Request, SamplingParams

VOCAB = 12


def sequence(
    params: SamplingParams,
    output: tuple[int, ...] = (),
    *,
    prompt: tuple[int, ...] = (0, 1),
    bad_words: tuple[tuple[int, ...], ...] = (),
    name: str = "r",
) -> Sequence:
    request = Request(
        request_id=name,
        prompt_token_ids=prompt,
        params=params,
        seed=5,
        max_tokens=50,
        min_tokens_ids=frozenset({9}),
        bad_words_ids=bad_words,
    )
    return Sequence(request=request, token_ids=[*prompt, *output], num_prompt=len(prompt))


def banned(sampler: Sampler, sequence: Sequence, drafts: tuple[int, ...]) -> list[set[int]]:
    rows = [Rows(sequence=sequence, drafts=drafts)]
    processed_RV = sampler.process(torch.zeros(len(drafts) + 1, VOCAB), rows)
    return [set((row == -math.inf).nonzero().flatten().tolist()) for row in processed_RV]


def test_bad_words_look_at_output_and_drafts_not_at_the_prompt() -> None:
    words = ((7,), (1, 2), (3, 4, 5))
    state = sequence(SamplingParams(), bad_words=words)
    assert banned(Sampler(VOCAB), state, (3, 4, 1)) == [{7}, {7}, {7, 5}, {7, 2}]
    state = sequence(SamplingParams(), (3, 4), bad_words=words)
    assert banned(Sampler(VOCAB), state, (1,)) == [{7, 5}, {7, 2}]


def test_min_tokens_count_drafts() -> None:
    state = sequence(SamplingParams(min_tokens=3), (4,))
    assert banned(Sampler(VOCAB), state, (4, 4, 4)) == [{9}, {9}, set(), set()]


def test_allowed_ids_and_ids_outside_the_vocabulary() -> None:
    params = SamplingParams(allowed_token_ids=[2, 3, 99], logit_bias={3: 2.0, 99: 5.0})
    sampler = Sampler(VOCAB)
    assert banned(sampler, sequence(params), ()) == [set(range(VOCAB)) - {2, 3}]
    (row,) = sampler.process(torch.zeros(1, VOCAB), [Rows(sequence=sequence(params))])
    assert row[[2, 3]].tolist() == [0.0, 2.0]


def test_penalties_follow_committed_tokens_and_drafts() -> None:
    params = SamplingParams(
        frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=2.0, seed=1
    )
    sampler = Sampler(VOCAB)
    state = sequence(params, prompt=(0, 1, 1))
    logits_RV = torch.full((3, VOCAB), 3.0)
    for committed in ((), (4,), (4, 4, 6), (4, 4, 6, *range(2, 12))):
        state.token_ids[3:] = committed
        drafts = (4, 0)
        found_RV = sampler.process(logits_RV, [Rows(sequence=state, drafts=drafts)])
        for row in range(3):
            output = [*committed, *drafts[:row]]
            for i in range(VOCAB):
                count = output.count(i)
                value = 1.5 if count or i in (0, 1) else 3.0
                value -= 0.5 * count + 0.25 * (count > 0)
                assert float(found_RV[row, i]) == pytest.approx(value), (committed, row, i)
    assert torch.equal(logits_RV, torch.full((3, VOCAB), 3.0))


def test_a_new_request_of_the_same_name_starts_afresh() -> None:
    sampler = Sampler(VOCAB)
    params = SamplingParams(presence_penalty=1.0)
    first = sequence(params, (3, 4))
    sampler.process(torch.zeros(1, VOCAB), [Rows(sequence=first)])
    sampler.release("r")
    sampler.release("r")
    for again in (sequence(params, (5,)), sequence(params, (6,))):
        (row,) = sampler.process(torch.zeros(1, VOCAB), [Rows(sequence=again)])
        assert (row < 0).nonzero().flatten().tolist() == [again.token_ids[-1]]


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits_RV = torch.zeros(2, VOCAB)
    logits_RV[0, [4, 8]] = 2.0
    state = sequence(SamplingParams(temperature=0))
    assert Sampler(VOCAB).choose(logits_RV, [Rows(sequence=state, drafts=(1,))]).tolist() == [4, 0]


def test_temperature_near_zero_is_greedy() -> None:
    logits_RV = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    for temperature in (1e-4, 1e-30, 5e-324):
        state = sequence(SamplingParams(temperature=temperature, seed=1))
        chosen = Sampler(VOCAB).choose(logits_RV, [Rows(sequence=state)])
        assert chosen.tolist() == logits_RV.argmax(dim=-1).tolist()


@pytest.mark.parametrize("method", ["auto", "probabilistic", "greedy"])
def test_a_drafter_with_the_targets_logits_drafts_the_targets_tokens(method: str) -> None:
    """Under matching, the same logits give the same tokens: that is why drafters share noise."""
    logits_RV = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(2))
    params = SamplingParams(temperature=0 if method == "greedy" else 0.9, top_p=0.8, seed=3)
    state = sequence(params, (4,))
    sampler = DraftSampler(Sampler(VOCAB), "auto", method)
    drafted: list[int] = []
    for row in range(3):
        choice = sampler.choose(logits_RV[row : row + 1], [state], [drafted])
        assert choice.probs_BV is None
        drafted.extend(choice.ids)
    targets = Sampler(VOCAB).choose(logits_RV, [Rows(sequence=state, drafts=tuple(drafted))])
    assert targets.tolist()[:3] == drafted


def test_drawn_drafts_come_with_their_distribution() -> None:
    logits_BV = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    free = SamplingParams(temperature=0.5, top_k=4)
    states = [
        sequence(free, name="a"),
        sequence(SamplingParams(seed=1), name="b"),
        sequence(SamplingParams(temperature=0), name="c"),
    ]
    sampler = DraftSampler(Sampler(VOCAB))
    assert [sampler.draws(s.request.params) for s in states] == [True, False, False]
    choice = sampler.choose(logits_BV, states, [[], [], []])
    assert choice.probs_BV is not None
    expected = (logits_BV[0] / 0.5).masked_fill(
        logits_BV[0] < logits_BV[0].topk(4).values[-1], -math.inf
    )
    assert torch.equal(choice.probs_BV[0], expected.softmax(dim=-1))
    assert float(choice.probs_BV[0, choice.ids[0]]) > 0
    for row in (1, 2):
        assert choice.probs_BV[row].tolist() == [float(i == choice.ids[row]) for i in range(VOCAB)]
    assert choice.ids[2] == int(logits_BV[2].argmax())


def test_distributions_on_demand() -> None:
    """A batch that draws somewhere needs rows for every draft of every round."""
    logits_BV = torch.zeros(1, VOCAB)
    state = sequence(SamplingParams(temperature=0))
    choice = DraftSampler(Sampler(VOCAB)).choose(logits_BV, [state], [[]], with_probs=True)
    assert choice.probs_BV is not None
    assert choice.probs_BV.tolist() == [[1.0] + [0.0] * (VOCAB - 1)]


def test_a_position_drafted_again_gets_fresh_noise() -> None:
    logits_BV = torch.zeros(1, VOCAB)
    sampler = DraftSampler(Sampler(VOCAB), "standard")
    found = set()
    for committed in range(12):
        state = sequence(SamplingParams(), (3,) * committed)
        drafted = [3] * (12 - committed)
        found.add(sampler.choose(logits_BV, [state], [drafted]).ids[0])
    assert len(found) > 1
