"""What a router hears of a server's KV pages: vLLM's frames and fields, and nothing false."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

msgspec = pytest.importorskip("msgspec", reason="the extra kv-events is not installed")
zmq = pytest.importorskip("zmq", reason="the extra kv-events is not installed")

from foretoken.config import EngineConfig  # noqa: E402
from foretoken.engine.wiring import build_engine  # noqa: E402
from foretoken.errors import ConfigError  # noqa: E402
from foretoken.server.app import build_state  # noqa: E402
from foretoken.server.settings import KVEventsConfig, ServerConfig  # noqa: E402
from foretoken.server.transport.drain import Drain  # noqa: E402
from foretoken.types.page_names import page_name  # noqa: E402
from tests.e2e.serving import Serving, post, serving  # noqa: E402
from tests.e2e.test_export_parsers import VLLM  # noqa: E402

PAGE = 8
LAST = (-1).to_bytes(8, "big", signed=True)
BODY = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}


def engine_config(**more: Any) -> EngineConfig:
    given = {"model": "demo", "block_size": PAGE, "max_num_seqs": 2, "max_model_len": 128}
    return EngineConfig.from_kwargs(**{**given, "kv_cache_memory_bytes": 1 << 20, **more})


@contextmanager
def told(folder: Path) -> Iterator[tuple[Serving, "Subscriber"]]:
    endpoint, replay = (f"ipc://{folder}/{name}" for name in ("events", "replay"))
    events = KVEventsConfig(
        enable_kv_cache_events=True, endpoint=endpoint, replay_endpoint=replay, topic="kv@here@demo"
    )
    with Subscriber(endpoint, replay) as subscriber:
        with serving(build_engine(engine_config()), ServerConfig(kv_events=events)) as running:
            yield running, subscriber


class Subscriber:
    """Frames as any subscriber of vLLM's reads them."""

    def __init__(self, endpoint: str, replay: str) -> None:
        self._heard = zmq.Context.instance().socket(zmq.SUB)
        self._heard.connect(endpoint)
        self._heard.subscribe(b"kv@here")
        self._replay = replay

    def __enter__(self) -> "Subscriber":
        return self

    def __exit__(self, *_: object) -> None:
        self._heard.close(linger=0)

    def live(self, timeout_ms: int) -> list[list[bytes]]:
        """The batches that come, until none does for so long."""
        found: list[list[bytes]] = []
        while self._heard.poll(timeout_ms):
            found.append(self._heard.recv_multipart())
        return found

    def replayed(self, first: int) -> list[bytes]:
        """The payloads of all batches from this number on."""
        dealer = zmq.Context.instance().socket(zmq.DEALER)
        dealer.connect(self._replay)
        dealer.send_multipart((b"", first.to_bytes(8, "big")))
        found: list[bytes] = []
        try:
            while dealer.poll(10_000):
                _, topic, number, payload = dealer.recv_multipart()
                if number == LAST:
                    return found
                assert topic == b"kv@here@demo" and int.from_bytes(number, "big") >= first
                found.append(payload)
        finally:
            dealer.close(linger=0)
        raise AssertionError("the replay did not end")


def events_of(payloads: list[bytes]) -> list[dict[str, Any]]:
    found = []
    for payload in payloads:
        at, events, rank = msgspec.msgpack.decode(payload)
        assert at > 1e9 and rank == 0
        found += events
    return found


def held(events: list[dict[str, Any]]) -> set[bytes]:
    """The pages that a router takes for held."""
    pages: set[bytes] = set()
    for event in events:
        if event["type"] == "AllBlocksCleared":
            pages.clear()
        elif event["type"] == "BlockRemoved":
            pages -= set(event["block_hashes"])
        else:
            pages |= set(event["block_hashes"])
    return pages


def ask(server: Serving, prompt: list[int], **more: Any) -> list[int]:
    body = {**BODY, "prompt": prompt, "return_token_ids": True, **more}
    answer = post(server, "/v1/completions", body)
    assert answer.status_code == 200, answer.text
    server.wait_idle()
    return list(answer.json()["choices"][0]["token_ids"])


def heard_at_last(server: Serving, subscriber: Subscriber) -> list[list[bytes]]:
    """What comes over the socket, once the subscription has come through."""
    for token in range(100):
        ask(server, [token] * (2 * PAGE), max_tokens=1)
        if found := subscriber.live(100):
            return found
    raise AssertionError("nothing is published")


@pytest.mark.slow
def test_pages_are_told_with_their_tokens_and_can_be_named_by_whoever_listens(
    tmp_path: Path,
) -> None:
    with told(tmp_path) as (server, subscriber):
        prompt = [7 + place % 50 for place in range(3 * PAGE + 2)]
        text = [*prompt, *ask(server, prompt)]
        stored = [one for one in events_of(subscriber.replayed(0)) if one["type"] == "BlockStored"]
        heard = heard_at_last(server, subscriber)
        cache = server.state.engine.engine.parts.scheduler.prefix
        assert cache is not None
        root = cache.root(None)
        assert [frames[0] for frames in heard] == [b"kv@here@demo"] * len(heard)
        assert events_of([frames[2] for frames in heard]), "published, not only kept"
    parent, at = None, 0
    for event in stored:
        assert event["parent_block_hash"] == parent and event["block_size"] == PAGE
        assert (event["medium"], event["lora_id"], event["lora_name"]) == ("CPU", None, None)
        assert "extra_keys" not in event
        tokens = event["token_ids"]
        assert tokens == text[at : at + len(tokens)]
        for place, name in enumerate(event["block_hashes"]):
            above = root if parent is None else parent
            assert name == page_name(above, tokens[place * PAGE : (place + 1) * PAGE])
            parent = name
        at += len(tokens)
    assert at // PAGE == (len(text) - 1) // PAGE


@pytest.mark.slow
def test_a_salt_is_told_hashed_and_evictions_as_they_happen(tmp_path: Path) -> None:
    with told(tmp_path) as (server, subscriber):
        ask(server, [9] * (2 * PAGE), cache_salt="team-a's own word")
        payloads = subscriber.replayed(0)
        assert all(b"team-a" not in payload for payload in payloads)
        first, *_ = [one for one in events_of(payloads) if one["type"] == "BlockStored"]
        assert len(first["extra_keys"]) == len(first["block_hashes"])
        assert len(first["extra_keys"][0][0]) == 32 and not any(first["extra_keys"][1:])
        for start in range(60):  # more than there is room for
            ask(
                server, [10 + (start * 37 + place) % 900 for place in range(9 * PAGE)], max_tokens=1
            )
        heard = events_of(subscriber.replayed(0))
        cache = server.state.engine.engine.parts.scheduler.prefix
        assert cache is not None
        cache.check_integrity()
        assert any(one["type"] == "BlockRemoved" for one in heard)
        assert held(heard) == set(cache._page_of)
        cache.clear()
        assert held(events_of(subscriber.replayed(0))) == set()


@pytest.mark.slow
@pytest.mark.skipif(not VLLM.exists(), reason=f"no vLLM in {VLLM.parents[1]}")
def test_vllm_s_own_classes_read_them(tmp_path: Path) -> None:
    with told(tmp_path) as (server, subscriber):
        ask(server, [9] * (2 * PAGE), cache_salt="team-a")
        cache = server.state.engine.engine.parts.scheduler.prefix
        assert cache is not None
        cache.clear()
        subscriber.live(500)
        payloads = [payload.hex() for payload in subscriber.replayed(0)]
    reader = (
        "import json, sys, msgspec\n"
        "from vllm.distributed.kv_events import KVEventBatch\n"
        "decode = msgspec.msgpack.Decoder(KVEventBatch).decode\n"
        "batches = [decode(bytes.fromhex(one)) for one in json.load(sys.stdin)]\n"
        "print(json.dumps([type(e).__name__ for b in batches for e in b.events]))\n"
    )
    answer = subprocess.run(
        [str(VLLM), "-W", "ignore", "-c", reader],
        input=json.dumps(payloads),
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
    )
    assert answer.returncode == 0, answer.stderr[-2000:]
    names = json.loads(answer.stdout.splitlines()[-1])
    assert {"BlockStored", "AllBlocksCleared"} <= set(names)


@pytest.mark.parametrize(
    ("events", "more", "said"),
    [
        ({"endpoint": "nowhere"}, {}, "kv_events_config.endpoint"),
        ({"endpoint": "tcp://127.0.0.1:1", "replay_endpoint": "tcp://256.0.0.1:1"}, {}, "replay"),
        ({}, {"enable_prefix_caching": False}, "prefix-caching"),
    ],
)
def test_what_cannot_be_told_is_said_at_the_start(
    events: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    config = ServerConfig(kv_events=KVEventsConfig(enable_kv_cache_events=True, **events))
    with pytest.raises(ConfigError, match=said):
        build_state(build_engine(engine_config(**more)), config, Drain(1.0))
