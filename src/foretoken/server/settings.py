"""Settings of the server: where it listens, who may ask, and how much.

Frozen and torch-free. The engine's own settings are in `foretoken.config`.
"""

import ipaddress
from dataclasses import dataclass, field
from typing import Annotated

from foretoken.config.reader import Allowed, at_least, between, check_fields, require, words

TOOL_PARSERS = ("hermes", "llama3_json")
METRICS_LEVELS = ("none", "summary", "detailed")
MOST_CONNECTIONS = 1024
"""However many descriptors there are: each connection may hold a body."""

_COUNT = Annotated[int, at_least(1)]
_SECONDS = Annotated[float, Allowed("a number > 0", lambda seconds: seconds > 0)]
_WORD = Allowed("letters, digits and _", str.isidentifier)
_ADDRESS = Allowed(
    "an http:// or https:// address", lambda url: url.startswith(("http://", "https://"))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one request, and all of them together, may ask for."""

    max_body_bytes: _COUNT = 4 << 20
    """Larger bodies are answered with 413."""
    max_prompt_tokens: _COUNT | None = None
    """Longer prompts are refused; None: what the model's context allows."""
    max_tokens: _COUNT | None = None
    """A larger max_tokens is refused; None: what the context leaves."""
    max_n: _COUNT = 128
    """Most outputs of one request, over all of its prompts."""
    max_prompts: _COUNT = 256
    """Most prompts of one request."""
    max_queue: Annotated[int, at_least(0)] = 256
    """Requests that may wait beyond those that can run; more are answered with 429."""
    timeout_s: _SECONDS = 600.0
    """A request that takes longer is ended and answered with 504."""
    max_unread_tokens: _COUNT = 4096
    """A stream whose client reads so slowly that more tokens than this wait is ended."""
    drain_s: Annotated[float, Allowed("a number >= 0", lambda seconds: seconds >= 0)] = 30.0
    """After SIGTERM, how long running requests may go on."""
    client_timeout_s: _SECONDS = 60.0
    """Most seconds for a request to come whole, and for a client to take what is sent to it."""
    max_connections: _COUNT | None = None
    """Connections at once; None: what the descriptors of the process allow, 1,024 at most."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """Whom to tell what becomes of KV pages; keys and defaults are vLLM's."""

    enable_kv_cache_events: bool = False
    """Whether anybody is told. With False nothing is."""
    publisher: Annotated[str, words("zmq", "null")] = "zmq"
    """`zmq`, or `null` for nobody."""
    endpoint: str = "tcp://*:5557"
    """Where events are published: with `*` the server listens there, else it connects. Whoever
    reaches it reads the token ids of all prompts."""
    replay_endpoint: str | None = None
    """Where subscribers ask for what they have missed; None: they cannot."""
    buffer_steps: _COUNT = 10_000
    """Batches that are kept for that."""
    hwm: _COUNT = 100_000
    """Batches that may wait for a slow subscriber; more are lost to it."""
    topic: str = ""
    """The first frame of each batch, by which subscribers choose."""

    def __post_init__(self) -> None:
        check_fields(self, "kv_events_config.")

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Everything about serving that is not about the engine."""

    host: str = "127.0.0.1"
    port: Annotated[int, between(0, 65535)] = 8000
    """0: any free one."""
    served_model_names: tuple[str, ...] = ()
    """Names that requests may give; the first is the one answered. Empty: the model's."""
    api_keys: tuple[str, ...] = ()
    """Keys that open /v1 and the playground; empty: no key is asked for."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in Host headers that are answered where no key is asked for, beside addresses,
    localhost and names without a dot; `*.example.com` for all below, `*` for all."""
    admin_key: str | None = None
    """Opens /admin; None: there is no /admin."""
    internal_key: str | None = None
    """Lets a request continue what another server began (`resume`); None: no request may."""
    per_request_metrics: str = "none"
    """What `metrics.speculative_decoding` of an answer holds: none, summary or detailed."""
    metrics_prefix: Annotated[str, _WORD] = "foretoken"
    """Prefix of the metrics that vLLM does not have."""
    otlp_traces_endpoint: Annotated[str, _ADDRESS] | None = None
    """Where OpenTelemetry spans are sent; None: there are none."""
    audit_share: Annotated[float, Allowed("a share from 0 to 1", lambda s: 0 <= s <= 1)] = 0.0
    """Share of finished requests that are decoded again without speculation when nothing else
    runs; speculation is turned off if it wrote what plain decoding would not. 0: none."""
    tool_parser: str = "hermes"
    """How tool calls are read from the text: hermes or llama3_json."""
    kv_events: KVEventsConfig = field(default_factory=KVEventsConfig)
    """Who is told what becomes of KV pages."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        allowed = "printable ASCII, at least one character, no space around it"
        for name in ("api_key", "admin_key", "internal_key"):
            keys = self.api_keys if name == "api_key" else (getattr(self, name),)
            optional = () if name == "api_key" else (None,)
            require(name, "...", all(key in optional or _is_key(key) for key in keys), allowed)
        levels = ", ".join(METRICS_LEVELS)
        level = self.per_request_metrics
        require("per_request_spec_decode_metrics", level, level in METRICS_LEVELS, levels)
        known = ", ".join(TOOL_PARSERS)
        require("tool_call_parser", self.tool_parser, self.tool_parser in TOOL_PARSERS, known)
        check_fields(self)

    @property
    def is_open(self) -> bool:
        """Whether other machines reach it and no key is asked for."""
        return not (self.api_keys or _is_here(self.host))

    def names_of(self, model: str) -> tuple[str, ...]:
        """Names that requests may give for `model`, the answered one first."""
        return self.served_model_names or (model,)


def _is_key(given: object) -> bool:
    """Whether a client can send it in a header as it is."""
    if not isinstance(given, str):
        return False
    return given.isascii() and given.isprintable() and bool(given) and given == given.strip()


def _is_here(host: str) -> bool:
    """Whether only this machine can reach what listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
