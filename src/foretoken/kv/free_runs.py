"""Runs of neighbouring free pages, kept so that every operation is O(1).

A run is known by its first page; its length is written at both of its ends, so that a page given
back finds its neighbours' runs without a search. Runs are filed by the bit length of their size,
so that one of the longest (within a factor of two) is at hand. Does not know who uses a page.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Run(NamedTuple):
    """Pages [start, start + length)."""

    start: int
    length: int


class FreeRuns:
    """A set of page numbers in [0, num_pages), organised as maximal runs."""

    def __init__(self, num_pages: int) -> None:
        self.num_free = 0
        self._num_pages = num_pages
        self._length_at_first = [0] * num_pages
        self._length_at_last = [0] * num_pages
        self._filed: list[dict[int, None]] = [{} for _ in range(num_pages.bit_length() + 1)]
        if num_pages:
            self._insert(Run(0, num_pages))

    def _insert(self, run: Run) -> None:
        self._length_at_first[run.start] = run.length
        self._length_at_last[run.start + run.length - 1] = run.length
        self._filed[run.length.bit_length()][run.start] = None
        self.num_free += run.length

    def _remove(self, start: int) -> Run:
        length = self._length_at_first[start]
        assert length > 0, f"no free run starts at page {start}"
        self._length_at_first[start] = 0
        self._length_at_last[start + length - 1] = 0
        del self._filed[length.bit_length()][start]
        self.num_free -= length
        return Run(start, length)

    def add(self, page: int) -> None:
        """Make `page` free, joined with its free neighbours."""
        start, length = page, 1
        if page > 0 and (before := self._length_at_last[page - 1]):
            start, length = self._remove(page - before).start, before + 1
        if page + 1 < self._num_pages and self._length_at_first[page + 1]:
            length += self._remove(page + 1).length
        self._insert(Run(start, length))

    def run_at(self, page: int) -> Run | None:
        """The run whose first page is `page`, if there is one."""
        if not 0 <= page < self._num_pages or not self._length_at_first[page]:
            return None
        return Run(page, self._length_at_first[page])

    def long_run(self) -> Run:
        """One of the longest runs, within a factor of two; asserts that there is any."""
        for filed in reversed(self._filed):
            if filed:
                start = next(iter(filed))
                return Run(start, self._length_at_first[start])
        raise AssertionError("no free page, but one was asked for")

    def take(self, run: Run, wanted: Run) -> None:
        """Make `wanted`, a part of the free `run`, no longer free."""
        end, wanted_end = run.start + run.length, wanted.start + wanted.length
        inside = run.start <= wanted.start and wanted_end <= end
        assert inside, f"{wanted} is not inside {run}"
        self._remove(run.start)
        if wanted.start > run.start:
            self._insert(Run(run.start, wanted.start - run.start))
        if wanted_end < end:
            self._insert(Run(wanted_end, end - wanted_end))

    def runs(self) -> list[Run]:
        """All runs in page order. O(P), for tests and figures."""
        return [Run(page, length) for page, length in enumerate(self._length_at_first) if length]

    def check_integrity(self) -> None:
        """Assert that runs are maximal, apart, filed right and counted right."""
        runs = self.runs()
        end = -1
        for run in runs:
            assert run.start > end, f"{run} touches or overlaps the run ending before page {end}"
            end = run.start + run.length
            assert end <= self._num_pages, f"{run} ends beyond {self._num_pages} pages"
            assert self._length_at_last[end - 1] == run.length, (run, self._length_at_last[end - 1])
            assert run.start in self._filed[run.length.bit_length()], f"{run} is not filed"
        lasts = sum(1 for length in self._length_at_last if length)
        assert lasts == len(runs), (lasts, len(runs))
        filed = sum(len(starts) for starts in self._filed)
        assert filed == len(runs), (filed, len(runs))
        total = sum(run.length for run in runs)
        assert total == self.num_free, (total, self.num_free)


def runs_of(pages: Iterable[int]) -> Iterator[Run]:
    """Neighbouring pages together."""
    start = length = 0
    for page in sorted(pages):
        if length and page == start + length:
            length += 1
            continue
        if length:
            yield Run(start, length)
        start, length = page, 1
    if length:
        yield Run(start, length)
