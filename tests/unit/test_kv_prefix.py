"""What is found again, for whom, and for how long."""

from foretoken.kv import table as tables
from foretoken.kv.pool import PagePool
from foretoken.kv.prefix import PrefixCache

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


def test_the_same_page_after_another_beginning_is_another_page() -> None:
    pool = PagePool(16, SIZE)
    prefix = PrefixCache(pool)
    fill(pool, prefix, PROMPT, None)
    assert find(prefix, [5, 5, 5, 5, *PROMPT[4:]]) == []


def test_salts_and_models_are_apart() -> None:
    pool = PagePool(16, SIZE)
    prefix = PrefixCache(pool, identity="one")
    table = fill(pool, prefix, PROMPT, "secret")
    assert find(prefix, PROMPT, None) == []
    assert find(prefix, PROMPT, "other") == []
    assert find(prefix, PROMPT, "secret") == table[:3]
    assert PrefixCache(pool, identity="two").root(None) != prefix.root(None)


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


def test_clearing_forgets_all() -> None:
    pool = PagePool(8, SIZE)
    prefix = PrefixCache(pool)
    table = fill(pool, prefix, PROMPT, None)
    prefix.clear()
    assert find(prefix, PROMPT) == []
    assert len(prefix) == 0
    tables.clear(pool, table)
    pool.check_integrity()
    assert pool.num_available == 8


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
