"""Decides what depends on the model's shape and the machine, once, and says so: type, device,
lengths, invariance, pages.

The result holds numbers only; nothing later changes it.
"""

from collections.abc import Collection
from dataclasses import dataclass

from foretoken.config.engine import EngineConfig
from foretoken.config.memory import (
    Budget,
    Drafting,
    MemoryFacts,
    ModelMemory,
    show,
)
from foretoken.config.quantization import QUANTIZATIONS
from foretoken.config.reader import require
from foretoken.config.refusal import budget_of
from foretoken.errors import ConfigError, NotYetError
from foretoken.hardware import Gpus, Hardware
from foretoken.shape import ModelShape
from foretoken.shape.memory_formula import Packs, shares_heads, uneven_parts

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
CPU_KV_SHARE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """What the engine is built from."""

    user: EngineConfig
    device: str
    dtype: str
    device_name: str
    """Of a GPU; empty: it is a CPU."""
    batch_invariant: bool
    has_bits_of_one: bool
    """Whether several processes compute the bits of one."""
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    budget: Budget
    """Where the memory goes; decides the number of pages."""

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.budget.page_size

    @property
    def num_pages(self) -> int:
        """Pages of target and drafters alike."""
        return self.budget.num_pages

    @property
    def window(self) -> int | None:
        """Positions that layers with a window see, which let go of what lies before; None: none
        does."""
        return self.budget.need.window

    @property
    def num_kv_tokens(self) -> int:
        """Tokens whose keys and values fit."""
        return self.budget.num_tokens

    def describe(self) -> str:
        """One line for the log."""
        full = self.budget.requests_of(self.max_model_len)
        bits = self.user.quantization
        weights = "" if bits is None else f"{bits} weights, "
        if self.user.activations != "auto":
            weights += f"{self.user.activations} activations, "
        ranks, as_one = self.user.num_processes, "(same tokens as one up to rounding)"
        several = f" in {ranks} processes" if ranks > 1 else ""
        several += f" {as_one}" if several and not self.has_bits_of_one else ""
        device = f" ({self.device_name})" if self.device_name else ""
        invariant = "on" if self.batch_invariant else "off (same tokens up to rounding)"
        return (
            f"{self.user.model}: {weights}{self.dtype} on {self.device}{device}{several}, "
            f"batch_invariant {invariant}, "
            f"{self._kv_words} {self.budget.page_bytes / 2**20:.0f} MiB = "
            f"{self.num_kv_tokens} tokens = {full:.1f} requests of {self.max_model_len}, "
            f"up to {self.max_num_seqs} at once, {self.max_num_batched_tokens} tokens a step"
        )

    @property
    def _kv_words(self) -> str:
        return "int8 KV cache" if self.user.kv_cache_dtype == "int8" else "KV cache"

    def describe_memory(self) -> list[str]:
        """The budget line by line, and what speculation takes of it."""
        budget, need, ranks = self.budget, self.budget.need, self.user.num_processes
        tokens, each = budget.num_tokens, self.budget.need.draft_kv_per_token
        of_ranks = f"of {ranks} processes together, as are all lines"
        if self.device != "cpu":
            of_ranks = f"of the first of {ranks} devices, as are all lines; it has most"
        of_drafts = f"{tokens} tokens x {each} B" if each else ""
        if each and budget.draft_bytes < tokens * each:
            of_drafts = f"beside a full KV cache, more beside an emptier one, x {each} B"
        kept, of_tokens = budget.kept_bytes, f"{tokens} tokens x {need.kv_per_token} B"
        if need.window is not None:
            of_tokens = (
                f"of one request {tokens} tokens x "
                f"{need.kv_per_token - need.window_kv_per_token} B, and of the last {need.window} "
                f"of each {need.window_kv_per_token} B more"
            )
        lines = [
            ("weights", need.weights, of_ranks if ranks > 1 else ""),
            ("draft weights", need.draft_weights, ""),
            (self._kv_words, kept, of_tokens),
            ("draft KV cache", budget.draft_bytes, of_drafts),
            ("activations", need.activations, "at most, in a full step"),
            ("workspace", need.workspace, ""),
        ]
        shown = [
            f"memory: {name:<15}{show(size):>11}  {note}".rstrip()
            for name, size, note in lines
            if size or note
        ]
        total = f"memory: {'all together':<15}{show(budget.total):>11}  of {show(budget.free)} free"
        if not need.drafts:
            return [*shown, total]
        slots = min(need.lookahead_tokens, tokens)
        share = budget.lost_tokens / budget.plain_tokens if budget.plain_tokens else 0.0
        shown += [
            total,
            f"memory: speculation costs {budget.lost_tokens} tokens of KV ({share:.1%} of the "
            f"{budget.plain_tokens} without it); drafts that are being checked hold up to {slots}",
        ]
        if each and not budget.is_shared:
            device = f"{self.device} gives no memory back"
            shown.append(f"memory: the draft KV cache is reserved, used or not: {device}")
        return shown


def resolve(
    config: EngineConfig,
    hardware: Hardware,
    shape: ModelShape,
    *,
    drafting: Drafting | None = None,
    packs: Collection[str] = ("cpu",),
    gpus: Gpus | None = None,
) -> ResolvedConfig:
    """Decide device, dtype, invariance, lengths and the number of KV pages.

    Args:
        config: what the user set.
        hardware: the machine.
        shape: the target's shape.
        drafting: what drafters keep; None: nothing.
        packs: devices whose kernels keep integer weights; on `cpu` they pack floats too.
        gpus: the CUDA devices; None: there are none.

    Raises:
        NotYetError: processes that are to share what only one can run.
        ConfigError: settings that contradict each other, the model or the machine, or not enough
            memory, with the arithmetic and with settings that would work.
    """
    target = _target(config, shape)
    device = resolve_device(config.device, gpus)
    dtype = resolve_dtype(config.dtype, device, hardware, shape, packs)
    invariant = resolve_invariance(config, device, dtype, shape, packs, gpus)
    used, held = None if device == "cpu" else gpus, _packs(device, dtype, packs)
    _check_ranks(target, used, can_watch="cpu" in packs)
    recorded = used is not None and _keeps_bits(used, dtype, shape)
    facts = MemoryFacts(
        target=target,
        drafting=drafting or Drafting(),
        dtype_bytes=DTYPE_BYTES[dtype],
        packs=held,
        free=_free(config, hardware, used),
        kv_share=CPU_KV_SHARE if device == "cpu" else 1.0,
        kv_bytes=config.kv_cache_memory_bytes,
        page_size=config.block_size,
        max_model_len=config.max_model_len or shape.max_position_embeddings,
        max_model_len_given=config.max_model_len is not None,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or 2048,
        gives_back=device == "cpu" and hardware.gives_memory_back,
        may_map=held is Packs.ALL and config.num_processes == 1 and shape.experts is not None,
        of_one_rank=device != "cpu",
    )
    return ResolvedConfig(
        user=config,
        device=device,
        device_name="" if used is None else used.name,
        dtype=dtype,
        batch_invariant=invariant,
        has_bits_of_one=held is Packs.ALL or recorded,
        max_model_len=facts.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        budget=budget_of(facts),
    )


def _free(config: EngineConfig, hardware: Hardware, used: Gpus | None) -> int:
    """Bytes that the engine may use; on each device, if there are several."""
    if used is None:
        return hardware.free_memory
    return int(used.free_memory * config.gpu_memory_utilization)


def _target(config: EngineConfig, shape: ModelShape) -> ModelMemory:
    """The model and how it is kept, if it can be kept and multiplied so, for so long a context."""
    given, rounded = config.activations, config.quantization in QUANTIZATIONS
    allowed = "auto, or beside integer weights: quantization int8 or int4"
    holds_integers = rounded or shape.stored is not None
    require("activations", given, given == "auto" or holds_integers, allowed)
    length, longest = config.max_model_len, shape.max_position_embeddings
    allowed = f"at most {longest}, the model's context"
    require("max_model_len", length, length is None or length <= longest, allowed)
    return ModelMemory(
        shape=shape,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        ranks=config.tensor_parallel_size,
        stages=config.pipeline_parallel_size,
    )


def _check_ranks(target: ModelMemory, gpus: Gpus | None, *, can_watch: bool) -> None:
    """Whether as many processes can compute the target, on these devices or the CPU (None).

    `can_watch`: whether there are the compiled kernels, by which processes watch each other.
    """
    shape, ranks, stages = target.shape, target.ranks, target.stages
    for where, count in (("tensor_parallel_size", ranks), ("pipeline_parallel_size", stages)):
        if count > 1 and not shape.is_own:
            raise NotYetError(where, count, "1 for a model that runs through transformers")
    where = "tensor_parallel_size"
    if ranks > 1:
        check_heads(where, ranks, shape)
    if ranks > 1 and gpus is not None:
        seen = f"1 to {gpus.count}, the CUDA devices that PyTorch sees"
        require(where, ranks, ranks <= gpus.count, seen)
        alone = "1 on cuda with a PyTorch that was built without NCCL"
        require(where, ranks, gpus.has_nccl, alone)
        alone = "1 on cuda without the compiled kernels, by which processes notice that one is lost"
        require(where, ranks, can_watch, alone)
        uneven = uneven_parts(  # NCCL gathers parts of one size
            ranks,
            shape.num_key_value_heads,
            shape.num_attention_heads,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            width_of_experts=0 if shape.experts is None else shape.experts.width,
            width_of_the_shared_expert=0 if shape.experts is None else shape.experts.shared_width,
            vocabulary=shape.vocab_size,
        )
        allowed = f"on cuda a number that divides the model's {' and '.join(uneven)}"
        require(where, ranks, not uneven, allowed)
    where, most = "pipeline_parallel_size", shape.num_hidden_layers
    if stages > 1:
        require(where, stages, stages <= most, f"1 to {most}, the layers of the model")
        together = shape.kv_sharing_layers or shape.layer_inputs
        require(where, stages, not together, "1: layers of this model share what they read")
        if gpus is not None:
            raise NotYetError(where, stages, "1 on cuda; device cpu, or tensor_parallel_size")


def check_heads(where: str, ranks: int, shape: ModelShape) -> None:
    """Raise a ConfigError about `where` unless so many processes can share a model's heads."""
    keys, queries = shape.num_key_value_heads, shape.num_attention_heads
    alone = "1: norms of this model reach over all heads"
    require(where, ranks, ranks == 1 or not shape.whole_norms, alone)
    alone = "1: layers of this model have heads of two sizes"
    require(where, ranks, ranks == 1 or shape.wide is None, alone)
    allowed = f"1 to {keys}, the key heads of the model"
    if more := range(2 * keys, queries + 1, keys):
        allowed += f", or a multiple of them up to {more[-1]}"
    require(where, ranks, shares_heads(keys, queries, ranks), allowed)


def _packs(device: str, dtype: str, devices: Collection[str]) -> Packs:
    if device not in devices or (device == "cpu" and dtype == "float16"):
        return Packs.NONE
    return Packs.ALL if device == "cpu" else Packs.INTEGERS


def resolve_device(wanted: str, gpus: Gpus | None) -> str:
    """A CUDA device where there is one, unless another is wanted.

    Raises:
        ConfigError: one is wanted, and there is none that this PyTorch computes on.
    """
    why_not = "PyTorch sees no CUDA device" if gpus is None else gpus.why_not
    if wanted == "auto":
        return "cpu" if why_not else "cuda"
    if wanted == "cuda" and why_not:
        raise ConfigError("device", "cuda", f"cpu: {why_not}")
    return wanted


def resolve_invariance(
    config: EngineConfig,
    device: str,
    dtype: str,
    shape: ModelShape,
    packs: Collection[str],
    gpus: Gpus | None,
) -> bool:
    """On where it costs nothing or little, unless the user says: our own layers have it by
    construction where kernels run them, on a GPU where a probe found it so, and for bfloat16 on a
    CPU it is cheap."""
    if config.batch_invariant != "auto":
        return bool(config.batch_invariant)
    if gpus is not None and device == "cuda":
        return _keeps_bits(gpus, dtype, shape)
    built_in = shape.is_own and _packs(device, dtype, packs) is Packs.ALL
    return built_in or (device == "cpu" and dtype == "bfloat16")


def _keeps_bits(gpus: Gpus, dtype: str, shape: ModelShape) -> bool:
    """Whether a model's steps run by kernels whose rows keep their bits on these GPUs."""
    return shape.is_own and gpus.keeps_bits and dtype != "float32"


def resolve_dtype(
    wanted: str, device: str, hardware: Hardware, shape: ModelShape, packs: Collection[str]
) -> str:
    """The checkpoint's 16-bit type where this machine computes it well, else float32.

    Kernels do so on every processor: they widen bfloat16 in registers where it is not multiplied,
    so that half as many bytes are read. PyTorch's operations need an instruction for it.
    """
    if wanted != "auto":
        return wanted
    if device == "cuda":
        return "float16" if shape.dtype == "float16" else "bfloat16"
    widens = "cpu" in packs and shape.is_own
    if shape.dtype == "float32" or not (widens or hardware.has_bf16):
        return "float32"
    return "bfloat16"
