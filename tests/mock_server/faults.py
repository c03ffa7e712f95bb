"""What goes wrong at the mock server, on demand: at its door, and in what it writes.

Knows no requests. Every fault of an answer has a share: of the answers that could have it, so many
do, chosen by a hash of the answer's number, so that two runs break the same ones.
"""

import hashlib
import struct
from dataclasses import dataclass, fields

from foretoken.errors import ConfigError, one_of


@dataclass(frozen=True, slots=True, kw_only=True)
class MockFaults:
    """What goes wrong. `..._every`: with every so-many-th request, 0 for never; numbers with a
    point: a share."""

    truncate_every: int = 0
    """The connection is cut in the middle of the stream."""
    error_every: int = 0
    """HTTP 500."""
    hang_every: int = 0
    """No answer, ever."""
    no_metrics: bool = False
    """Neither /metrics nor per-request numbers."""
    refuse: tuple[str, ...] = ()
    """Parameters answered with HTTP 400, such as min_p."""
    longest: int = 0
    """Longer drafts than this are answered with HTTP 400; 0: none are."""
    skip_verification: float = 0.0
    """Of words: taken from the draft as it is."""
    leak_placeholder: float = 0.0
    """Of answers: one token stands for a draft that was never filled in."""
    drop_grammar: float = 0.0
    """Of answers with a grammar: it is forgotten in the middle."""
    lose_prefix: float = 0.0
    """Of prompts that are in the cache: computed again."""
    miss_stop: float = 0.0
    """Of answers that reach a stop string: written past it."""
    wrong_logprobs: float = 0.0
    """Of answers: log-probabilities are the draft's."""
    unscored_drafts: float = 0.0
    """Of answers: tokens of steps with drafts have log-probability 0, no likeliest tokens, and in
    a stream no row at all, as llama.cpp's server does."""
    ignore_seed: float = 0.0
    """Of seeded requests: drawn with a seed of the server's own."""
    tear_stream: float = 0.0
    """Of streams: one event's text does not come."""
    break_tools: float = 0.0
    """Of tool calls: their arguments are cut short."""
    alter_copy: float = 0.0
    """Of answers that copy a list: one identifier comes altered."""
    leak_page: float = 0.0
    """Of answers that are written while 11 others are: they have the end of another's prompt."""
    garble_loaded: float = 0.0
    """Of answers that are written while 11 others are: from the middle on, one sign over and over,
    as where logits are no numbers."""
    wrong_depth: float = 0.0
    """Of answers with 5 drafts a step: a piece comes altered."""
    stuck_acceptance: float = 0.0
    """Of every forty requests, one after another: no draft is accepted, and drawn answers repeat
    themselves."""
    sure_acceptance: float = 0.0
    """Of every forty requests, one after another: every draft is accepted."""
    miscount: float = 0.0
    """Of answers: usage counts a draft that was refused."""


SHARES = tuple(f.name for f in fields(MockFaults) if isinstance(f.default, float))
"""Faults of answers."""


def faults_of(given: list[str]) -> MockFaults:
    """Faults written as NAME or NAME=SHARE; alone, every answer has it.

    Raises:
        ConfigError: there is no such fault, or the share is none.
    """
    found: dict[str, float] = {}
    for text in given:
        name, _, share = text.partition("=")
        name = name.strip().replace("-", "_")
        if name not in SHARES:
            raise ConfigError("--fault", name, one_of(name, SHARES))
        try:
            found[name] = float(share or 1.0)
        except ValueError:
            found[name] = -1.0
        if not 0.0 <= found[name] <= 1.0:
            raise ConfigError("--fault", text, f"{name}= and a share from 0 to 1")
    return MockFaults(**found)  # type: ignore[arg-type]


def in_stretch(share: float, number: int) -> bool:
    """Whether request `number` is in a stretch that lasts for a `share` of every forty."""
    return number % 40 >= 40 - 40 * share


def hash_of(*parts: object) -> int:
    text = "\x1f".join(map(str, parts)).encode()
    return int(struct.unpack("<Q", hashlib.blake2b(text, digest_size=8).digest())[0])


def strikes(share: float, *key: object) -> bool:
    """Whether something that happens to a `share` of all keys happens to this one."""
    return share > 0.0 and hash_of("fault", *key) % 1_000_003 < share * 1_000_003
