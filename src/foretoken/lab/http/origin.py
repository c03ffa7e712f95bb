"""Where a server is: what a URL says of host, port and what stands before every path."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from foretoken.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Origin:
    """Where to connect, and what stands before every path."""

    host: str
    port: int
    secure: bool
    prefix: str

    @classmethod
    def parse(cls, url: str) -> "Origin":
        """From a URL; a trailing /v1 is dropped, since paths bring it.

        Raises:
            ConfigError: it is not an http or https URL with a host.
        """
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("url", url, "such as http://127.0.0.1:8000")
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise ConfigError("url", url, "a port from 1 to 65535") from error
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port, parts.scheme == "https", prefix)

    @property
    def url(self) -> str:
        """The URL again."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.secure else 'http'}://{host}:{self.port}{self.prefix}"
