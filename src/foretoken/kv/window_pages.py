"""Keys and values of layers with a window: kept while some row to come can see them.

A page belongs to a sequence in all layers alike, and its table lists all of them. Of layers with a
window a page has memory only from when it is written: once it lies before the window of every
sequence that has it, its contents may go, the rest of the page stays. They go where memory is
short; until then a prefix can be reused that ends there. `foretoken.kv.shared_pages` counts the
bytes. Knows page numbers and positions, not requests or tensors.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple, final

from foretoken.kv.free_runs import Run, runs_of
from foretoken.kv.pool import PagePool
from foretoken.shape.memory_formula import most_pages


@final
@dataclass(slots=True)
class InWindow:
    """What a sequence holds: places of its table."""

    start: int = 0
    """The first that some row to come sees."""
    end: int = 0
    """One behind the last that is written, or going to be in this step."""
    reserved: int = 0
    """Pages that it holds at most before its table grows."""


class WindowBytes(NamedTuple):
    """Of pages with their layers that have a window counted apart."""

    page: int
    """Of a page in layers with a window."""
    rest: int
    """Of a page in the others."""
    budget: int
    """What all pages may take."""


@final
class WindowPages:
    """Which pages have memory in layers with a window, and who sees them.

    Invariant: sequences hold no more than they reserved, and what all reserved fits beside their
    pages in other layers.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        window: int,
        step_tokens: int,
        sizes: WindowBytes,
        give_back: Callable[[Iterable[Run]], object],
        charge: Callable[[], object],
    ) -> None:
        """Nothing written.

        Args:
            pool: of which nothing is used yet.
            window: positions that a row sees, its own included; of several, the most.
            step_tokens: most tokens of a step.
            sizes: of pages, and what all may take.
            give_back: gives back memory of pages in layers with a window.
            charge: is told when they take more, and makes room.
        """
        self.page_bytes = sizes.page
        self.num_reclaimed = 0
        """Pages whose contents went before those of other layers."""
        self._pool, self._window = pool, window
        self._most = most_pages(window, step_tokens, pool.page_size)
        self._rest_bytes, self._budget = sizes.rest, sizes.budget
        self._give_back, self._charge = give_back, charge
        self._free = pool.follow_free()
        self._users = [0] * pool.num_pages
        self._written: set[int] = set()
        # Unseen pages in the order in which they became so: because the window of a sequence moved
        # on, or because it ended, so that the next one may go on there.
        self._passed: dict[int, None] = {}
        self._ended: dict[int, None] = {}
        self._num_reserved = 0

    @property
    def num_bytes(self) -> int:
        """What they take."""
        return len(self._written) * self.page_bytes

    @property
    def usage(self) -> float:
        """Share of the budget that running sequences need."""
        return self.used_bytes() / self._budget

    def used_bytes(self, more_pages: int = 0, more_reserved: int = 0) -> int:
        """What running sequences need in all layers, with so much more."""
        pages, reserved = self._pool.num_used + more_pages, self._num_reserved + more_reserved
        return pages * self._rest_bytes + reserved * self.page_bytes

    def room(self, draft_bytes: int = 0) -> int:
        """Pages that sequences could have in all layers, but for `draft_bytes`."""
        left = self._budget - self.used_bytes() - draft_bytes
        whole = self._rest_bytes + self.page_bytes
        return max(0, min(self._pool.num_available, left // whole))

    def pages_of_new(self, count: int, spare: int) -> int:
        """The same of a sequence with a table of so many pages and of `spare` ones, as pages in all
        layers."""
        whole = self._rest_bytes + self.page_bytes
        needed = count * self._rest_bytes + min(count, self._most) * self.page_bytes
        return -(-needed // whole) + spare

    def fits(self, held: InWindow, table: Sequence[int], more: int, spare: int) -> bool:
        """Whether a table can grow by so many pages and `spare` ones would be left."""
        reserved = self._reserves(held, len(table) + more) - held.reserved
        used = self.used_bytes(more + spare, reserved + spare)
        return more + spare <= self._pool.num_available and used <= self._budget

    def _reserves(self, held: InWindow, num_pages: int) -> int:
        return max(0, min(num_pages - held.start, self._most))

    def _first(self, num_computed: int) -> int:
        """Place of the first page that the next row sees."""
        return max(0, num_computed - self._window + 1) // self._pool.page_size

    def has(self, page: int) -> bool:
        """Whether a page that has contents has them in all layers."""
        return page in self._written

    def usable(self, pages: Sequence[int]) -> int:
        """How many of these pages, the beginning of a text, a new sequence can go on after."""
        size, count = self._pool.page_size, len(pages)
        while count:
            first = self._first(count * size)
            missing = [at for at in range(first, count) if not self.has(pages[at])]
            if not missing:
                break
            count = missing[-1]
        return count

    def begin(self, held: InWindow, table: Sequence[int]) -> None:
        """A sequence goes on after these pages, `usable` ones."""
        held.start = self._first(len(table) * self._pool.page_size)
        held.end = held.start
        self._see(held, table, len(table))

    def write(self, held: InWindow, table: Sequence[int], stop: int) -> None:
        """Pages up to place `stop` are going to be written."""
        fresh = self._see(held, table, stop)
        if fresh:
            self._written.update(fresh)
            self._charge()

    def _see(self, held: InWindow, table: Sequence[int], stop: int) -> list[int]:
        """Hold more of the table; the pages among them that have no memory yet."""
        pages = table[held.end : stop]
        held.end = max(held.end, stop)
        for page in pages:
            self._users[page] += 1
            self._passed.pop(page, None)
            self._ended.pop(page, None)
        return [page for page in pages if page not in self._written]

    def follow(self, held: InWindow, table: Sequence[int], num_computed: int) -> None:
        """The table has grown, or so many of its tokens have been computed."""
        start = min(self._first(num_computed), held.end)
        self._leave(table[held.start : start], self._passed)
        held.start = max(held.start, start)
        self._reserve(held, len(table))

    def cut(self, held: InWindow, table: Sequence[int], num_pages: int) -> None:
        """The table is going to lose all but its first pages."""
        self._leave(table[max(held.start, num_pages) : held.end], self._ended)
        held.start, held.end = min(held.start, num_pages), min(held.end, num_pages)
        self._reserve(held, num_pages)

    def _reserve(self, held: InWindow, num_pages: int) -> None:
        reserved = self._reserves(held, num_pages)
        self._num_reserved += reserved - held.reserved
        held.reserved = reserved

    def _leave(self, pages: Iterable[int], unseen: dict[int, None]) -> None:
        for page in pages:
            self._users[page] -= 1
            if self._users[page] == 0:
                unseen[page] = None

    def drop(self, wanted: int, *, ended: bool) -> int:
        """Give back up to `wanted` bytes, a page more at most, of pages that nobody sees; returns
        how many.

        Args:
            wanted: how many.
            ended: whether to take those too that a sequence that ended had in its window.
        """
        worthless = [page for page in self._ended if page in self._free]
        count = -(-wanted // self.page_bytes)
        rest = self._ended if ended else ()
        found = list(islice(dict.fromkeys(chain(worthless, self._passed, rest)), count))
        if found:
            for page in found:
                self._passed.pop(page, None)
                self._ended.pop(page, None)
            self._written.difference_update(found)
            self.num_reclaimed += len(found)
            self._give_back(runs_of(found))
        return len(found) * self.page_bytes

    def check_integrity(self, held: Iterable[tuple[InWindow, Sequence[int]]]) -> None:
        """Assert that the books are right, given what sequences hold and their tables. O(P)."""
        users, reserved = [0] * self._pool.num_pages, 0
        for one, table in held:
            assert 0 <= one.start <= one.end <= len(table), (one, len(table))
            assert one.end - one.start <= one.reserved, one
            reserved += one.reserved
            for page in table[one.start : one.end]:
                users[page] += 1
                assert page in self._written, f"page {page} is seen and was not written"
        assert users == self._users, "pages are seen by others"
        assert reserved == self._num_reserved, (reserved, self._num_reserved)
        unseen = self._passed.keys() | self._ended.keys()
        assert not self._passed.keys() & self._ended.keys(), "unseen twice"
        assert unseen == {page for page in self._written if not users[page]}, unseen
        assert self.used_bytes() <= self._budget, (self.used_bytes(), self._budget)
