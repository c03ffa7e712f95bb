"""From bytes to a checked body: size, number of values, JSON, fields.

Invariants: whatever a client sends, the answer is a body of the right type or a Problem; bodies
that have not come whole hold no more memory together than their `BodyRoom` has.
"""

import asyncio
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import ClientDisconnect, Request

from foretoken.errors import nearest, shown
from foretoken.server.problems import Problem
from foretoken.server.transport.body_room import BodyRoom
from foretoken.server.transport.json_size import SMALL, check_json_size

Body = TypeVar("Body", bound=BaseModel)
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
    """The first thing that is wrong with the body `raw` of `kind`, and how many more there are.

    Pydantic says each mistake once for every form that a value could have had, and names those
    forms in the place; here they are one mistake again, of the form that was meant.
    """
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


async def read_body(request: Request, kind: type[Body], max_bytes: int) -> Body:
    """Read a request's JSON as `kind`.

    Raises:
        Problem: 413 too large, 415 not JSON or compressed, 400 malformed, with wrong fields or too
            many values, 499 gone, 503 no room.
    """
    return as_body(await read_json(request, max_bytes), kind)


async def read_json(request: Request, max_bytes: int) -> bytes:
    """A request's body, if it says that it is JSON and has no more values than are read at once.

    Raises:
        Problem: 413 too large, 415 not JSON or compressed, 400 too many values, 499 gone, 503 no
            room.
    """
    codings = ", ".join(request.headers.getlist("content-encoding")).strip().lower()
    if codings not in ("", "identity"):
        allowed = "identity: a body is not compressed"
        headers = {"accept-encoding": "identity"}
        raise Problem(415, f"content-encoding: got {codings[:200]!r}; allowed: {allowed}",
                      headers=headers)  # fmt: skip
    unsaid = "application/json" if request.scope["foretoken.tenant"] is not None else ""
    media = request.headers.get("content-type", unsaid).split(";")[0].strip().lower()
    if media != "application/json":
        allowed = "application/json (curl: -H 'content-type: application/json')"
        raise Problem(415, f"content-type: got {media!r}; allowed: {allowed}")
    raw = await _read(request, max_bytes)
    if len(raw) > SMALL:
        await asyncio.to_thread(check_json_size, raw)
    return raw


def as_body(raw: bytes, kind: type[Body]) -> Body:
    """JSON as `kind`.

    Raises:
        Problem: 400, malformed, or with wrong fields.
    """
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise problem_of_body(error, kind, raw) from None


async def _read(request: Request, max_bytes: int) -> bytes:
    """The body, of which no more than `max_bytes` is ever held."""
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and len(announced) < 20 and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    room: BodyRoom = request.scope["foretoken.bodies"]
    with room.body() as body:
        try:
            async with body.unless_dropped():
                async for chunk in request.stream():
                    body.add(chunk)
                    if len(body.raw) > max_bytes:
                        raise _too_large(max_bytes)
        except ClientDisconnect:
            raise Problem(499, "the client has gone") from None
        return bytes(body.raw)


def _too_large(max_bytes: int) -> Problem:
    return Problem(
        413, f"the body is larger than {max_bytes} bytes", headers={"connection": "close"}
    )


def json_schema(kinds: list[type[BaseModel]]) -> dict[str, Any]:
    """JSON schemas of bodies, by name, for the OpenAPI document."""
    from pydantic.json_schema import models_json_schema

    _, schema = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template="#/components/schemas/{model}"
    )
    return dict(schema["$defs"])
