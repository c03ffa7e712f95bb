"""What the output of one request must look like: vLLM's structured outputs, every value checked.

Knows no tokens; whether a schema or a grammar makes sense is checked where it is compiled.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from foretoken.errors import ParameterError
from foretoken.types.scalars import record_of

MOST_CHARACTERS = 1 << 17
KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """Exactly one of the five kinds; names as in vLLM. Raises ParameterError: none or several
    kinds, or a value of the wrong type or size."""

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as a dictionary or as text; kept as text."""
    regex: str | None = None
    """A regular expression that the whole output matches."""
    choice: Sequence[str] | None = None
    """The output is one of these texts."""
    grammar: str | None = None
    """A context-free grammar: Lark as llguidance reads it, or GBNF."""
    json_object: bool | None = None
    """True: any JSON object."""
    disable_any_whitespace: bool = False
    """JSON without whitespace between its parts."""

    @classmethod
    def of(cls, given: object) -> Self | None:
        """Read what a user wrote: None, a dictionary with these keys, or an object of this class.
        Raises ParameterError: something else, or an unknown key."""
        return None if given is None else record_of(cls, given, "structured_outputs", "None or ")

    def __post_init__(self) -> None:
        """Check types and sizes; turn a schema into text and choices into a tuple."""
        given = [name for name in KINDS if self._has(name)]
        _check("", given, len(given) == 1, f"exactly one of {', '.join(KINDS)}")
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        if self.choice is not None:
            listed = isinstance(self.choice, Sequence) and not isinstance(self.choice, str)
            ok = listed and all(isinstance(text, str) and text for text in self.choice)
            _check(".choice", self.choice, ok and bool(self.choice), "a list of non-empty texts")
            object.__setattr__(self, "choice", tuple(self.choice))
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            _check(f".{name}", value, value is None or isinstance(value, str), "a text")
        ok = self.json_object is None or isinstance(self.json_object, bool)
        _check(".json_object", self.json_object, ok, "True or None")
        ok = isinstance(self.disable_any_whitespace, bool)
        _check(".disable_any_whitespace", self.disable_any_whitespace, ok, "True or False")
        size = len(self.source)
        _check("", f"{size} characters", size <= MOST_CHARACTERS, f"at most {MOST_CHARACTERS}")

    @property
    def kind(self) -> str:
        """Which of KINDS it is."""
        return next(name for name in KINDS if self._has(name))

    def _has(self, name: str) -> bool:
        value = getattr(self, name)
        return value is not None and value is not False

    @property
    def source(self) -> str:
        """The schema, expression, grammar, or choices as text."""
        if self.choice is not None:
            return json.dumps(list(self.choice))
        if self.json_object:
            return '{"type": "object"}'
        value = getattr(self, self.kind)
        assert isinstance(value, str), (self.kind, type(value))
        return value


def _schema(given: object) -> str:
    allowed = "a JSON schema: an object, or its text"
    if isinstance(given, Mapping):
        try:
            return json.dumps(given, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            raise ParameterError("structured_outputs.json", "...", allowed) from None
    _check(".json", given, isinstance(given, str), allowed)
    assert isinstance(given, str), "just checked"
    try:
        ok = isinstance(json.loads(given), Mapping)
    except (ValueError, RecursionError):
        ok = False
    _check(".json", given, ok, allowed)
    return given


def _check(name: str, given: object, ok: bool, allowed: str) -> None:
    if not ok:
        raise ParameterError(f"structured_outputs{name}", given, allowed)
