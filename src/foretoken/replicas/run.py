"""Runs a front and its replicas until it is told to stop.

SIGTERM, SIGINT and SIGHUP: no new requests, running ones may finish, then the replicas end; exit
code 0.
"""

import logging
import random
import secrets
from collections.abc import Callable
from dataclasses import replace

import httpx

from foretoken.checkpoint import find_model
from foretoken.config import EngineConfig
from foretoken.errors import ConfigError, EngineLostError
from foretoken.extras import OptionalPackages
from foretoken.replicas.front import FrontState, build_front
from foretoken.replicas.members import Directory, Members, ReplicaPlace
from foretoken.replicas.relaying import FrontMetrics, RelayedRequests, RelayParts
from foretoken.replicas.settings import PER_NODE, ReplicaConfig, ReplicaSpec
from foretoken.server.replica_protocol.origin import INTERNAL_HEADER
from foretoken.server.replica_protocol.report import PATH, Report
from foretoken.server.run import bound, drained_by_signals, run_until_told, url_of
from foretoken.server.settings import ServerConfig
from foretoken.server.transport.drain import Drain
from foretoken.server.transport.draining_server import DrainingServer
from foretoken.shape import ModelShape

_CONNECT_S = 5.0


def serve_replicas(
    engine: EngineConfig,
    server: ServerConfig,
    config: ReplicaConfig,
    say: Callable[[str], None],
    log_format: str,
) -> int:
    """Start replicas, listen, and serve until a signal; the exit code.

    Raises:
        ConfigError: a setting is wrong, the port is taken, or there is no such cluster.
        EngineLostError: the replicas could not be started.
        MissingPackageError: Ray is not installed.
        ModelError: the model is missing or not supported.
    """
    if config.cores is not None and engine.device not in ("auto", "cpu"):
        allowed = f"a number beside --device {engine.device}: NUMA nodes are of processors"
        raise ConfigError("--replicas", PER_NODE, allowed)
    with OptionalPackages("--replicas"):
        from foretoken.replicas.on_ray import RayReplicas
    logging.getLogger("httpx").setLevel(logging.WARNING)
    key = secrets.token_hex(32)
    spec = replace(ReplicaSpec.of(engine, server, key), log_format=log_format)
    with bound(server) as listening:
        if config.ray_address is None:  # said at once, not by a replica
            ModelShape.from_config(find_model(engine.model, revision=engine.revision))
        name = f"foretoken-{listening.getsockname()[1]}"
        with RayReplicas(config, spec, name) as replicas:
            drain = Drain(server.limits.drain_s)
            state = front_state(server, replicas.places, key, drain, engine.seed)
            report = _report_of(replicas.first(), key)
            runner = front_server(state)
            listening.listen()
            asked = "asked for" if server.api_keys else "none"
            names = ", ".join(server.names_of(engine.model))
            with drained_by_signals(runner):
                say(f"Serving {names} at {url_of(listening)}  (API at /v1, page at /)")
                say(f"Replicas: {config.replicas}" + _words_of_count(config))
                say(f"Speculation: {report.speculation}; API key: {asked}; stop with Ctrl-C")
                return 0 if run_until_told(runner, listening) else 1


def front_server(state: FrontState) -> DrainingServer:
    """What listens for the clients of a front."""
    limits, work = state.config.limits, state.parts.requests
    # A connection of a client, and the one to the replica that answers it.
    return DrainingServer(build_front(state), limits, work, state.draining, descriptors=2)


def front_state(
    server: ServerConfig, directory: Directory, internal_key: str, drain: Drain, seed: int
) -> FrontState:
    """What a front is made of.

    Args:
        server: its own settings, those of its replicas without the keys.
        directory: says which replicas have been started.
        internal_key: theirs.
        drain: whether the front has been told to stop.
        seed: of the noise of requests without a seed.
    """
    client = httpx.AsyncClient(
        # A connection for each request: a kept one may be closed just when it is used again.
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        timeout=httpx.Timeout(None, connect=_CONNECT_S),
        trust_env=False,
    )
    parts = RelayParts(
        members=Members(directory, client, internal_key),
        client=client,
        metrics=FrontMetrics(server.metrics_prefix),
        requests=RelayedRequests(),
    )
    return FrontState(
        config=server,
        parts=parts,
        draining=drain,
        internal_key=internal_key,
        noise=random.Random(seed),
    )


def _words_of_count(config: ReplicaConfig) -> str:
    if config.cores is not None:
        return ", one on each NUMA node"
    return "" if config.max_replicas is None else f" to {config.max_replicas}, by load"


def _report_of(place: ReplicaPlace, key: str) -> Report:
    try:
        answer = httpx.get(
            place.url + PATH, headers={INTERNAL_HEADER: key}, timeout=30.0, trust_env=False
        )
        answer.raise_for_status()
    except httpx.HTTPError as error:
        raise EngineLostError(f"replica {place.replica_id} does not answer: {error}") from error
    return Report.model_validate_json(answer.content)
