"""Where pages are placed, who holds them, and which go first."""

from random import Random

import pytest

from foretoken.kv import table as tables
from foretoken.kv.pool import PagePool


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


def test_a_blocked_sequence_goes_on_elsewhere() -> None:
    pool = PagePool(6, 4)
    first = pool.allocate(2)
    pool.allocate(1, after=1)
    assert pool.allocate(1, after=first[-1]) != [2]
    pool.check_integrity()


def test_scattered_pages_are_found_when_no_run_is_long_enough() -> None:
    pool = PagePool(9, 4)
    pages = pool.allocate(9)
    pool.release(pages[::2])
    got = pool.allocate(5)
    assert sorted(got) == pages[::2]
    assert pool.num_available == 0


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


def test_dropping_kept_pages_leaves_used_ones() -> None:
    pool = PagePool(4, 4)
    used, unused = pool.allocate(2)
    pool.keep(used)
    pool.keep(unused)
    pool.release([unused])
    pool.drop_kept()
    pool.check_integrity()
    assert pool.references(used) == 1
    pool.release([used])
    assert pool.allocate(4)


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


def test_the_latest_released_pages_are_spared_by_a_growing_neighbour() -> None:
    pool = PagePool(16, 4)
    pages = pool.allocate(16)
    for page in pages[8:]:
        pool.keep(page)
    pool.release(reversed(pages[8:]))
    assert pool.allocate(1, after=7) != [8]
    pool.check_integrity()
    pool = PagePool(16, 4)
    pages = pool.allocate(16)
    for page in pages[8:]:
        pool.keep(page)
    pool.release(pages[8:])
    assert pool.allocate(1, after=7) == [8]
    pool.check_integrity()


def test_truncation_gives_back_what_is_not_needed() -> None:
    pool = PagePool(8, 4)
    table: list[int] = []
    tables.grow(pool, table, 17)
    assert len(table) == 5
    tables.truncate(pool, table, 8)
    assert table == [0, 1]
    tables.truncate(pool, table, 30)
    assert table == [0, 1]
    tables.clear(pool, table)
    assert (table, pool.num_available) == ([], 8)
