"""Values of options: numbers, JSON, and what a text does not say.

Expressions of a script and variables of a shell are unknown here; how they stand in the JSON of a
command and come back in it. Knows no engine.
"""

import json
import re
import shlex
from dataclasses import dataclass
from typing import Any

_REFERENCE = re.compile(r"\$(?:\(\([^()]*\)\)|\([^()]*\)|\{[^{}]*\}|\w+)")
_IN_JSON = re.compile(rf'("(?:[^"\\]|\\.)*")|({_REFERENCE.pattern})')
_IN_SINGLE_QUOTES = re.compile("'[^']*'")
_MARK = "\0"
_MARKED = re.compile(r'"\\u0000((?:[^"\\]|\\.)*)"')
_NUMBERS = (
    "num_speculative_tokens",
    "draft_tensor_parallel_size",
    "prompt_lookup_max",
    "prompt_lookup_min",
    "max_model_len",
)
"""Keys whose value is a number, so that a variable in its place has no quotes."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A value that only running the script would tell."""

    source: str

    def __str__(self) -> str:
        """As it was written."""
        return self.source


def is_unsaid(value: object) -> bool:
    """Whether only running tells what a value is."""
    whole = isinstance(value, str) and _REFERENCE.fullmatch(value.strip()) is not None
    return whole or isinstance(value, Expression)


def one_more(value: object) -> object:
    """The number after one that is unsaid, as its language writes it."""
    if isinstance(value, Expression):
        return Expression(f"{value.source} + 1")
    return f"$(({str(value).strip('${}()')} + 1))"


def read_json(text: str, raw: str = "") -> Any:
    """JSON in which variables may stand for numbers; each becomes its name as text.

    Args:
        text: what the program gets, with variables as they stand.
        raw: how it was written; in single quotes a shell fills in nothing.

    Raises:
        ValueError: it is no JSON, whatever the variables are.
    """
    written = raw or text
    filled = written if written.startswith('"') else _IN_SINGLE_QUOTES.sub("", written)
    if "$" not in filled:
        return json.loads(text)
    return json.loads(_IN_JSON.sub(lambda match: match[1] or json.dumps(match[2]), text))


def json_text(value: Any) -> str:
    """JSON of a value, with variables as they have to stand: numbers without quotes."""
    text = json.dumps(_marked(value), default=lambda one: f"{_MARK}{one}")
    return _MARKED.sub(lambda match: match[1], text)


def json_for_shell(value: Any) -> str:
    """The same, quoted for a shell that fills the variables in."""
    return _REFERENCE.sub(lambda match: f"'\"{match[0]}\"'", shlex.quote(json_text(value)))


def _marked(value: Any, *, number: bool = False) -> Any:
    if isinstance(value, dict):
        return {key: _marked(one, number=key in _NUMBERS) for key, one in value.items()}
    if isinstance(value, list):
        return [_marked(one, number=True) for one in value]
    return Expression(value) if number and is_unsaid(value) and isinstance(value, str) else value


def number(value: object) -> int | None:
    """A value as an integer, if it is one."""
    try:
        return None if isinstance(value, bool) else int(str(value))
    except ValueError:
        return None


def typed(value: Any) -> Any:
    """A text of a command line as the JSON value that it is, if it is one."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def as_text(value: Any) -> str:
    """A value as a word of a command."""
    return json_text(value) if isinstance(value, dict | list) else str(value)
