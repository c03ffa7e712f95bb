"""/admin/speculation narrows drafting for all requests, live; /admin/corpora has texts for it.

Off unless the server was started with an admin key; `foretoken.server.access` asks for it.
"""

from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from foretoken.engine.engine import Engine
from foretoken.errors import named_as
from foretoken.proposers.choose.drafters import Drafters
from foretoken.proposers.lookup.suffix.proposer import SuffixProposer
from foretoken.proposers.lookup.suffix.texts import CachedText
from foretoken.server.problems import Problem
from foretoken.server.requests.prompt_ids import encode
from foretoken.server.schemas import CorpusBody, SpeculationBody
from foretoken.server.state import ServerState, salt_from, state_of, tenant_of
from foretoken.server.transport.events import json_response
from foretoken.server.transport.reading import read_body
from foretoken.types import Speculation


async def read_speculation(request: Request) -> Response:
    """What is in force, what there is, and how it has done."""
    return json_response(await _describe(state_of(request)))


async def write_speculation(request: Request) -> Response:
    """Put another policy in force from the next step on; fields left out are as configured."""
    state = state_of(request)
    body = await read_body(request, SpeculationBody, state.config.limits.max_body_bytes)
    with named_as({"speculation": ""}):
        policy = Speculation.of(body.model_dump())
        assert policy is not None, "made of a dictionary"
        await state.engine.call(lambda engine: engine.set_speculation(policy))
    return json_response(await _describe(state))


async def _describe(state: ServerState) -> dict[str, Any]:
    parts = state.engine.engine.parts
    policy = parts.controller.live.speculation
    metrics = {metric.name: metric for metric in state.engine.engine.metrics.read()}
    names = ("acceptance_length", "draft_acceptance_rate", "draft_length")
    control = await state.engine.call(_control)
    models = await state.engine.call(lambda engine: engine.parts.controller.models())
    recent = {name: getattr(metrics[f"foretoken:recent_{name}"], "value", None) for name in names}
    return {
        **asdict(policy),
        "drafters": dict(parts.intake.drafters),
        "last_minute": recent,
        "control": control,
        "models": models,
        "audit": None if state.auditor is None else state.auditor.describe(),
    }


def _control(engine: Engine) -> dict[str, Any] | None:
    """What control does and why, with what steps are expected to take; None: nothing drafts."""
    journal = engine.parts.controller.journal
    if journal is None:
        return None
    return {**journal.describe(), "step_by_rows": journal.step_by_rows()}


_AT_ONCE = 4096
"""Tokens that are indexed between two steps: a few milliseconds."""


async def list_corpora(request: Request) -> Response:
    """Texts for suffix drafting, by name, with their tokens."""
    state = state_of(request)
    found = await state.engine.call(lambda engine: dict(_suffix(engine).corpora))
    return json_response({"corpora": found})


async def put_corpus(request: Request) -> Response:
    """Draft from a text, for the requests of one salt (and API key); replaces one of its name. If
    its own is replaced or removed while it is indexed, that ends with 409."""
    state, name = state_of(request), request.path_params["name"]
    body = await read_body(request, CorpusBody, state.config.limits.max_body_bytes)
    salt = _salt(state, body)
    ids = await encode(state, body.text, special=False)
    text: CachedText = await state.engine.call(
        lambda engine: _suffix(engine).add_corpus(name, salt, ids[:_AT_ONCE])
    )

    async def extend(part: list[int]) -> bool:
        return await state.engine.call(lambda engine: _suffix(engine).extend_corpus(text, part))

    for start in range(_AT_ONCE, len(ids), _AT_ONCE):
        if not await extend(ids[start : start + _AT_ONCE]):
            raise Problem(409, f"corpus: {name[:100]!r} was replaced or removed meanwhile")
    return json_response({"name": name, "tokens": len(ids)})


async def delete_corpus(request: Request) -> Response:
    """Forget a text."""
    state, name = state_of(request), request.path_params["name"]
    if not await state.engine.call(lambda engine: _suffix(engine).remove_corpus(name)):
        raise Problem(404, f"corpus: got {name[:100]!r}, which there is not")
    return json_response({"name": name})


def _salt(state: ServerState, body: CorpusBody) -> str | None:
    if not state.config.api_keys:
        return salt_from(None, body.cache_salt)
    if body.api_key not in state.config.api_keys:
        raise Problem(400, "api_key: name the key whose requests may see the text", "api_key")
    return salt_from(tenant_of(body.api_key or ""), body.cache_salt)


def _suffix(engine: Engine) -> SuffixProposer:
    """The engine's suffix drafter. Raises Problem: 400, it has none."""
    drafters = engine.parts.proposer
    assert isinstance(drafters, Drafters), type(drafters)
    for member in drafters.members.values():
        if isinstance(member.proposer, SuffixProposer):
            return member.proposer
    raise Problem(400, "no drafter here uses texts: start the server with --spec-method suffix")
