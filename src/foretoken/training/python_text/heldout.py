"""Prompts cut from held-out modules when they are asked for.

Owns where prompts begin and end. They end before a newline, never after it: a tokenizer joins a
newline to the indentation that follows, so a prompt that ends with one is no natural text. No text
of the standard library is stored: the prompts come from the reader's own interpreter. Invariant:
every prompt lies inside a held-out module.
"""

import random
import re
from pathlib import Path

from foretoken.training.python_text.edits import edit_document, excerpt
from foretoken.training.python_text.library import Prompt, SourceFile, held_out_files

CHARACTERS_PER_TOKEN = 3.4
FUNCTION = re.compile(r"^(?: {4})?(?:async )?def \w+", re.MULTILINE)


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
