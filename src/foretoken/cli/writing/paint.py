"""Text with the colour of who wrote it: accepted drafts, and three kinds of the target's tokens.

Knows the sources, nothing about how they came about. Colour is for terminals; without one the
same text comes out plain. What came out of a block is also underlined, where there is no colour.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from foretoken.types import Output, TokenSource

if TYPE_CHECKING:
    from foretoken.text.tokenizer import Tokenizer

BLOCK = "block"
"""Beside the sources: an accepted draft of a drafter that fills in whole blocks."""
STYLES: dict[str, str] = {
    TokenSource.TARGET: "default",
    TokenSource.ACCEPTED: "green",
    BLOCK: "underline magenta",
    TokenSource.RECOVERED: "yellow",
    TokenSource.BONUS: "cyan",
}
MEANINGS: dict[str, str] = {
    TokenSource.TARGET: "target alone",
    TokenSource.ACCEPTED: "draft accepted",
    BLOCK: "block accepted",
    TokenSource.RECOVERED: "recovered (draft rejected)",
    TokenSource.BONUS: "bonus (all accepted)",
}


def legend() -> Text:
    """What each colour means, on one line."""
    found = Text.assemble(("tokens: ", "dim"))
    for source, meaning in MEANINGS.items():
        found.append(meaning, STYLES[source]).append("  ")
    return found


class Painter:
    """Splits the text of a stream of outputs into pieces by token source.

    The pieces of one output together are exactly its text, which may lag behind its tokens while
    a character is incomplete or a stop string may be starting.
    """

    def __init__(
        self, tokenizer: "Tokenizer", block_drafters: frozenset[str] = frozenset()
    ) -> None:
        """Start with nothing written; drafts of `block_drafters` come as `BLOCK`."""
        from foretoken.text.tokenizer import TextOptions

        self._stream = tokenizer.stream(TextOptions())
        self._block_drafters = block_drafters
        self._num_seen = 0
        self._waiting: list[tuple[str, str]] = []

    def paint(self, output: Output) -> Iterator[tuple[str, str]]:
        """The new text of `output`, piece by piece, each with a key of `STYLES`."""
        each = zip(output.new_token_ids, output.sources, output.drafters, strict=True)
        for token, source, drafter in each:
            self._stream.feed([token])
            piece = self._stream.text[self._num_seen :]
            self._num_seen = len(self._stream.text)
            if piece:
                mark = BLOCK if drafter in self._block_drafters else source
                self._waiting.append((piece, mark))
        yield from self._take(output.text)

    def _take(self, text: str) -> Iterator[tuple[str, str]]:
        while text:
            piece, source = self._waiting.pop(0) if self._waiting else (text, TokenSource.TARGET)
            part, rest = piece[: len(text)], piece[len(text) :]
            if rest:
                self._waiting.insert(0, (rest, source))
            text = text[len(part) :]
            yield part, source
