"""Which slots a drafter feeds before its first draft, ragged and padded."""

from foretoken.proposers.own_kv import DraftLimits


def limits(padded_to: int) -> DraftLimits:
    return DraftLimits(max_model_len=64, max_num_batched_tokens=64, padded_to=padded_to)


def test_ragged_feeds_what_is_missing() -> None:
    assert limits(0).starts([9, 4, 0], [10, 8, 30]) == [9, 4, 0]


def test_padded_feeds_as_many_of_all_that_decode() -> None:
    """As many as the longest of them, a prompt aside, as far as there are places before them."""
    assert limits(5).starts([9, 4, 0, 1], [10, 8, 30, 2]) == [6, 4, 0, 0]
    assert limits(3).starts([9, 4, 0, 1], [10, 8, 30, 2]) == [9, 4, 0, 1]
