"""Replicas as a deployment of Ray Serve. The only module that knows Ray.

Ray Serve starts the replicas' processes on its machines, asks each whether it is well and starts it
again if not, and decides with our policy how many there are. Requests do not pass through it: the
front speaks HTTP with each replica, because

- which replica gets a request can be said to Serve by a `RequestRouter` alone, and that is alpha
- a token that comes as an item of a Ray generator costs more than an event on a socket, on both
  sides
- a socket breaks at once when a process dies, and its replica is the server that is tested anyway

Of what is used, Ray calls `serve.deployment`, `serve.run`, `serve.start`, `serve.delete`,
`AutoscalingConfig` and `AutoscalingPolicy` stable (2.60), and `ray.remote` actors are public.
`check_health`, `record_autoscaling_stats` and an explicit call of `__del__` at the end are
documented for users' classes. Nothing used is alpha.

Replicas say where they listen on a board, an actor without a core. It ends with the process that
made it; replicas whose board is gone go on, and are found again by the next front only if that
starts them anew.
"""

import logging
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from foretoken.errors import ConfigError, EngineLostError
from foretoken.hardware import usable_cores
from foretoken.replicas.board import FORGOTTEN_S, Board
from foretoken.replicas.members import ReplicaPlace
from foretoken.replicas.replica_server import ReplicaServer
from foretoken.replicas.scaling import LOAD, cores_of_each, policy, threads_of_each
from foretoken.replicas.settings import ReplicaConfig, ReplicaSpec

logger = logging.getLogger("foretoken")

_TOLD_EVERY_S = 1.0
_WELL_EVERY_S = 2.0
_WELL_WITHIN_S = 10.0
_CONNECT_S = 5.0
_STARTS = 3
"""Times that a replica which cannot be made is tried again."""
MORE_AFTER_S, FEWER_AFTER_S = 30.0, 600.0
"""How long the load has to ask for more replicas, or for fewer."""
_STORE_BYTES = 80 << 20
"""Shared memory of a local Ray; nothing of ours goes through it."""


@final
class EngineReplica:
    """What Ray Serve makes, asks and ends."""

    def __init__(self, spec: ReplicaSpec, board: Any, is_local: bool) -> None:
        """Load the model and serve, at the address of the machine unless all are on one; tell the
        board."""
        host = "127.0.0.1" if is_local else ray.util.get_node_ip_address()
        self._server = ReplicaServer(spec.reached_at(host))
        self._board = board
        self._ended = threading.Event()
        self._told = threading.Event()
        threading.Thread(target=self._keep_telling, daemon=True).start()
        if not self._told.wait(FORGOTTEN_S):
            raise EngineLostError("the front cannot be told of the replica")

    def check_health(self) -> None:
        self._server.check()

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {LOAD: self._server.load}

    def __del__(self) -> None:
        """Called by Serve when the replica is to end, and by Python: requests may finish."""
        if hasattr(self, "_ended") and not self._ended.is_set():
            self._server.close()
            self._ended.set()

    def _keep_telling(self) -> None:
        place = self._server.place
        while not self._ended.is_set():
            try:
                told = self._board.tell.remote(place.replica_id, place.url)
                ray.get(told, timeout=FORGOTTEN_S)
                self._told.set()
            except Exception as error:  # noqa: BLE001 - a board that is away may come back
                logger.debug("the board cannot be told: %s", error)
            self._ended.wait(_TOLD_EVERY_S)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Application:
    """Replicas that Serve starts alike."""

    name: str
    spec: ReplicaSpec
    place: dict[str, Any]
    """What each takes of a machine."""
    count: dict[str, Any]
    """How many there are, in Serve's words."""


@final
class RayReplicas:
    """The replicas of one front; a context, at whose end they are ended."""

    def __init__(self, config: ReplicaConfig, spec: ReplicaSpec, name: str) -> None:
        """`name` tells fronts on one cluster apart."""
        self._config = config
        self._spec = spec
        self._name = name
        self._board: Any = None
        self._deployed: list[str] = []

    def __enter__(self) -> "RayReplicas":
        """Start Ray or join it, and all replicas. Raises ConfigError: there is no cluster at the
        address, or it has too few cores; EngineLostError: the replicas could not be started."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Workers of a Ray are 15 nicer than others; a server among them would lose its cores.
        os.environ.setdefault("RAY_worker_niceness", "0")
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        try:
            self._join()
            self._board = ray.remote(num_cpus=0, max_restarts=-1)(Board).remote()
            self._deploy()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        """End the replicas, and Ray if it was started here."""
        if ray.is_initialized():
            for name in self._deployed:
                serve.delete(name)
            ray.shutdown()

    async def places(self) -> Sequence[ReplicaPlace]:
        """Where replicas listen."""
        return [ReplicaPlace(*one) for one in await self._board.read.remote()]

    def first(self) -> ReplicaPlace:
        return ReplicaPlace(*ray.get(self._board.read.remote())[0])

    def _join(self) -> None:
        address = self._config.ray_address
        given: dict[str, Any] = {"log_to_driver": True, "logging_level": logging.ERROR}
        if address is None:
            # As many places as replicas, also where there are fewer cores.
            cores = max(usable_cores(), sum(self._threads), self._config.most)
            given |= {"num_cpus": cores, "object_store_memory": _STORE_BYTES}
            given |= {"include_dashboard": False}
        try:
            if address is not None:
                _check_somebody_listens(address)
            ray.init(address or "local", **given)
        except (OSError, ValueError) as error:
            allowed = f"a Ray cluster ({error}); if it asks for a token, set RAY_AUTH_MODE=token"
            raise ConfigError("--ray-address", address, allowed) from error

    @property
    def _threads(self) -> list[int]:
        """Of replicas that keep to cores of their own; empty where they do not."""
        return threads_of_each(self._config.cores or (), usable_cores())

    def _applications(self) -> Iterator[_Application]:
        """One; or one for each replica where they keep to cores, since Serve has no other way to
        tell the replicas of one application apart."""
        config, cores = self._config, self._config.cores
        if cores is not None:
            spec = self._spec.sharing_memory(config.most)
            each = zip(cores, self._threads, strict=True)
            for number, (own, threads) in enumerate(each):
                place, count = {"num_cpus": threads}, {"num_replicas": 1}
                kept = replace(spec, cores=own, threads=threads)
                name = f"{self._name}-{number}"
                yield _Application(name=name, spec=kept, place=place, count=count)
            return
        place = self._place_of_each()
        spec = replace(self._spec, threads=place["num_cpus"])
        if config.ray_address is None and "num_gpus" not in place:
            spec = spec.sharing_memory(config.most)
        yield _Application(name=self._name, spec=spec, place=place, count=self._count())

    def _deploy(self) -> None:
        applications = list(self._applications())
        quiet = {"log_level": "WARNING"}
        serve.start(proxy_location="Disabled", logging_config=quiet)
        for one in applications:
            made = serve.deployment(
                EngineReplica,
                ray_actor_options=one.place,
                health_check_period_s=_WELL_EVERY_S,
                health_check_timeout_s=_WELL_WITHIN_S,
                graceful_shutdown_timeout_s=one.spec.server.limits.drain_s + _WELL_WITHIN_S,
                graceful_shutdown_wait_loop_s=0.1,
                max_constructor_retry_count=_STARTS,
                **one.count,
            )
            self._deployed.append(one.name)
            app = made.bind(one.spec, self._board, self._config.ray_address is None)
            try:
                serve.run(app, name=one.name, route_prefix=None, logging_config=quiet)
            except RuntimeError as error:
                raise EngineLostError(f"the replicas could not be started: {error}") from error

    def _place_of_each(self) -> dict[str, Any]:
        """What each replica takes; one that finds no place would be waited for without end."""
        config, nodes = self._config, _cores_of_nodes()
        cores = cores_of_each(nodes, config.most)
        places = sum(node // cores for node in nodes)
        options: dict[str, Any] = {"num_cpus": cores}
        gpus = int(ray.cluster_resources().get("GPU", 0))
        if gpus and self._spec.engine.device != "cpu":
            each = self._spec.engine.num_processes
            places, options["num_gpus"] = min(places, gpus // each), each
        if places < config.replicas:
            allowed = f"at most {places}: there are {sum(nodes)} cores and {gpus} GPUs"
            raise ConfigError("--replicas", config.replicas, allowed)
        return options

    def _count(self) -> dict[str, Any]:
        config = self._config
        if config.max_replicas is None:
            return {"num_replicas": config.replicas}
        scaling = AutoscalingConfig(
            min_replicas=config.replicas,
            max_replicas=config.max_replicas,
            policy=AutoscalingPolicy(policy_function=policy),
            upscale_delay_s=MORE_AFTER_S,
            downscale_delay_s=FEWER_AFTER_S,
        )
        return {"autoscaling_config": scaling}


def _check_somebody_listens(address: str) -> None:
    """Raise an OSError for HOST:PORT where nobody does: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()


def _cores_of_nodes() -> list[int]:
    """Of nodes that have any for replicas: often the head has none."""
    nodes = (node["Resources"] for node in ray.nodes() if node["Alive"])
    return [int(node["CPU"]) for node in nodes if node.get("CPU", 0) >= 1]
