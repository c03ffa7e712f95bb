"""From bytes to a checked body: size, number of values, JSON, fields.

Invariants: whatever a client sends, the answer is a body of the right type or a Problem; bodies
that have not come whole hold no more memory together than their `BodyRoom` has.

How many values a body holds is found without reading it as JSON. Reading millions of tiny values
takes seconds in which no other Python runs, the engine's thread included; one long text takes none.
So what is bounded is the number of values, not of bytes.

`BodyRoom` bounds what the bodies may hold together that have not come whole. When there is no room
for more, the body goes whose sender has been silent longest, with 503 and `retry-after`: whoever
sends is served, whoever stalls makes room. Invariant: the bytes held are at most the room's; small
bodies are not counted, so that they always get in.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple, TypeVar, final, get_args

import numpy as np
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import ClientDisconnect, Request

from foretoken.errors import nearest, shown
from foretoken.server.problems import Problem

SMALL = 1 << 16
"""Bytes of a body that are read in a few milliseconds, whatever they are."""


class JsonSize(NamedTuple):
    """What stands in a body outside of its strings."""

    values: int
    """Commas: one less than the values of each list and object."""
    members: int
    """Colons: names of objects."""
    nests: int
    """Lists and objects."""


MOST = JsonSize(values=1 << 18, members=1 << 14, nests=1 << 13)
"""Read in some tens of milliseconds; a token array has one value a token."""


def json_size(raw: bytes) -> JsonSize:
    """Count; a body that is not JSON gives some counts too."""
    # Escapes first, two backslashes before a quotation mark: each mark left opens or ends a string.
    plain = raw.replace(rb"\\", b"").replace(rb"\"", b"") if b"\\" in raw else raw
    signs = np.frombuffer(plain, dtype=np.uint8)
    inside = np.bitwise_xor.accumulate((signs == ord('"')).view(np.uint8)).view(np.bool_)

    def outside(sign: str) -> int:
        return int(np.count_nonzero((signs == ord(sign)) > inside))

    return JsonSize(values=outside(","), members=outside(":"), nests=outside("[") + outside("{"))


def check_json_size(raw: bytes) -> None:
    """Raise a Problem (400) for a body with more values than are read at once."""
    at_most = JsonSize(raw.count(b","), raw.count(b":"), raw.count(b"[") + raw.count(b"{"))
    if all(given <= most for given, most in zip(at_most, MOST, strict=True)):
        return
    names = ("values", "members of objects", "lists and objects")
    for name, given, most in zip(names, json_size(raw), MOST, strict=True):
        if given > most:
            raise Problem(400, f"the body has {given:,} {name}; allowed: {most:,}")


LARGEST_BODIES = 16
"""Bodies of the largest size that there is room for."""


@final
class BodyRoom:
    """What all connections of a server share."""

    def __init__(self, max_body_bytes: int) -> None:
        """Nobody has sent anything; no body is larger than `max_body_bytes`."""
        self.most_bytes = LARGEST_BODIES * max_body_bytes
        self.held_bytes = 0
        self._large: dict[IncomingBody, None] = {}
        """Bodies that are counted; who has just sent something stands last."""

    @contextmanager
    def body(self) -> Iterator["IncomingBody"]:
        """A body that begins to come; it holds nothing behind the block."""
        body = IncomingBody(self)
        try:
            yield body
        finally:
            self.leave(body)

    def take(self, body: "IncomingBody", more_bytes: int) -> None:
        """`body` grows; others may have to go for it."""
        self._large.pop(body, None)
        while self._large and self.held_bytes + more_bytes > self.most_bytes:
            silent = next(iter(self._large))
            self.leave(silent)
            silent.drop()
        self.held_bytes += more_bytes
        self._large[body] = None

    def leave(self, body: "IncomingBody") -> None:
        if body in self._large:
            del self._large[body]
            self.held_bytes -= len(body.raw)


@final
class IncomingBody:
    """One body while it comes; `BodyRoom.body` gives it."""

    def __init__(self, room: BodyRoom) -> None:
        self.raw = bytearray()
        self._room = room
        self._waiting: asyncio.Timeout | None = None
        self._dropped = False

    def add(self, chunk: bytes) -> None:
        size, more = len(self.raw), len(chunk)
        if size + more > SMALL:
            self._room.take(self, more if size > SMALL else size + more)
        self.raw += chunk

    @asynccontextmanager
    async def unless_dropped(self) -> AsyncIterator[None]:
        """The reading of it. Raises Problem: 503, it had to make room."""
        try:
            async with asyncio.timeout(None) as self._waiting:
                yield
        except TimeoutError:
            if not self._dropped:
                raise
            message = "there is no room for a body that comes so slowly just now; send it again"
            headers = {"retry-after": "1", "connection": "close"}
            raise Problem(503, message, headers=headers) from None

    def drop(self) -> None:
        """Make room for others."""
        self.raw = bytearray()
        self._dropped = True
        if self._waiting is not None:
            self._waiting.reschedule(asyncio.get_running_loop().time())


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
    """Read a request's JSON as `kind`. Raises Problem: 413 too large, 415 not JSON or compressed,
    400 malformed, with wrong fields or too many values, 499 gone, 503 no room."""
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
    """JSON as `kind`. Raises Problem: 400, malformed, or with wrong fields."""
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
