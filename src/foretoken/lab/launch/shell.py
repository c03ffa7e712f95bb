"""Commands of a shell text: quotes, continued lines, comments.

Runs nothing. A word keeps how it was written, so that a command can be given back with its
variables, which stay unknown.
"""

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

ASSIGNED = re.compile(r"([A-Za-z_]\w*)=")
_CONTINUED = re.compile(r"\\[ \t]*\r?\n|\\[ \t]+(?=-)")
"""A backslash at the end of a line, or where such lines were joined into one by copying."""
_TORN = re.compile(r"\r?\n[ \t]*(?=--[a-z])")
"""Its lack before a line of options, which are no command of their own; marked as `\\v`."""
_COMMENT = re.compile(r"[^\n\v]*")
_COMMAND = re.compile(r"[ \v]-[-\w]|=|vllm|llama-|sglang|foretoken|trtllm|docker|python")
_WORD = re.compile(
    r"""(?:[^\s'"\\`$;&|()#]|\\.|'[^']*'|"(?:\\.|[^"\\])*"|`[^`]*`|\$\((?:[^()]|\([^()]*\))*\)|"""
    r"""\$\{[^}]*\}|\$|(?<=[^\s;&|()])\#|&(?=>)|(?<=>)&)+""",
    re.DOTALL,
)


class Word(NamedTuple):
    """A word of a command."""

    text: str
    """What the program gets, variables as they stand."""
    raw: str = ""
    """How it was written; empty for one that was made here."""


class Command(NamedTuple):
    """A command, behind what it sets for itself alone (`A=1 command`)."""

    words: list[Word]
    torn: str = ""
    """Its first option at the beginning of a line that the line before does not go on with, where
    a shell would end it."""
    unclosed: str = ""
    """Of a line that was left out since a quotation in it has no end: the line."""


def read_commands(text: str) -> Iterator[Command]:
    """The commands of a text, in order."""
    text = _TORN.sub("\v", _CONTINUED.sub(" ", text))
    words: list[Word] = []
    torn, at = "", 0
    while at <= len(text):
        word, char = _word_at(text, at), text[at : at + 1]
        if word is not None:
            words.append(_word(word[0]))
            if text[at - 1 : at] == "\v" and words[0].text[:1] != "-":
                torn = torn or words[-1].text
            at = word.end()
        elif char == "(" and words and words[-1].raw.endswith("="):  # an array
            words, at = words[:-1], text.find(")", at) + 1 or len(text)
        elif char == "#":
            at = _COMMENT.match(text, at).end()  # type: ignore[union-attr]
        elif char and char in " \t\r\v\\`":
            at += 1
        else:
            ends = char in "\n;&|()"  # or a quotation begins that has no end
            line = text[text.rfind("\n", 0, at) + 1 : _next_line(text, at) - 1]
            if words and ends:
                yield Command(words, torn)
            elif not ends:
                yield Command([], unclosed=line.strip())
            words, torn, at = [], "", at + 1 if ends else _next_line(text, at)


def _word_at(text: str, at: int) -> re.Match[str] | None:
    """The word that begins here; a quotation over several lines only begins in a command."""
    word = _WORD.match(text, at)
    line = text[text.rfind("\n", 0, at) + 1 : _next_line(text, at) - 1]
    return word if word is None or "\n" not in word[0] or _COMMAND.search(line) else None


def _word(raw: str) -> Word:
    try:
        found = shlex.split(raw)
    except ValueError:
        found = []
    return Word(found[0] if len(found) == 1 else raw, raw)


def _next_line(text: str, at: int) -> int:
    return text.find("\n", at) + 1 or len(text) + 1
