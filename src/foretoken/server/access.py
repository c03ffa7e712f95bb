"""The outermost layer: request ids, hosts, API keys, the access log, and errors as JSON.

A plain ASGI middleware. Invariants: every answer has an x-request-id; a key is compared in
constant time and never logged; an exception becomes 500 without its text.
"""

import hmac
import ipaddress
import logging
import re
import time
import uuid
from collections.abc import Sequence

from prometheus_client import Counter
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foretoken.errors import ForetokenError
from foretoken.server.observing.log_lines import milliseconds
from foretoken.server.problems import Problem, internal, problem_of
from foretoken.server.replica_protocol.origin import INTERNAL_HEADER, RequestOrigin
from foretoken.server.settings import ServerConfig
from foretoken.server.state import request_id_of, tenant_of
from foretoken.server.transport.events import to_json
from foretoken.server.transport.reading import BodyRoom

logger = logging.getLogger("foretoken.access")

_WATCHING = ("/health", "/ping", "/health/live", "/health/ready", "/version", "/metrics")
_OPEN = (*_WATCHING, "/", "/control")
_INTERNAL_BELOW = "/internal/"
_OPEN_BELOW = ("/page/", _INTERNAL_BELOW)
"""Without an API key; what is internal asks for the internal key itself."""
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_LABEL = r"[a-z0-9_-]{1,63}"
_HOST = re.compile(
    rf"(\[(?P<v6>[0-9a-f]*:[0-9a-f:.]*)\]|(?P<name>{_LABEL}(\.{_LABEL})*)\.?)(:[0-9]{{0,5}})?",
    re.ASCII | re.IGNORECASE,
)
"""An address of version 6 in brackets, or a name or address of version 4; a port or none."""


def is_own(host: str, allowed: Sequence[str]) -> bool:
    """Whether a request with this Host header may be meant for us.

    A page of a foreign site can have its own name resolve to this machine (DNS rebinding), and then
    asks this server as if it were its own; the Host header still says the foreign name.

    An address, `localhost`, a name without a dot (nobody outside can register one) and the names of
    `allowed` are; `*.example.com` allows names below it, `*` all. So is a missing header, which
    browsers never leave out.
    """
    if not host or "*" in allowed:
        return True
    name = host_name(host)
    if name is None:
        return False
    if "." not in name or name.endswith(".localhost") or _is_address(name):
        return True
    return any(_is_named(name, one) for one in allowed)


def host_name(host: str) -> str | None:
    """The name or address in a Host header, in the one way to write it; None: it is malformed."""
    found = _HOST.fullmatch(host)
    if found is None or (found["v6"] is not None and not _is_address(found["v6"])):
        return None
    return str(found["v6"] or found["name"]).lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_named(name: str, allowed: str) -> bool:
    """Whether a name is one that was allowed, which may have been written with a port."""
    if allowed.startswith("*."):
        below = host_name(allowed[2:])
        return below is not None and name.endswith("." + below)
    return name == host_name(allowed)


class Access:
    """Wraps the app."""

    def __init__(
        self, app: ASGIApp, config: ServerConfig, answers: Counter, paths: Sequence[str]
    ) -> None:
        """`answers` counts by path and status; `paths` are the templates of those paths."""
        self._app = app
        self._config = config
        self._answers = answers
        self._paths = frozenset(paths)
        self._bodies = BodyRoom(config.limits.max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        own = headers.get("x-request-id", "")
        request_id = own if _ID.fullmatch(own) else uuid.uuid4().hex
        scope["foretoken.request_id"] = request_id
        scope["foretoken.bodies"] = self._bodies
        began, status, started = time.perf_counter(), 500, False

        async def tagged(message: Message) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                started, status = True, message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            self._check_host(scope["path"], headers)
            self._admit(scope, headers)
            await self._app(scope, receive, tagged)
        except Exception as error:
            if not isinstance(error, Problem):
                logger.exception("request %s failed", request_id)
            if not started:
                response = await as_response(Request(scope), error)
                await response(scope, receive, tagged)
        finally:
            self._record(scope, status, time.perf_counter() - began, request_id)

    def _admit(self, scope: Scope, headers: Headers) -> None:
        """Say whose a request is; the front of several replicas has asked for the key itself."""
        key = self._config.internal_key
        internal = key is not None and _matches(headers.get(INTERNAL_HEADER, ""), (key,))
        origin = RequestOrigin.of(headers) if internal else None
        tenant = self._authorize(scope["path"], headers) if origin is None else origin.tenant
        scope["foretoken.internal"], scope["foretoken.origin"] = internal, origin
        scope["foretoken.tenant"] = tenant

    def _check_host(self, path: str, headers: Headers) -> None:
        """Raise a Problem (403) for a name that is not ours, where no key protects us."""
        host = headers.get("host", "")
        named = (*self._config.allowed_hosts, self._config.host)
        if self._config.api_keys or path in _WATCHING or is_own(host, named):
            return
        allowed = "an address, localhost, or a name given with --allowed-host; or use --api-key"
        raise Problem(403, f"host: got {host[:200]!r}; allowed: {allowed}", code="foreign_host")

    def _authorize(self, path: str, headers: Headers) -> str | None:
        """The tenant that the key stands for, None if no key is asked for. Raises Problem: 401, the
        key does not open the path."""
        given = _token(headers.get("authorization", ""))
        if path.startswith("/admin"):
            key = self._config.admin_key
            if key is None:
                raise Problem(404, "there is no /admin: the server was started without its key")
            if not _matches(given, (key,)):
                raise Problem(401, "the admin key is needed", code="invalid_api_key")
            return None
        keys = self._config.api_keys
        if not keys or path in _OPEN or path.startswith(_OPEN_BELOW):
            return None
        if not _matches(given, keys):
            message = "a valid API key is needed: `Authorization: Bearer KEY`"
            wanted = {"www-authenticate": "Bearer"}
            raise Problem(401, message, code="invalid_api_key", headers=wanted)
        return tenant_of(given)

    def _record(self, scope: Scope, status: int, seconds: float, request_id: str) -> None:
        path = scope["path"] if scope["path"] in self._paths else "other"
        self._answers.labels(path, str(status)).inc()
        facts = {
            "request_id": request_id,
            "method": scope["method"],
            "path": path,
            "status": status,
            "ms": milliseconds(seconds),
        }
        quiet = status < 400 and (path in _OPEN or path.startswith(_INTERNAL_BELOW))
        logger.log(logging.DEBUG if quiet else logging.INFO, "http", extra={"facts": facts})


def _token(authorization: str) -> str:
    """The key of an Authorization header; the word before it in any case."""
    scheme, _, key = authorization.strip().partition(" ")
    return key.strip() if scheme.lower() == "bearer" else authorization


def _matches(given: str, keys: Sequence[str]) -> bool:
    """Whether `given` is one of the keys; the time tells neither which nor how nearly."""
    found = [hmac.compare_digest(given.encode(), key.encode()) for key in keys]
    return any(found)


async def as_response(request: Request, error: Exception) -> Response:
    """The answer to a request that ended in an exception; unknown ones tell nothing."""
    problem = internal()
    if isinstance(error, Problem):
        problem = error
    elif isinstance(error, ForetokenError):
        problem = problem_of(error)
    elif isinstance(error, HTTPException):
        what = f"{request.method} {request.url.path[:200]}: {error.detail}"
        problem = Problem(error.status_code, what, headers=error.headers)
    body = to_json(problem.body(request_id_of(request)))
    return Response(body, problem.status, problem.headers, media_type="application/json")
