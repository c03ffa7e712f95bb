"""GET and PUT /admin/speculation: read and narrow drafting for all requests, live.

Off unless the server was started with an admin key; `foretoken.server.access` asks for it.
"""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from foretoken.server.events import to_json
from foretoken.server.reading import read_body
from foretoken.server.schemas import SpeculationBody
from foretoken.server.state import ServerState, state_of
from foretoken.types import Speculation


async def read_speculation(request: Request) -> Response:
    """What is in force, what there is, and how it has done."""
    return Response(to_json(await _describe(state_of(request))), media_type="application/json")


async def write_speculation(request: Request) -> Response:
    """Put another policy in force from the next step on; fields left out are as configured."""
    state = state_of(request)
    body = await read_body(request, SpeculationBody, state.config.limits.max_body_bytes)
    policy = Speculation.of(body.model_dump())
    assert policy is not None, "made of a dictionary"
    await state.engine.call(lambda engine: engine.set_speculation(policy))
    return Response(to_json(await _describe(state)), media_type="application/json")


async def _describe(state: ServerState) -> dict[str, Any]:
    parts = state.engine.engine.parts
    policy = parts.live.speculation
    metrics = {metric.name: metric for metric in state.engine.engine.metrics.read()}
    names = ("acceptance_length", "draft_acceptance_rate", "draft_length")
    recent = {name: getattr(metrics[f"foretoken:recent_{name}"], "value", None) for name in names}
    return {
        "enabled": policy.enabled,
        "drafter": policy.drafter,
        "num_speculative_tokens": policy.num_speculative_tokens,
        "drafters": dict(parts.drafters),
        "last_minute": recent,
    }
