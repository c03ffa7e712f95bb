"""Which Host headers a server without a key answers to.

A page of a foreign site can have its own name resolve to this machine (DNS rebinding), and then
asks this server as if it were its own; the Host header still says the foreign name. Knows no keys.
"""

import ipaddress
from collections.abc import Sequence


def is_own(host: str, allowed: Sequence[str]) -> bool:
    """Whether a request with this Host header may be meant for us.

    An address, `localhost`, a name without a dot (nobody outside can register one) and the names of
    `allowed` are; `*.example.com` allows names below it, `*` all. So is a missing header, which
    browsers never leave out.
    """
    name = _name(host)
    if not name or "." not in name or name.endswith(".localhost") or _is_address(name):
        return True
    return any(_matches(name, _name(one)) for one in allowed)


def _name(host: str) -> str:
    """A Host header without its port, in the one way to write it."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    if host.count(":") > 1:
        return host.lower()
    return host.partition(":")[0].rstrip(".").lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _matches(name: str, allowed: str) -> bool:
    if allowed.startswith("*."):
        return name.endswith(allowed[1:])
    return allowed in ("*", name)
