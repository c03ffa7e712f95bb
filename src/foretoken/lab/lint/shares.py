"""The share of the memory that a launch sets apart, by the rules of SGLang and of TensorRT-LLM.

SGLang's share holds the target's weights and cache; the draft's weights and cache, activations and
graphs have to find room in the rest, since its draft worker is started when the target's cache
stands. TensorRT-LLM's is a share of what all weights leave. Bytes per rank throughout. Sizes are
the planner's; measures nothing.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from foretoken.lab.findings import Finding
from foretoken.lab.launch.launch import Launch
from foretoken.lab.launch.values import number
from foretoken.lab.plan.memory_plan import draft_load, overhead_bytes, plan_memory
from foretoken.lab.plan.setup import Setup

SHARE_CHECK = "memory_share"
SHARES = ("sglang", "tensorrt-llm")
_SGLANG_RUNNING = 48
"""Requests at once that SGLang allows where it speculates and is not told otherwise."""
_LOGIT_BYTES = 4.0


def check_share(launch: Launch, setup: Setup) -> Iterator[Finding]:
    """Whether the share that a launch names leaves room for the rest, and holds a request."""
    check = {"sglang": _sglang, "tensorrt-llm": _tensorrt}.get(launch.engine)
    sizes = _sizes(setup)
    if check and sizes.free > 0:  # else it loads with no share, as `kv_budget` says
        yield from check(launch, setup, sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Bytes on one rank."""

    memory: float
    overhead: float
    """Activations, graphs and the runtime."""
    target: float
    draft: float
    token: float
    """Of the target's cache, per token."""
    draft_token: float

    @property
    def free(self) -> float:
        """What weights and overhead leave."""
        return self.memory - self.overhead - self.target - self.draft


def _sizes(setup: Setup) -> _Sizes:
    ranks, plan = setup.tp, plan_memory(setup, draft_load(setup))
    draft_ranks = min(setup.draft_tp, ranks)
    return _Sizes(
        memory=setup.device.memory_bytes,
        overhead=overhead_bytes(setup),
        target=plan.weight_bytes / ranks,
        draft=plan.draft_weight_bytes / draft_ranks,
        token=plan.kv_bytes_per_token / ranks,
        draft_token=plan.draft_kv_bytes_per_token / draft_ranks,
    )


def _sglang(launch: Launch, setup: Setup, sizes: _Sizes) -> Iterator[Finding]:
    flag, options = "--mem-fraction-static", launch.options
    share = _share(options.get("mem-fraction-static"))
    if share is None:
        return
    pool, context = share * sizes.memory - sizes.target, setup.settings.context
    verified = number(options.get("speculative-num-draft-tokens")) or setup.k + 1
    rows = verified * (number(options.get("max-running-requests")) or _SGLANG_RUNNING)
    drafts = verified > 1 and setup.drafts_with
    logits = rows * setup.target.vocab_size * _LOGIT_BYTES if drafts else 0.0
    # The draft's cache has a place for each of the target's.
    least = (sizes.target + context * sizes.token) / sizes.memory
    room = (sizes.free - logits) / (1.0 + sizes.draft_token / sizes.token)
    most = (sizes.target + room) / sizes.memory
    remedy = f"{flag} {int(most * 100) / 100:.2f}"
    if most < least:
        remedy = "more devices, smaller weights, a shorter context or fewer requests at once"
    if pool < context * sizes.token:
        message = (
            f"{share:g} is {_gb(share * sizes.memory)} GB a rank for weights of "
            f"{_gb(sizes.target)} GB and the cache: not one request of {context:,} tokens fits"
        )
        yield Finding.of(SHARE_CHECK, "error", flag, message, remedy)
        return
    parts = {
        "draft weights": sizes.draft,
        "the draft's cache": pool / sizes.token * sizes.draft_token,
        f"logits of {rows:,} rows to verify": logits,
        "activations and graphs": sizes.overhead,
    }
    wanted, left = sum(parts.values()), (1.0 - share) * sizes.memory
    if wanted > left:
        said = ", ".join(f"{_gb(size)} GB {name}" for name, size in parts.items() if size)
        message = (
            f"{share:g} leaves {_gb(left)} GB a rank, and beside the target are wanted about "
            f"{_gb(wanted)} GB: {said}"
        )
        yield Finding.of(SHARE_CHECK, "warning", flag, message, remedy)


def _tensorrt(launch: Launch, setup: Setup, sizes: _Sizes) -> Iterator[Finding]:
    name, context = "kv-cache-free-gpu-memory-fraction", setup.settings.context
    where, given = "--kv_cache_free_gpu_memory_fraction", launch.options.get(name)
    if given is None:  # JSON, or KvCacheConfig(...)
        written = str(launch.options.get("kv-cache-config", ""))
        match = re.search(r"free_gpu_memory_fraction\W+([\d.]+)", written)
        where, given = "kv_cache_config.free_gpu_memory_fraction", match and match[1]
    share = _share(given)
    if share is None:
        return
    each = sizes.token + sizes.draft_token
    tokens = int(share * sizes.free / each)
    wanted = (context + setup.k) * each / sizes.free
    if tokens < context + setup.k:
        message = (
            f"{share:g} of the {_gb(sizes.free)} GB a rank that weights leave holds {tokens:,} "
            f"tokens: not one request of {context:,}"
        )
        enough = f"{wanted + 0.01:.2f} or more" if wanted < 0.95 else ""
        remedy = enough or "more devices or smaller weights"
        yield Finding.of(SHARE_CHECK, "error", where, message, remedy)


def _share(given: object) -> float | None:
    """A share within 0 and 1; None: nothing, or nothing that could be one."""
    try:
        share = float(str(given))
    except ValueError:
        return None
    return share if 0.0 < share <= 1.0 else None


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f}"
