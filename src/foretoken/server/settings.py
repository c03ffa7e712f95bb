"""Settings of the server: where it listens, who may ask, and how much.

Frozen and torch-free. The engine's own settings are in `foretoken.config`.
"""

from dataclasses import dataclass, field

from foretoken.config.reader import is_int, require

TOOL_PARSERS = ("hermes", "llama3_json")
METRICS_LEVELS = ("none", "summary", "detailed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one request, and all of them together, may ask for."""

    max_body_bytes: int = 4 << 20
    """Larger bodies are answered with 413."""
    max_prompt_tokens: int | None = None
    """Longer prompts are refused; None: what the model's context allows."""
    max_tokens: int | None = None
    """A larger max_tokens is refused; None: what the context leaves."""
    max_n: int = 128
    """Most outputs of one request, over all of its prompts."""
    max_prompts: int = 256
    """Most prompts of one request."""
    max_queue: int = 256
    """Requests that may wait beyond those that can run; more are answered with 429."""
    timeout_s: float = 600.0
    """A request that takes longer is ended and answered with 504."""
    max_unread_tokens: int = 4096
    """A stream whose client reads so slowly that more tokens than this wait is ended."""
    drain_s: float = 30.0
    """After SIGTERM, how long running requests may go on."""
    client_timeout_s: float = 60.0
    """Most seconds for a request to come whole, and for a client to take what is sent to it."""
    max_connections: int | None = None
    """Connections at once; None: what the descriptors of the process allow, 1,024 at most."""

    def __post_init__(self) -> None:
        """Raise a ConfigError for what is out of range."""
        for name in ("max_body_bytes", "max_n", "max_prompts", "max_unread_tokens"):
            value = getattr(self, name)
            require(name, value, is_int(value, 1), "an integer >= 1")
        for name in ("max_prompt_tokens", "max_tokens", "max_connections"):
            value = getattr(self, name)
            require(name, value, value is None or is_int(value, 1), "None or an integer >= 1")
        require("max_queue", self.max_queue, is_int(self.max_queue, 0), "an integer >= 0")
        require("timeout_s", self.timeout_s, self.timeout_s > 0, "a number > 0")
        require(
            "client_timeout_s", self.client_timeout_s, self.client_timeout_s > 0, "a number > 0"
        )
        require("drain_s", self.drain_s, self.drain_s >= 0, "a number >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Everything about serving that is not about the engine."""

    host: str = "127.0.0.1"
    port: int = 8000
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
    per_request_metrics: str = "none"
    """What `metrics.speculative_decoding` of an answer holds: none, summary or detailed."""
    metrics_prefix: str = "foretoken"
    """Prefix of the metrics that vLLM does not have."""
    otlp_traces_endpoint: str | None = None
    """Where OpenTelemetry spans are sent; None: there are none."""
    tool_parser: str = "hermes"
    """How tool calls are read from the text: hermes or llama3_json."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        """Raise a ConfigError for what is out of range."""
        require("port", self.port, 0 <= self.port <= 65535, "0 to 65535")
        levels = ", ".join(METRICS_LEVELS)
        level = self.per_request_metrics
        require("per_request_spec_decode_metrics", level, level in METRICS_LEVELS, levels)
        known = ", ".join(TOOL_PARSERS)
        require("tool_call_parser", self.tool_parser, self.tool_parser in TOOL_PARSERS, known)
        endpoint = self.otlp_traces_endpoint
        ok = endpoint is None or endpoint.startswith(("http://", "https://"))
        require("otlp_traces_endpoint", endpoint, ok, "an http:// or https:// address")
        prefix = self.metrics_prefix
        require("metrics_prefix", prefix, prefix.isidentifier(), "letters, digits and _")
        for key in (*self.api_keys, *((self.admin_key,) if self.admin_key is not None else ())):
            ok = bool(key) and key.isascii() and key.isprintable()
            require("api_key", "...", ok, "printable ASCII, at least one character")

    def names_of(self, model: str) -> tuple[str, ...]:
        """Names that requests may give for `model`, the answered one first."""
        return self.served_model_names or (model,)
