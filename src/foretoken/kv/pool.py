"""Who uses which KV page: reference counts, placement, and the order of eviction.

A page is used (reference count > 0), kept (count 0, but its contents may be wanted again), or
free. Kept pages are evicted in least-recently-released order, with one exception for the sake
of contiguous tables. `generation[page]` rises each time the contents of a page are given up, so
whoever remembers something about a page remembers the generation with it. Knows page numbers
only: neither tokens nor tensors.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

from foretoken.kv.free_runs import FreeRuns, Run


class PageMemory(Protocol):
    """Whoever has some of the memory of free pages: `SharedPages`."""

    @property
    def withheld(self) -> int:
        """Pages that have to be free."""

    def make_room(self, count: int) -> None:
        """See to it that so many of the available pages can be handed out."""

    def handed_out(self, pages: Iterable[int]) -> None:
        """These are going to be written."""

    def check_integrity(self) -> None:
        """Assert that the books are right."""


class PagePool:
    """`num_pages` pages of `page_size` tokens.

    Placement: a sequence grows into the page after its last one where that is free, or kept and
    not among the latest eighth to be released. Otherwise, and for a new sequence, a piece of one
    of the longest free runs is taken: its beginning, or its middle if the page before it is used,
    so that both can grow. When kept pages must go, up to an eighth of the pool goes at once:
    evicted one by one, in an order that has nothing to do with their places, they would leave
    every table in as many pieces as it has pages.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        """All pages free, at generation 1 (so a remembered 0 never matches)."""
        assert num_pages > 0, num_pages
        assert page_size > 0, page_size
        self.num_pages = num_pages
        self.page_size = page_size
        self.generation = [1] * num_pages
        """Read only. Rises whenever a page's contents are given up, before it is used again."""
        self.num_evicted = 0
        """Kept pages given up so far."""
        self.shared: PageMemory | None = None
        """Who else has the memory of free pages; None: nobody."""
        self.free: set[int] | None = None
        """Read only. Pages without contents, if somebody asked for that with `follow_free`."""
        self.on_given_up: Callable[[int], None] | None = None
        """Called with each page whose contents are given up; None: nobody wants to know."""
        self._references = [0] * num_pages
        self._keep = [False] * num_pages
        self._free = FreeRuns(num_pages)
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._released_at = [0] * num_pages
        self._num_kept_releases = 0
        self._eighth = num_pages // 8

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can hand out: free ones and kept ones nobody uses."""
        return self._free.num_free + len(self._evictable)

    @property
    def num_spare(self) -> int:
        """Those of them that nobody else has the memory of."""
        return self.num_available - (0 if self.shared is None else self.shared.withheld)

    @property
    def num_free(self) -> int:
        """Pages without contents."""
        return self._free.num_free

    @property
    def num_kept(self) -> int:
        """Pages that nobody uses and whose contents may be wanted again."""
        return len(self._evictable)

    @property
    def num_used(self) -> int:
        """Pages with at least one reference."""
        return self.num_pages - self.num_available

    @property
    def capacity(self) -> int:
        """Tokens that fit into all pages together."""
        return self.num_pages * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def references(self, page: int) -> int:
        """How many tables hold `page`."""
        return self._references[page]

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Hand out `count` pages with one reference each, from `after` + 1 on if possible.

        Evicts the longest unused kept pages when the free ones do not suffice. Asserts
        count <= num_available.
        """
        assert 0 <= count <= self.num_available, (count, self.num_available)
        if self.shared is not None:
            self.shared.make_room(count)
        if count > self._free.num_free:
            self.evict(count - self._free.num_free)
        pages: list[int] = []
        while len(pages) < count:
            run = self._place(count - len(pages), after)
            pages.extend(range(run.start, run.start + run.length))
            after = pages[-1]
        for page in pages:
            self._references[page] = 1
        if self.free is not None:
            self.free.difference_update(pages)
        if self.shared is not None:
            self.shared.handed_out(pages)
        return pages

    def _place(self, count: int, after: int | None) -> Run:
        """Take up to `count` neighbouring free pages."""
        run = None if after is None else self._run_after(after)
        if run is not None:
            wanted = Run(run.start, min(count, run.length))
        else:
            run = self._free.long_run()
            length = min(count, run.length)
            beside_used = run.start > 0 and self._references[run.start - 1] > 0
            spare = run.length - length if beside_used else 0
            wanted = Run(run.start + spare // 2, length)
        self._free.take(run, wanted)
        return wanted

    def _run_after(self, page: int) -> Run | None:
        """The free pages right after `page`; an old kept one there is evicted out of turn."""
        neighbour = page + 1
        if neighbour in self._evictable:
            age = self._num_kept_releases - self._released_at[neighbour]
            if age >= self._eighth:
                self._evict_page(neighbour)
        return self._free.run_at(neighbour)

    def evict(self, count: int) -> None:
        """Free at least `count` kept pages, the longest released first; asserts that there are."""
        assert count <= len(self._evictable), (count, len(self._evictable))
        ahead = min(self._eighth, len(self._evictable) // 2)
        for _ in range(max(count, ahead)):
            self._evict_page(next(iter(self._evictable)))

    def _evict_page(self, page: int) -> None:
        del self._evictable[page]
        self.num_evicted += 1
        self._give_up(page)

    def _give_up(self, page: int) -> None:
        self._keep[page] = False
        self.generation[page] += 1
        self._free.add(page)
        if self.free is not None:
            self.free.add(page)
        if self.on_given_up is not None:
            self.on_given_up(page)

    def retain(self, page: int) -> None:
        """One more reference to a used or kept page."""
        if self._references[page] == 0:
            assert page in self._evictable, f"page {page} is free and cannot be retained"
            del self._evictable[page]
        self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One reference less to each, in the order in which they may be evicted."""
        for page in pages:
            references = self._references[page] - 1
            assert references >= 0, f"page {page} is released but has no reference"
            self._references[page] = references
            if references == 0:
                if self._keep[page]:
                    self._evictable[page] = None
                    self._num_kept_releases += 1
                    self._released_at[page] = self._num_kept_releases
                else:
                    self._give_up(page)

    def keep(self, page: int) -> None:
        """Keep the contents of a used page after its last release, until it is evicted."""
        assert self._references[page] > 0, f"page {page} is not used and cannot be kept"
        self._keep[page] = True

    def is_kept(self, page: int) -> bool:
        """Whether the contents outlive the last reference."""
        return self._keep[page]

    def drop_kept(self) -> None:
        """Give up all kept contents; pages in use become free at their last release."""
        for page in range(self.num_pages):
            self.drop(page)

    def drop(self, page: int) -> None:
        """Give up the contents of a page if they are kept."""
        if self._keep[page]:
            self._keep[page] = False
            if self._references[page] == 0:
                del self._evictable[page]
                self._give_up(page)

    def follow_free(self) -> set[int]:
        """The pages without contents, from now on kept up to date."""
        if self.free is None:
            runs = self._free.runs()
            self.free = {p for run in runs for p in range(run.start, run.start + run.length)}
        return self.free

    def check_integrity(self) -> None:
        """Assert that every page is used, kept or free, and nothing else. O(P)."""
        self._free.check_integrity()
        if self.shared is not None:
            self.shared.check_integrity()
        free = {p for run in self._free.runs() for p in range(run.start, run.start + run.length)}
        assert self.free is None or self.free == free, self.free ^ free
        for page, references in enumerate(self._references):
            states = (references > 0, page in self._evictable, page in free)
            assert sum(states) == 1, f"page {page}: used, kept, free are {states}"
            assert not (page in free and self._keep[page]), f"free page {page} is marked kept"
            assert self._keep[page] or page not in self._evictable, f"page {page} is not kept"
        total = self.num_used + self.num_available
        assert total == self.num_pages, (total, self.num_pages)
