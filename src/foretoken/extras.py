"""Which optional packages belong to which extra of the installation.

Owns the table, which says what pyproject.toml says (a guard test compares them), and the error of
a package that is not there. Knows nothing of what the packages are for, and imports none of them.
"""

from importlib.util import find_spec
from types import TracebackType

from foretoken.errors import MissingPackageError

EXTRA_OF = {
    "datasets": "data",
    "gguf": "gguf",
    "httptools": "serve",
    "llguidance": "serve",
    "matplotlib": "report",
    "msgspec": "kv-events",
    "opentelemetry": "otel",
    "prometheus_client": "serve",
    "ray": "ray",
    "starlette": "serve",
    "uvicorn": "serve",
    "zmq": "kv-events",
}
"""The extra of each optional package, by the name that is imported."""


def require_package(what: str, package: str) -> None:
    """Refuse at once what would otherwise fail where its package is imported.

    Args:
        what: needs it, as the beginning of the error.
        package: by the name that is imported.

    Raises:
        MissingPackageError: it is not installed.
    """
    if find_spec(package) is None:
        raise MissingPackageError(what, package, EXTRA_OF[package])


class OptionalPackages:
    """A block that may import packages of an extra; one that is not installed is named, and how."""

    def __init__(self, what: str) -> None:
        """`what` the packages are for, as the beginning of the error."""
        self._what = what

    def __enter__(self) -> None:
        """Nothing is looked at yet."""

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Translate a missing package; every other error goes on as it is. Raises
        MissingPackageError: a package of an extra is not installed."""
        if isinstance(error, ModuleNotFoundError) and error.name is not None:
            package = error.name.split(".")[0]
            if package in EXTRA_OF:
                raise MissingPackageError(self._what, package, EXTRA_OF[package]) from error
