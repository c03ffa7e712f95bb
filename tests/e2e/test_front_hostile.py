"""Clients that mean harm, at a front. The guarded bugs: clients who take all connections, so that
replicas look dead; a request that goes round all replicas because its client does not read; work
that goes on for nobody.
"""

import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from foretoken.config import EngineConfig
from foretoken.engine.wiring import build_engine
from foretoken.errors import EngineLostError
from foretoken.replicas import members
from foretoken.replicas.members import ReplicaPlace
from foretoken.replicas.replica_server import ReplicaServer
from foretoken.replicas.settings import ReplicaSpec
from foretoken.server.replica_protocol.origin import INTERNAL_HEADER, ORIGIN_HEADER, RequestOrigin
from foretoken.server.settings import Limits, ServerConfig
from foretoken.testing import write_tiny_llama
from tests.e2e.fronting import KEY, Fronting, Streamed, fronting, stream
from tests.e2e.serving import Serving, connect, serving

ROOM = 32
"""Connections: more than are accepted in one go, before it is known who asks for something."""
PATH = "/v1/completions"
BODY: dict[str, Any] = {"prompt": [1, 2, 3], "temperature": 0, "ignore_eos": True}
MINE = {"authorization": "Bearer mine"}
SETTINGS = ServerConfig(
    api_keys=("mine",),
    limits=Limits(client_timeout_s=1.0, max_connections=ROOM, max_body_bytes=20_000),
)


@contextmanager
def at_work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fronting, list[Serving]]]:
    """A front of two replicas, which have the settings that a front gives them."""
    folder = write_tiny_llama(
        tmp_path_factory.mktemp("model"), max_position_embeddings=4096, vocab_size=97
    )
    engine = EngineConfig.from_kwargs(
        model=str(folder), kv_cache_memory_bytes=8 << 20, batch_invariant=True
    )
    own = ReplicaSpec.of(engine, SETTINGS, KEY).server
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(build_engine(engine), own)) for _ in range(2)]
        places = [ReplicaPlace(str(number), one.url) for number, one in enumerate(servers)]
        yield stack.enter_context(fronting(places, SETTINGS)), servers


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fronting, list[Serving]]]:
    with at_work(tmp_path_factory) as found:
        yield found


def asking(body: dict[str, Any], key: str = "mine", length: int | None = None) -> bytes:
    raw = json.dumps(body).encode()
    lines = [f"POST {PATH} HTTP/1.1", "host: x", f"authorization: Bearer {key}",
             f"content-length: {len(raw) if length is None else length}", "", ""]  # fmt: skip
    return "\r\n".join(lines).encode() + raw


def wait_idle(front: Fronting, servers: list[Serving], seconds: float = 30.0) -> None:
    """Until nobody is answered and nothing is computed any more."""
    until = time.monotonic() + seconds
    while front.state.parts.requests.num_open or front.runner.server_state.connections:
        assert time.monotonic() < until, front.runner.server_state.connections
        time.sleep(0.02)
    for one in servers:
        one.wait_idle()


def persistent(url: str, body: dict[str, Any]) -> Streamed:
    """A stream. Whoever is hung up on before anything came asks again: where all connections are
    taken, those go whose requests have not been read."""
    until, chunks = time.monotonic() + 60.0, [0]
    while True:
        try:
            return stream(
                url, PATH, body, seen=chunks.append,
                authorization=MINE["authorization"],
            )  # fmt: skip
        except httpx.TransportError:
            assert chunks == [0], "a stream that had begun was broken"
            assert time.monotonic() < until, "nobody was let in for a minute"


def restarts(front: Fronting) -> list[str]:
    return re.findall(r"request_restarts_total\{.*", httpx.get(front.url + "/metrics").text)


@pytest.mark.slow
def test_clients_who_take_all_connections_make_no_replica_look_dead(
    running: tuple[Fronting, list[Serving]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one replica has all of them: it has room for the front's own questions."""
    front, servers = running
    monkeypatch.setattr(members, "LOST_S", 4.0)
    body = {**BODY, "max_tokens": 4000, "stream": True}
    with ExitStack() as stack:
        for _ in range(ROOM):
            client = stack.enter_context(connect(front.url))
            client.sendall(asking(body))
            assert b"200 OK" in client.recv(100)
        until = time.monotonic() + 6.0
        while time.monotonic() < until:
            assert len(front.state.parts.members.views) == 2
            time.sleep(0.02)
        late = stack.enter_context(connect(front.url))
        late.sendall(asking(body))
        assert b" 503 " in late.recv(100)
    wait_idle(front, servers)
    assert not restarts(front)


@pytest.mark.slow
def test_beside_hostile_clients_a_stream_is_what_it_would_be(
    running: tuple[Fronting, list[Serving]],
) -> None:
    front, servers = running
    body = {**BODY, "max_tokens": 3000, "return_token_ids": True}
    undisturbed = stream(front.url, PATH, body, authorization=MINE["authorization"])
    ending = threading.Event()

    def half_open() -> None:
        with ExitStack() as stack:
            for number in range(4 * ROOM):
                client = stack.enter_context(connect(front.url))
                client.sendall([b"", b"POST /v1", asking(BODY, length=9999)][number % 3])

    def aborted() -> None:
        with connect(front.url) as client:
            client.sendall(asking({**BODY, "max_tokens": 2000, "stream": True}))
            client.recv(300)

    def huge() -> None:
        with connect(front.url) as client:
            client.sendall(asking({"prompt": "a" * 200_000}))
            client.recv(300)

    def keyless() -> None:
        with connect(front.url) as client:
            client.sendall(asking(BODY, key=KEY))
            answer = client.recv(300)  # nothing: it had to make room for others
            assert not answer or b" 401 " in answer

    def keep_on(attack: Any) -> int:
        count = 0
        while not ending.is_set():
            try:
                attack()
            except OSError:
                continue  # it was hung up on
            count += 1
        return count

    with ThreadPoolExecutor(4) as pool:
        attacks = [pool.submit(keep_on, one) for one in (half_open, aborted, huge, keyless)]
        try:
            found = [persistent(front.url, body) for _ in range(3)]
        finally:
            ending.set()
        assert all(one.result() > 0 for one in attacks)
    assert all(one.ended and one.by_choice == undisturbed.by_choice for one in found)
    wait_idle(front, servers)
    assert not restarts(front)


@pytest.mark.slow
def test_a_stream_that_nobody_takes_goes_to_no_other_replica(
    running: tuple[Fronting, list[Serving]],
) -> None:
    """It is the client's fault that the replica has to wait."""
    front, servers = running
    with connect(front.url) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.sendall(asking({**BODY, "max_tokens": 1500, "logprobs": 20, "n": 8, "stream": True}))
        wait_idle(front, servers, 100)
    assert not restarts(front)
    assert len(front.state.parts.members.views) == 2


# One replica by itself: whom it believes, and how it ends. The guarded bugs: a client who writes
# what only a front may say, an end that cuts what was accepted.
REPLICA_BODY: dict[str, Any] = {"prompt": "x = ", "temperature": 0, "ignore_eos": True}
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
    url, body = replica.place.url + PATH, {**REPLICA_BODY, "max_tokens": 2}

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

    body = {**REPLICA_BODY, "max_tokens": 400, "return_token_ids": True}
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
