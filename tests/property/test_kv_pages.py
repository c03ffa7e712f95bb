"""Pages under any order of growing, truncating, sharing, publishing and evicting."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
)

from foretoken.kv import table as tables
from foretoken.kv.free_runs import FreeRuns, Run
from foretoken.kv.page_events import PageGivenUp, PagesStored
from foretoken.kv.pool import PagePool
from foretoken.kv.prefix import PrefixCache

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
        self.prefix = PrefixCache(self.pool, identity="model")
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
