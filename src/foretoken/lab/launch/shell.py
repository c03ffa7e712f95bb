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


def read_commands(text: str) -> Iterator[list[Word]]:
    """The commands of a text, in order, each behind what it sets for itself alone (`A=1 command`).
    A line with a quotation that has no end is left out."""
    for words, _ in commands_as_torn(text):
        yield words


def commands_as_torn(text: str) -> Iterator[tuple[list[Word], str]]:
    """The same, each with its first option at the beginning of a line that the line before does not
    go on with, where a shell would end the command; empty if there is none."""
    text = _TORN.sub("\v", _CONTINUED.sub(" ", text))
    words: list[Word] = []
    torn, at = "", 0
    while at <= len(text):
        if word := _word_at(text, at):
            words.append(_word(word[0]))
            if text[at - 1 : at] == "\v" and words[0].text[:1] != "-":
                torn = torn or words[-1].text
            at = word.end()
            continue
        if text[at : at + 1] == "(" and words and words[-1].raw.endswith("="):  # an array
            words, at = words[:-1], text.find(")", at) + 1 or len(text)
        elif at == len(text) or text[at] not in " \t\r\v#\\`":
            unclosed = text[at : at + 1] != "" and text[at] not in "\n;&|()"
            if words and not unclosed:
                yield words, torn
            words, torn = [], ""
            at = _next_line(text, at) if unclosed else at + 1
        else:
            at = _next_line(text, at) - 1 if text[at] == "#" else at + 1


def open_quotations(text: str) -> Iterator[tuple[int, str]]:
    """Lines, from 1 on, at which a quotation begins that has no end, with what stands there."""
    at = 0
    while at < len(text):
        word = _word_at(text, at)
        if word is None and text[at] in "'\"":
            begin = text.rfind("\n", 0, at) + 1
            end = _next_line(text, at)
            yield text.count("\n", 0, at) + 1, text[begin:end].strip()
            at = end
        elif word is None:
            at = _next_line(text, at) if text[at] == "#" else at + 1
        else:
            at = word.end()


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
