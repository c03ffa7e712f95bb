"""Settings of the engine: names, defaults and meaning as in vLLM where vLLM has them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, Self, TypeAlias

from foretoken.config.quantization import (
    Activations,
    KVCacheDtype,
    PrecisionConfig,
    Quantization,
    check_quantization,
)
from foretoken.config.reader import Allowed, at_least, between, check_fields, require, words
from foretoken.config.speculative import SpeculativeConfig
from foretoken.config.translate import ENGINE_KEYS, translate_keywords
from foretoken.errors import NotYetError

_PAGE = Allowed("a multiple of 8", lambda size: size >= 8 and size % 8 == 0)
_SHARE = Allowed("a number in (0, 1]", lambda share: 0 < share <= 1)
_INVARIANT = Allowed('"auto", True or False', lambda given: given in ("auto", True, False))
_ADAPTIVE = Allowed(
    '"auto", True or False; True learns from what steps took, which "measured" was for',
    lambda given: given in ("auto", True, False),
)

Control: TypeAlias = Literal["adaptive", "fixed"]
"""How the length of drafts is decided: by what is expected, or not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What `LLM(...)` takes. `resolve` turns it into numbers. Raises ConfigError: a value is out of
    range; NotYetError: a value asks for a part that is not built."""

    model: Annotated[str, Allowed("a name", bool)]
    """Packaged name (`demo`, `demo-draft`), local folder or GGUF file, or Hugging Face id; of its
    GGUF files one by its type, `org/repo:Q4_K_M`, or by its path, `org/repo/file.gguf`."""
    tokenizer: str | None = None
    """The same, for the tokenizer; default: the model's own."""
    revision: str | None = None
    """Branch, tag or commit of a Hugging Face id."""
    dtype: Annotated[str, words("auto", "bfloat16", "float16", "float32")] = "auto"
    """`auto`, `bfloat16`, `float16` or `float32`. Auto: the checkpoint's 16-bit type where this
    machine computes it well (any CPU with the compiled kernels, or with an instruction for it),
    else float32."""
    quantization: Quantization = None
    """`int8` or `int4`: round the weights while loading, as docs/quantization.md says; of a
    checkpoint that is quantized already, those that it holds as floats. Such a checkpoint needs
    no setting; naming its format (`gptq`, ...) only checks it. Activations keep the type of
    `dtype`. A draft model has a setting of its own, in speculative_config."""
    activations: Activations = "auto"
    """What integer weights are multiplied with. `int16`, which is `auto`: activations in 16-bit
    fixed point, finer than bfloat16. `int8`: 8 bits and a scale for 128 of them, faster where
    products are what takes the time, and another model: see docs/quantization.md. A drafter has a
    setting of its own, in speculative_config."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """`auto`: keys and values in the type of `dtype`. `int8`: 8 bits a number and a float32 scale
    for each token and head, about half the memory and another model, though hardly: see
    docs/quantization.md. A drafter has a setting of its own, in speculative_config."""
    device: Annotated[str, words("auto", "cpu", "cuda")] = "auto"
    """`auto`, `cpu` or `cuda`. Auto: a CUDA device if there is one."""
    seed: int = 0
    """Seeds the keys of requests that bring no seed of their own."""
    max_model_len: Annotated[int, at_least(1)] | None = None
    """Most tokens of a request, prompt and output together; default: the model's context."""
    max_num_seqs: Annotated[int, at_least(1)] = 64
    """Most requests running at once."""
    max_num_batched_tokens: Annotated[int, at_least(1)] | None = None
    """Most tokens of one step, prompt chunks and drafts included; default 2048."""
    block_size: Annotated[int, _PAGE] = 32
    """Tokens of a KV page; a multiple of 8."""
    enable_prefix_caching: bool = True
    """Reuse the KV of prompt beginnings that were computed before."""
    gpu_memory_utilization: Annotated[float, _SHARE] = 0.9
    """Share of a GPU's memory to use; on a CPU, kv_cache_memory_bytes is what counts."""
    kv_cache_memory_bytes: Annotated[int, at_least(1)] | None = None
    """Memory for keys and values; default on a CPU: a quarter of the free memory, on a GPU: what
    gpu_memory_utilization leaves. On several GPUs: on each. Never more than max_num_seqs full
    contexts."""
    batch_invariant: Annotated[bool | str, _INVARIANT] = "auto"
    """Bitwise the same tokens whatever the batch, the chunking and the drafts. Auto: on where it
    is cheap (on a CPU with the compiled kernels, and for bfloat16), off elsewhere; the choice is
    logged."""
    tensor_parallel_size: Annotated[int, at_least(1)] = 1
    """Processes that share every layer, on one machine's cores, or on a CUDA device each: see
    docs/serving.md. With the compiled kernels on a CPU tokens are those of 1."""
    pipeline_parallel_size: Annotated[int, between(1, 2)] = 1
    """Processes that have some consecutive layers each, on a CPU: 1, or 2 beside
    tensor_parallel_size 1. With the compiled kernels tokens are those of 1, and no time is saved:
    see docs/serving.md."""
    disable_log_stats: bool = True
    """False: one log line every ten seconds, and those of the start."""
    speculative_config: SpeculativeConfig | None = None
    """How to draft; None: plain decoding."""
    adaptive_speculation: Annotated[bool | str, _ADAPTIVE] = "auto"
    """In each step draft only as far as it is expected to be faster, up to num_speculative_tokens,
    and not at all where it is not. What is written stays the same. `auto`: True with a
    speculative_config, unless that has lengths by load or trees, which are drafted whole. False:
    always as far as configured."""

    @classmethod
    def from_kwargs(cls, **given: Any) -> Self:
        """Check keyword arguments as a vLLM script would pass them.

        Raises:
            ConfigError: an unknown or removed key, or a value out of range.
            NotYetError: a key of vLLM whose part is not built, at other than its neutral value.
        """
        known = tuple(field.name for field in fields(cls))
        kept = ENGINE_KEYS.accept(translate_keywords(given, known), known)
        keys = kept.get("speculative_config")
        if isinstance(keys, Mapping):
            kept["speculative_config"] = SpeculativeConfig.from_keys(keys, kept.get("model"))
        return cls(**kept)

    def __post_init__(self) -> None:
        """Check ranges; cross-checks with the model are in `resolve`."""
        spec = self.speculative_config
        ok = spec is None or isinstance(spec, SpeculativeConfig)
        require("speculative_config", spec, ok, "None or a dictionary")
        check_fields(self)
        check_quantization("quantization", self.quantization)
        adaptive = self.adaptive_speculation
        if spec is not None and adaptive not in ("auto", False):
            allowed = "False beside lengths by load in speculative_config"
            require("adaptive_speculation", adaptive, not spec.load.is_set, allowed)
            allowed = "False beside trees, which are drafted whole; disable_by_batch_size ends them"
            require("adaptive_speculation", adaptive, not spec.drafts_trees, allowed)
        if self.pipeline_parallel_size > 1 and self.tensor_parallel_size > 1:
            given = self.pipeline_parallel_size
            raise NotYetError("pipeline_parallel_size", given, "1 beside tensor_parallel_size > 1")

    @property
    def num_processes(self) -> int:
        """Processes that compute the target."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def precision(self) -> PrecisionConfig:
        """How the target's weights, activations, keys and values are kept."""
        return PrecisionConfig(
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            activations=self.activations,
        )

    @property
    def control(self) -> Control:
        """How the length of drafts is decided, `auto` resolved."""
        spec, given = self.speculative_config, self.adaptive_speculation
        if given == "auto":
            given = spec is not None and not (spec.load.is_set or spec.drafts_trees)
        return "adaptive" if given else "fixed"
