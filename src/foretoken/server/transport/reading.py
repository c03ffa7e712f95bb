"""From bytes to a checked body: size, number of values, JSON, fields.

Invariants: whatever a client sends, the answer is a body of the right type or a Problem; bodies
that have not come whole hold no more memory together than their `BodyRoom` has.
"""

import asyncio
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from foretoken.server.problems import Problem
from foretoken.server.transport.body_room import BodyRoom
from foretoken.server.transport.json_size import SMALL, check_json_size
from foretoken.server.transport.mistakes import problem_of_body

Body = TypeVar("Body", bound=BaseModel)


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
