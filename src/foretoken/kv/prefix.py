"""Reuse of KV pages between sequences that begin with the same tokens.

A full page is named by `foretoken.types.page_names`, so a name stands for everything before it,
the model and the request's salt. Only full pages of committed, computed tokens are inserted, hence
a shared page is never written again. Knows token ids and page numbers, not requests.
"""

from collections.abc import Callable, Sequence

from foretoken.kv.page_events import AllGivenUp, PageGivenUp, PageJournal
from foretoken.kv.pool import PagePool
from foretoken.types.page_names import page_name, root_name


class PrefixCache:
    """Names of the pages in `pool` that hold a known prefix.

    An entry is valid while the pool's generation of its page is the one it was made with, so
    eviction needs no callback (a journal has one, to tell of it at once); there is at most one
    entry per page.
    """

    def __init__(self, pool: PagePool) -> None:
        self.num_queried_tokens = 0
        """Tokens of all prompts looked up."""
        self.num_hit_tokens = 0
        """Tokens of those that need not be computed."""
        self._pool = pool
        self._page_of: dict[bytes, int] = {}
        self._name_of: list[bytes | None] = [None] * pool.num_pages
        self._generation = [0] * pool.num_pages
        self.journal: PageJournal | None = None
        """Read only. What becomes of entries, if somebody asked for that with `keep_journal`."""

    def __len__(self) -> int:
        """Entries, of which some may be outdated."""
        return len(self._page_of)

    def keep_journal(self) -> PageJournal:
        """Events of all entries from now on; what there was before is forgotten first."""
        assert self.journal is None, "one journal, one reader"
        self.clear()
        self.journal = PageJournal()
        self._pool.on_given_up = self._forget
        return self.journal

    def root(self, salt: str | None) -> bytes:
        """The parent of a first page."""
        return root_name(self._pool.page_size, salt)

    def extend_names(
        self, names: list[bytes], token_ids: Sequence[int], salt: str | None, num_pages: int
    ) -> None:
        """Append to `names`, in place, those of the next full pages until there are `num_pages`."""
        size = self._pool.page_size
        assert num_pages * size <= len(token_ids), (num_pages * size, len(token_ids))
        for index in range(len(names), num_pages):
            parent = names[-1] if names else self.root(salt)
            names.append(page_name(parent, token_ids[index * size : (index + 1) * size]))

    def _find(self, name: bytes) -> int | None:
        page = self._page_of.get(name)
        if page is None:
            return None
        if self._generation[page] != self._pool.generation[page]:
            self._forget(page)
            return None
        return page

    def _forget(self, page: int) -> None:
        name = self._name_of[page]
        if name is not None:
            self._name_of[page] = None
            del self._page_of[name]
            if self.journal is not None:
                self.journal.add(PageGivenUp(name))

    def lookup(self, names: list[bytes], token_ids: Sequence[int], salt: str | None) -> list[int]:
        """The longest run of pages that hold the beginning of `token_ids`, each retained.

        Never all of the tokens: at least one is left to compute, for its logits. `names` is
        extended as far as pages are found, and once beyond.
        """
        limit = (len(token_ids) - 1) // self._pool.page_size
        pages: list[int] = []
        while len(pages) < limit:
            self.extend_names(names, token_ids, salt, max(len(names), len(pages) + 1))
            page = self._find(names[len(pages)])
            if page is None:
                break
            self._pool.retain(page)
            pages.append(page)
        return pages

    def count(self, num_tokens: int, num_pages_hit: int) -> None:
        """Add one admitted prompt to the figures."""
        self.num_queried_tokens += num_tokens
        self.num_hit_tokens += num_pages_hit * self._pool.page_size

    def insert(self, name: bytes, page: int, whole: Callable[[int], bool] | None = None) -> bool:
        """Offer a full, used page; False if another page already has that name (it stays).

        Args:
            name: of the page.
            page: its number.
            whole: whether a page has its contents in all layers: one that has does not give way,
                one that has not does. None: all have.
        """
        found = self._find(name)
        if found is not None:
            if whole is None or whole(found) or not whole(page):
                return False
            self._forget(found)
            self._pool.drop(found)
        self._forget(page)
        self._page_of[name] = page
        self._name_of[page] = name
        self._generation[page] = self._pool.generation[page]
        self._pool.keep(page)
        return True

    def clear(self) -> None:
        """Forget everything, as after a change of weights. Pages in use stay with their users."""
        self._page_of.clear()
        self._name_of = [None] * self._pool.num_pages
        if self.journal is not None:
            self.journal.add(AllGivenUp())
        self._pool.drop_kept()

    def check_integrity(self) -> None:
        """Assert that names and pages map one to one and that valid entries are kept pages."""
        named = {page: name for page, name in enumerate(self._name_of) if name is not None}
        assert len(named) == len(self._page_of), (len(named), len(self._page_of))
        for page, name in named.items():
            assert self._page_of[name] == page, (self._page_of[name], page)
            if self._generation[page] == self._pool.generation[page]:
                assert self._pool.is_kept(page), f"page {page} has a name but is not kept"
