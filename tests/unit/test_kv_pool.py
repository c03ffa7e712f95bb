"""Pages of keys and values: where they are placed, who holds them, which go first, what is found
again, and what drafters feed."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.kv import table as tables
from foretoken.kv.features import FeatureGaps, GapRecord
from foretoken.kv.pool import PagePool
from foretoken.kv.prefix import PrefixCache
from foretoken.proposers.kv_progress import DraftLimits, DraftProgress, MadeOf
from foretoken.runtime.sequence import Sequence
from tests.unit.proposing import make_sequence, make_span


def num_pieces(table: list[int]) -> int:
    """Runs of neighbouring pages that a table consists of."""
    return sum(i == 0 or page != table[i - 1] + 1 for i, page in enumerate(table))


def test_a_first_sequence_gets_the_first_pages() -> None:
    assert PagePool(8, 4).allocate(3) == [0, 1, 2]


def test_growth_is_contiguous() -> None:
    pool = PagePool(64, 4)
    long: list[int] = []
    others: list[list[int]] = [[] for _ in range(3)]
    tables.grow(pool, long, 8)
    for num_tokens in range(9, 60):
        tables.grow(pool, long, num_tokens)
        for other in others:
            tables.grow(pool, other, num_tokens // 2)
        pool.check_integrity()
    for table in (long, *others):
        assert num_pieces(table) == 1, table


def test_more_than_there_is_cannot_be_allocated() -> None:
    pool = PagePool(2, 4)
    with pytest.raises(AssertionError):
        pool.allocate(3)


def test_a_page_is_free_after_its_last_release() -> None:
    pool = PagePool(4, 4)
    (page,) = pool.allocate(1)
    pool.retain(page)
    pool.release([page])
    assert pool.references(page) == 1
    pool.release([page])
    assert pool.num_available == 4
    with pytest.raises(AssertionError):
        pool.release([page])
    with pytest.raises(AssertionError):
        pool.retain(page)


def test_kept_pages_are_evicted_in_order_of_release_and_only_when_needed() -> None:
    pool = PagePool(6, 4)
    pages = pool.allocate(4)
    for page in pages:
        pool.keep(page)
    pool.release([pages[2], pages[0], pages[3], pages[1]])
    pool.allocate(2)
    assert all(pool.is_kept(page) for page in pages)
    assert pool.num_available == 4
    assert pool.allocate(1) == [pages[2]]
    pool.retain(pages[0])
    assert pool.allocate(1) == [pages[3]]
    assert pool.is_kept(pages[0])
    pool.check_integrity()


def test_generation_rises_when_contents_are_given_up() -> None:
    pool = PagePool(3, 4)
    kept, dropped = pool.allocate(2)
    before = list(pool.generation)
    pool.keep(kept)
    pool.release([kept, dropped])
    assert pool.generation[kept] == before[kept]
    assert pool.generation[dropped] > before[dropped]
    pool.retain(kept)
    assert pool.generation[kept] == before[kept]
    pool.release([kept])
    pool.allocate(3)
    assert pool.generation[kept] > before[kept]
    assert min(before) > 0


def test_tables_stay_contiguous_when_the_pool_is_full_of_kept_pages() -> None:
    random = Random(0)
    pool = PagePool(256, 4)
    pieces: list[int] = []
    live: list[tuple[list[int], int]] = []
    for _ in range(4000):
        if len(live) < 4:
            live.append(([], random.randint(20, 60)))
        for table, final in list(live):
            tables.grow(pool, table, max(16, len(table) * 4 + 1))
            if len(table) * 4 >= final:
                for page in table:
                    pool.keep(page)
                pieces.append(num_pieces(table))
                tables.clear(pool, table)
                live.remove((table, final))
    assert pool.num_evicted > 2000
    assert sum(pieces) < 1.5 * len(pieces), sum(pieces) / len(pieces)


@pytest.mark.parametrize("last", [True, False])
def test_the_latest_released_pages_are_spared_by_a_growing_neighbour(last: bool) -> None:
    pool = PagePool(16, 4)
    pages = pool.allocate(16)
    for page in pages[8:]:
        pool.keep(page)
    pool.release(reversed(pages[8:]) if last else pages[8:])
    assert (pool.allocate(1, after=7) == [8]) != last
    pool.check_integrity()


SIZE = 4
PROMPT = list(range(14))


def fill(pool: PagePool, prefix: PrefixCache, token_ids: list[int], salt: str | None) -> list[int]:
    table: list[int] = []
    names: list[bytes] = []
    tables.grow(pool, table, len(token_ids))
    full = len(token_ids) // SIZE
    prefix.extend_names(names, token_ids, salt, full)
    for name, page in zip(names, table, strict=False):
        prefix.insert(name, page)
    return table


def find(prefix: PrefixCache, token_ids: list[int], salt: str | None = None) -> list[int]:
    return prefix.lookup([], token_ids, salt)


def test_the_longest_known_beginning_is_found() -> None:
    pool = PagePool(16, SIZE)
    prefix = PrefixCache(pool)
    table = fill(pool, prefix, PROMPT, None)
    assert find(prefix, PROMPT) == table[:3]
    assert find(prefix, [*PROMPT[:9], 99, *PROMPT]) == table[:2]
    assert find(prefix, [99, *PROMPT]) == []
    assert pool.references(table[0]) == 3
    assert pool.references(table[2]) == 2


def test_one_token_is_left_to_compute() -> None:
    pool = PagePool(16, SIZE)
    prefix = PrefixCache(pool)
    table = fill(pool, prefix, PROMPT[:8], None)
    assert find(prefix, PROMPT[:8]) == table[:1]
    assert find(prefix, PROMPT[:9]) == table[:2]
    assert find(prefix, PROMPT[:1]) == []


def test_salts_are_apart() -> None:
    pool = PagePool(16, SIZE)
    prefix = PrefixCache(pool)
    table = fill(pool, prefix, PROMPT, "secret")
    assert find(prefix, PROMPT, None) == []
    assert find(prefix, PROMPT, "other") == []
    assert find(prefix, PROMPT, "secret") == table[:3]


def test_the_first_page_of_a_name_stays() -> None:
    pool = PagePool(16, SIZE)
    prefix = PrefixCache(pool)
    first = fill(pool, prefix, PROMPT, None)
    second = fill(pool, prefix, PROMPT, None)
    assert not set(first) & set(second)
    assert find(prefix, PROMPT) == first[:3]
    tables.clear(pool, second)
    prefix.check_integrity()
    assert not any(pool.is_kept(page) for page in second)


def test_evicted_pages_are_not_found_and_the_tail_goes_first() -> None:
    pool = PagePool(8, SIZE)
    prefix = PrefixCache(pool)
    table = fill(pool, prefix, PROMPT, None)
    kept = table[:3]
    tables.clear(pool, table)
    assert pool.num_available == 8
    others = pool.allocate(6)
    assert find(prefix, PROMPT) == kept[:2]
    prefix.check_integrity()
    pool.release(kept[:2])
    pool.release(others)
    pool.allocate(8)
    assert find(prefix, PROMPT) == []
    prefix.check_integrity()


def test_a_page_that_is_found_again_is_evicted_later() -> None:
    pool = PagePool(4, SIZE)
    prefix = PrefixCache(pool)
    old = fill(pool, prefix, PROMPT[:4], None)
    new = fill(pool, prefix, PROMPT[5:9], None)
    pages = [*old, *new]
    tables.clear(pool, old)
    tables.clear(pool, new)
    pool.release(find(prefix, PROMPT[:5]))
    pool.allocate(3)
    assert pool.is_kept(pages[0])
    assert not pool.is_kept(pages[1])


def test_names_are_extended_in_place_and_only_as_far_as_needed() -> None:
    pool = PagePool(8, SIZE)
    prefix = PrefixCache(pool)
    fill(pool, prefix, PROMPT[:8], None)
    names: list[bytes] = []
    prefix.lookup(names, [*PROMPT[:8], *[7] * 20], None)
    assert len(names) == 3
    known = list(names)
    prefix.lookup(names, [*PROMPT[:8], *[7] * 20], None)
    assert names == known


PAGE = 4


def progress(gaps: FeatureGaps | None = None, *, made_of: MadeOf = MadeOf.TOKEN) -> DraftProgress:
    limits = DraftLimits(max_model_len=64, max_num_batched_tokens=64)
    return DraftProgress([1] * 64, PAGE, limits, gaps=gaps, made_of=made_of)


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
    gaps = GapRecord([1] * 64, PAGE)
    book, sequence = progress(FeatureGaps([gaps]), made_of=MadeOf.PAIR), sequence_of(30)
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
    gaps = GapRecord([1] * 64, PAGE)
    book, sequence = progress(FeatureGaps([gaps]), made_of=MadeOf.PAIR), sequence_of(30)
    book.record(sequence)
    gaps.add([60], 0, 2)
    sequence.token_ids.append(1)
    assert book.prepare(sequence, 1) and book.seen(sequence) is sequence
    assert book.num_missing(sequence) == 1


def test_a_reader_lacks_what_was_left_out_while_it_rested_with_whomever() -> None:
    alone, together = GapRecord([1] * 8, PAGE), GapRecord([1] * 8, PAGE)
    gaps, other = FeatureGaps([alone, together]), FeatureGaps([together])
    assert not gaps and gaps.known_from(range(4), 0, 16) == 0
    together.add(range(4), 0, 3)
    alone.add(range(4), 3, 5)
    assert gaps and other
    assert (gaps.known_from(range(4), 0, 16), other.known_from(range(4), 0, 16)) == (5, 3)


@given(st.lists(st.tuples(st.integers(0, 31), st.integers(1, 32), st.booleans()), max_size=12))
def test_gaps_are_known_for_as_long_as_the_contents_stay(
    steps: list[tuple[int, int, bool]],
) -> None:
    """Against a set of places; a page that has any gap counts up to the last one. What stood behind
    the newest was rolled back."""
    generations, table = [1] * 8, list(range(8))
    gaps, missing = GapRecord(generations, PAGE), set[int]()
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
