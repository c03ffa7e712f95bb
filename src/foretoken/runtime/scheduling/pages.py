"""The pages of sequences: admission with prefix reuse, growth, rollback, publishing, release.

Between steps a running sequence holds the pages of its committed tokens and no more (room for
drafts is reserved by `schedule` and given back by `commit`); the pages of the whole prompt are
allocated at admission, so only decoding ever runs short. A page is offered to the prefix cache
once all its tokens are committed and computed. Layers with a window may have less of them
(`foretoken.kv.window_pages`): then room is a matter of bytes. Does not know who is served when.
"""

from collections import Counter
from collections.abc import Iterable

from foretoken.kv import table as tables
from foretoken.kv.pool import PagePool
from foretoken.kv.prefix import PrefixCache
from foretoken.kv.shared_pages import SharedPages
from foretoken.kv.window_pages import WindowPages
from foretoken.runtime.sequence import Sequence


class SequencePages:
    """Applies the pool and, if given, the prefix cache to sequences."""

    def __init__(
        self, pool: PagePool, prefix: PrefixCache | None, shared: SharedPages | None = None
    ) -> None:
        """No prefix cache: every sequence computes all of its tokens."""
        self.pool = pool
        self.prefix = prefix
        self._shared = shared
        self._windows: WindowPages | None = None if shared is None else shared.windows

    @property
    def usage(self) -> float:
        """Share of the memory of pages that sequences need."""
        if self._windows is None:
            return self.pool.num_used / self.pool.num_pages
        return self._windows.usage

    def admit(self, sequence: Sequence, spare: int) -> bool:
        """Give a waiting sequence pages for all of its tokens, shared ones first.

        False, and nothing changed, if fewer than `spare` pages would remain available.
        """
        pool, table = self.pool, sequence.page_table
        assert not table, f"{sequence.request.request_id} waits but holds {len(table)} pages"
        if self.prefix is not None and not sequence.wants_prompt_logprobs:
            salt = sequence.request.cache_salt
            table += self.prefix.lookup(sequence.page_hashes, sequence.token_ids, salt)
        if self._windows is not None:
            usable = self._windows.usable(table)
            tables.truncate(pool, table, usable * pool.page_size)
            self._windows.begin(sequence.in_window, table)
        num_hit = len(table)
        if not self.fits(sequence, spare):
            self.release(sequence)
            return False
        tables.grow(pool, table, sequence.num_tokens)
        sequence.num_published = num_hit
        sequence.num_computed = num_hit * pool.page_size
        self._follow(sequence)
        if self.prefix is not None:
            self.prefix.count(sequence.num_tokens, num_hit)
        return True

    def fits(self, sequence: Sequence, spare: int = 0) -> bool:
        """Whether there are the pages that the committed tokens still need, and `spare` ones."""
        table = sequence.page_table
        missing = tables.missing_pages(self.pool, table, sequence.num_tokens)
        if self._windows is None:
            return missing + spare <= self.pool.num_available
        return self._windows.fits(sequence.in_window, table, missing, spare)

    def wanted(self, waiting: Sequence, spare: int) -> int:
        """Pages that `admit` may need for it; 0 where there are too few in any case."""
        count = self.pool.pages_for(waiting.num_tokens)
        if self._windows is None:
            needed, available = count + spare, self.pool.num_available
        else:
            needed, available = self._windows.pages_of_new(count, spare), self._windows.room()
        return needed if needed <= available else 0

    def draft_room(self, sequence: Sequence, kept_free: int = 0) -> int:
        """How many drafts could have pages, beyond the committed tokens and `kept_free` pages."""
        spare = self.pool.num_spare
        if self._windows is not None and self._shared is not None:
            spare = self._windows.room(self._shared.draft_bytes)
        free = max(0, spare - kept_free)
        num_pages = len(sequence.page_table) + free
        return num_pages * self.pool.page_size - sequence.num_tokens

    def reserve(self, sequence: Sequence, num_drafts: int) -> None:
        """Give the sequence pages for its committed tokens and `num_drafts` more, all to be written
        in this step."""
        num_tokens = sequence.num_tokens + num_drafts
        tables.grow(self.pool, sequence.page_table, num_tokens)
        self._follow(sequence)
        self.write(sequence, num_tokens)

    def write(self, sequence: Sequence, num_tokens: int) -> None:
        """The step is going to write so many of its tokens, those before them included."""
        if self._windows is not None:
            stop = self.pool.pages_for(num_tokens)
            self._windows.write(sequence.in_window, sequence.page_table, stop)

    def trim(self, sequence: Sequence) -> None:
        """Give back pages beyond the committed tokens."""
        self._cut(sequence, sequence.num_tokens)
        self._follow(sequence)

    def _cut(self, sequence: Sequence, num_tokens: int) -> None:
        if self._windows is not None:
            count = min(self.pool.pages_for(num_tokens), len(sequence.page_table))
            self._windows.cut(sequence.in_window, sequence.page_table, count)
        tables.truncate(self.pool, sequence.page_table, num_tokens)

    def _follow(self, sequence: Sequence) -> None:
        if self._windows is not None:
            self._windows.follow(sequence.in_window, sequence.page_table, sequence.num_computed)

    def publish(self, sequence: Sequence) -> None:
        """Offer the pages that were filled since the last call to the prefix cache."""
        num_full = min(sequence.num_computed, sequence.num_tokens) // self.pool.page_size
        first = sequence.num_published
        if self.prefix is None or num_full <= first:
            return
        names, salt = sequence.page_hashes, sequence.request.cache_salt
        self.prefix.extend_names(names, sequence.token_ids, salt, max(num_full, len(names)))
        table = sequence.page_table
        whole = None if self._windows is None else self._windows.has
        places = range(first, num_full)
        new = [at for at in places if self.prefix.insert(names[at], table[at], whole)]
        if self.prefix.journal is not None and new:
            tokens = sequence.token_ids[: num_full * self.pool.page_size]
            self.prefix.journal.stored(names[:num_full], new, tokens, salt)
        sequence.num_published = num_full

    def release(self, sequence: Sequence) -> None:
        """Give back all pages; nothing of the sequence counts as computed any more."""
        self._cut(sequence, 0)
        sequence.num_computed = 0
        sequence.num_published = 0

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Assert that `sequences` hold all references there are, and cover what they computed."""
        self.pool.check_integrity()
        if self.prefix is not None:
            self.prefix.check_integrity()
        sequences = list(sequences)
        if self._windows is not None:
            self._windows.check_integrity((one.in_window, one.page_table) for one in sequences)
        held: Counter[int] = Counter()
        for sequence in sequences:
            table = sequence.page_table
            held.update(table)
            assert len(set(table)) == len(table), "a page stands twice in a table"
            covered = len(table) * self.pool.page_size
            assert covered >= sequence.num_computed, (covered, sequence.num_computed)
            assert sequence.num_published <= len(table), (sequence.num_published, len(table))
        for page in range(self.pool.num_pages):
            references = self.pool.references(page)
            assert references == held[page], f"page {page}: {references}, held by {held[page]}"
