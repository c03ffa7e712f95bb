"""One replica: a whole server in a thread of its process, for the front alone.

Answers nobody without the front's key. Knows neither the front nor who started the process.
Invariant: `check` raises as soon as the engine is lost or has not ended a step for `STALLED_S`.
"""

import asyncio
import logging
import threading
import time
import uuid
from typing import final

import torch

from foretoken.engine.logs import show_logs
from foretoken.engine.wiring import build_engine
from foretoken.errors import EngineLostError
from foretoken.placement import keep_to
from foretoken.replicas.members import STALLED_S, ReplicaPlace
from foretoken.replicas.settings import ReplicaSpec
from foretoken.server.app import build_app, build_state
from foretoken.server.observing.log_lines import LineFormatter
from foretoken.server.run import bound, spans_of, url_of, warm_up
from foretoken.server.transport.drain import Drain
from foretoken.server.transport.draining_server import DrainingServer

logger = logging.getLogger("foretoken")

_LAST_WORDS_S = 10.0


@final
class ReplicaServer:
    """A server that runs until it is closed."""

    def __init__(self, spec: ReplicaSpec) -> None:
        """Load the model and begin to serve. Raises ConfigError: a setting is wrong; ModelError:
        the model is missing or broken; EngineLostError: the server did not start."""
        if spec.cores is not None:
            keep_to(frozenset(spec.cores))  # before weights and caches are written
        if spec.log_format is not None:
            show_logs(LineFormatter(spec.log_format))
        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        spans = spans_of(spec.server, spec.engine.model)
        engine = build_engine(spec.engine)
        warm_up(engine)
        limits = spec.server.limits
        self._drain = Drain(limits.drain_s)
        self._drain_s = limits.drain_s
        self._state = state = build_state(engine, spec.server, self._drain, spans)
        self._runner = DrainingServer(build_app(state), limits, state.engine, self._drain)
        self._listening = bound(spec.server)
        self.place = ReplicaPlace(uuid.uuid4().hex[:8], url_of(self._listening))
        self._thread = threading.Thread(target=self._main, name="foretoken-replica", daemon=True)
        self._thread.start()
        while not self._runner.started:
            if not self._thread.is_alive():
                raise EngineLostError("the server of the replica did not start")
            time.sleep(0.01)

    @property
    def load(self) -> float:
        """How full it is: 1 when it runs as many requests as it may, or its keys and values fill
        its memory; above 1 when others wait."""
        parts = self._state.engine.engine.parts
        requests = self._state.engine.num_open / parts.config.max_num_seqs
        return max(requests, parts.scheduler.kv_usage)

    def check(self) -> None:
        """Raise an EngineLostError if it can answer nobody any more."""
        engine = self._state.engine
        if not (engine.alive and self._thread.is_alive()):
            raise EngineLostError("the engine has stopped")
        if engine.stalled_s >= STALLED_S:
            raise EngineLostError(f"no step has ended for {engine.stalled_s:.0f} s")

    def close(self) -> None:
        """Let what was accepted end, for as long as the settings allow; closing twice is fine."""
        self._drain.begin()
        self._thread.join(self._drain_s + _LAST_WORDS_S)
        if self._thread.is_alive():
            self._drain.begin()
            self._thread.join(_LAST_WORDS_S)
        self._listening.close()

    def _main(self) -> None:
        try:
            asyncio.run(self._runner.serve(sockets=[self._listening]))
        except Exception:
            logger.exception("the server of the replica has ended")
