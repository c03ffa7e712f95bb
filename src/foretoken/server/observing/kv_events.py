"""Publishes what becomes of KV pages, for routers that send a prompt where its beginning lies.

The frames, the encoding and the names of fields are those of vLLM's `--kv-events-config` (ZeroMQ,
msgpack): topic, number of the batch (8 bytes, big-endian), and `[time, events, rank]`. Hashes are
the engine's own page names; a salt is hashed before it is told, token ids are told as they are.
A thread of its own takes events from the engine's journal; nothing waits for a subscriber.
"""

import logging
import threading
import time
from collections import deque
from hashlib import blake2b
from typing import Any, final

import msgspec
import zmq

from foretoken.errors import ConfigError
from foretoken.kv.page_events import AllGivenUp, PageEvent, PageGivenUp, PageJournal, PagesStored
from foretoken.server.settings import KVEventsConfig

logger = logging.getLogger("foretoken")

_LAST_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_WAITED_S = 0.1
"""How long events are waited for before requests of replays are looked at."""


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Pages that may be reused from now on."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    """For each page what else its hash is made of: of a prompt's first the hashed salt."""


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """Pages that are gone."""

    block_hashes: list[bytes]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True):
    """No page is left."""


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """Events that were taken together, in their order."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


@final
class KVEventPublisher:
    """Publishes one server's events, and repeats what a subscriber has missed."""

    def __init__(
        self, journal: PageJournal, config: KVEventsConfig, *, page_size: int, medium: str
    ) -> None:
        """Open the sockets; nothing is published before `start`.

        Args:
            journal: where events come from; nobody else may take from it.
            config: where they go.
            page_size: tokens of a page.
            medium: what pages lie on: `CPU` or `GPU`.

        Raises:
            ConfigError: an endpoint is none, or taken.
        """
        self._journal = journal
        self._page_size, self._medium = page_size, medium
        self._encoder = msgspec.msgpack.Encoder()
        self._topic = config.topic.encode()
        self._number = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._published: zmq.Socket[bytes] = context.socket(zmq.PUB)
        self._published.set_hwm(config.hwm)
        self._asked: zmq.Socket[bytes] | None = None
        if config.replay_endpoint is not None:
            self._asked = context.socket(zmq.ROUTER)
        try:
            _open(self._published, "endpoint", config.endpoint)
            if self._asked is not None:
                _open(self._asked, "replay_endpoint", str(config.replay_endpoint))
        except ConfigError:
            self._close()
            raise
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="foretoken-kv-events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Publish what there still is, then close."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._close()

    def _close(self) -> None:
        for socket in (self._published, self._asked):
            if socket is not None:
                socket.close(linger=0)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._repeat()
            self._publish(self._journal.take(_WAITED_S))
        self._publish(self._journal.take(0.0))

    def _publish(self, events: list[PageEvent]) -> None:
        if not events:
            return
        told = [self._told(event) for event in events]
        payload = self._encoder.encode(KVEventBatch(time.time(), told, 0))
        self._published.send_multipart((self._topic, _number(self._number), payload))
        self._kept.append((self._number, payload))
        self._number += 1

    def _told(self, event: PageEvent) -> BlockStored | BlockRemoved | AllBlocksCleared:
        if isinstance(event, PageGivenUp):
            return BlockRemoved(block_hashes=[event.name], medium=self._medium)
        if isinstance(event, AllGivenUp):
            return AllBlocksCleared()
        assert isinstance(event, PagesStored), type(event)
        return BlockStored(
            block_hashes=list(event.names),
            parent_block_hash=event.parent,
            token_ids=list(event.token_ids),
            block_size=self._page_size,
            lora_id=None,
            medium=self._medium,
            lora_name=None,
            extra_keys=_extra_keys(event),
        )

    def _repeat(self) -> None:
        """Answer whoever asks for batches from a number on."""
        if self._asked is None or not self._asked.poll(0):
            return
        self._publish(self._journal.take(0.0))  # so that the answer has all that happened before
        frames = self._asked.recv_multipart()
        if len(frames) != 3:
            logger.warning("a request for KV events has %d frames instead of 3", len(frames))
            return
        whose, first = frames[0], int.from_bytes(frames[2], "big")
        for number, payload in self._kept:
            if number >= first:
                answer = (whose, b"", self._topic, _number(number), payload)
                self._asked.send_multipart(answer)
        self._asked.send_multipart((whose, b"", b"", _LAST_OF_REPLAY, b""))


def _number(number: int) -> bytes:
    return number.to_bytes(8, "big")


def _open(socket: "zmq.Socket[Any]", name: str, endpoint: str) -> None:
    """Bind to addresses of this machine (`*`, `ipc://`, `inproc://`), connect to others."""
    own = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
    try:
        if own or name == "replay_endpoint":
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
    except zmq.ZMQError as error:
        allowed = f"an address of ZeroMQ's that is free, such as tcp://*:5557 ({error})"
        raise ConfigError(f"kv_events_config.{name}", endpoint, allowed) from error


def _extra_keys(event: PagesStored) -> list[tuple[str, ...] | None] | None:
    """The salt, hashed, beside the first page of a prompt; None where there is none."""
    if event.salt is None:
        return None
    keys: list[tuple[str, ...] | None] = [None] * len(event.names)
    if event.parent is None:
        keys[0] = (blake2b(event.salt.encode(), digest_size=16).hexdigest(),)
    return keys
