"""From bytes to a checked body: size, number of values, JSON, fields.

Invariants: whatever a client sends, the answer is a body of the right type or a Problem; bodies
that have not come whole hold no more memory together than their `BodyRoom` has.
"""

import asyncio
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from foretoken.errors import nearest
from foretoken.server.problems import Problem
from foretoken.server.transport.body_room import BodyRoom
from foretoken.server.transport.json_size import SMALL, check_json_size

Body = TypeVar("Body", bound=BaseModel)


async def read_body(request: Request, kind: type[Body], max_bytes: int) -> Body:
    """Read a request's JSON as `kind`.

    Raises:
        Problem: 413 too large, 415 not JSON, 400 malformed, with wrong fields or too
            many values, 499 gone, 503 no room.
    """
    return as_body(await read_json(request, max_bytes), kind)


async def read_json(request: Request, max_bytes: int) -> bytes:
    """A request's body, if it says that it is JSON and has no more values than are read at once.

    Raises:
        Problem: 413 too large, 415 not JSON, 400 too many values, 499 gone, 503 no room.
    """
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
        raise _problem(error, kind) from None


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


def _problem(error: ValidationError, kind: type[BaseModel]) -> Problem:
    """The first thing that is wrong, and how many more there are."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    first = found[0]
    path = [str(part) for part in first["loc"]]
    param = ".".join(path) or None
    if first["type"] == "extra_forbidden" and len(path) == 1:
        message = _unknown(path[0], kind)
    elif first["type"] == "json_invalid":
        message = f"the body is not valid JSON: {first['msg']}"
    elif param is None:
        message = 'the body: a JSON object is wanted, such as {"prompt": "x"}'
    else:
        message = f"{param}: {first['msg']}"
    if len(found) > 1:
        message += f" (and {len(found) - 1} more)"
    return Problem(400, message[:1000], param[:200] if param else None)


def _unknown(name: str, kind: type[BaseModel]) -> str:
    near = nearest(name, kind.model_fields)
    hint = f"did you mean {near!r}?" if near else "allowed: " + ", ".join(kind.model_fields)
    return f"{name[:100]}: not a field of this request; {hint}"


def json_schema(kinds: list[type[BaseModel]]) -> dict[str, Any]:
    """JSON schemas of bodies, by name, for the OpenAPI document."""
    from pydantic.json_schema import models_json_schema

    _, schema = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template="#/components/schemas/{model}"
    )
    return dict(schema["$defs"])
