"""What a drafter feeds before its first draft: ragged, padded, in pieces, from a window on."""

from hypothesis import given
from hypothesis import strategies as st

from foretoken.kv.features import FeatureGaps
from foretoken.proposers.progress import DraftLimits, DraftProgress, MadeOf
from foretoken.runtime.sequence import Sequence
from tests.unit.proposing import make_sequence, make_span

PAGE = 4


def limits(padded_to: int) -> DraftLimits:
    return DraftLimits(max_model_len=64, max_num_batched_tokens=64, padded_to=padded_to)


def test_ragged_feeds_what_is_missing() -> None:
    assert limits(0).starts([9, 4, 0], [10, 8, 30]) == [9, 4, 0]


def test_padded_feeds_as_many_of_all_that_decode() -> None:
    """As many as the longest of them, a prompt aside, as far as there are places before them."""
    assert limits(5).starts([9, 4, 0, 1], [10, 8, 30, 2]) == [6, 4, 0, 0]
    assert limits(3).starts([9, 4, 0, 1], [10, 8, 30, 2]) == [9, 4, 0, 1]


def progress(gaps: FeatureGaps | None = None, *, made_of: MadeOf = MadeOf.TOKEN) -> DraftProgress:
    return DraftProgress([1] * 64, PAGE, limits(0), gaps=gaps, made_of=made_of)


def sequence_of(count: int, first_page: int = 0, name: str = "r") -> Sequence:
    found = make_sequence(list(range(count)), request_id=name)
    found.page_table = list(range(first_page, first_page + -(-count // PAGE)))
    return found


def feed(book: DraftProgress, sequence: Sequence, most: int = 64) -> int:
    start, end = book.to_feed(sequence, most)
    if start < end:
        book.record_until(sequence, end)
    return end - start


def test_catching_up_in_pieces_leaves_the_newest_place() -> None:
    book, sequence = progress(), sequence_of(20)
    assert book.num_missing(sequence) == 20
    assert [feed(book, sequence, 8) for _ in range(4)] == [8, 8, 3, 0]
    assert book.num_missing(sequence) == 1
    [start], [end] = (
        book.missing([make_span(sequence, 2)]).starts,
        book.missing([make_span(sequence, 2)]).ends,
    )
    assert (start, end) == (19, 20)


def test_a_window_begins_with_a_page_and_is_the_whole_text() -> None:
    book, sequence = progress(), sequence_of(30)
    assert book.enter(sequence, 10)
    assert book.num_missing(sequence) == 10
    seen = book.seen(sequence)
    assert seen.token_ids == list(range(20, 30)) and seen.page_table == [5, 6, 7]
    fed = book.missing([make_span(sequence, 2)])
    assert (fed.starts, fed.ends) == ([0], [10])
    book.record(sequence)
    assert book.num_missing(sequence) == 1
    assert not book.enter(sequence, 4), "it knows the window already"


def test_windows_are_not_found_by_prefix_hits() -> None:
    book, sequence, other = progress(), sequence_of(30), sequence_of(30, name="other")
    book.enter(sequence, 10)
    book.record(sequence)
    assert book.num_missing(other) == 30
    book.release("r")
    assert book.num_missing(other) == 30
    book.record(other)
    book.release("other")
    assert book.num_missing(other) == 2, "the last page is not full"


def test_nothing_is_gained_by_a_window_as_long_as_what_is_missing() -> None:
    book, sequence = progress(), sequence_of(30)
    feed(book, sequence, 18)
    assert not book.enter(sequence, 10)
    assert book.enter(sequence, 6)


def test_who_enters_goes_behind_pages_that_others_use() -> None:
    book, first = progress(), sequence_of(30)
    feed(book, first, 24)
    other = make_sequence(list(range(30)), request_id="other")
    other.page_table = [40, 41, 42, 43, 4, 5, 46, 47]
    assert book.enter(other, 20)
    assert book.seen(other).token_ids[0] == 24


def test_who_comes_from_the_beginning_makes_others_enter_again() -> None:
    book, entered, whole = progress(), sequence_of(40), sequence_of(30, name="whole")
    book.enter(entered, 28)
    book.record(entered)
    assert book.seen(entered).token_ids[0] == 12
    feed(book, whole)
    assert book.seen(entered).token_ids[0] == 32
    assert book.num_missing(entered) == 8
    assert book.prepare(entered, 1)


def test_a_position_that_matters_by_itself_allows_no_window() -> None:
    only_whole = DraftLimits(max_model_len=64, max_num_batched_tokens=64, enters=False)
    book, sequence = DraftProgress([1] * 64, PAGE, only_whole), sequence_of(30)
    assert not book.enter(sequence, 10)
    assert book.num_missing(sequence) == 30


def test_a_window_keeps_within_a_context_that_the_text_has_left() -> None:
    book, sequence = progress(), sequence_of(64)
    assert not book.prepare(sequence, 4)
    assert book.enter(sequence, 20) and book.prepare(sequence, 4)


def test_a_head_enters_behind_what_has_no_features() -> None:
    gaps = FeatureGaps([1] * 64, PAGE)
    book, sequence = progress(gaps, made_of=MadeOf.PAIR), sequence_of(30)
    assert book.num_missing(sequence) == 29
    gaps.add(sequence.page_table, 3, 18)
    assert book.num_missing(sequence) == 9
    assert book.prepare(sequence, 1)
    assert book.seen(sequence).token_ids[0] == 20
    gaps.add(sequence.page_table, 27, 29)
    assert book.num_missing(sequence) == 0 and not book.prepare(sequence, 1)
    sequence.token_ids += [1, 2, 3, 4]
    sequence.page_table.append(8)
    assert book.num_missing(sequence) == 1 and book.prepare(sequence, 1)
    assert book.seen(sequence).page_table == [8]
    assert book.num_missing(sequence) == 1 + 4 - 4


def test_what_was_fed_before_the_features_stopped_is_kept() -> None:
    gaps = FeatureGaps([1] * 64, PAGE)
    book, sequence = progress(gaps, made_of=MadeOf.PAIR), sequence_of(30)
    book.record(sequence)
    gaps.add([60], 0, 2)
    sequence.token_ids.append(1)
    assert book.prepare(sequence, 1) and book.seen(sequence) is sequence
    assert book.num_missing(sequence) == 1


@given(st.lists(st.tuples(st.integers(0, 31), st.integers(1, 32), st.booleans()), max_size=12))
def test_gaps_are_known_for_as_long_as_the_contents_stay(
    steps: list[tuple[int, int, bool]],
) -> None:
    """Against a set of places; a page that has any gap counts up to the last one. What stood behind
    the newest was rolled back."""
    generations, table = [1] * 8, list(range(8))
    gaps, missing = FeatureGaps(generations, PAGE), set[int]()
    for start, count, gives_up in steps:
        end = min(start + count, 32)
        if gives_up:
            page = start // PAGE
            generations[page] += 1
            missing -= set(range(page * PAGE, (page + 1) * PAGE))
        else:
            gaps.add(table, start, end)
            last = (end - 1) // PAGE
            missing = {p for p in missing if p < end or p // PAGE != last}
            missing |= set(range(start, end))
        for first in range(32):
            expected = max((p + 1 for p in missing if p >= first), default=first)
            assert gaps.known_from(table, first, 32) >= expected
            assert (gaps.known_from(table, first, 32) == first) or expected > first
