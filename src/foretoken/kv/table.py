"""Page tables: growing, truncating and giving back the pages of one sequence.

A table is a plain list of page numbers, page i holding positions [i * page_size, (i + 1) *
page_size). Rolling back is truncation: rejected drafts leave their KV behind in pages that are
overwritten or, beyond the last committed token, given back. Knows neither requests nor hashes.
"""

from foretoken.kv.pool import PagePool


def missing_pages(pool: PagePool, table: list[int], num_tokens: int) -> int:
    """How many pages `table` lacks to hold `num_tokens` tokens."""
    return max(0, pool.pages_for(num_tokens) - len(table))


def grow(pool: PagePool, table: list[int], num_tokens: int) -> None:
    """Add pages until `table` holds `num_tokens` tokens; asserts that the pool has them."""
    count = missing_pages(pool, table, num_tokens)
    if count:
        table.extend(pool.allocate(count, after=table[-1] if table else None))


def truncate(pool: PagePool, table: list[int], num_tokens: int) -> None:
    """Give back the pages that `num_tokens` tokens do not need, the last one first."""
    count = pool.pages_for(num_tokens)
    if count < len(table):
        pool.release(reversed(table[count:]))
        del table[count:]


def clear(pool: PagePool, table: list[int]) -> None:
    """Give back all pages. The last goes first, so that prefixes outlive what follows them."""
    truncate(pool, table, 0)
