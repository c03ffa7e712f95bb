"""One budget for the pages of a target and of drafters, under any order of use.

The guarded bugs: more memory written than there is, a page in use that loses its memory, a target
that is refused a page because of drafts, books that drift.
"""

from collections.abc import Collection, Iterable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from foretoken.kv.free_runs import Run
from foretoken.kv.pool import PagePool
from foretoken.kv.shared_pages import DraftPages, SharedPages, runs_of

NUM_PAGES, PAGE_BYTES = 40, 100


def pages_of(runs: Iterable[Run]) -> set[int]:
    return {page for run in runs for page in range(run.start, run.start + run.length)}


class Shared(RuleBasedStateMachine):
    """What is written is modelled page by page, for the target and each drafter."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES, 4)
        self.tables: list[list[int]] = []
        self.kept: set[int] = set()
        self.memory: list[set[int]] = [set(), set(), set()]

    @initialize(beside=st.sampled_from([0, 250, 5000]))
    def begin(self, beside: int) -> None:
        self.budget = NUM_PAGES * PAGE_BYTES + beside
        self.shared = SharedPages(self.pool, self.budget, PAGE_BYTES, self.give_back_target)
        self.drafts = [self.add(index, name, size) for index, name, size in DRAFTERS]

    def add(self, index: int, name: str, page_bytes: int) -> DraftPages:
        def give_back(runs: Iterable[Run]) -> None:
            self.memory[index] -= pages_of(runs)

        def forget(pages: Collection[int]) -> None:
            assert not self.memory[index] & set(pages), "told before it was given back"
            for page in pages:
                assert self.pool.references(page) or self.pool.is_kept(page), "nobody's loss"

        found = self.shared.add({name}, page_bytes, give_back)
        found.forget = forget
        return found

    def give_back_target(self, runs: Iterable[Run]) -> None:
        pages = pages_of(runs)
        for page in pages:
            assert self.pool.references(page) == 0 and not self.pool.is_kept(page), page
        self.memory[0] -= pages

    @rule(share=st.floats(0, 1))
    def arrive(self, share: float) -> None:
        """All that is said to be available can be had, whatever drafters hold."""
        count = int(share * self.pool.num_available)
        table = self.pool.allocate(count)
        self.memory[0] |= set(table)
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), keeps=st.booleans())
    def leave(self, data: st.DataObject, keeps: bool) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        if keeps:
            for page in table:
                self.pool.keep(page)
        self.pool.release(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), which=st.integers(0, 1), resting=st.booleans())
    def draft(self, data: st.DataObject, which: int, resting: bool) -> None:
        table = data.draw(st.sampled_from(self.tables))
        before = self.shared.draft_bytes
        drafts = self.drafts[which]
        if drafts.take(table):
            assert drafts.has(table) or drafts.rests
            self.memory[which + 1] |= set(drafts.written)
        else:
            assert self.shared.draft_bytes <= before
            assert self.pool.num_available - self.shared.withheld < NUM_PAGES

    @rule(names=st.sets(st.sampled_from(["model", "head"])))
    def rest(self, names: set[str]) -> None:
        self.shared.resting = frozenset(names)

    @invariant()
    def everything_fits(self) -> None:
        if not hasattr(self, "shared"):
            return
        self.pool.check_integrity()
        sizes = (PAGE_BYTES, *(one.page_bytes for one in self.drafts))
        written = sum(len(one) * size for one, size in zip(self.memory, sizes, strict=True))
        assert written <= self.budget
        for drafts, memory in zip(self.drafts, self.memory[1:], strict=True):
            assert drafts.written.keys() == memory
        for table in self.tables:
            assert self.memory[0] >= set(table), "a page in use has no memory"


DRAFTERS = ((1, "model", 40), (2, "head", 130))
Shared.TestCase.settings = settings(stateful_step_count=40)
TestShared: Any = Shared.TestCase


def small(page_bytes: int = 50) -> tuple[PagePool, SharedPages, DraftPages]:
    pool = PagePool(32, 4)
    shared = SharedPages(pool, 32 * 100, 100, lambda runs: None)
    return pool, shared, shared.add({"d"}, page_bytes, lambda runs: None)


def test_a_target_alone_has_every_page() -> None:
    pool, shared, drafts = small()
    assert len(pool.allocate(32)) == 32
    assert shared.withheld == 0 and not drafts.take([0])


def test_a_resting_drafter_gives_way_to_the_target_and_to_others() -> None:
    pool, shared, drafts = small()
    other = shared.add({"other"}, 50, lambda runs: None)
    table = pool.allocate(18)
    assert drafts.take(table) and shared.withheld == 9
    assert not other.take(table)
    shared.resting = frozenset({"d"})
    assert other.take(table) and len(drafts.written) < 18
    assert len(pool.allocate(14)) == 14 and not drafts.written


def test_kept_prefixes_go_before_pages_that_are_drafted_on() -> None:
    pool, shared, drafts = small()
    table, prefix = pool.allocate(12), pool.allocate(20)
    for page in prefix:
        pool.keep(page)
    pool.release(prefix)
    assert drafts.take(table), "prefixes make room"
    assert pool.num_evicted >= 6 and shared.num_reclaimed == 0
    pool.allocate(pool.num_available)
    assert shared.num_reclaimed == 12 and shared.draft_bytes == 0


def test_pages_that_nobody_has_are_worth_nothing() -> None:
    pool, shared, drafts = small(100)
    first = pool.allocate(10)
    assert drafts.take(first)
    pool.release(first)
    pool.allocate(24)
    assert shared.num_reclaimed > 0 and shared.withheld <= 8 and not drafts.rests


def test_the_target_keeps_some_pages_to_grow_into() -> None:
    pool, shared, drafts = small(100)
    table = pool.allocate(15)
    assert drafts.take(table)
    more = pool.allocate(1)
    assert not drafts.take(more) and drafts.has(table)


def test_neighbours_are_given_back_together() -> None:
    assert list(runs_of([7, 3, 4, 9, 8, 1])) == [Run(1, 1), Run(3, 2), Run(7, 3)]
    assert list(runs_of([])) == []
