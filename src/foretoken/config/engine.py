"""Settings of the engine: names, defaults and meaning as in vLLM where vLLM has them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from foretoken.config.aliases import with_flags_gathered
from foretoken.config.keys import KeyTable, is_int, require
from foretoken.config.quantization import check_kv_cache, check_quantization
from foretoken.config.speculative import SpeculativeConfig

DTYPES = ("auto", "bfloat16", "float16", "float32")

KEYS = KeyTable(
    where="LLM",
    neutral={
        "trust_remote_code": (False,),
        "enforce_eager": (True, False),
        "load_format": ("auto", "safetensors"),
        "tokenizer_mode": ("auto",),
        "skip_tokenizer_init": (False,),
        "tokenizer_revision": (None,),
        "enable_chunked_prefill": (None, True),
        "disable_custom_all_reduce": (False, True),
        "distributed_executor_backend": (None,),
        "pipeline_parallel_size": (1,),
        "data_parallel_size": (1,),
        "enable_lora": (False,),
        "cpu_offload_gb": (0, 0.0),
        "hf_overrides": (None,),
        "limit_mm_per_prompt": (None,),
        "compilation_config": (None,),
    },
    removed={
        "use_v2_block_manager": "leave it out: pages are always block-managed",
        "max_seq_len_to_capture": "leave it out: there are no graphs to capture",
        "swap_space": "leave it out: preempted requests are recomputed",
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What `LLM(...)` takes. `resolve` turns it into numbers.

    Raises:
        ConfigError: a value is out of range.
        NotYetError: a value asks for a part that is not built.
    """

    model: str
    """Packaged name (`demo`, `demo-draft`), local folder or GGUF file, or Hugging Face id."""
    tokenizer: str | None = None
    """The same, for the tokenizer; default: the model's own."""
    revision: str | None = None
    """Branch, tag or commit of a Hugging Face id."""
    dtype: str = "auto"
    """`auto`, `bfloat16`, `float16` or `float32`. Auto: the checkpoint's 16-bit type where the
    machine multiplies it in hardware, else float32."""
    quantization: str | None = None
    """`int8` or `int4`: round the weights while loading, as docs/quantization.md says; of a
    checkpoint that is quantized already, those that it holds as floats. Such a checkpoint needs
    no setting; naming its format (`gptq`, ...) only checks it. Activations keep the type of
    `dtype`. A draft model has a setting of its own, in speculative_config."""
    kv_cache_dtype: str = "auto"
    """`auto`: keys and values in the type of `dtype`. `int8`: 8 bits a number and a float32 scale
    for each token and head, about half the memory and another model, though hardly: see
    docs/quantization.md. A drafter has a setting of its own, in speculative_config."""
    device: str = "auto"
    """`auto`, `cpu` or `cuda`. Auto: a CUDA device if there is one."""
    seed: int = 0
    """Seeds the keys of requests that bring no seed of their own."""
    max_model_len: int | None = None
    """Most tokens of a request, prompt and output together; default: the model's context."""
    max_num_seqs: int = 64
    """Most requests running at once."""
    max_num_batched_tokens: int | None = None
    """Most tokens of one step, prompt chunks and drafts included; default 2048."""
    block_size: int = 32
    """Tokens of a KV page; a multiple of 8."""
    enable_prefix_caching: bool = True
    """Reuse the KV of prompt beginnings that were computed before."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory to use; on a CPU, kv_cache_memory_bytes is what counts."""
    kv_cache_memory_bytes: int | None = None
    """Memory for keys and values; default on a CPU: a quarter of the free memory, on a GPU: what
    gpu_memory_utilization leaves. Never more than max_num_seqs full contexts."""
    batch_invariant: bool | str = "auto"
    """Bitwise the same tokens whatever the batch, the chunking and the drafts. Auto: on where it
    is cheap (packed bfloat16 on a CPU), off elsewhere; the choice is logged."""
    tensor_parallel_size: int = 1
    """Only 1 so far."""
    disable_log_stats: bool = True
    """False: one log line every ten seconds, and those of the start."""
    speculative_config: SpeculativeConfig | None = None
    """How to draft; None: plain decoding."""
    adaptive_speculation: bool = False
    """Draft as many tokens, up to num_speculative_tokens, as measured fastest with as many running
    requests; none where drafting is not faster. What is written stays the same. `foretoken serve`
    turns it on, unless speculative_config has lengths by load."""

    @classmethod
    def from_kwargs(cls, **given: Any) -> Self:
        """Check keyword arguments as a vLLM script would pass them.

        Raises:
            ConfigError: an unknown or removed key, or a value out of range.
            NotYetError: a key of vLLM whose part is not built, at other than its neutral value.
        """
        kept = KEYS.accept(with_flags_gathered(given), (f.name for f in fields(cls)))
        speculative = kept.get("speculative_config")
        if isinstance(speculative, Mapping):
            kept["speculative_config"] = SpeculativeConfig.from_dict(
                speculative, target=kept.get("model")
            )
        return cls(**kept)

    def __post_init__(self) -> None:
        """Check ranges; cross-checks with the model are in `resolve`."""
        require("model", self.model, isinstance(self.model, str) and bool(self.model), "a name")
        require("dtype", self.dtype, self.dtype in DTYPES, ", ".join(DTYPES))
        check_quantization("quantization", self.quantization)
        check_kv_cache("kv_cache_dtype", self.kv_cache_dtype)
        devices = ("auto", "cpu", "cuda")
        require("device", self.device, self.device in devices, ", ".join(devices))
        seed_ok = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        require("seed", self.seed, seed_ok, "an integer")
        for name in ("max_model_len", "max_num_batched_tokens", "kv_cache_memory_bytes"):
            value = getattr(self, name)
            require(name, value, value is None or is_int(value, 1), "None or an integer >= 1")
        require("max_num_seqs", self.max_num_seqs, is_int(self.max_num_seqs, 1), "an integer >= 1")
        ok = is_int(self.block_size, 8) and self.block_size % 8 == 0
        require("block_size", self.block_size, ok, "a multiple of 8")
        share = self.gpu_memory_utilization
        ok = isinstance(share, int | float) and 0 < share <= 1
        require("gpu_memory_utilization", share, ok, "a number in (0, 1]")
        ok = self.batch_invariant in ("auto", True, False)
        require("batch_invariant", self.batch_invariant, ok, '"auto", True or False')
        one = self.tensor_parallel_size == 1
        require("tensor_parallel_size", self.tensor_parallel_size, one, "1 (more: not yet built)")
        spec = self.speculative_config
        ok = spec is None or isinstance(spec, SpeculativeConfig)
        require("speculative_config", spec, ok, "None or a dictionary")
        adaptive = self.adaptive_speculation
        ok = adaptive is False or (adaptive is True and not self.has_lengths_by_load)
        allowed = "True or False; only False beside lengths by load in speculative_config"
        require("adaptive_speculation", adaptive, ok, allowed)

    @property
    def has_lengths_by_load(self) -> bool:
        """Whether the user said how far to draft at which load."""
        spec = self.speculative_config
        if spec is None:
            return False
        by_load = spec.num_speculative_tokens_per_batch_size, spec.disable_by_batch_size
        return by_load != (None, None)
