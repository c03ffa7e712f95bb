"""Prompts cut from held-out modules when they are asked for: code to complete, and code to edit.

Owns where prompts begin and end, and the documents that show code and then the same code edited.
Prompts end before a newline, never after it: a tokenizer joins a newline to the indentation that
follows, so a prompt that ends with one is no natural text. The prompts come from the reader's own
interpreter; those that ship with the package were cut once. Invariants: every prompt lies inside a
held-out module; every edit is a function of the text and the random generator alone.
"""

import keyword
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tools.python_text.stdlib import Prompt, SourceFile, held_out_files

CHARACTERS_PER_TOKEN = 3.4
FUNCTION = re.compile(r"^(?: {4})?(?:async )?def \w+", re.MULTILINE)
NAME = re.compile(r"\b[A-Za-z_][A-Za-z0-9_]{2,}\b")
NUMBER = re.compile(r"(?<![\w.])\d{1,4}(?![\w.])")
DEF_LINE = re.compile(r"^( *)def (\w+)\((.*)\):$", re.MULTILINE)
PARTS = ("new", "old", "first", "next", "local", "my", "base", "inner", "main", "raw")
WORDS = ("item", "value", "entry", "node", "data", "record", "result", "target", "source", "field")
OPTIONS = ("verbose=False", "timeout=None", "strict=True", "*, debug=False", "default=None")


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """What was asked for, and the text after it."""

    request: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EditDocument:
    """A text, the request, and the edited text; `head` ends where the edited text starts."""

    head: str
    edited: str

    @property
    def text(self) -> str:
        """The whole document."""
        return self.head + self.edited


def _rename(text: str, rng: random.Random) -> Edit | None:
    counts = Counter(NAME.findall(text))
    usual = [n for n, c in counts.items() if 2 <= c <= 40 and not keyword.iskeyword(n)]
    if not usual:
        return None
    old = rng.choice(sorted(usual))
    word = rng.choice(WORDS)
    new = rng.choice((f"{rng.choice(PARTS)}_{word}", f"{old}_{word}", f"{rng.choice(PARTS)}_{old}"))
    return Edit(request=f"rename {old} to {new}", text=re.sub(rf"\b{old}\b", new, text))


def _constant(text: str, rng: random.Random) -> Edit | None:
    numbers = sorted(set(NUMBER.findall(text)))
    if not numbers:
        return None
    old, new = rng.choice(numbers), str(rng.choice((2, 3, 5, 8, 10, 16, 20, 64, 100, 255, 1000)))
    return Edit(
        request=f"change {old} to {new}", text=re.sub(rf"(?<![\w.]){old}(?![\w.])", new, text)
    )


def _uncomment(text: str, rng: random.Random) -> Edit | None:
    kept = [line for line in text.split("\n") if not line.lstrip().startswith("#")]
    edited = "\n".join(kept)
    return None if edited == text else Edit(request="remove the comments", text=edited)


def _argument(text: str, rng: random.Random) -> Edit | None:
    found = [m for m in DEF_LINE.finditer(text) if "*" not in m[3] and m[3]]
    if not found:
        return None
    match, option = rng.choice(found), rng.choice(OPTIONS)
    line = f"{match[1]}def {match[2]}({match[3]}, {option}):"
    name = option.split("=")[0].removeprefix("*, ")
    return Edit(
        request=f"add the argument {name} to {match[2]}",
        text=text[: match.start()] + line + text[match.end() :],
    )


def _annotate(text: str, rng: random.Random) -> Edit | None:
    kind = rng.choice(("None", "str", "int", "bool", "object"))
    edited = DEF_LINE.sub(rf"\1def \2(\3) -> {kind}:", text)
    return None if edited == text else Edit(request=f"annotate results as {kind}", text=edited)


def _document(text: str, rng: random.Random) -> Edit | None:
    word = rng.choice(("Return the", "Set the", "Handle the", "Compute the"))
    edited = DEF_LINE.sub(
        lambda m: f'{m[0]}\n{m[1]}    """{word} {m[2].strip("_").replace("_", " ")}."""', text
    )
    return None if edited == text else Edit(request="add docstrings", text=edited)


def _log(text: str, rng: random.Random) -> Edit | None:
    call = rng.choice(("log.debug", "logger.info", "print", "trace"))
    edited = DEF_LINE.sub(rf"\g<0>\n\1    {call}('\2')", text)
    return None if edited == text else Edit(request=f"call {call} in functions", text=edited)


def _quotes(text: str, rng: random.Random) -> Edit | None:
    edited = re.sub(r"(?<!['\"\\])'([^'\"\\\n]*)'(?!['\"])", r'"\1"', text)
    return None if edited == text else Edit(request="use double quotes", text=edited)


def _nothing(text: str, rng: random.Random) -> Edit | None:
    return Edit(request="no change", text=text)


EDITS: tuple[Callable[[str, random.Random], Edit | None], ...] = (
    _rename, _rename, _rename, _constant, _constant, _uncomment, _argument, _argument, _annotate,
    _document, _log, _quotes, _nothing,
)  # fmt: skip


def edit_text(text: str, rng: random.Random) -> Edit:
    """Apply one edit that changes something, drawn with `rng`; a copy where none applies."""
    for make in rng.sample(EDITS, len(EDITS)):
        edit = make(text, rng)
        if edit is not None:
            return edit
    return Edit(request="no change", text=text)


def edit_document(text: str, rng: random.Random) -> EditDocument:
    """A document that shows `text`, names an edit, and shows the edited text."""
    text = text.strip("\n") + "\n"
    edit = edit_text(text, rng)
    return EditDocument(head=f"# original\n{text}# edited: {edit.request}\n", edited=edit.text)


def excerpt(text: str, length: int, rng: random.Random) -> str:
    """Whole lines of `text`, about `length` characters, from the start of a top-level statement."""
    starts = [m.start() for m in re.finditer(r"^(?:def|class|@|import|from|[a-zA-Z_])", text, re.M)]
    possible = [start for start in starts if start + length // 2 < len(text)] or [0]
    start = rng.choice(possible)
    piece = text[start : start + length]
    end = piece.rfind("\n")
    return piece[: end + 1] if end > 0 else piece


def _cut(file: SourceFile, characters: int, rest: int, rng: random.Random) -> Prompt | None:
    """A prompt that ends with a function's `def` line or its docstring's first line."""
    ends = []
    for match in FUNCTION.finditer(file.text):
        colon = file.text.find(":\n", match.start())
        end = colon + 1
        if file.text[end:].lstrip().startswith('"""'):
            end = file.text.find("\n", end + 1)
        if colon > 0 and end > characters and end + rest // 2 < len(file.text):
            ends.append(end)
    if not ends:
        return None
    end = rng.choice(ends)
    start = file.text.find("\n", end - characters) + 1
    return Prompt(
        name=f"{file.path}:{file.text.count(chr(10), 0, end)}",
        text=file.text[start:end],
        reference=file.text[end : end + rest],
    )


def heldout_prompts(
    count: int, *, tokens: int = 128, rest: int = 128, seed: int = 0, root: Path | None = None
) -> tuple[Prompt, ...]:
    """`count` prompts of about `tokens` tokens that end inside a function of a held-out module.

    `rest` is the length of the reference continuation, in tokens, about. The same arguments and
    interpreter give the same prompts. Raises ConfigError where the library's sources are missing.
    """
    rng = random.Random(seed)
    files = [file for file in held_out_files(root) if len(file.text) > 8000]
    found: list[Prompt] = []
    sizes = int(tokens * CHARACTERS_PER_TOKEN), int(rest * CHARACTERS_PER_TOKEN)
    while len(found) < count:
        rng.shuffle(files)
        cuts = [_cut(file, *sizes, rng) for file in files[: count - len(found)]]
        found += [cut for cut in cuts if cut is not None]
    return tuple(found)


def edit_prompts(
    count: int, *, tokens: int = 300, seed: int = 0, root: Path | None = None
) -> tuple[Prompt, ...]:
    """`count` prompts that show held-out code of about `tokens` tokens and name an edit of it.

    The prompt ends where the edited code starts, after its first line; the reference is the
    rest of the edited code.
    """
    rng = random.Random(seed)
    files = [file for file in held_out_files(root) if len(file.text) > 8000]
    found = []
    for index in range(count):
        file = rng.choice(files)
        document = edit_document(excerpt(file.text, int(tokens * CHARACTERS_PER_TOKEN), rng), rng)
        first = document.edited.find("\n")
        prompt = document.head + document.edited[:first]
        found.append(
            Prompt(name=f"edit {index} {file.path}", text=prompt, reference=document.edited[first:])
        )
    return tuple(found)
