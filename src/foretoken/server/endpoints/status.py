"""GET endpoints that say how the server is: health, version, models, metrics, OpenAPI; and the
playground at / and /page/..., plain files out of the package, nothing from elsewhere.
"""

from importlib import resources
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

import foretoken
from foretoken.server.problems import Problem, draining
from foretoken.server.requests.prompt_ids import check_model
from foretoken.server.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from foretoken.server.state import state_of
from foretoken.server.transport.events import json_response
from foretoken.server.transport.reading import json_schema

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_FILES = (
    "index.html", "style.css", "app.js", "ask.js", "pane.js", "verdict.js", "examples.js",
    "live.js", "charts.js", "metrics.js", "control.js",
)  # fmt: skip
_POLICY = "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'"


async def page(request: Request) -> Response:
    """A file of the page; `/` is index.html."""
    name = request.path_params.get("name", "index.html")
    if name not in _FILES:
        raise Problem(404, f"page: got {name[:100]!r}; allowed: {', '.join(_FILES)}")
    content = resources.files("foretoken.server").joinpath("page_files", name).read_bytes()
    headers = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff"}
    suffix = name[name.rindex(".") :]
    return Response(content, headers=headers, media_type=_TYPES[suffix] + "; charset=utf-8")


async def health(request: Request) -> Response:
    """200 while the server can take requests; as /health, /health/ready."""
    await live(request)
    if state_of(request).draining():
        raise draining()
    return json_response({"status": "ready"})


async def live(request: Request) -> Response:
    """200 while the process is worth keeping, draining included; as /health/live."""
    state = state_of(request)
    if not state.engine.alive:
        raise Problem(503, "the engine has stopped")
    return json_response({"status": "live"})


async def version(request: Request) -> Response:
    """The version of Foretoken, what it serves and how it speculates."""
    state = state_of(request)
    return json_response(
        {
            "version": foretoken.__version__,
            "model": state.model_names[0],
            "speculation": state.speculation,
            "block_drafters": sorted(state.engine.engine.parts.block_drafters),
        }
    )


async def models(request: Request) -> Response:
    """The names that requests may give."""
    state, wanted = state_of(request), request.path_params.get("name")
    check_model(state, wanted)
    entries = [
        {
            "id": name,
            "object": "model",
            "created": state.created,
            "owned_by": "foretoken",
            "root": state.model_names[0],
            "parent": None,
            "max_model_len": state.max_model_len,
        }
        for name in (state.model_names if wanted is None else (wanted,))
    ]
    if wanted is not None:
        return json_response(entries[0])
    return json_response({"object": "list", "data": entries})


async def metrics(request: Request) -> Response:
    """Prometheus text."""
    return Response(state_of(request).metrics.render(), media_type=CONTENT_TYPE_LATEST)


async def control(request: Request) -> Response:
    """What control does and why, for the page; nothing of single requests."""
    journal = state_of(request).engine.engine.parts.controller.journal
    return json_response(None if journal is None else journal.describe())


async def not_built(request: Request) -> Response:
    """What OpenAI has and this server has not. 404, since clients ask again after a 501."""
    instead = "use /v1/chat/completions or /v1/completions"
    raise Problem(404, f"{request.url.path}: not built; {instead}", code="not_built")


_POSTS: dict[str, tuple[type[BaseModel], str]] = {
    "/v1/completions": (CompletionBody, "Continue prompts"),
    "/v1/chat/completions": (ChatBody, "Answer a conversation"),
    "/tokenize": (TokenizeBody, "Token ids of a text"),
    "/detokenize": (DetokenizeBody, "The text of token ids"),
}
_GETS = {
    "/v1/models": "The models served",
    "/health": "Whether the server takes requests",
    "/health/live": "Whether the process is alive",
    "/health/ready": "Whether the server takes requests",
    "/version": "The version",
    "/metrics": "Prometheus metrics",
    "/control": "How far drafts go now, and why",
}


def openapi_document() -> dict[str, Any]:
    """The OpenAPI document: paths, and the schemas of bodies as pydantic has them."""
    error = {"description": "An error in OpenAI's shape"}
    responses = {"200": {"description": "Done"}, "default": error}
    paths: dict[str, Any] = {}
    for path, (kind, summary) in _POSTS.items():
        schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[path] = {"post": {"summary": summary, "requestBody": body, "responses": responses}}
    for path, summary in _GETS.items():
        paths[path] = {"get": {"summary": summary, "responses": responses}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Foretoken", "version": foretoken.__version__},
        "paths": paths,
        "components": {"schemas": json_schema([kind for kind, _ in _POSTS.values()])},
    }


async def openapi(request: Request) -> Response:
    """The same as an answer."""
    return json_response(openapi_document())
