"""Reading one call, `{"name": ..., "arguments": {...}}`, while its text arrives.

Works character by character, so how the text was cut into deltas cannot matter. Arguments are
passed on as they were written. Knows no template and no HTTP.
"""

import json
from dataclasses import dataclass
from typing import Any, final

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
