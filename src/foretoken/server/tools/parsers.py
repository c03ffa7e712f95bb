"""Finding tool calls in text as it arrives: one parser per way in which templates write them.

Invariant: what a parser gives out depends on the text alone, not on how it was cut: it never
passes on as content what may still become a call.

One call, `{"name": ..., "arguments": {...}}`, is read character by character; arguments are passed
on as they were written. Knows no HTTP.
"""

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, final

_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What a stretch of text turned out to be: content, a call's name, or part of its arguments."""

    content: str = ""
    call: int | None = None
    """Number of the call that `name` or `arguments` belong to."""
    name: str | None = None
    arguments: str = ""


@final
class CallReader:
    """One JSON object, from its opening brace to its closing one."""

    def __init__(self, number: int) -> None:
        """Read call `number`."""
        self.text = ""
        """All of it so far."""
        self.done = False
        self.name: str | None = None
        self._number = number
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._string_start = 0
        self._key: str | None = None
        self._value_start = 0
        self._expects_value = False
        self._held = ""

    def feed(self, char: str) -> list[Piece]:
        """Add one character."""
        assert not self.done, "the object is closed"
        at = len(self.text)
        self.text += char
        in_arguments = self._expects_value and self._key in _ARGUMENTS and self._depth >= 1
        pieces: list[Piece] = []
        ended = self._track(char, at)
        if ended:
            pieces += self._end_of_value(at)
        elif in_arguments and (self._value_start or not char.isspace()):
            pieces += self._argument(char)
        if self._expects_value and not self._value_start and not char.isspace() and char != ":":
            self._value_start = at or 1
        return pieces

    def _track(self, char: str, at: int) -> bool:
        """Follow strings and nesting; whether a top-level value ends before this character."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                if self._depth == 1 and not self._expects_value:
                    self._key = _loads(self.text[self._string_start :])
            return False
        if char == '"':
            self._in_string, self._string_start = True, at
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.done = self._depth == 0
            return self.done and self._expects_value
        elif char == ":" and self._depth == 1 and not self._expects_value:
            self._expects_value, self._value_start = True, 0
        elif char == "," and self._depth == 1:
            return self._expects_value
        return False

    def _end_of_value(self, at: int) -> list[Piece]:
        """The value of a key is complete: the name may set free the arguments before it."""
        value = self.text[self._value_start : at]
        key, self._key, self._expects_value = self._key, None, False
        if key == "name":
            name = _loads(value)
            if isinstance(name, str) and name and self.name is None:
                self.name = name
                pieces = [Piece(call=self._number, name=name)]
                if self._held:
                    pieces.append(Piece(call=self._number, arguments=self._held))
                return pieces
        return []

    def _argument(self, char: str) -> list[Piece]:
        if self.name is None:
            self._held += char
            return []
        return [Piece(call=self._number, arguments=char)]


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def merged(pieces: list[Piece]) -> list[Piece]:
    """Neighbouring pieces of the same kind joined."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if last is None or piece.name is not None or last.call != piece.call:
            found.append(piece)
        elif piece.call is None:
            found[-1] = Piece(content=last.content + piece.content)
        else:
            joined = last.arguments + piece.arguments
            found[-1] = Piece(call=last.call, name=last.name, arguments=joined)
    return found


class ToolParser(ABC):
    """Reads the text of one choice."""

    marks: ClassVar[tuple[str, ...]] = ()
    """Texts by which it knows a call; a model may have a token for each."""

    @abstractmethod
    def feed(self, text: str) -> list[Piece]:
        """Add text; what is certain by now."""

    @abstractmethod
    def finish(self) -> list[Piece]:
        """No more text: what was held back."""


@final
class PlainParser(ToolParser):
    """No calls: everything is content."""

    def feed(self, text: str) -> list[Piece]:
        """The text itself."""
        return [Piece(content=text)] if text else []

    def finish(self) -> list[Piece]:
        """Nothing was held back."""
        return []


@final
class ArgumentsParser(ToolParser):
    """A named tool choice: the whole text is the arguments of one call."""

    def __init__(self, name: str) -> None:
        """Call `name`."""
        self._name: str | None = name

    def feed(self, text: str) -> list[Piece]:
        """The name first, then arguments."""
        if not text:
            return []
        name, self._name = self._name, None
        return [Piece(call=0, name=name, arguments=text)]

    def finish(self) -> list[Piece]:
        """Nothing was held back."""
        return []


@final
class HermesParser(ToolParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number, text between."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    marks = (OPEN, CLOSE)

    def __init__(self) -> None:
        """Outside of any call."""
        self._held = ""
        self._num_calls = 0
        self._reader: CallReader | None = None
        self._after_call = False

    def feed(self, text: str) -> list[Piece]:
        """Content, names and arguments, as far as they are certain."""
        return merged([piece for char in text for piece in self._char(char)])

    def finish(self) -> list[Piece]:
        """Text that looked like the beginning of a call and was none."""
        held = self._held
        if self._reader is not None and self._reader.name is None:
            held = self.OPEN + held + self._reader.text
        elif self._reader is not None or self._after_call:
            held = ""
        self._held = ""
        return [Piece(content=held)] if held else []

    def _char(self, char: str) -> list[Piece]:
        reader = self._reader
        if reader is None:
            return self._outside(char)
        if not reader.text and char.isspace():
            self._held += char
            return []
        if not reader.text and char != "{":
            self._reader, held, self._held = None, self.OPEN + self._held + char, ""
            return [Piece(content=held)]
        if reader.done:
            return self._until_closed(char)
        return reader.feed(char)

    def _until_closed(self, char: str) -> list[Piece]:
        """After the object: skip what closes the call."""
        assert self._reader is not None, "called inside"
        self._held += char
        if not self._held.endswith(self.CLOSE):
            return []
        reader, self._reader, self._held = self._reader, None, ""
        if reader.name is None:
            return [Piece(content=f"{self.OPEN}{reader.text}{self.CLOSE}")]
        self._num_calls += 1
        self._after_call = True
        return []

    def _outside(self, char: str) -> list[Piece]:
        self._held += char
        if self._held.endswith(self.OPEN):
            content, self._held = self._held.removesuffix(self.OPEN), ""
            self._reader = CallReader(self._num_calls)
            return self._content(content)
        keep = _overlap(self._held, self.OPEN)
        content = self._held[: len(self._held) - keep]
        if self._after_call and content.isspace():
            return []
        self._held = self._held[len(content) :]
        return self._content(content)

    def _content(self, content: str) -> list[Piece]:
        """Content; blank text between calls is none."""
        if not content or (self._after_call and content.isspace()):
            return []
        self._after_call = False
        return [Piece(content=content)]


@final
class LlamaJsonParser(ToolParser):
    """The whole text is `{"name": ..., "parameters": {...}}`, several separated by `;`."""

    TAG = "<|python_tag|>"

    def __init__(self) -> None:
        """Nothing seen yet."""
        self._held = ""
        self._num_calls = 0
        self._reader: CallReader | None = None
        self._is_content = False

    def feed(self, text: str) -> list[Piece]:
        """Content, names and arguments, as far as they are certain."""
        return merged([piece for char in text for piece in self._char(char)])

    def finish(self) -> list[Piece]:
        """Text that looked like the beginning of a call and was none."""
        held = self._held
        if self._reader is not None and self._reader.name is None:
            held += self._reader.text
        elif self._num_calls or self._reader is not None:
            held = ""
        return [Piece(content=held)] if held else []

    def _char(self, char: str) -> list[Piece]:
        if self._is_content:
            return [Piece(content=char)]
        if self._reader is not None:
            return self._inside(char)
        if char == "{":
            self._reader = CallReader(self._num_calls)
            return self._reader.feed(char)
        self._held += char
        start = self._held.strip()
        if not start or self.TAG.startswith(start) or start == self.TAG:
            return []
        if self._num_calls and char == ";":
            self._held = ""
            return []
        return self._give_up()

    def _inside(self, char: str) -> list[Piece]:
        reader = self._reader
        assert reader is not None, "called inside"
        pieces = reader.feed(char)
        if not reader.done:
            return pieces
        self._reader = None
        if reader.name is None:
            self._held += reader.text
            return pieces + self._give_up()
        self._num_calls += 1
        self._held = ""
        return pieces

    def _give_up(self) -> list[Piece]:
        """It is no call; whatever comes is content."""
        self._is_content, held, self._held = True, self._held, ""
        return [Piece(content=held)]


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a beginning of `marker`."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if marker.startswith(text[-n:])), 0)


PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": LlamaJsonParser,
}
