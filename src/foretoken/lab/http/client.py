"""One OpenAI-style server: who it is, one request at a time as a RequestRecord, and its metrics.

Adds to each request what makes its kind of server talk about drafts, and nothing a server of
another kind would refuse.

Metrics are a flat mapping by current vLLM's names without `_total`, whatever the server calls them,
summed over labels; `_created` lines and histogram buckets are left out. Written by hand because a
page is read every second in the process that sends timed requests: prometheus_client's parser takes
forty times as long, and ends at the first line that it cannot read (benchmarks/LOG.md).
"""

import asyncio
import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from foretoken.errors import ConfigError, EndpointError, ForetokenError, one_of
from foretoken.lab.http.read_answer import read_answer
from foretoken.lab.http.timed import HttpPool, Pool, TransportError, now
from foretoken.lab.measure.experiment import ArmConfig
from foretoken.lab.measure.workload import Item
from foretoken.lab.records.results import RequestRecord, ServerInfo

EXTRAS: dict[str, dict[str, Any]] = {
    "vllm": {"return_token_ids": True},
    "foretoken": {"return_token_ids": True},
    "mock": {"return_token_ids": True},
    "llama.cpp": {"timings_per_token": True},
    "sglang": {"return_spec_tokens_details": True},
}
_REMEDIES = {
    401: "; set api_key_env of the arm to the name of the variable that holds the key",
    404: "; is that the URL of an OpenAI-style server?",
}
"""What to do about an answer's HTTP status."""


class Client:
    def __init__(self, arm: ArmConfig, info: ServerInfo, pool: HttpPool) -> None:
        self.arm, self.info, self.pool = arm, info, pool
        self._extras = {**EXTRAS.get(info.engine, {}), **arm.extra_body}
        self._reading = asyncio.Lock()

    async def complete(
        self, item: Item, record: RequestRecord, start_s: float, *, keep_text: bool = False
    ) -> RequestRecord:
        """Send `item` now; `record` comes back filled in, with its error if there was one. Its
        times count from `start_s` on the monotonic clock."""
        path, body = self.request_of(item)
        payload = json.dumps(body).encode()
        try:
            answer = await self.pool.send("POST", path, payload, timeout_s=self.arm.timeout_s)
        except TransportError as error:
            return replace(record, end_s=now() - start_s, error=str(error))
        # Answers of one step end together: read one, then let what is due be sent.
        async with self._reading:
            await asyncio.sleep(0)
            return read_answer(record, answer, start_s, keep_text=keep_text)

    def request_of(self, item: Item) -> tuple[str, dict[str, Any]]:
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
        await self.pool.close()


async def connect(arm: ArmConfig, url: str = "") -> Client:
    """A client of the arm's server, once it is known who answers at `url`; empty: at the arm's.
    Raises EndpointError if nothing answers there, or not as an OpenAI-style server."""
    pool = HttpPool(url or arm.url or "", headers=arm.headers)
    try:
        return Client(arm, await _identify(arm, pool), pool)
    except ForetokenError:
        await pool.close()
        raise


async def _identify(arm: ArmConfig, pool: HttpPool) -> ServerInfo:
    listed = await _get_json(pool, "/v1/models", timeout_s=min(10.0, arm.timeout_s))
    entries = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(entries, list) or not entries or not isinstance(entries[0], dict):
        said = "/v1/models lists no model, which an OpenAI-style server does"
        raise EndpointError(f"{pool.origin.url}: {said}; is that the server's URL?")
    names = [entry.get("id") for entry in entries if isinstance(entry, dict)]
    if arm.model is not None and arm.model not in names:
        allowed = f"one the server has: {one_of(arm.model, map(str, names))}"
        raise ConfigError("model", arm.model, allowed)
    owner = str(entries[0].get("owned_by", "unknown"))
    engine = arm.engine or ("llama.cpp" if owner == "llamacpp" else owner)
    try:
        found = await _get_json(pool, "/props" if engine == "llama.cpp" else "/version")
    except EndpointError:
        found = None
    named = found.get("version") or found.get("build_info") if isinstance(found, dict) else None
    return ServerInfo(
        url=pool.origin.url,
        engine=engine,
        version=None if named is None else str(named),
        model=arm.model or names[0],
        command=arm.command,
        restarted_by=arm.restart_command,
    )


async def _get_json(pool: HttpPool, path: str, *, timeout_s: float = 10.0) -> Any:
    """The JSON of a GET. Raises EndpointError: no answer, an error, or no JSON."""
    where = f"{pool.origin.url}{path}"
    try:
        answer = await pool.send("GET", path, timeout_s=timeout_s)
    except TransportError as error:
        why = "start the server first, or give another URL"
        raise EndpointError(f"{where}: {error}; {why}") from error
    if answer.broken is not None or answer.status != 200:
        said = answer.broken or f"HTTP {answer.status}"
        elsewhere = dict(answer.headers).get("location", "")
        remedy = f"; it says {elsewhere[:160]}: give the URL there" if elsewhere else ""
        raise EndpointError(f"{where}: {said}{remedy or _REMEDIES.get(answer.status, '')}")
    try:
        return json.loads(answer.body)
    except (ValueError, RecursionError) as error:
        raise EndpointError(f"{where}: not JSON{_REMEDIES[404]}") from error


_RENAMED = {
    "vllm:gpu_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "llamacpp:spec_decode_num_drafts": "vllm:spec_decode_num_drafts",
    "llamacpp:spec_decode_num_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "llamacpp:spec_decode_num_accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
    "llamacpp:kv_cache_usage_ratio": "vllm:kv_cache_usage_perc",
    "sglang:token_usage": "vllm:kv_cache_usage_perc",
}
_COUNTERS = (
    "vllm:spec_decode_num_drafts",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
    "vllm:num_preemptions",
)
KV_USAGE = "vllm:kv_cache_usage_perc"
_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
"""Followed by a point and the position, from 0."""
_POSITION = re.compile(r'position="(\d+)"')


def parse_metrics(page: str) -> dict[str, float]:
    """Every counter and gauge of a Prometheus page; lines it cannot read are left out."""
    found: dict[str, float] = {}
    for match in filter(None, map(_LINE.match, page.splitlines())):
        if match[1].endswith(("_created", "_bucket")):
            continue
        name = match[1].removesuffix("_total")
        name = _RENAMED.get(name, name)
        if name == PER_POSITION and (place := _POSITION.search(match[2] or "")):
            name = f"{name}.{place[1]}"
        try:
            value = float(match[3])
        except ValueError:
            continue
        if math.isfinite(value):  # a quantile of nothing is NaN
            found[name] = found.get(name, 0.0) + value
    return found


def grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Growth of counters between two scrapes; a server that started anew counts from zero."""
    return {
        name: after[name] - (old if (old := before.get(name, 0.0)) <= after[name] else 0.0)
        for name in _COUNTERS
        if name in after
    }


async def scrape(pool: Pool) -> dict[str, float] | None:
    """The server's metrics now; None if it has none or does not answer."""
    try:
        answer = await pool.send("GET", "/metrics", timeout_s=5.0)
    except TransportError:
        return None
    if answer.status != 200 or answer.broken is not None:
        return None
    return parse_metrics(answer.body.decode("utf-8", "replace")) or None
