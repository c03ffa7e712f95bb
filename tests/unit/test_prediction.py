"""Drafting from a prediction: the pointer, and how it is set again after a difference."""

import pytest

from foretoken.proposers.lookup.prediction import PredictionProposer
from tests.unit.proposing import make_context, make_sequence

FILE = tuple(range(100, 160))
PROMPT = (1, 2, 3)


def drafts_after(output: list[int], budget: int = 8, expected: tuple[int, ...] = FILE) -> list[int]:
    proposer = PredictionProposer()
    sequence = make_sequence(PROMPT, prediction_ids=expected)
    draft: list[int] = []
    for token in output:
        sequence.token_ids.append(token)
        draft = list(proposer.propose(make_context((sequence, budget))).ids[0])
    return draft


def test_an_agreeing_output_gets_the_next_expected_tokens() -> None:
    assert drafts_after([100, 101, 102]) == list(FILE[3:11])


def test_the_end_of_the_prediction_ends_the_drafts() -> None:
    assert drafts_after(list(FILE[:57])) == [157, 158, 159]
    assert drafts_after(list(FILE)) == []


@pytest.mark.parametrize(
    ("change", "resumed"),
    [([7], 111), ([7, 8, 9], 111), ([110, 7, 8], 111), ([], 111)],
    ids=["one token replaced", "three for one", "inserted", "deleted"],
)
def test_the_pointer_is_set_again_after_a_change(change: list[int], resumed: int) -> None:
    """Two agreeing tokens after the change are enough; then drafts continue from there."""
    output = [*FILE[:10], *change, 111, 112]
    draft = drafts_after(output)
    assert draft, "nothing was drafted after the change"
    assert draft == list(range(113, 113 + len(draft)))


def test_drafts_are_short_until_agreement_is_sure_again() -> None:
    lengths = [len(drafts_after([*FILE[:10], 7, *FILE[11 : 11 + n]])) for n in range(1, 7)]
    assert lengths[0] < 8
    assert lengths == sorted(lengths)
    assert lengths[-1] == 8


def test_an_unrelated_output_gets_no_drafts() -> None:
    assert drafts_after([5, 6, 7, 8]) == []


def test_of_equal_places_the_nearest_ahead_is_taken() -> None:
    expected = (50, 51, 60, 1, 50, 51, 70, 2, 50, 51, 80, 3)
    assert drafts_after([50, 51, 60, 1, 9, 50, 51], 1, expected) == [70]


def test_a_request_without_prediction_gets_nothing_and_is_not_remembered() -> None:
    proposer = PredictionProposer()
    context = make_context((make_sequence(PROMPT, [1]), 5), (make_sequence(PROMPT, [1]), 0))
    assert proposer.propose(context).ids == ((), ())
    assert not proposer._followers


def test_release_forgets() -> None:
    proposer = PredictionProposer()
    sequence = make_sequence(PROMPT, [100], prediction_ids=FILE)
    proposer.propose(make_context((sequence, 4)))
    assert proposer._followers
    proposer.release("r")
    proposer.release("unknown")
    assert not proposer._followers
