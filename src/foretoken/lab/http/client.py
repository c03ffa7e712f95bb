"""One OpenAI-style server: who it is, and one request at a time as a RequestRecord.

Adds to each request what makes its kind of server talk about drafts, and nothing a server of
another kind would refuse.
"""

import asyncio
import json
from dataclasses import dataclass, field, replace
from typing import Any

from foretoken.errors import ConfigError, EndpointError, ForetokenError, one_of
from foretoken.lab.http.read_answer import ReadingOptions, failed, read_answer
from foretoken.lab.http.timed import HttpPool, TransportError, now
from foretoken.lab.measure.workload import Item
from foretoken.lab.records.results import RequestRecord, ServerInfo

EXTRAS: dict[str, dict[str, Any]] = {
    "vllm": {"return_token_ids": True},
    "foretoken": {"return_token_ids": True},
    "mock": {"return_token_ids": True},
    "llama.cpp": {"timings_per_token": True},
    "sglang": {"return_spec_tokens_details": True},
}
_OWNERS = {"llamacpp": "llama.cpp"}
_REMEDIES = {
    401: "; set api_key_env of the arm to the name of the variable that holds the key",
    404: "; is that the URL of an OpenAI-style server?",
}
"""What to do about an answer's HTTP status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig:
    """How a server is spoken to."""

    url: str
    model: str | None = None
    """None: the first that the server lists."""
    engine: str | None = None
    """None: found out."""
    api_key: str | None = None
    timeout_s: float = 300.0
    """Longest time that one request may take."""
    k: int = 0
    """Draft length to assume where acceptance can only be told from chunks."""
    extra_body: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise a ConfigError for what is out of range."""
        if self.timeout_s <= 0:
            raise ConfigError("timeout_s", self.timeout_s, "seconds > 0")


class Client:
    """Requests to one server."""

    def __init__(self, config: EndpointConfig, info: ServerInfo, pool: HttpPool) -> None:
        """Take a server that `connect` has found."""
        self.config, self.info, self.pool = config, info, pool
        self._extras = {**EXTRAS.get(info.engine, {}), **config.extra_body}
        self._reading = asyncio.Lock()

    async def complete(
        self, item: Item, record: RequestRecord, options: ReadingOptions
    ) -> RequestRecord:
        """Send `item` now; `record` comes back filled in, with its error if there was one."""
        path, body = self.request_of(item)
        payload = json.dumps(body).encode()
        try:
            answer = await self.pool.send("POST", path, payload, timeout_s=self.config.timeout_s)
        except TransportError as error:
            return failed(record, error, options.start_s, now())
        # Answers of one step end together: read one, then let what is due be sent.
        async with self._reading:
            await asyncio.sleep(0)
            return read_answer(record, answer, replace(options, k=options.k or self.config.k))

    def request_of(self, item: Item) -> tuple[str, dict[str, Any]]:
        """Path and body of an item's request."""
        body: dict[str, Any] = {"model": self.info.model, "max_tokens": item.max_tokens}
        if item.temperature is not None:
            body["temperature"] = item.temperature
        if item.seed is not None:
            body["seed"] = item.seed
        body |= item.parameters
        body |= {"stream": True, "stream_options": {"include_usage": True}} | self._extras
        if item.messages:
            return "/v1/chat/completions", {**body, "messages": list(item.messages)}
        return "/v1/completions", {**body, "prompt": item.prompt}

    async def close(self) -> None:
        """Close connections."""
        await self.pool.close()


def key_headers(key: str | None) -> dict[str, str]:
    """What a server with keys wants with every request."""
    return {"authorization": f"Bearer {key}"} if key else {}


async def connect(
    config: EndpointConfig, *, command: str | None = None, restarted_by: str | None = None
) -> Client:
    """A client of the server at `config.url`, once it is known who answers.

    Raises:
        EndpointError: nothing answers there, or not as an OpenAI-style server.
    """
    pool = HttpPool(config.url, headers=key_headers(config.api_key))
    try:
        info = await _identify(config, pool)
    except ForetokenError:
        await pool.close()
        raise
    return Client(config, replace(info, command=command, restarted_by=restarted_by), pool)


async def _identify(config: EndpointConfig, pool: HttpPool) -> ServerInfo:
    patience = min(10.0, config.timeout_s)
    listed = await get_json(pool, "/v1/models", timeout_s=patience)
    entries = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(entries, list) or not entries or not isinstance(entries[0], dict):
        said = "/v1/models lists no model, which an OpenAI-style server does"
        raise EndpointError(f"{config.url}: {said}; is that the server's URL?")
    names = [entry.get("id") for entry in entries if isinstance(entry, dict)]
    if config.model is not None and config.model not in names:
        allowed = f"one the server has: {one_of(config.model, map(str, names))}"
        raise ConfigError("model", config.model, allowed)
    owner = str(entries[0].get("owned_by", "unknown"))
    info = ServerInfo(
        url=pool.origin.url,
        engine=config.engine or _OWNERS.get(owner, owner),
        model=config.model or names[0],
    )
    return replace(info, version=await _version(pool, info.engine))


async def get_json(pool: HttpPool, path: str, *, timeout_s: float = 10.0) -> Any:
    """The JSON of a GET.

    Raises:
        EndpointError: no answer, an error, or no JSON.
    """
    try:
        answer = await pool.send("GET", path, timeout_s=timeout_s)
    except TransportError as error:
        why = "start the server first, or give another URL"
        raise EndpointError(f"{pool.origin.url}{path}: {error}; {why}") from error
    if answer.broken is not None or answer.status != 200:
        said = answer.broken or f"HTTP {answer.status}"
        raise EndpointError(f"{pool.origin.url}{path}: {said}{_REMEDIES.get(answer.status, '')}")
    try:
        return json.loads(answer.body)
    except ValueError as error:
        raise EndpointError(f"{pool.origin.url}{path}: not JSON{_REMEDIES[404]}") from error


async def _version(pool: HttpPool, engine: str) -> str | None:
    path = "/props" if engine == "llama.cpp" else "/version"
    try:
        found = await get_json(pool, path)
    except EndpointError:
        return None
    value = found.get("version") or found.get("build_info") if isinstance(found, dict) else None
    return str(value) if value is not None else None
