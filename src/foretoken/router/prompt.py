"""A prompt as the router sees it: how long it is, and the names of its pages.

Invariant: no token and no text is kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, final

from foretoken.types.page_names import page_name, root_name


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedPrompt:
    """The tokens of a request that are to be computed: its prompt, and output it already has."""

    tokens: int
    page_size: int
    names: tuple[bytes, ...]
    """Of its whole pages, first to last; of a long one perhaps the first alone."""
    key: bytes
    """Prompts that begin alike have the same: the name of the first page, or of all where there is
    less than a page."""

    @classmethod
    def of(
        cls,
        token_ids: Sequence[int],
        salt: str | None,
        *,
        page_size: int,
        most_pages: int | None = None,
    ) -> Self:
        """Name the pages of `token_ids`.

        Args:
            token_ids: at least one.
            salt: prefixes are known to prompts of the same salt only; a server makes it of the
                tenant and the request's cache salt.
            page_size: tokens of a page, as the replicas have it.
            most_pages: that are named, at least 1; None: all.
        """
        assert token_ids, "a prompt has at least one token"
        root = root_name(page_size, salt)
        names: list[bytes] = []
        named = token_ids if most_pages is None else token_ids[: most_pages * page_size]
        for start in range(0, len(named) - page_size + 1, page_size):
            parent = names[-1] if names else root
            names.append(page_name(parent, named[start : start + page_size]))
        key = names[0] if names else page_name(root, token_ids)
        return cls(tokens=len(token_ids), page_size=page_size, names=tuple(names), key=key)

    def hit_tokens(self, pages: int) -> int:
        """Tokens that need not be computed where the first `pages` are held: never all of them,
        since the last one's logits are wanted."""
        whole = (self.tokens - 1) // self.page_size
        return min(pages, whole) * self.page_size
