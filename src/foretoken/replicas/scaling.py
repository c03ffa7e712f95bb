"""How many replicas there should be, and how many cores each has.

Knows no Ray, though its policy is one of Ray Serve's. Holds no state.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

TARGET_LOAD = 0.7
"""Of a replica, which is full at 1: above, more are started."""
LOAD = "load"
"""The name under which replicas tell how full they are."""


class ScalingContext(Protocol):
    """What Ray Serve says to a policy, as far as ours listens."""

    target_num_replicas: int

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None:
        """By the name of a number: what each replica told of late, on average."""


def policy(context: ScalingContext) -> tuple[int, dict[str, Any]]:
    """How many replicas Serve should have; it keeps the bounds and waits before it acts."""
    loads = (context.aggregated_metrics or {}).get(LOAD, {})
    return wanted_replicas(list(loads.values()), context.target_num_replicas), {}


def wanted_replicas(loads: Sequence[float], current: int) -> int:
    """Replicas at which each would have `TARGET_LOAD`, at least 1.

    Args:
        loads: of each replica that has told, how full it is; above 1 where requests wait.
        current: replicas that there are to be by now, those that have not told included.
    """
    if not loads:
        return current
    # One that has just been started is to take its share of what the others have.
    rounded = math.ceil(sum(loads) / TARGET_LOAD - 1e-9)
    return max(1, rounded)


def cores_of_each(nodes: Sequence[int], replicas: int) -> int:
    """Cores of a replica so that all of them find a place; 1 where there are too few.

    Args:
        nodes: usable cores of each machine.
        replicas: how many there may be.
    """
    for cores in range(max(nodes, default=1), 1, -1):
        if sum(node // cores for node in nodes) >= replicas:
            return cores
    return 1


def threads_of_each(cores: Sequence[Sequence[int]], usable: int) -> list[int]:
    """Threads of replicas that keep to cores of their own.

    Args:
        cores: those of each replica.
        usable: as many as the process may keep busy: fewer than there are in a container with a
            share of them, of which each replica gets its part; at least 1.
    """
    total = sum(map(len, cores))
    return [max(1, len(own) * min(usable, total) // total) for own in cores]
