"""One budget of bytes for the target's pages, what its layers with a window keep of them, and what
drafters keep beside them.

All tensors lie under the pool's page numbers and have room for every page; a page of a tensor takes
memory from when it is first written. The target comes first: as far as the pool is concerned, what
drafters hold is free. When pages are short, drafters give theirs back: those of pages that nobody
has any more and of drafters that rest, then, once the oldest kept prefixes went too, the others
that were written longest ago. Drafters take what is left, and kept prefixes, but no page in use.

Where there are `WindowPages`, the bytes of a page are those of the other layers, and what layers
with a window have written is counted beside them, as drafts are; what no row can see any more goes
before anything else.

Invariant: the target's pages that are used or kept and all that drafters and layers with a window
have written fit the budget; so do the target's pages that were ever written and not given back.
Knows page numbers and bytes, not tensors.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from typing import final

from foretoken.kv.free_runs import Run, runs_of
from foretoken.kv.pool import PagePool
from foretoken.kv.window_pages import WindowBytes, WindowPages

GiveBack = Callable[[Iterable[Run]], object]
"""Gives the memory of pages back to the system; what stood there is zeros then."""
_HEADROOM = 16
"""Drafters leave one page of so many to the target, so that it does not ask for them at once."""
_AT_ONCE = 8
"""They give back one page of so many at once, and not one by one."""


class DraftPages:
    """Which pages a drafter has written, or the features of several."""

    def __init__(
        self, shared: "SharedPages", pool: PagePool, readers: Collection[str], page_bytes: int
    ) -> None:
        """Nothing written; `SharedPages.add` makes it."""
        self.page_bytes = page_bytes
        self.free = pool.follow_free()
        """Pages that nobody has: what stands there is worth nothing."""
        self.written: dict[int, None] = {}
        """Read only; in order of writing."""
        self.forget: Callable[[Collection[int]], object] = lambda pages: None
        """Is told which pages with contents were given back."""
        self._shared = shared
        self._readers = frozenset(readers)

    @property
    def num_bytes(self) -> int:
        """What they take."""
        return len(self.written) * self.page_bytes

    @property
    def rests(self) -> bool:
        """Whether nobody is going to read them soon."""
        return self._readers <= self._shared.resting

    def take(self, pages: Iterable[int]) -> bool:
        """Have these, so that they may be written; False: there is no room for them."""
        written = self.written
        fresh = [page for page in pages if page not in written]
        return not fresh or self._shared.charge(self, fresh)

    def has(self, pages: Iterable[int]) -> bool:
        """Whether all of these still hold what was written."""
        return all(map(self.written.__contains__, pages))


@final
class SharedPages:
    """Who may write how many pages."""

    def __init__(
        self, pool: PagePool, num_bytes: int, page_bytes: int, give_back: GiveBack
    ) -> None:
        """Share `num_bytes` from now on.

        Args:
            pool: the target's, of which nothing is used yet.
            num_bytes: of everything together; at least those of all of the target's pages.
            page_bytes: of a page of the target; in layers without a window alone, if `add_windows`
                is going to count the others.
            give_back: gives back memory of those of the target's pages.
        """
        assert num_bytes >= pool.num_pages * page_bytes, (num_bytes, pool.num_pages, page_bytes)
        self.resting: frozenset[str] = frozenset()
        """Drafters that rest."""
        self.num_reclaimed = 0
        """Pages of drafters given back so far."""
        self.windows: WindowPages | None = None
        """Read only. Of layers with a window; None: they keep what the others keep."""
        self._pool, self._page_bytes, self._num_bytes = pool, page_bytes, num_bytes
        self._beside = num_bytes - pool.num_pages * page_bytes
        self._drafts: list[tuple[DraftPages, GiveBack]] = []
        self._draft_bytes = 0
        self._give_back = give_back
        self._touched = bytearray(pool.num_pages)
        self._num_touched = 0
        self._free = pool.follow_free()
        self._no_room: tuple[object, ...] = ()
        """What everything was like when there was no room for a page."""
        pool.shared = self

    @property
    def draft_bytes(self) -> int:
        """What drafters have written."""
        return self._draft_bytes

    @property
    def withheld(self) -> int:
        """Pages of the target that have to be free, because drafters have their memory."""
        return self._withheld(self._held)

    @property
    def _held(self) -> int:
        """Bytes beside the target's pages."""
        return self._draft_bytes + (0 if self.windows is None else self.windows.num_bytes)

    def add_windows(
        self, window: int, step_tokens: int, page_bytes: int, give_back: GiveBack
    ) -> WindowPages:
        """Count layers with a window apart from now on; see `WindowPages`."""
        self.windows = WindowPages(
            self._pool,
            window=window,
            step_tokens=step_tokens,
            sizes=WindowBytes(page=page_bytes, rest=self._page_bytes, budget=self._num_bytes),
            give_back=give_back,
            charge=self._charge_windows,
        )
        return self.windows

    def _charge_windows(self) -> None:
        self.make_room(0)
        self._keep_target_small()

    def add(
        self,
        readers: Collection[str],
        page_bytes: int,
        give_back: GiveBack,
        pool: PagePool | None = None,
    ) -> DraftPages:
        """The book of tensors beside the target's, which nobody has written yet.

        Args:
            readers: drafters that read them.
            page_bytes: of a page of them.
            give_back: gives back memory of them.
            pool: whose page numbers they lie under; None: the target's.
        """
        pages = DraftPages(self, pool or self._pool, readers, page_bytes)
        self._drafts.append((pages, give_back))
        return pages

    def charge(self, drafts: DraftPages, fresh: Sequence[int]) -> bool:
        """Let a drafter write pages that it had not written, if that leaves some to the target."""
        pool, more = self._pool, len(fresh) * drafts.page_bytes
        # Where many sequences ask in a step that has no room, one answer is enough.
        state = (pool.num_available, pool.num_free, self._held, self.resting)
        if state == self._no_room:
            return False
        withheld, headroom = self._withheld(self._held + more), pool.num_pages // _HEADROOM
        # Prefixes could make room too, but what nobody reads goes first.
        lacking = max(withheld - pool.num_free, withheld + headroom - pool.num_available)
        if withheld and lacking > 0:
            self._reclaim(lacking, busy=False)
            withheld = self._withheld(self._held + more)
        if withheld and withheld + headroom > pool.num_available:
            if len(fresh) == 1:
                self._no_room = (*state[:2], self._held, self.resting)
            return False
        if withheld > pool.num_free:
            pool.evict(withheld - pool.num_free)
        self._draft_bytes += more
        drafts.written.update(dict.fromkeys(fresh))
        self._keep_target_small()
        return True

    def make_room(self, count: int) -> None:
        """See to it that the pool can hand out so many of its available pages."""
        pool = self._pool
        lacking = count + self.withheld - pool.num_free
        if lacking > 0:
            self._reclaim(lacking, busy=False)
            lacking = count + self.withheld - pool.num_free
        while lacking > 0 and pool.num_kept:
            self._evict(lacking)
            lacking = count + self.withheld - pool.num_free
        if lacking > 0:
            self._reclaim(lacking, busy=True)

    def _evict(self, lacking: int) -> None:
        """Have the pool give up its oldest kept pages, up to what so many take."""
        pool, bytes_wanted = self._pool, lacking * self._page_bytes
        if self.windows is None:
            pool.evict(min(lacking, pool.num_kept))
            return
        whole = self._page_bytes + self.windows.page_bytes
        pool.evict(min(-(-bytes_wanted // whole), pool.num_kept))
        self.windows.drop(bytes_wanted, ended=False)

    def handed_out(self, pages: Iterable[int]) -> None:
        """The pool handed out pages, which are going to be written."""
        touched = self._touched
        fresh = [page for page in pages if not touched[page]]
        for page in fresh:
            touched[page] = 1
        self._num_touched += len(fresh)
        if fresh:
            self._keep_target_small()

    def _withheld(self, held: int) -> int:
        return max(0, -(-(held - self._beside) // self._page_bytes))

    def _reclaim(self, lacking: int, *, busy: bool) -> None:
        """Have layers with a window and drafters give back what `lacking` pages of the target take,
        if they have it."""
        # A little more than is needed: the next page of the target is not far.
        wanted = max(lacking * self._page_bytes, self._held // _AT_ONCE)
        if self.windows is not None:
            wanted -= self.windows.drop(wanted, ended=busy)
        for drafts, give_back in sorted(self._drafts, key=lambda one: not one[0].rests):
            if wanted <= 0:
                break
            all_go = busy or drafts.rests
            pages = drafts.written if all_go else drafts.written.keys() & drafts.free
            found = list(islice(pages, -(-wanted // drafts.page_bytes)))
            if found:
                wanted -= len(found) * drafts.page_bytes
                self._drop(drafts, found, give_back)

    def _drop(self, drafts: DraftPages, pages: list[int], give_back: GiveBack) -> None:
        for page in pages:
            del drafts.written[page]
        self._draft_bytes -= len(pages) * drafts.page_bytes
        self.num_reclaimed += len(pages)
        give_back(runs_of(pages))
        # A page that nobody has may be somebody's before long, and is no loss to anybody.
        lost = [page for page in pages if page not in drafts.free]
        if lost:
            drafts.forget(lost)

    def _keep_target_small(self) -> None:
        """Give back free pages of the target that were written, if drafters have their memory."""
        if self._num_touched <= self._pool.num_pages - self.withheld:
            return
        # All at once: finding them looks at every free page.
        free = [page for page in self._free if self._touched[page]]
        self._give_back(runs_of(free))
        for page in free:
            self._touched[page] = 0
        self._num_touched -= len(free)

    def check_integrity(self) -> None:
        """Assert that the books are right and that everything fits. O(P)."""
        pool = self._pool
        drafted = sum(drafts.num_bytes for drafts, _ in self._drafts)
        assert drafted == self._draft_bytes, (drafted, self._draft_bytes)
        assert self.withheld <= pool.num_free, (self.withheld, pool.num_free)
        budget = pool.num_pages * self._page_bytes + self._beside
        held = (pool.num_pages - pool.num_free) * self._page_bytes + self._held
        assert held <= budget, (held, budget)
        assert sum(self._touched) == self._num_touched, self._num_touched
        written = self._num_touched * self._page_bytes + self._held
        assert written <= budget, f"{written} bytes are written of {budget}"
        for page in range(pool.num_pages):
            assert self._touched[page] or page in self._free, (
                f"page {page} is used and was not written"
            )
