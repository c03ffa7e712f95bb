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
from foretoken.lab.launch.launch import Launch, number
from foretoken.lab.plan.memory_plan import draft_load, overhead_bytes, plan_memory
from foretoken.lab.plan.setup import Setup

SHARE_CHECK = "memory_share"
SHARES = ("sglang", "tensorrt-llm")
_SGLANG_RUNNING = 48
"""Requests at once that SGLang allows where it speculates and is not told otherwise."""
_LOGIT_BYTES = 4.0


def check_share(launch: Launch, setup: Setup) -> Iterator[Finding]:
    """Whether the share that a launch names leaves room for the rest, and holds a request."""
    sizes = _sizes(setup)
    if sizes.free <= 0:
        return  # it does not load with any share, as `kv_budget` says
    if launch.engine == "sglang":
        yield from _sglang(launch, setup, sizes)
    elif launch.engine == "tensorrt-llm":
        yield from _tensorrt(launch, setup, sizes)


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
    share = _share(launch.options.get("mem-fraction-static"))
    if share is None:
        return
    pool = share * sizes.memory - sizes.target
    need = setup.settings.context * sizes.token
    verified = _verified(launch, setup)
    rows = verified * (number(launch.options.get("max-running-requests")) or _SGLANG_RUNNING)
    logits = rows * setup.target.vocab_size * _LOGIT_BYTES if verified > 1 else 0.0
    beside = sizes.draft + sizes.overhead + logits
    # The draft's cache has a place for each of the target's.
    least = (sizes.target + need) / sizes.memory
    room = (sizes.free - logits) / (1.0 + sizes.draft_token / sizes.token)
    most = (sizes.target + room) / sizes.memory
    if pool < need:
        yield _finding(
            "error",
            "--mem-fraction-static",
            f"{share:g} is {_gb(share * sizes.memory)} GB a rank for weights of "
            f"{_gb(sizes.target)} GB and the cache: not one request of "
            f"{setup.settings.context:,} tokens fits",
            _between(least, most),
        )
        return
    cache = pool / sizes.token * sizes.draft_token
    left = (1.0 - share) * sizes.memory
    if beside + cache > left:
        parts = [
            (sizes.draft, "draft weights"),
            (cache, "the draft's cache"),
            (logits, f"logits of {rows:,} rows to verify"),
            (sizes.overhead, "activations and graphs"),
        ]
        said = ", ".join(f"{_gb(size)} GB {name}" for size, name in parts if size)
        yield _finding(
            "warning",
            "--mem-fraction-static",
            f"{share:g} leaves {_gb(left)} GB a rank, and beside the target are wanted about "
            f"{_gb(beside + cache)} GB: {said}",
            _between(least, most),
        )


def _verified(launch: Launch, setup: Setup) -> int:
    """Rows of a request that SGLang verifies in one step."""
    if not setup.drafts_with:
        return 1
    return number(launch.options.get("speculative-num-draft-tokens")) or setup.k + 1


def _between(least: float, most: float) -> str:
    if most < least:
        return "more devices, smaller weights, a shorter context or fewer requests at once"
    return f"--mem-fraction-static {_down(most):.2f}"


def _down(share: float) -> float:
    return int(share * 100) / 100


def _tensorrt(launch: Launch, setup: Setup, sizes: _Sizes) -> Iterator[Finding]:
    where, given = _free_share(launch)
    share = _share(given)
    if share is None:
        return
    each = sizes.token + sizes.draft_token
    tokens = int(share * sizes.free / each)
    need = setup.settings.context + setup.k
    if tokens < need:
        wanted = need * each / sizes.free
        yield _finding(
            "error",
            where,
            f"{share:g} of the {_gb(sizes.free)} GB a rank that weights leave holds {tokens:,} "
            f"tokens: not one request of {setup.settings.context:,}",
            f"{wanted + 0.01:.2f} or more" if wanted < 0.95 else "more devices or smaller weights",
        )


def _free_share(launch: Launch) -> tuple[str, object]:
    """Where the share of the free memory stands, and what is given."""
    name = "kv-cache-free-gpu-memory-fraction"
    if name in launch.options:
        return "--kv_cache_free_gpu_memory_fraction", launch.options[name]
    written = str(launch.options.get("kv-cache-config", ""))
    given = re.search(
        r"free_gpu_memory_fraction\W+([\d.]+)", written
    )  # JSON, or KvCacheConfig(...)
    return "kv_cache_config.free_gpu_memory_fraction", given[1] if given else None


def _share(given: object) -> float | None:
    """A share within 0 and 1; None: nothing, or nothing that could be one."""
    try:
        share = float(str(given))
    except ValueError:
        return None
    return share if 0.0 < share <= 1.0 else None


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f}"


def _finding(level: str, where: str, message: str, remedy: str) -> Finding:
    return Finding(check=SHARE_CHECK, level=level, where=where, message=message, remedy=remedy)
