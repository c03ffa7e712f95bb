"""Commands of a shell text: quotes, continued lines, comments, variables, arrays.

Runs nothing. A word keeps how it was written, so that a command can be given back with its
variables. Text that is no shell, such as prose around a command, is skipped line by line.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

ASSIGNED = re.compile(r"([A-Za-z_]\w*)=")
_EXPORTED = re.compile(r"^[ \t]*(?:export|ARG|ENV)[ \t]+(?=[A-Za-z_]\w*[= ])", re.MULTILINE)
_UNIT = re.compile(r"^ExecStart=-?", re.MULTILINE)
_CONTINUED = re.compile(r"\\[ \t]*\r?\n|\\[ \t]+(?=-)|\r?\n[ \t]*(?=--[a-z])")
"""A backslash at the end of a line, or where such lines were joined into one by copying; or its
lack before a line of options, which are no command of their own."""
SHELL_CHECK = "torn_off"
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^{}]*))?\})")
_WHOLE_VARIABLE = re.compile(r"\$\{?(\w+)\}?")
_WHOLE_ARRAY = re.compile(r'"?\$\{(\w+)\[[@*]\]\}"?')
_STARTS_COMMAND = re.compile(r"-[-\w]|.*(?:vllm|llama-|sglang|foretoken|trtllm|docker|python)")


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command."""

    text: str
    """What the program gets, as far as the text says."""
    raw: str
    """How it was written; empty for one that was made here."""


def read_commands(text: str) -> Iterator[list[Word]]:
    """The commands of a text, in order, each behind what it sets for itself alone (`A=1 command`).

    What cannot be read as a command is left out.
    """
    for words, _ in commands_as_torn(text):
        yield words


def commands_as_torn(text: str) -> Iterator[tuple[list[Word], str]]:
    """The same, each with its first option at the beginning of a line that the line before does not
    go on with, where a shell would end the command; empty if there is none."""
    text = _EXPORTED.sub("", _UNIT.sub("", text))
    names: dict[str, str] = {}
    arrays: dict[str, list[Word]] = {}
    at = 0
    while at < len(text):
        command = _Command(text, at, names)
        if not command.read():
            at = _next_line(text, at)
            continue
        at = command.end
        words = list(_expanded(command.words, names, arrays))
        num_assigned = 0
        for word in words:
            match = ASSIGNED.match(word.text)
            if match is None:
                break
            names[match[1]] = word.text[match.end() :]
            num_assigned += 1
        if command.array is not None:
            arrays[command.array] = words[num_assigned:]
        elif words[num_assigned:]:
            yield words, command.torn


def open_quotations(text: str) -> Iterator[tuple[int, str]]:
    """Lines, from 1 on, at which a quotation begins that has no end, with what stands there."""
    at = 0
    while at < len(text):
        command = _Command(text, at, {})
        if command.read():
            at = command.end
            continue
        end = _next_line(text, at)
        yield text.count("\n", 0, at) + 1, text[at:end].strip()
        at = end


def quoted(word: Word) -> str:
    """A word as it stands in a shell: as it was written, or quoted where it was made here."""
    return word.raw or shlex.quote(word.text)


def _next_line(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end + 1


def _expanded(
    words: list[Word], names: dict[str, str], arrays: dict[str, list[Word]]
) -> Iterator[Word]:
    """The words, with arrays and variables of several words in place."""
    for word in words:
        array = _WHOLE_ARRAY.fullmatch(word.raw)
        plain = _WHOLE_VARIABLE.fullmatch(word.raw)
        if array and array[1] in arrays:
            yield from arrays[array[1]]
        elif plain and " " in names.get(plain[1], ""):
            try:
                yield from (Word(part, "") for part in shlex.split(names[plain[1]]))
            except ValueError:
                yield word
        else:
            yield word


class _Command:
    """One command, read from `at` on."""

    def __init__(self, text: str, at: int, names: dict[str, str]) -> None:
        self.words: list[Word] = []
        self.end = at
        self.array: str | None = None
        """The variable that the words are the elements of."""
        self.torn = ""
        """The first option behind a line that does not go on."""
        self._text, self._names = text, names
        self._value, self._raw, self._in_word = "", "", False

    def read(self) -> bool:
        """Read to the end of the command; False if a quotation has no end, or is prose."""
        text = self._text
        while self.end < len(text):
            at, char = self.end, text[self.end]
            continued = _CONTINUED.match(text, at)
            if continued:
                self._finish()
                self.end = continued.end()
                if char in "\r\n" and self._has_begun():
                    self.torn = self.torn or text[self.end :].split(maxsplit=1)[0]
            elif char in " \t\r":
                self._finish()
                self.end += 1
            elif char == "#" and not self._in_word:
                self.end = _next_line(text, at) - 1 if "\n" in text[at:] else len(text)
            elif char == "\n" and self.array is not None:
                self._finish()
                self.end += 1
            elif char in "\n;|()" or (char == "&" and not self._raw.endswith(">")):
                if not self._at_separator(char):
                    break
            elif not self._take(char):
                return False
        self._finish()
        return True

    def _at_separator(self, char: str) -> bool:
        """Step over a separator; whether the command goes on behind it."""
        self.end += 1
        opens = ASSIGNED.fullmatch(self._raw) if char == "(" else None
        if opens:
            self.array, self._value, self._raw, self._in_word = opens[1], "", "", False
        return opens is not None

    def _take(self, char: str) -> bool:
        """Add what stands at the present place to the word; False if it has no end."""
        text, at = self._text, self.end
        self._in_word = True
        if char == "'":
            end = text.find("'", at + 1)
            return end > 0 and self._add(text[at + 1 : end], end + 1)
        if char == '"':
            return self._take_double()
        if text.startswith("$(", at) or char == "`":
            closing = self._closing(at)
            return closing > 0 and self._add(text[at:closing], closing)
        if char == "$":
            return self._take_variable()
        if char == "\\":
            return self._add(text[at + 1 : at + 2], at + 2)
        return self._add(char, at + 1)

    def _take_double(self) -> bool:
        """A double quotation: variables are put in, a backslash protects a few characters."""
        text, at = self._text, self.end
        end = at + 1
        while end < len(text) and text[end] != '"':
            end += 2 if text[end] == "\\" else 1
        if end >= len(text):
            return False
        inside = re.sub(
            r'\\(["\\$`\n])', lambda m: "" if m[1] == "\n" else m[1], text[at + 1 : end]
        )
        return self._add(self._filled(inside), end + 1)

    def _take_variable(self) -> bool:
        match = _VARIABLE.match(self._text, self.end)
        if match is None:
            end = self._text.find("}", self.end) + 1 if self._text[self.end + 1 :][:1] == "{" else 0
            end = end or self.end + 1
            return self._add(self._text[self.end : end], end)
        return self._add(self._filled(match[0]), match.end())

    def _filled(self, text: str) -> str:
        def value(match: re.Match[str]) -> str:
            known = self._names.get(match[1] or match[2])
            return known if known is not None else (match[3] or match[0])

        return _VARIABLE.sub(value, text)

    def _closing(self, at: int) -> int:
        if self._text[at] == "`":
            return self._text.find("`", at + 1) + 1
        depth = 0
        for place in range(at + 1, len(self._text)):
            depth += {"(": 1, ")": -1}.get(self._text[place], 0)
            if depth == 0:
                return place + 1
        return 0

    def _add(self, value: str, end: int) -> bool:
        """Add a piece; False where a quotation over several lines begins in prose."""
        raw = self._text[self.end : end]
        several = "\n" in raw and raw[0] in "'\""
        if several and not self._is_command():
            return False
        self._value += value
        self._raw += raw
        self.end = end
        return True

    def _has_begun(self) -> bool:
        """Whether a command was read so far, and no array or list of options."""
        return bool(self.words) and self.array is None and self.words[0].text[:1] != "-"

    def _is_command(self) -> bool:
        """Whether what was read so far looks like a command or an assignment."""
        words = [*(word.text for word in self.words), self._raw]
        return any(_STARTS_COMMAND.match(w) or ASSIGNED.match(w) for w in words if w)

    def _finish(self) -> None:
        if self._in_word:
            self.words.append(Word(self._value, self._raw))
        self._value, self._raw, self._in_word = "", "", False
