"""Text with the colour of who wrote it: accepted drafts, and three kinds of the target's tokens.

Knows the sources, nothing about how they came about. Colour is for terminals; without one the
same text comes out plain.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from foretoken.types import Output, TokenSource

if TYPE_CHECKING:
    from foretoken.text.tokenizer import Tokenizer

STYLES = {
    TokenSource.TARGET: "default",
    TokenSource.ACCEPTED: "green",
    TokenSource.RECOVERED: "yellow",
    TokenSource.BONUS: "cyan",
}
MEANINGS = {
    TokenSource.TARGET: "target, no draft",
    TokenSource.ACCEPTED: "draft accepted",
    TokenSource.RECOVERED: "recovered (draft rejected)",
    TokenSource.BONUS: "bonus (whole draft accepted)",
}


def legend() -> Text:
    """What each colour means, on one line."""
    parts = [(f"{meaning}  ", STYLES[source]) for source, meaning in MEANINGS.items()]
    return Text.assemble(("tokens: ", "dim"), *parts)


class Painter:
    """Splits the text of a stream of outputs into pieces by token source.

    The pieces of one output together are exactly its text, which may lag behind its tokens while
    a character is incomplete or a stop string may be starting.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        """Start with nothing written."""
        from foretoken.text.tokenizer import TextOptions

        self._stream = tokenizer.stream(TextOptions())
        self._num_seen = 0
        self._waiting: list[tuple[str, TokenSource]] = []

    def paint(self, output: Output) -> Iterator[tuple[str, TokenSource]]:
        """The new text of `output`, piece by piece."""
        for token, source in zip(output.new_token_ids, output.sources, strict=True):
            self._stream.feed([token])
            piece = self._stream.text[self._num_seen :]
            self._num_seen = len(self._stream.text)
            if piece:
                self._waiting.append((piece, source))
        yield from self._take(output.text)

    def _take(self, text: str) -> Iterator[tuple[str, TokenSource]]:
        while text:
            piece, source = self._waiting.pop(0) if self._waiting else (text, TokenSource.TARGET)
            part, rest = piece[: len(text)], piece[len(text) :]
            if rest:
                self._waiting.insert(0, (rest, source))
            text = text[len(part) :]
            yield part, source
