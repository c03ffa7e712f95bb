"""Pages under any order of growing, truncating, sharing, publishing and evicting."""

from collections.abc import Collection, Iterable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from foretoken.kv import table as tables
from foretoken.kv.free_runs import FreeRuns, Run, runs_of
from foretoken.kv.page_events import PageGivenUp, PagesStored
from foretoken.kv.pool import PagePool
from foretoken.kv.prefix import PrefixCache
from foretoken.kv.shared_pages import DraftPages, SharedPages

PAGE_SIZE = 3
NUM_PAGES = 12
token_lists = st.lists(st.integers(0, 1), max_size=4 * PAGE_SIZE)


class Holder:
    def __init__(self, token_ids: list[int], salt: str | None) -> None:
        self.token_ids = token_ids
        self.salt = salt
        self.names: list[bytes] = []
        self.table: list[int] = []


class Pages(RuleBasedStateMachine):
    """Contents are modelled per page: what was written, in which generation."""

    holders = Bundle("holders")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES, PAGE_SIZE)
        self.prefix = PrefixCache(self.pool)
        self.live: list[Holder] = []
        self.contents: dict[int, tuple[str | None, tuple[int, ...]]] = {}
        self.marks: dict[int, int] = {}

    def write(self, holder: Holder, first_page: int) -> None:
        for index in range(first_page, len(holder.table)):
            written = holder.token_ids[: (index + 1) * PAGE_SIZE]
            self.contents[holder.table[index]] = (holder.salt, tuple(written))
            self.marks.pop(holder.table[index], None)

    @rule(target=holders, token_ids=token_lists, more=st.integers(0, 5), salt=st.sampled_from("ab"))
    def arrive(self, token_ids: list[int], more: int, salt: str) -> Holder:
        holder = Holder([*token_ids, *[0] * more, 1], salt)
        self.live.append(holder)
        return holder

    @rule(holder=holders)
    def admit(self, holder: Holder) -> None:
        if holder.table:
            return
        hits = self.prefix.lookup(holder.names, holder.token_ids, holder.salt)
        assert len(hits) * PAGE_SIZE < len(holder.token_ids)
        for index, page in enumerate(hits):
            found = (holder.salt, tuple(holder.token_ids[: (index + 1) * PAGE_SIZE]))
            assert self.contents[page] == found, "a prefix hit holds other tokens"
        holder.table += hits
        missing = tables.missing_pages(self.pool, holder.table, len(holder.token_ids))
        if missing > self.pool.num_available:
            tables.clear(self.pool, holder.table)
            return
        tables.grow(self.pool, holder.table, len(holder.token_ids))
        self.write(holder, len(hits))

    @rule(holder=holders, count=st.integers(1, 7), ids=st.integers(0, 1))
    def append(self, holder: Holder, count: int, ids: int) -> None:
        total = len(holder.token_ids) + count
        missing = tables.missing_pages(self.pool, holder.table, total)
        if not holder.table or missing > self.pool.num_available:
            return
        first = len(holder.token_ids) // PAGE_SIZE
        tables.grow(self.pool, holder.table, total)
        holder.token_ids += [ids] * count
        self.write(holder, first)

    @rule(holder=holders, count=st.integers(1, 9))
    def reserve_and_roll_back(self, holder: Holder, count: int) -> None:
        total = len(holder.token_ids) + count
        if tables.missing_pages(self.pool, holder.table, total) > self.pool.num_available:
            return
        if holder.table:
            before = list(holder.table)
            tables.grow(self.pool, holder.table, total)
            tables.truncate(self.pool, holder.table, len(holder.token_ids))
            assert holder.table == before

    @rule(holder=holders)
    def publish(self, holder: Holder) -> None:
        full = len(holder.token_ids) // PAGE_SIZE
        if len(holder.table) < full:
            return
        self.prefix.extend_names(holder.names, holder.token_ids, holder.salt, full)
        pages = enumerate(zip(holder.names, holder.table[:full], strict=False))
        new = [place for place, (name, page) in pages if self.prefix.insert(name, page)]
        if self.prefix.journal is not None:
            written = holder.token_ids[: full * PAGE_SIZE]
            self.prefix.journal.stored(holder.names[:full], new, written, holder.salt)

    @rule(holder=consumes(holders))
    def leave(self, holder: Holder) -> None:
        tables.clear(self.pool, holder.table)
        self.live.remove(holder)

    @rule(holder=holders)
    def mark_filled(self, holder: Holder) -> None:
        for page in holder.table:
            self.marks[page] = self.pool.generation[page]

    @precondition(lambda self: len(self.prefix) > 0)
    @rule()
    def forget_prefixes(self) -> None:
        self.prefix.clear()
        assert len(self.prefix) == 0

    @invariant()
    def pages_are_sound(self) -> None:
        self.pool.check_integrity()
        self.prefix.check_integrity()
        held: dict[int, int] = {}
        for holder in self.live:
            for page in holder.table:
                held[page] = held.get(page, 0) + 1
        for page in range(NUM_PAGES):
            assert self.pool.references(page) == held.get(page, 0)
        assert self.pool.num_used == len(held)

    @invariant()
    def contents_are_mine(self) -> None:
        for holder in self.live:
            for index, page in enumerate(holder.table):
                written = tuple(holder.token_ids[: (index + 1) * PAGE_SIZE])
                salt, found = self.contents[page]
                assert (salt, found[: len(written)]) == (holder.salt, written[: len(found)])

    @invariant()
    def marks_do_not_outlive_contents(self) -> None:
        """`write` drops the mark of a page; a mark that stands must then be of old contents."""
        for page, generation in self.marks.items():
            assert generation <= self.pool.generation[page]
        fresh = [p for p, g in self.marks.items() if g == self.pool.generation[p]]
        assert all(self.pool.references(p) or self.pool.is_kept(p) for p in fresh)


Pages.TestCase.settings = settings(stateful_step_count=40)
TestPages: Any = Pages.TestCase


def _pages_of(token_ids: tuple[int, ...]) -> list[tuple[int, ...]]:
    starts = range(0, len(token_ids) - PAGE_SIZE + 1, PAGE_SIZE)
    return [token_ids[start : start + PAGE_SIZE] for start in starts]


class ToldPages(Pages):
    """Whoever hears the events knows which pages can be found, with their tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.journal = self.prefix.keep_journal()
        self.heard: dict[bytes, tuple[int, ...]] = {}

    @invariant()
    def events_say_what_is_there(self) -> None:
        for event in self.journal.take(0.0):
            if isinstance(event, PagesStored):
                size = len(event.token_ids) // len(event.names)
                assert size == PAGE_SIZE
                for place, name in enumerate(event.names):
                    self.heard[name] = event.token_ids[place * size : (place + 1) * size]
            elif isinstance(event, PageGivenUp):
                del self.heard[event.name]
            else:
                self.heard.clear()
        named = self.prefix._name_of
        there = {name: page for page, name in enumerate(named) if name is not None}
        assert self.heard.keys() == there.keys()
        for name, page in there.items():
            written = self.contents[page][1]
            assert self.heard[name] in _pages_of(written)


ToldPages.TestCase.settings = settings(stateful_step_count=40)
TestToldPages: Any = ToldPages.TestCase


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 15), st.integers(1, 4)), max_size=60))
def test_free_runs_are_a_set_of_pages(steps: list[tuple[bool, int, int]]) -> None:
    runs, free = FreeRuns(16), set(range(16))
    for give_back, page, count in steps:
        if give_back and page not in free:
            runs.add(page)
            free.add(page)
        elif not give_back and free:
            run = runs.run_at(page) or runs.long_run()
            length = min(count, run.length)
            wanted = Run(run.start + (run.length - length) // 2, length)
            runs.take(run, wanted)
            free -= set(range(wanted.start, wanted.start + wanted.length))
        runs.check_integrity()
        pages = {p for run in runs.runs() for p in range(run.start, run.start + run.length)}
        assert pages == free
        longest = max((run.length for run in runs.runs()), default=0)
        assert not free or 2 * runs.long_run().length > longest


# One budget for the pages of a target and of drafters, under any order of use. The guarded bugs:
# more memory written than there is, a page in use that loses its memory, a target that is refused
# a page because of drafts, books that drift.
SHARED_PAGES, PAGE_BYTES = 40, 100


def pages_of(runs: Iterable[Run]) -> set[int]:
    return {page for run in runs for page in range(run.start, run.start + run.length)}


class Shared(RuleBasedStateMachine):
    """What is written is modelled page by page, for the target and each drafter."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(SHARED_PAGES, 4)
        self.tables: list[list[int]] = []
        self.kept: set[int] = set()
        self.memory: list[set[int]] = [set(), set(), set()]

    @initialize(beside=st.sampled_from([0, 250, 5000]))
    def begin(self, beside: int) -> None:
        self.budget = SHARED_PAGES * PAGE_BYTES + beside
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
            assert self.pool.num_available - self.shared.withheld < SHARED_PAGES

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
