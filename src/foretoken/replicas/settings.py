"""Settings of several replicas behind one address. Frozen and torch-free."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, final

from foretoken.config import EngineConfig
from foretoken.config.reader import at_least, check_fields, require
from foretoken.config.resolve import CPU_KV_SHARE
from foretoken.errors import ConfigError
from foretoken.hardware import Hardware
from foretoken.placement import usable_nodes
from foretoken.server.settings import MOST_CONNECTIONS, ServerConfig

logger = logging.getLogger("foretoken")

PER_NODE = "numa"
"""In the place of a number of replicas: one on each NUMA node."""
_FOR_THE_FRONT = 32
"""Connections of a replica by which the front asks how it is, while clients take all of its own."""
_PATIENCE_S = 60.0
"""How much longer than for a client a replica waits for the front: it sees to slow clients itself,
and is no less well for being late with many of them."""
_COUNT = Annotated[int, at_least(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """How many replicas there are, and where they run."""

    replicas: _COUNT = 1
    """Replicas at the start, and always at least."""
    max_replicas: _COUNT | None = None
    """Replicas under load at most; None: as many as at the start."""
    ray_address: str | None = None
    """A Ray cluster to join, as `ray.init` takes it; None: a local one is started."""
    cores: tuple[tuple[int, ...], ...] | None = None
    """Of each replica the cores of this machine that it keeps to; None: any."""

    def __post_init__(self) -> None:
        check_fields(self)
        most = self.max_replicas
        ok = most is None or most >= self.replicas
        require("max_replicas", most, ok, f"at least --replicas, which is {self.replicas}")
        if self.cores is not None:
            assert len(self.cores) == self.most, (len(self.cores), self.most)

    @classmethod
    def of_options(cls, given: Mapping[str, Any]) -> "ReplicaConfig":
        """From the options of the command line or its file, where `replicas` may be text. Raises
        ConfigError: a value is not allowed."""
        count = given.get("replicas", 1)
        if count == PER_NODE:
            for name in given.keys() - {"replicas"}:
                allowed = "left out beside --replicas numa: the nodes of this machine say how many"
                raise ConfigError(f"--{name.replace('_', '-')}", given[name], allowed)
            return cls._per_node()
        if isinstance(count, str) and not count.isdecimal():
            raise ConfigError("--replicas", count, "an integer >= 1, or numa: one on each node")
        return cls(**{**given, "replicas": int(count) if isinstance(count, str) else count})

    @classmethod
    def _per_node(cls) -> "ReplicaConfig":
        """One for each NUMA node whose cores this process may use; there is nothing to keep to
        where that is one."""
        nodes = usable_nodes()
        if len(nodes) < 2:
            logger.info("--replicas numa: one replica, since there is one NUMA node to use")
            return cls()
        cores = tuple(tuple(sorted(nodes[node])) for node in sorted(nodes))
        return cls(replicas=len(cores), cores=cores)

    @property
    def most(self) -> int:
        """Replicas that there may be at once."""
        return self.max_replicas or self.replicas


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpec:
    """What a replica is made of; the same for all of a front but for its cores."""

    engine: EngineConfig
    server: ServerConfig
    threads: int | None = None
    """Threads of a step; None: as many as there are cores."""
    cores: tuple[int, ...] | None = None
    """Cores that it keeps to, with what it writes to memory; None: any."""
    log_format: str | None = None
    """How its log lines are written; None: whoever runs it has seen to that."""

    @classmethod
    def of(cls, engine: EngineConfig, server: ServerConfig, internal_key: str) -> "ReplicaSpec":
        """A replica of a front with these settings, reached on this machine only."""
        most = (server.limits.max_connections or MOST_CONNECTIONS) + _FOR_THE_FRONT
        patience_s = server.limits.client_timeout_s + _PATIENCE_S
        own = replace(
            server,
            limits=replace(server.limits, max_connections=most, client_timeout_s=patience_s),
            host="127.0.0.1",
            port=0,
            api_keys=(internal_key,),
            internal_key=internal_key,
            admin_key=None,
            allowed_hosts=(),
        )
        return cls(engine=engine, server=own)

    def sharing_memory(self, replicas: int) -> "ReplicaSpec":
        """The same as one of several on a machine: together they take what one would."""
        if self.engine.kv_cache_memory_bytes is not None:
            return self
        share = int(CPU_KV_SHARE * Hardware.detect().free_memory / replicas)
        return replace(self, engine=replace(self.engine, kv_cache_memory_bytes=share))

    def reached_at(self, host: str) -> "ReplicaSpec":
        return replace(self, server=replace(self.server, host=host))
