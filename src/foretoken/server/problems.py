"""What can go wrong with an HTTP request, and how it is said: OpenAI's error shape.

Messages name the field, what was given and what is allowed; never a path, a key or a traceback.
"""

from collections.abc import Mapping
from typing import Any

from foretoken.errors import CapacityError, ContextError, ForetokenError, ModelError, RequestError

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
    501: "not_implemented_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class Problem(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        *,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """HTTP `status`, what to say, the field it is about, OpenAI's `code` if it has one."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self, request_id: str) -> dict[str, Any]:
        """The JSON that OpenAI would send, and the id to look for in the log."""
        other = "invalid_request_error" if self.status < 500 else "internal_server_error"
        return {
            "error": {
                "message": self.message,
                "type": _KINDS.get(self.status, other),
                "param": self.param,
                "code": self.code or self.status,
                "request_id": request_id,
            }
        }


def problem_of(error: ForetokenError) -> Problem:
    """The problem that an exception of our tree is to a client.

    A model's own troubles on disk are nobody's business outside, and are not described.
    """
    if isinstance(error, ModelError):
        return Problem(500, "the model cannot do this")
    param = error.field if isinstance(error, RequestError) else None
    over = isinstance(error, ContextError | CapacityError)
    code = "context_length_exceeded" if over else None
    return Problem(error.http_status, str(error), param, code=code)


def internal() -> Problem:
    """Something of ours broke; the log says what, under the request id."""
    return Problem(500, "internal error; the request id finds it in the server's log")


def draining() -> Problem:
    """The server has been told to stop: it takes nothing new, or ended what it had taken."""
    message = "the server is draining: it is going away, ask again elsewhere or later"
    return Problem(503, message, code="draining", headers={"retry-after": "5"})
