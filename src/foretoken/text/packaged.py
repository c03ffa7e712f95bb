"""Prompts and text that ship with the package: excerpts of CPython's standard library.

`tools/python_text` cut them; the packaged models were trained on none of the modules that prompts
are of. Their licence lies beside the file.
"""

import json
from pathlib import Path
from typing import Literal, NamedTuple

from foretoken.errors import ConfigError

PATH = Path(__file__).parents[1] / "packaged" / "prompts.jsonl"
Kind = Literal["code", "edit", "text"]
"""Functions to go on with; code, a wish and the first line of the edited code; training text."""


class PackagedText(NamedTuple):
    """One of them, with the module and line that it is of."""

    name: str
    text: str


def packaged_texts(kind: Kind, count: int | None = None) -> tuple[PackagedText, ...]:
    """The first `count` of a kind, or all: 200 of code, 48 edits, 128 texts of about 512 tokens.
    Raises ConfigError: there are not so many."""
    rows = [json.loads(line) for line in PATH.read_text("utf-8").splitlines()]
    found = tuple(PackagedText(row["name"], row["text"]) for row in rows if row["kind"] == kind)
    if count is not None and count > len(found):
        raise ConfigError("count", count, f"at most {len(found)}, the packaged ones, or a file")
    return found[:count]
