"""One replica by itself: whom it believes, and how it ends. The guarded bugs: a client who writes
what only a front may say, an end that cuts what was accepted."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from foretoken.config import EngineConfig
from foretoken.errors import EngineLostError
from foretoken.replicas.replica_server import ReplicaServer
from foretoken.replicas.settings import ReplicaSpec
from foretoken.server.replica_protocol.origin import INTERNAL_HEADER, ORIGIN_HEADER, RequestOrigin
from foretoken.server.settings import Limits, ServerConfig
from tests.e2e.fronting import KEY, fronting, stream

PATH = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "x = ", "temperature": 0, "ignore_eos": True}
ENGINE = EngineConfig.from_kwargs(
    model="demo", max_num_seqs=2, kv_cache_memory_bytes=32 << 20, adaptive_speculation=False
)


@pytest.fixture
def replica() -> Iterator[ReplicaServer]:
    settings = ServerConfig(limits=Limits(drain_s=20.0), api_keys=("of a client",))
    found = ReplicaServer(ReplicaSpec.of(ENGINE, settings, KEY))
    yield found
    found.close()


def test_what_a_front_says_is_believed_of_a_front_alone(replica: ReplicaServer) -> None:
    url, body = replica.place.url + PATH, {**BODY, "max_tokens": 2}

    def asked(**headers: str) -> httpx.Response:
        return httpx.post(url, json=body, headers=headers, timeout=60)

    origin = RequestOrigin(tenant="another", answer="0" * 32, created=1, noise=1)
    said = {ORIGIN_HEADER: origin.model_dump_json()}
    assert asked(authorization="Bearer of a client", **said).status_code == 401
    answer = asked(authorization=f"Bearer {KEY}", **said).json()
    assert not answer["id"].endswith(origin.answer)
    answer = asked(**{INTERNAL_HEADER: KEY}, **said).json()
    assert answer["id"].endswith(origin.answer) and answer["created"] == 1
    assert asked(**{INTERNAL_HEADER: KEY, ORIGIN_HEADER: "{}"}).status_code == 400


@pytest.mark.slow
def test_a_replica_ends_when_it_is_told(replica: ReplicaServer) -> None:
    """As Ray Serve has it end: what was accepted may finish."""
    begun = threading.Event()

    def seen(chunks: int) -> None:
        begun.set()

    body = {**BODY, "max_tokens": 400, "return_token_ids": True}
    with fronting([replica.place]) as front, ThreadPoolExecutor(1) as beside:
        replica.check()
        assert replica.load == 0.0
        reading = beside.submit(stream, front.url, PATH, body, seen=seen)
        assert begun.wait(60) and replica.load >= 0.5
        replica.close()
        found = reading.result()
        assert found.ended and len(found.ids) == 400
        with pytest.raises(EngineLostError, match="stopped"):
            replica.check()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_a_replica_keeps_to_its_cores() -> None:
    """With every thread: memory lies with the node whose core writes it first."""
    before, core = os.sched_getaffinity(0), max(os.sched_getaffinity(0))
    spec = ReplicaSpec.of(ENGINE, ServerConfig(), KEY)
    try:
        found = ReplicaServer(replace(spec, cores=(core,), threads=1))
        bound = [os.sched_getaffinity(thread) for thread in threads()]
        found.close()
    finally:
        for thread in threads():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(thread, before)
    assert bound == [{core}] * len(bound)


def threads() -> list[int]:
    return [int(one.name) for one in Path("/proc/self/task").iterdir()]
