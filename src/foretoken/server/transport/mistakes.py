"""What is wrong with a body, in our words: the field as it was typed, what was given, what may be.

Pydantic says each mistake once for every form that a value could have had, and names those forms
in the place; here they are one mistake again, of the form that was meant.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json

from foretoken.errors import nearest, shown
from foretoken.server.problems import Problem

_KINDS = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_from_float": "an integer",
    "int_type": "an integer",
    "list_type": "a list",
    "model_type": "an object",
    "none_required": "null",
    "string_type": "a text",
}
"""What a value should have been at all."""
_LEAD = re.compile(r"^(Input|String|List|Dictionary) should (be |have |match )?")


def problem_of_body(error: ValidationError, kind: type[BaseModel], raw: bytes) -> Problem:
    """The first thing that is wrong with the body `raw` of `kind`, and how many more there are."""
    found = error.errors(include_url=False)
    if found[0]["type"] == "json_invalid":
        return Problem(400, f"the body is not valid JSON: {found[0]['msg']}"[:1000])
    if not found[0]["loc"]:
        return Problem(400, 'the body: a JSON object is wanted, such as {"prompt": "x"}')
    given = from_json(raw)
    # A field that is missing may be there by a misspelt name: what is said of that comes first.
    found.sort(key=lambda one: one["type"] == "missing")
    placed = [(_typed(one, given), one) for one in found]
    first = placed[0][0]
    same = [one for one in placed if one[0][: len(first)] == first]
    path = max((path for path, _ in same), key=len)
    message = _said([one for there, one in same if there == path], path, kind)
    more = _num_mistakes(path for path, _ in placed) - 1
    return Problem(400, message[:1000] + (f" (and {more} more)" if more else ""), _dotted(path))


def _num_mistakes(paths: Iterable[Sequence[str]]) -> int:
    """How many places are wrong; what is within one that is belongs to it."""
    places: set[tuple[str, ...]] = set()
    for path in paths:
        if not any(tuple(path[:depth]) in places for depth in range(len(path) + 1)):
            places.add(tuple(path))
    return len(places)


def _dotted(path: Sequence[str]) -> str:
    return ".".join(path)[:200]


def _typed(error: ErrorDetails, given: Any) -> list[str]:
    """The place of a mistake in what was given, without the names of forms."""
    path = []
    *places, last = error["loc"]
    for part in places:
        inside = part in given if isinstance(given, dict) else isinstance(part, int)
        if inside and isinstance(given, dict | list):
            path.append(str(part))
            given = given[part]  # type: ignore[index]
    known = last in given if isinstance(given, dict) else isinstance(last, int)
    return [*path, str(last)] if known or error["type"] == "missing" else path


def _said(errors: Sequence[ErrorDetails], path: Sequence[str], kind: type[BaseModel]) -> str:
    """What is wrong at one place, where a value may have one of several forms."""
    name, first = _dotted(path), errors[0]
    if first["type"] == "missing":
        return f"{name}: missing, and required"
    if first["type"] == "extra_forbidden":
        return _unknown(path, kind)
    given = first["input"]
    others = [one for one in errors if not _other_form(one)]
    allowed = " or ".join(dict.fromkeys(map(_allowed, others or errors)))
    return f"{name}: got {_given(given)}; allowed: {allowed}"


def _other_form(error: ErrorDetails) -> bool:
    """Whether the value was meant to have another form than the one that says this."""
    words = error["type"] == "literal_error" and isinstance(error["input"], dict | list)
    return words or error["type"] in _KINDS


def _allowed(error: ErrorDetails) -> str:
    if error["type"] in _KINDS:
        return _KINDS[error["type"]]
    ctx = error.get("ctx", {})
    if error["type"] == "literal_error":
        expected = str(ctx["expected"])
        return expected.lower() if expected in ("True", "False") else expected
    if error["type"] in ("too_long", "too_short"):
        most = ctx.get("max_length")
        return f"at most {most}" if most is not None else f"at least {ctx['min_length']}"
    return _LEAD.sub("", error["msg"])


def _given(value: Any) -> str:
    """What was given, by its size where that could be long."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return "an object" if isinstance(value, dict) else shown(value)


def _unknown(path: Sequence[str], kind: type[BaseModel]) -> str:
    *places, name = path
    model = kind
    for part in places:
        fields = model.model_fields.items()
        found = next((field for key, field in fields if part in (key, field.alias)), None)
        if found is not None:
            model = next(_models(found.annotation), model)
    known = [field.alias or key for key, field in model.model_fields.items()]
    near = nearest(name, known)
    hint = f"did you mean {near!r}?" if near else "allowed: " + ", ".join(known)
    where = _dotted(places) or "this request"
    return f"{_dotted(path)}: not a field of {where}; {hint}"


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The objects that a field of this annotation may be or hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)
