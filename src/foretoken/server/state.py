"""What every endpoint is given: the engine, the settings, the metrics. Made once, never changed."""

import asyncio
import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.requests import Request

from foretoken.engine.thread import AsyncEngine
from foretoken.errors import ParameterError
from foretoken.server.observing.server_metrics import ServerMetrics
from foretoken.server.replica_protocol.pace import ServerPace
from foretoken.server.settings import ServerConfig
from foretoken.text.renderers import MOST_RENDERS
from foretoken.text.tokenizer import Tokenizer
from foretoken.types.fingerprint import Fingerprint

if TYPE_CHECKING:
    from foretoken.server.auditor import Auditor
    from foretoken.server.observing.kv_events import KVEventPublisher
    from foretoken.server.observing.tracing import RequestSpans


_MOST_PRIORITY = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """The parts of a running server."""

    config: ServerConfig
    engine: AsyncEngine
    metrics: ServerMetrics
    pace: ServerPace
    """How long a request would wait."""
    fingerprint: Fingerprint
    """What another engine has to share to go on with a stream of this one."""
    draining: Callable[[], bool]
    """Whether the server has been told to stop."""
    spans: "RequestSpans | None" = None
    """Makes OpenTelemetry spans, where they are wanted."""
    auditor: "Auditor | None" = None
    """Decodes finished requests again, where that is wanted."""
    kv_events: "KVEventPublisher | None" = None
    """Tells what becomes of KV pages, where that is wanted."""
    compiling: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "foretoken-grammars")
    )
    """Where grammars are compiled, one at a time."""
    rendering: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(MOST_RENDERS, "foretoken-templates")
    )
    """Where chat templates are waited for: one that takes long holds up nothing else."""
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """The turn of whoever writes a slice of a large answer."""
    created: int = field(default_factory=lambda: int(time.time()))

    def close(self) -> None:
        """Stop what runs beside the engine; a grammar that is being compiled is refused."""
        for executor in (self.compiling, self.rendering):
            executor.shutdown(wait=False, cancel_futures=True)
        self.engine.engine.parts.grammars.stop()

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.engine.engine.parts.tokenizer

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that requests may give, the answered one first."""
        return self.config.names_of(self.engine.engine.parts.config.user.model)

    @property
    def speculation(self) -> str:
        """Drafters and their lengths, in words."""
        drafters = self.engine.engine.parts.intake.drafters
        if not drafters:
            return "off (predictions and grammars are drafted from)"
        named = ", ".join(f"{name} (up to {most} tokens)" for name, most in drafters.items())
        journal = self.engine.engine.parts.controller.journal
        controlled = journal is not None and journal.mode == "adaptive"
        return f"{named}, as far as expected to be faster" if controlled else named

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt and output together."""
        return self.engine.engine.parts.config.max_model_len


def state_of(request: Request) -> ServerState:
    """The state of the app that serves `request`."""
    state: ServerState = request.app.state.foretoken
    return state


def request_id_of(request: Request) -> str:
    """The id that answers, logs and errors of `request` carry."""
    found: str = request.scope["foretoken.request_id"]
    return found


def priority_of(request: Request, given: int) -> int:
    """The priority of a request; with API keys a tenant may step back, but never ahead of others.
    Raises ParameterError: it is out of bounds."""
    keyed = request.scope["foretoken.tenant"] is not None
    least, most = (0 if keyed else -_MOST_PRIORITY), _MOST_PRIORITY
    if not least <= given <= most:
        allowed = f"{least} to {most}" + (", where lower goes first" if keyed else "")
        raise ParameterError("priority", given, allowed)
    return given


def tenant_of(key: str) -> str:
    """What stands for an API key in salts, so that no key is kept beside texts."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def salt_from(tenant: str | None, given: str | None) -> str | None:
    """The salt of a tenant's requests that bring `given`; None where there are no keys."""
    if tenant is None and given is None:
        return None
    return f"{tenant or ''}:{given or ''}"
