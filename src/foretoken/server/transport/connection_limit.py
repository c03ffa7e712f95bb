"""How many connections there may be: as many as there are descriptors for, or as was set."""

import os
import resource

MOST_CONNECTIONS = 1024
"""However many descriptors there are: each connection may hold a body."""
ACCEPTED_AT_ONCE = 16
"""Connections that are taken before those taken earlier are looked at."""
_KEPT = 2 * ACCEPTED_AT_ONCE
"""Descriptors for what is being accepted and for files that are opened meanwhile."""
_FEWEST = 4


def most_connections(wanted: int | None, descriptors: int = 1) -> int:
    """Connections that may be open at once, at the moment of asking.

    Args:
        wanted: as was set; None: as many as there are descriptors for.
        descriptors: that each may take, with what is opened to answer it.
    """
    if wanted is not None:
        return wanted
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    used = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    return max(_FEWEST, min(MOST_CONNECTIONS, (limit - used - _KEPT) // descriptors))
