"""A server's Prometheus metrics as one flat mapping, whatever the server calls them.

Names become current vLLM's without `_total`; values of one name are summed over their labels,
except the draft position. Renamed and foreign names are translated; `_created` lines and histogram
buckets are left out. Written by hand because a page is read every second in
the process that sends timed requests: prometheus_client's parser takes forty times as long, and
ends at the first line that it cannot read (benchmarks/LOG.md).
"""

import re
from collections.abc import Iterator, Mapping

from foretoken.lab.http.timed import HttpPool, TransportError

RENAMED = {
    "vllm:gpu_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "llamacpp:spec_decode_num_drafts": "vllm:spec_decode_num_drafts",
    "llamacpp:spec_decode_num_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "llamacpp:spec_decode_num_accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
    "llamacpp:spec_decode_num_accepted_tokens_per_pos": (
        "vllm:spec_decode_num_accepted_tokens_per_pos"
    ),
    "llamacpp:prompt_tokens": "vllm:prompt_tokens",
    "llamacpp:tokens_predicted": "vllm:generation_tokens",
    "llamacpp:kv_cache_usage_ratio": "vllm:kv_cache_usage_perc",
    "llamacpp:requests_processing": "vllm:num_requests_running",
    "llamacpp:requests_deferred": "vllm:num_requests_waiting",
    "sglang:num_running_reqs": "vllm:num_requests_running",
    "sglang:num_queue_reqs": "vllm:num_requests_waiting",
    "sglang:token_usage": "vllm:kv_cache_usage_perc",
    "sglang:generation_tokens": "vllm:generation_tokens",
    "sglang:prompt_tokens": "vllm:prompt_tokens",
}
COUNTERS = (
    "vllm:spec_decode_num_drafts",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
    "vllm:generation_tokens",
    "vllm:prompt_tokens",
    "vllm:num_preemptions",
    "vllm:request_success",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
)
GAUGES = ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting")
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_POSITION = re.compile(r'position="(\d+)"')


def _samples(page: str) -> Iterator[tuple[str, str, float]]:
    """Name, labels and value of every line that can be read."""
    for line in page.splitlines():
        match = None if line.startswith("#") else _LINE.match(line)
        if match is None:
            continue
        try:
            yield match[1], match[2] or "", float(match[3])
        except ValueError:
            continue


def parse_metrics(page: str) -> dict[str, float]:
    """Every counter and gauge of a Prometheus page; lines it cannot read are left out."""
    found: dict[str, float] = {}
    for name, labels, value in _samples(page):
        if name.endswith(("_created", "_bucket")):
            continue
        name = name.removesuffix("_total")
        name = RENAMED.get(name, name)
        position = _POSITION.search(labels) if name == PER_POSITION else None
        key = f'{name}{{position="{position[1]}"}}' if position else name
        found[key] = found.get(key, 0.0) + value
    return found


def grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Growth of counters between two scrapes; a server that started anew counts from zero."""
    names = [n for n in after if n in COUNTERS or n.startswith(PER_POSITION)]
    return {n: after[n] - before.get(n, 0.0) if after[n] >= before.get(n, 0.0) else after[n]
            for n in names}  # fmt: skip


async def scrape(pool: HttpPool, *, timeout_s: float = 5.0) -> dict[str, float] | None:
    """The server's metrics now; None if it has none or does not answer."""
    try:
        answer = await pool.send("GET", "/metrics", timeout_s=timeout_s)
    except TransportError:
        return None
    if answer.status != 200 or answer.broken is not None:
        return None
    return parse_metrics(answer.body.decode("utf-8", "replace")) or None
