"""Which Host headers a server without a key answers to.

A page of a foreign site can have its own name resolve to this machine (DNS rebinding), and then
asks this server as if it were its own; the Host header still says the foreign name. What is not
exactly a host and a port is nobody's name. Knows no keys.
"""

import ipaddress
import re
from collections.abc import Sequence

_LABEL = r"[a-z0-9_-]{1,63}"
_HOST = re.compile(
    rf"(\[(?P<v6>[0-9a-f]*:[0-9a-f:.]*)\]|(?P<name>{_LABEL}(\.{_LABEL})*)\.?)(:[0-9]{{0,5}})?",
    re.ASCII | re.IGNORECASE,
)
"""An address of version 6 in brackets, or a name or address of version 4; a port or none."""


def is_own(host: str, allowed: Sequence[str]) -> bool:
    """Whether a request with this Host header may be meant for us.

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
    return any(_matches(name, one) for one in allowed)


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


def _matches(name: str, allowed: str) -> bool:
    """Whether a name is one that was allowed, which may have been written with a port."""
    if allowed.startswith("*."):
        below = host_name(allowed[2:])
        return below is not None and name.endswith("." + below)
    return name == host_name(allowed)
