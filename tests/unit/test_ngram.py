"""Prompt lookup: longest n-gram, most recent place, incremental index equal to a full scan."""

from hypothesis import given
from hypothesis import strategies as st

from foretoken.proposers.base import Context
from foretoken.proposers.lookup.ngram import NgramProposer
from foretoken.runtime.batch import Span
from foretoken.runtime.sequence import Sequence
from foretoken.types import Request, SamplingParams


def make_sequence(token_ids: list[int], num_prompt: int = 1) -> Sequence:
    request = Request(
        request_id="r",
        prompt_token_ids=tuple(token_ids[:num_prompt]),
        params=SamplingParams(),
        seed=0,
        max_tokens=100,
    )
    return Sequence(request=request, token_ids=token_ids, num_prompt=num_prompt)


def draft(proposer: NgramProposer, sequence: Sequence, budget: int) -> tuple[int, ...]:
    at = sequence.num_tokens - 1
    span = Span(sequence=sequence, start=at, length=1, draft_budget=budget, samples=True)
    return proposer.propose(Context((span,))).ids[0]


def scan(tokens: list[int], low: int, high: int, count: int) -> tuple[int, ...]:
    for length in range(high, low - 1, -1):
        if length >= len(tokens):
            continue
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                period = len(tokens) - end
                text = list(tokens)
                for _ in range(count):
                    text.append(text[-period])
                return tuple(text[len(tokens) :])
    return ()


def test_the_longest_match_wins_over_a_more_recent_one() -> None:
    proposer = NgramProposer(prompt_lookup_min=1, prompt_lookup_max=3)
    sequence = make_sequence([1, 2, 3, 7, 9, 3, 8, 1, 2, 3])
    assert draft(proposer, sequence, 2) == (7, 9)


def test_the_most_recent_place_wins_among_equals() -> None:
    proposer = NgramProposer(prompt_lookup_min=2, prompt_lookup_max=2)
    assert draft(proposer, make_sequence([1, 2, 5, 1, 2, 6, 1, 2]), 1) == (6,)


def test_no_match_no_draft_and_no_budget_no_work() -> None:
    proposer = NgramProposer(prompt_lookup_min=2, prompt_lookup_max=4)
    assert draft(proposer, make_sequence([1, 2, 3, 4]), 3) == ()
    assert draft(proposer, make_sequence([1, 1, 1, 1]), 0) == ()


def test_a_repeating_text_goes_on_past_its_end() -> None:
    proposer = NgramProposer(prompt_lookup_min=1, prompt_lookup_max=4)
    assert draft(proposer, make_sequence([5, 6, 5, 6, 5]), 5) == (6, 5, 6, 5, 6)


@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=40),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 6),
)
def test_growing_index_equals_a_scan(tokens: list[int], low: int, more: int, count: int) -> None:
    proposer = NgramProposer(prompt_lookup_min=low, prompt_lookup_max=low + more)
    sequence = make_sequence([])
    for token in tokens:
        sequence.token_ids.append(token)
        found = draft(proposer, sequence, count)
        assert found == scan(sequence.token_ids, low, low + more, count)


def test_release_forgets() -> None:
    proposer = NgramProposer(prompt_lookup_min=1, prompt_lookup_max=2)
    assert draft(proposer, make_sequence([1, 2, 1]), 1) == (2,)
    proposer.release("r")
    proposer.release("unknown")
    assert draft(proposer, make_sequence([1, 3, 1]), 1) == (3,)
