"""Decides every "auto" once, from the config, the model's shape and the machine, and says so.

The result holds numbers only; nothing later changes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.config.engine import EngineConfig
from foretoken.errors import ConfigError
from foretoken.hardware import Hardware
from foretoken.shape import ModelShape

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_MIN_KV_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """What the engine is built from."""

    user: EngineConfig
    device: str
    dtype: str
    batch_invariant: bool
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    num_pages: int
    kv_bytes_per_token: int
    """Target and drafters together, all layers; features that heads read included."""

    @property
    def num_kv_tokens(self) -> int:
        """Tokens whose keys and values fit."""
        return self.num_pages * self.page_size

    def describe(self) -> str:
        """One line for the log."""
        full = self.num_kv_tokens / self.max_model_len
        bits = self.user.quantization
        weights = "" if bits is None else f"{bits} weights, "
        invariant = "on" if self.batch_invariant else "off (same tokens up to rounding)"
        return (
            f"{self.user.model}: {weights}{self.dtype} on {self.device}, "
            f"batch_invariant {invariant}, "
            f"KV cache {self.num_kv_tokens * self.kv_bytes_per_token / 2**20:.0f} MiB = "
            f"{self.num_kv_tokens} tokens = {full:.1f} requests of {self.max_model_len}, "
            f"up to {self.max_num_seqs} at once, {self.max_num_batched_tokens} tokens a step"
        )


def resolve(
    config: EngineConfig,
    hardware: Hardware,
    shape: ModelShape,
    *,
    draft_shapes: Sequence[ModelShape] = (),
    head_values_per_token: int = 0,
    gpu_free_memory: int | None = None,
) -> ResolvedConfig:
    """Decide device, dtype, invariance, lengths and the number of KV pages.

    Args:
        config: what the user set.
        hardware: the machine.
        shape: the target's shape.
        draft_shapes: those of the draft models; they share the pages.
        head_values_per_token: what heads keep for a token: features, keys and values.
        gpu_free_memory: free bytes of the CUDA device, None if there is none.

    Raises:
        ConfigError: max_model_len beyond the model's context, no CUDA device, or a KV budget
            smaller than one page.
    """
    device = config.device
    if device == "auto":
        device = "cpu" if gpu_free_memory is None else "cuda"
    if device == "cuda" and gpu_free_memory is None:
        raise ConfigError("device", "cuda", "cpu: PyTorch sees no CUDA device")
    dtype = resolve_dtype(config.dtype, device, hardware, shape)
    invariant = config.batch_invariant
    if invariant == "auto":
        invariant = device == "cpu" and dtype == "bfloat16"
    max_model_len = config.max_model_len or shape.max_position_embeddings
    if max_model_len > shape.max_position_embeddings:
        allowed = f"at most {shape.max_position_embeddings}, the model's context"
        raise ConfigError("max_model_len", max_model_len, allowed)
    per_token = shape.kv_bytes_per_token(DTYPE_BYTES[dtype])
    for draft_shape in draft_shapes:
        per_token += draft_shape.kv_bytes_per_token(DTYPE_BYTES[dtype])
    per_token += head_values_per_token * DTYPE_BYTES[dtype]
    page_bytes = per_token * config.block_size
    pages_each = -(-max_model_len // config.block_size)
    budget = _kv_budget(config, device, hardware, gpu_free_memory, shape, DTYPE_BYTES[dtype])
    num_pages = min(budget // page_bytes, config.max_num_seqs * pages_each)
    if num_pages < 1:
        given = config.kv_cache_memory_bytes or budget
        raise ConfigError("kv_cache_memory_bytes", given, f"at least one page, {page_bytes} bytes")
    return ResolvedConfig(
        user=config,
        device=device,
        dtype=dtype,
        batch_invariant=bool(invariant),
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or 2048,
        page_size=config.block_size,
        num_pages=num_pages,
        kv_bytes_per_token=per_token,
    )


def resolve_dtype(wanted: str, device: str, hardware: Hardware, shape: ModelShape) -> str:
    """The checkpoint's 16-bit type where the machine has it, else float32."""
    if wanted != "auto":
        return wanted
    if device == "cuda":
        return "float16" if shape.dtype == "float16" else "bfloat16"
    if shape.dtype == "float32" or not hardware.has_bf16:
        return "float32"
    return "bfloat16"


def _kv_budget(
    config: EngineConfig,
    device: str,
    hardware: Hardware,
    gpu_free_memory: int | None,
    shape: ModelShape,
    dtype_bytes: int,
) -> int:
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    if device == "cuda" and gpu_free_memory is not None:
        weights = shape.weight_bytes(dtype_bytes)
        return max(int(gpu_free_memory * config.gpu_memory_utilization) - weights, _MIN_KV_BYTES)
    return max(hardware.free_memory // 4, _MIN_KV_BYTES)
