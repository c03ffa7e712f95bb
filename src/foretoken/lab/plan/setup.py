"""What a plan is about: models, devices, and the settings of the server and of the load.

Frozen values; names of settings follow vLLM. Built from a mapping (a YAML file with the command
line's options over it), where an unknown key is an error. Devices are from data sheets. What an
engine's own work adds to a step no data sheet says: assumptions from published paces without drafts
and from how its kernels are built; `lab decide --fit` says a server's own step times.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Annotated, Any, Self

from foretoken.config.method_registry import DraftingMethod
from foretoken.config.quantization import KVCacheDtype
from foretoken.config.reader import Allowed, at_least, between, check_fields, read, require, words
from foretoken.errors import ConfigError, one_of
from foretoken.hardware import Hardware
from foretoken.lab.plain import from_plain
from foretoken.lab.plan.method_plans import MethodPlan, plan_of, planned_methods
from foretoken.lab.plan.sizes import (
    PlanModel,
    Quantization,
    find_quantization,
    kv_element_bytes,
    load_plan_model,
)
from foretoken.shape import memory_formula as formula

MOST_K = 16
"""Drafts per verification, the most that are looked at unless more are asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or one CPU socket. Bytes, bytes per second, operations per second."""

    name: str
    kind: str
    advertised_bytes: int
    """The decimal gigabytes of the product's name."""
    memory_bytes: int
    bandwidth: float
    flops: dict[str, float]
    """Peak dense matrix operations by operand type; multiply-adds count two."""
    link: float
    step_s_per_layer: float
    """Time per layer below which a decoding step does not go; an assumption."""
    source: str

    def flops_for(self, compute: str) -> float:
        """Operations per second with operands of type `compute`, or the next wider type."""
        for name in (compute, "fp8", "int8", "bf16"):
            if name in self.flops and (name == compute or compute == "fp4"):
                return self.flops[name]
        return self.flops["bf16"]


@cache
def _table() -> dict[str, dict[str, Any]]:
    text = resources.files(__package__).joinpath("devices.toml").read_text("utf-8")
    return tomllib.loads(text)


@cache
def known_devices() -> dict[str, Device]:
    return {
        name: Device(
            name=name,
            kind=row.get("kind", "gpu"),
            advertised_bytes=round(row["advertised_gb"] * 1e9),
            memory_bytes=row["memory_mib"] << 20,
            bandwidth=row["bandwidth_gb_s"] * 1e9,
            flops={kind: value * 1e12 for kind, value in row["tflops"].items()},
            link=row.get("link_gb_s", 0) * 1e9,
            step_s_per_layer=row["step_us_per_layer"] * 1e-6,
            source=row["source"],
        )
        for name, row in _table().items()
    }


def find_device(name: str) -> Device:
    """A device of the table, or `this`: the CPU of this machine, its speed an assumption. Raises
    ConfigError where there is none of that name."""
    wanted = name.lower().replace("_", "-")
    if wanted == "this":
        return _this_machine()
    found = known_devices()
    # What people say when they mean one of several devices is the one that they mostly have.
    wanted = next((n for n, row in _table().items() if wanted in row.get("also", ())), wanted)
    if wanted in found:
        return found[wanted]
    close = [known for known in found if wanted in known or known in wanted]
    if len(close) == 1:
        return found[close[0]]
    raise ConfigError("--device", name, one_of(wanted, close or (*found, "this")))


def _this_machine() -> Device:
    hardware = Hardware.detect()
    wide = 128 if "avx512_bf16" in hardware.cpu_flags else 32
    wide = 1024 if "amx_bf16" in hardware.cpu_flags else wide
    return Device(
        name=f"this ({hardware.cpu_name}, {hardware.num_cores} cores)",
        kind="cpu",
        advertised_bytes=hardware.free_memory,
        memory_bytes=hardware.free_memory,
        bandwidth=min(20e9 * hardware.num_cores, 400e9),
        flops={"bf16": 2.5e9 * wide * hardware.num_cores},
        link=0.0,
        step_s_per_layer=30e-6,
        source="detected; assumed: 20 GB/s and 2.5 GHz per core (--bandwidth-gb-s overrides it)",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCost:
    step_s: float = 0.0
    """Scheduling and sampling around each pass of the target."""
    draft_s: float = 0.0
    layer_s: float = 0.0
    """Launch time per layer; 0: the device's, with captured graphs."""
    exchanges: int = 2
    """Exchanges of a layer between ranks that share it."""
    exchange_s: float = 10e-6
    reread_share: float = 0.0
    """Share of the weights' reading that each further row repeats, of weights below 16 bit: such
    kernels unpack a weight again for every row, so each row to verify costs time of its own."""


ENGINE_COSTS = {
    "vllm": EngineCost(step_s=1.0e-3, draft_s=0.6e-3),
    "sglang": EngineCost(step_s=0.5e-3, draft_s=0.25e-3),
    "tensorrt-llm": EngineCost(step_s=0.3e-3, draft_s=0.15e-3),
    "transformers": EngineCost(step_s=2e-3, draft_s=2e-3, layer_s=0.7e-3),
    "llama.cpp": EngineCost(step_s=0.3e-3, draft_s=0.2e-3, reread_share=0.2),
    "vllm-metal": EngineCost(step_s=1.0e-3, draft_s=0.5e-3, reread_share=0.3),
    "mlx": EngineCost(step_s=1e-3, draft_s=0.5e-3, reread_share=0.8),
    "foretoken": EngineCost(exchanges=4, exchange_s=20e-6),
}
"""By engine; Foretoken's own work is small beside what a processor computes. Its exchanges were
measured (benchmarks/LOG.md)."""


ENGINES = ("vllm", "llama.cpp", "foretoken")
_FROM_ZERO = Allowed("a number >= 0", lambda value: bool(value >= 0))
WORKLOADS = ("chat", "code", "math", "summarize", "rag", "edit", "json", "creative", "mixed")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    target: str
    draft: str | None = None
    """The draft model, or several with commas between them, of which the best is taken; None: only
    methods without one can be planned."""
    method: str = "auto"
    """A planned method or `none`; `auto`: draft_model if there is a draft, else ngram."""
    engine: Annotated[str, words(*ENGINES)] = "vllm"
    quantization: str = "auto"
    """How the target's weights are stored; `auto`: as its checkpoint."""
    draft_quantization: str = "auto"
    kv_cache_dtype: str = "auto"
    draft_kv_cache_dtype: str = "auto"
    device: str = "h100-sxm"
    """A row of the table of devices, or `this`."""
    count: Annotated[int, at_least(1)] = 1
    tensor_parallel_size: int = 0
    """Ranks the target is split over; 0: one on each device. Those of Foretoken are processes, of
    which there may be several on a CPU."""
    draft_tensor_parallel_size: int = 0
    """Ranks the draft is split over; 0: as the target, with Foretoken 1."""
    utilization: Annotated[float, between(0.0, 1.0)] = 0.0
    """Share of the memory the server may use; 0: the engine's default."""
    overhead_gb: float = -1.0
    """Memory per device for activations, graphs and the runtime; negative: estimated."""
    max_num_batched_tokens: int = 8192
    num_speculative_tokens: Annotated[int, between(0, 128)] = 0
    """Drafts per verification; 0: the method's usual start."""
    context: Annotated[int, at_least(1)] = 4096
    """Tokens of a typical request when it ends, prompt included."""
    output_tokens: Annotated[int, at_least(1)] = 256
    """Tokens of that request which the model writes."""
    concurrency: Annotated[int, at_least(1)] = 8
    """Requests in flight on an ordinary day."""
    peak_concurrency: Annotated[int, at_least(1)] = 64
    workload: Annotated[str, words(*WORKLOADS)] = "chat"
    """One of WORKLOADS; decides which acceptance is assumed."""
    temperature: Annotated[float, _FROM_ZERO] = 0.0
    """Temperature of the median request in production."""
    acceptance: str = ""
    """Chance that a draft is accepted given that all before it were, as LOW:HIGH; empty: assumed
    from method, workload and temperature."""
    rate: str = ""
    """Accepted over drafted tokens, as servers count them, as LOW:HIGH, with as many drafts per
    verification as are asked for; empty: as `acceptance` says. The two are one number for a single
    draft only."""
    slo: Annotated[str, words("tpot", "ttft", "throughput")] = "tpot"
    bandwidth_gb_s: Annotated[float, _FROM_ZERO] = 0.0
    """Measured memory bandwidth per device; 0: the data sheet's."""

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> Self:
        """Settings of a YAML file. Raises ConfigError at an unknown key, a wrong type or value."""
        named = {str(key).replace("-", "_"): value for key, value in given.items()}
        if named.get("target") is None:
            allowed = "the model to serve, as in `foretoken lab plan qwen3-8b`"
            raise ConfigError("plan.target", None, allowed)
        return from_plain(cls, named, "plan")

    def __post_init__(self) -> None:
        check_fields(self, "plan.")
        both = bool(self.acceptance and self.rate)
        require("plan.rate", self.rate, not both, "one of plan.acceptance and plan.rate")
        methods = ("auto", *planned_methods(), "none")
        require("plan.method", self.method, self.method in methods, one_of(self.method, methods))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The settings with every name looked up and every 0 replaced by what it stands for."""

    settings: PlanSettings
    target: PlanModel
    draft: PlanModel | None
    method: str
    device: Device
    quantization: Quantization
    draft_quantization: Quantization
    kv_bytes: float
    """Bytes of one element of the target's keys and values."""
    draft_kv_bytes: float
    tp: int
    draft_tp: int
    devices: int
    """Those that the ranks are on."""
    utilization: float
    k: int
    host: EngineCost
    usual: int
    peak: int
    """Requests in flight on an ordinary day and at the peak: as many of those that were asked for
    as fit at once, once it is known how many do."""

    @property
    def deciding(self) -> int:
        return self.peak if self.settings.slo == "throughput" else self.usual

    @property
    def drafting(self) -> DraftingMethod | None:
        return planned_methods().get(self.method)

    @property
    def method_plan(self) -> MethodPlan | None:
        return plan_of(self.drafting) if self.drafting else None

    @property
    def drafts_with(self) -> str:
        """`text`, `model` or `head`; empty for `none`."""
        return self.drafting.drafts_with if self.drafting else ""

    @property
    def draft_model(self) -> PlanModel | None:
        return self.draft if self.drafts_with == "model" else None

    @property
    def in_processes(self) -> bool:
        """Whether ranks are processes of Foretoken: they share memory, and one of them drafts."""
        return self.settings.engine == "foretoken" and self.device.kind == "cpu"

    @property
    def draft_ranks(self) -> int:
        """Ranks that keep a part of the drafter."""
        return min(self.draft_tp, self.tp)

    @property
    def has_weights(self) -> bool:
        return self.drafting is not None and self.drafting.has_weights

    @property
    def drafts_in_one_pass(self) -> bool:
        """Whether all drafts of a step come of one pass, a row each."""
        return self.drafting is not None and self.drafting.in_one_pass

    @property
    def max_drafts(self) -> int:
        """Most drafts per step that are looked at: no more than a usual block, unless asked for."""
        block = self.method_plan.block if self.method_plan else 0
        return min(MOST_K, max(self.k, block)) if block else MOST_K

    @property
    def head_quantization(self) -> Quantization:
        """How the weights of a head are stored: as the checkpoint that brings it, else as asked of
        drafts, unless that is said of a draft model."""
        if self.method_plan is not None and not self.method_plan.own_file:
            return self.quantization
        return self.draft_quantization if self.draft is None else find_quantization("bf16", "bf16")


DEFAULT_UTILIZATION = {"vllm": 0.92, "llama.cpp": 1.0, "foretoken": 0.9}
"""vLLM 0.33's default; llama.cpp has none."""
DRAWN_FROM = 0.5
"""The temperature above which other engines are told to draw their drafts."""


def first_drafts(settings: PlanSettings) -> int:
    """Drafts per verification that were asked for, else those of the method to start with."""
    own = planned_methods().get(_method(settings))
    return settings.num_speculative_tokens or (plan_of(own).usual_drafts if own else 0)


def _method(settings: PlanSettings) -> str:
    if settings.method != "auto":
        return settings.method
    return "draft_model" if settings.draft else "ngram"


def resolve_setup(settings: PlanSettings) -> Setup:
    """Look everything up. Raises ConfigError at an unknown device or quantization, or a method that
    lacks its draft; ModelNotFoundError at an unknown model."""
    method = _method(settings)
    drafting = planned_methods().get(method)
    if drafting is not None and drafting.drafts_with == "model" and not settings.draft:
        others = ", ".join(name for name in planned_methods() if name != method)
        allowed = f"a draft model for method {method}, or another method: {others}"
        raise ConfigError("plan.draft", None, allowed)
    target = load_plan_model(settings.target, "plan.target")
    draft = load_plan_model(settings.draft, "plan.draft") if settings.draft else None
    own = target.quantization if settings.quantization == "auto" else settings.quantization
    drafts = settings.draft_quantization
    if drafts == "auto":
        drafts = draft.quantization if draft else "bf16"
    weights = find_quantization(own, "plan.quantization")
    draft_weights = find_quantization(drafts, "plan.draft_quantization")
    device = find_device(settings.device)
    tp, draft_tp = _ranks(settings, device)
    return Setup(
        settings=settings,
        target=target,
        draft=draft,
        method=method,
        device=device,
        quantization=weights,
        draft_quantization=draft_weights,
        kv_bytes=_kv_bytes("kv_cache_dtype", settings, target, weights),
        draft_kv_bytes=_kv_bytes("draft_kv_cache_dtype", settings, draft or target, draft_weights),
        tp=tp,
        draft_tp=draft_tp,
        devices=min(tp, settings.count),
        utilization=settings.utilization or DEFAULT_UTILIZATION[settings.engine],
        k=first_drafts(settings),
        host=ENGINE_COSTS[settings.engine],
        usual=settings.concurrency,
        peak=settings.peak_concurrency,
    )


def _ranks(settings: PlanSettings, device: Device) -> tuple[int, int]:
    """Those of the target and of the draft. Raises ConfigError where there are more than can be, or
    with Foretoken several for the draft."""
    count, draft = settings.count, settings.draft_tensor_parallel_size
    tp, own = settings.tensor_parallel_size or count, settings.engine == "foretoken"
    several = own and device.kind == "cpu"
    if tp < 1 or (tp > count and not several):
        raise ConfigError("plan.tensor_parallel_size", tp, f"1 to plan.count ({count})")
    if not own:
        return tp, draft or tp
    allowed = "1: a drafter runs in one process"
    require("plan.draft_tensor_parallel_size", draft, draft in (0, 1), allowed)
    return tp, 1


def _kv_bytes(name: str, settings: PlanSettings, model: PlanModel, weights: Quantization) -> float:
    """Bytes of one element of the keys and values of `model`, kept as the setting `name` says."""
    given, field = getattr(settings, name), f"plan.{name}"
    if settings.engine != "foretoken":
        return kv_element_bytes(given, field)
    read(KVCacheDtype, given, field)
    dtype_bytes = 4 if weights.name == "fp32" else 2
    return formula.kv_element_bytes(dtype_bytes, given, model.shape.head_dim)
