"""Settings of speculation: vLLM's `speculative_config` keys, checked one by one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from foretoken.config import acceptance
from foretoken.config.aliases import with_our_names
from foretoken.config.keys import KeyTable, is_int, require
from foretoken.errors import ConfigError, NotYetError

METHODS = ("draft_model", "ngram")
METHODS_NOT_YET = (
    "suffix", "eagle", "eagle3", "mlp", "mlp_speculator", "medusa", "pard", "peagle", "parallel",
    "mtp", "dflash", "dspark", "custom_class", "ngram_gpu", "extract_hidden_states",
)  # fmt: skip
LOOKUP_MAX, LOOKUP_MIN = 5, 2
DRAFT_SAMPLE_METHODS = ("auto", "greedy", "probabilistic")

KEYS = KeyTable(
    where="speculative_config",
    neutral={
        "num_speculative_tokens_per_batch_size": (None,),
        "enable_adaptive_verification": (False,),
        "draft_tensor_parallel_size": (None, 1),
        "quantization": (None,),
        "moe_backend": (None, "auto"),
        "attention_backend": (None, "auto"),
        "kv_cache_dtype": (None, "auto"),
        "draft_load_config": (None,),
        "code_revision": (None,),
        "enforce_eager": (None, True, False),
        "suffix_decoding_max_tree_depth": (24,),
        "suffix_decoding_max_cached_requests": (10000,),
        "suffix_decoding_max_spec_factor": (1.0,),
        "suffix_decoding_min_token_prob": (0.1,),
        "parallel_drafting": (False,),
        "fly_window_size": (None,),
        "fly_entropy_threshold": (0.3,),
        "fly_entropy_top_k": (3,),
        "disable_padded_drafter_batch": (False,),
        "disable_eagle_block_drop": (False,),
        "disable_lookahead_block_hashes": (False,),
        "draft_lm_head_quantization": (None,),
        "use_local_argmax_reduction": (False,),
        "disable_by_batch_size": (None,),
        "drafters": (None,),
        "policy": (None,),
        "min_speculative_tokens": (None, 0),
        "draft_confidence_threshold": (None, 0, 0.0),
    },
    removed={
        "tensor_parallel_size": "draft_tensor_parallel_size",
        "synthetic_acceptance_rate": "synthetic_acceptance_rates",
        "speculative_token_tree": "leave it out: trees have their own methods",
        "disable_mqa_scorer": "leave it out: drafts are always checked in one pass",
        "disable_logprobs": "leave it out: logprobs are always exact",
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are made and checked.

    Raises:
        ConfigError: a value is out of range or two values contradict each other.
        NotYetError: a method, a rule or a key of vLLM that is not built yet.
    """

    method: str
    """`draft_model` or `ngram`; inferred from `model` when left out."""
    model: str | None = None
    """The draft model: packaged name, local folder or Hugging Face id (draft_model only)."""
    num_speculative_tokens: int = 5
    """Most draft tokens per verification; >= 1."""
    prompt_lookup_max: int = LOOKUP_MAX
    """Longest n-gram looked up (ngram)."""
    prompt_lookup_min: int = LOOKUP_MIN
    """Shortest n-gram looked up (ngram)."""
    draft_sample_method: str = "auto"
    """`greedy`: the draft's best token. `probabilistic`: drawn from the draft's distribution.
    `auto`: greedy at temperature 0; with a seed, drawn with the target's own noise, so that both
    agree often; otherwise probabilistic."""
    rejection_sample_method: str = "auto"
    """`matching`: a draft is accepted if it is the token that the target itself draws: identical
    output with and without speculation. `standard`: the rejection rule of Leviathan et al. and
    Chen et al.: the same distribution. `block`: the same distribution, tested for all drafts
    together (Sun et al.), never fewer accepted on average. `auto`: matching for greedy and seeded
    requests and for one-hot drafts, else standard. Two change the output and are never chosen by
    `auto`: `typical`, LOSSY: accepts what the target finds probable enough (Medusa); `synthetic`,
    INVALID output: accepts at given rates, to measure an engine. docs/rules.md has the proofs."""
    posterior_threshold: float = acceptance.THRESHOLD
    """`typical` only, LOSSY: highest bar for a draft's probability."""
    posterior_alpha: float = acceptance.ALPHA
    """`typical` only, LOSSY: the bar is this times exp(-entropy) where that is lower."""
    synthetic_acceptance_rates: Sequence[float] | None = None
    """`synthetic` only: for each of num_speculative_tokens drafts, the share of verifications
    that accept it; in [0, 1], none above the one before it."""
    synthetic_acceptance_length: float | None = None
    """`synthetic` only, instead of rates: mean tokens per verification, the recovered or bonus
    token included; 1 to num_speculative_tokens + 1."""
    max_model_len: int | None = None
    """No drafts beyond this many tokens; default: the draft model's context."""
    use_heterogeneous_vocab: bool = False
    """For a draft_model with another tokenizer: it drafts only tokens that both have. Exact under
    sampling, with any rule."""
    use_string_matching: bool = False
    """The same through text, for tokenizers that share too little: the draft continues the text
    greedily in its own tokens, and the target's tokens of that text are the draft."""
    revision: str | None = None
    """Branch, tag or commit of the draft's Hugging Face id."""

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        """Check a dictionary written as for vLLM.

        Raises:
            ConfigError: an unknown or removed key, or a value out of range.
            NotYetError: a key whose part is not built, at other than its neutral value.
        """
        given = with_our_names(given)
        method = given.get("method")
        if method is not None:
            _check_choice("method", method, METHODS, METHODS_NOT_YET)
        kept = KEYS.accept(given, (f.name for f in fields(cls)))
        if kept.get("method") is None:
            kept["method"] = _infer_method(kept.get("model"))
        return cls(**_complete_lookup(kept))

    def __post_init__(self) -> None:
        """Check ranges and what belongs together."""
        where = "speculative_config."
        _check_choice("method", self.method, METHODS, METHODS_NOT_YET)
        rule = self.rejection_sample_method
        _check_choice("rejection_sample_method", rule, acceptance.RULES, acceptance.RULES_NOT_YET)
        _check_choice("draft_sample_method", self.draft_sample_method, DRAFT_SAMPLE_METHODS, ())
        for name in ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"):
            value = getattr(self, name)
            require(where + name, value, is_int(value, 1), "an integer >= 1")
        count = self.num_speculative_tokens
        require(where + "num_speculative_tokens", count, count <= 128, "1 to 128")
        acceptance.check_typical(rule, self.posterior_threshold, self.posterior_alpha)
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        acceptance.check_synthetic(rule, rates, length, count)
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        require(where + "prompt_lookup_min", low, low <= high, f"1 to prompt_lookup_max ({high})")
        self._check_vocabulary_keys()
        limit = self.max_model_len
        ok = limit is None or is_int(limit, 1)
        require(where + "max_model_len", limit, ok, "None or an integer >= 1")
        named = isinstance(self.model, str) and bool(self.model)
        if self.method == "draft_model":
            require(where + "model", self.model, named, "the draft model's name, folder or hub id")
        else:
            ok = self.model in (None, self.method, f"[{self.method}]")
            require(where + "model", self.model, ok, f"nothing: {self.method} has no weights")

    def _check_vocabulary_keys(self) -> None:
        for name in ("use_heterogeneous_vocab", "use_string_matching"):
            where, value = f"speculative_config.{name}", getattr(self, name)
            require(where, value, isinstance(value, bool), "True or False")
            if self.method != "draft_model":
                require(where, value, not value, f"False: {self.method} has no tokenizer")
        both = self.use_heterogeneous_vocab and self.use_string_matching
        where = "speculative_config.use_string_matching"
        require(where, True, not both, "one of use_heterogeneous_vocab and use_string_matching")

    @property
    def synthetic_rates(self) -> tuple[float, ...]:
        """Share of verifications that keep each draft under `synthetic`; else empty."""
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        return acceptance.synthetic_rates(rates, length, self.num_speculative_tokens)


def _check_choice(
    name: str, given: object, choices: tuple[str, ...], later: tuple[str, ...]
) -> None:
    if given in later:
        allowed = f"{', '.join(choices)} ({given!r} is not yet built)"
        raise NotYetError(f"speculative_config.{name}", given, allowed)
    require(f"speculative_config.{name}", given, given in choices, ", ".join(choices))


def _infer_method(model: object) -> str:
    if model in ("ngram", "[ngram]"):
        return "ngram"
    if isinstance(model, str) and model:
        return "draft_model"
    raise ConfigError("speculative_config.method", None, ", ".join(METHODS))


def _complete_lookup(kept: dict[str, Any]) -> dict[str, Any]:
    """One bound of the n-gram length alone also sets the other where they would cross."""
    low: Any = kept.get("prompt_lookup_min")
    high: Any = kept.get("prompt_lookup_max")
    if is_int(low, 1) and high is None:
        kept["prompt_lookup_max"] = max(low, LOOKUP_MAX)
    if is_int(high, 1) and low is None:
        kept["prompt_lookup_min"] = min(high, LOOKUP_MIN)
    return {k: v for k, v in kept.items() if v is not None}
