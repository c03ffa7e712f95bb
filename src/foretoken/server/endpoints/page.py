"""GET / and /page/...: the playground, plain files out of the package, nothing from elsewhere."""

from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

from foretoken.server.problems import Problem

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
