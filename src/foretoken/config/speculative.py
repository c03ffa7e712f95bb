"""Settings of speculation: vLLM's `speculative_config` keys, checked one by one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from foretoken.config import acceptance, drafting, several, trees
from foretoken.config.aliases import with_our_names
from foretoken.config.foreign import KEYS
from foretoken.config.heads import head_method, shipped_drafter
from foretoken.config.keys import is_int, require
from foretoken.config.methods import find_method, method_names
from foretoken.config.quantization import check_draft_kv_cache, check_draft_quantization
from foretoken.errors import ConfigError, NotYetError

SEVERAL = "drafters"
DRAFT_SAMPLE_METHODS = ("auto", "greedy", "probabilistic")
POLICIES = ("first", "best")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are made and checked.

    Raises:
        ConfigError: a value is out of range or two values contradict each other.
        NotYetError: a method, a rule or a key of vLLM that is not built yet.
    """

    method: str
    """`draft_model`, `parallel` (PARD), `eagle`, `eagle3`, `mlp`, `medusa`, `ngram`, `suffix` or
    `custom_class`; inferred from `model` when left out. `drafters` where there are several."""
    model: str | None = None
    """The drafter's weights: packaged name, local folder or Hugging Face id (left out: the one that
    ships for the target, if one does); the dotted path of a `Proposer`, `package.module.Class`
    (custom_class)."""
    parallel_drafting: bool = False
    """All drafts in one pass over mask tokens: of a draft_model that was trained for it (PARD), or
    of a P-EAGLE head, which does so in any case."""
    name: str | None = None
    """What requests, provenance and metrics call this drafter; default: its method."""
    num_speculative_tokens: int = 5
    """Most draft tokens per verification, 1 to 128; for suffix the default is the tree depth."""
    min_speculative_tokens: int = 0
    """Shorter drafts are not checked. A draft model is not started where there is no room for as
    many, and its confidence threshold does not stop it before."""
    draft_confidence_threshold: float = 0.0
    """Draft no further where the drafter gives its best next token less probability than this
    (chains of draft models and heads); a token that was drawn is always checked. In [0, 1)."""
    draft_expected_gain: bool = False
    """Draft no further where one more draft is expected to take more time than it saves: by the
    drafter's probabilities so far, and by accepted shares and times as measured (chains of draft
    models and heads). It may stand beside a threshold."""
    num_speculative_tokens_per_batch_size: drafting.Schedule | None = None
    """Draft length by load: (first, last, drafts) for each range of running sequences, 0 drafts
    allowed; sizes between and beyond the ranges keep the drafts of the range before."""
    disable_by_batch_size: int | None = None
    """No drafts while this many sequences or more run; >= 2. (vLLM's old flag of this name
    counted queued requests.)"""
    drafters: "tuple[SpeculativeConfig, ...]" = ()
    """Several drafters: a list of dictionaries with the keys of one drafter each."""
    policy: str = "first"
    """Which of several drafters serves a sequence: `first`: the first in the list that has a
    draft; `best`: the one that promises most accepted tokens per second, as measured."""
    disable_padded_drafter_batch: bool = True
    """Before its first draft, a drafter with keys and values of its own feeds of each sequence what
    it misses: one token, or as many as were accepted. False: equally many of all that decode, by
    feeding some again, which was never faster. (vLLM pads by default.)"""
    choices: Sequence[Sequence[int]] | None = None
    """Draft a tree of this shape instead of a chain (draft_model and heads): paths of ranks, each
    with its beginnings, such as [[0], [0, 0], [1]]; num_speculative_tokens is their number."""
    tree_top_k: int | None = None
    """Draft a tree that grows by confidence (EAGLE-2; draft_model and heads): so many nodes a level
    get as many children; the num_speculative_tokens best (default: top_k * depth) are checked."""
    tree_depth: int = trees.DEPTH
    """With tree_top_k: most drafts on a branch."""
    prompt_lookup_max: int = drafting.LOOKUP_MAX
    """Longest n-gram looked up (ngram)."""
    prompt_lookup_min: int = drafting.LOOKUP_MIN
    """Shortest n-gram looked up (ngram)."""
    suffix_decoding_max_tree_depth: int = drafting.TREE_DEPTH
    """Longest context compared, and longest draft (suffix)."""
    suffix_decoding_max_cached_requests: int = 10000
    """Past outputs to draft from, the oldest forgotten first; 0: only the request's own text
    (suffix)."""
    suffix_decoding_max_spec_factor: float = 1.0
    """At most this many drafts per matching context token (suffix)."""
    suffix_decoding_min_token_prob: float = 0.1
    """Draft no further where the text so far makes the draft less probable than this (suffix)."""
    draft_sample_method: str = "auto"
    """`greedy`: the draft's best token. `probabilistic`: drawn from its distribution. `auto`:
    greedy at temperature 0; with a seed, drawn with the target's own noise, so that both agree
    often; otherwise probabilistic."""
    rejection_sample_method: str = "auto"
    """`matching`: a draft is accepted if it is the token that the target itself draws: identical
    output with and without speculation. `standard`: the rejection rule of Leviathan et al. and
    Chen et al.: the same distribution. `block`: the same distribution, tested for all drafts
    together (Sun et al.), never fewer accepted on average. `traversal`: the same for trees
    (Weng et al.). `auto`: matching for greedy and seeded requests and for one-hot
    drafts, else standard. Two change the output and are never chosen by `auto`: `typical`, LOSSY:
    accepts what the target finds probable enough (Medusa); `synthetic`, INVALID output: accepts
    at given rates, to measure an engine. docs/rules.md has the proofs."""
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
    quantization: str | None = None
    """`int8` or `int4`: round a drafter's weights while loading. `auto`, draft models:
    int8 if draft steps, timed at load, are faster with it. It never changes the output."""
    kv_cache_dtype: str = "auto"
    """`int8`: the drafter's own keys and values (draft models, EAGLE) as LLM keeps the target's."""

    @classmethod
    def from_dict(cls, given: Mapping[str, Any], target: str | None = None) -> Self:
        """Check a dictionary written as for vLLM.

        Args:
            given: the dictionary.
            target: the name of the target; a drafter without a model is the one shipped for it.

        Raises:
            ConfigError: an unknown or removed key, or a value out of range.
            NotYetError: a key whose part is not built, at other than its neutral value.
        """
        given = with_our_names(given)
        if given.get("drafters") is not None:
            return cls._of_several(given, target)
        method = given.get("method")
        if method is not None:
            find_method(method)
        kept = KEYS.accept(given, (f.name for f in fields(cls)))
        if kept.get("method") is None:
            kept["method"] = _infer_method(kept.get("model"))
        if kept.get("parallel_drafting") is True:
            kept["method"] = find_method(kept["method"]).under_parallel_drafting or kept["method"]
        if kept.get("model") is None:
            kept["model"] = shipped_drafter(target, kept)
        return cls(**drafting.complete(kept))

    @classmethod
    def _of_several(cls, given: Mapping[str, Any], target: str | None) -> Self:
        _check_choice("method", given.get("method", SEVERAL), (SEVERAL,), ())
        kept = KEYS.accept(given, (f.name for f in fields(cls)))
        drafters = tuple(cls.from_dict(entry, target) for entry in several.split(given))
        most = max(drafter.num_speculative_tokens for drafter in drafters)
        own = {"method": SEVERAL, "drafters": drafters, "num_speculative_tokens": most}
        return cls(**{**{k: v for k, v in kept.items() if v is not None}, **own})

    def __post_init__(self) -> None:
        """Check ranges and what belongs together."""
        where = "speculative_config."
        if self.drafters:
            _check_choice("method", self.method, (SEVERAL,), ())
        else:
            find_method(self.method)
        _check_choice("policy", self.policy, POLICIES if self.drafters else POLICIES[:1], ())
        several.check_names([drafter.label for drafter in self.each])
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
        self._check_load()
        if not self.drafters:
            self._check_drafter()
        acceptance.check_synthetic(rule, rates, length, self._depth)

    def _check_drafter(self) -> None:
        """Check what is of one drafter."""
        where = "speculative_config."
        method = find_method(self.method)
        self._check_drafting(method.has_weights)
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        require(where + "prompt_lookup_min", low, low <= high, f"1 to prompt_lookup_max ({high})")
        shared, strings = self.use_heterogeneous_vocab, self.use_string_matching
        drafting.check_vocabularies(self.method, shared, strings)
        check_draft_quantization(self.method, self.quantization)
        check_draft_kv_cache(self.method, self.kv_cache_dtype)
        for name in ("parallel_drafting", "disable_padded_drafter_batch"):
            value = getattr(self, name)
            require(where + name, value, isinstance(value, bool), "True or False")
        if self.parallel_drafting and method.under_parallel_drafting is None:
            can = ", ".join(method_names(lambda one: one.under_parallel_drafting is not None))
            raise ConfigError(where + "parallel_drafting", True, f"False; only {can} can")
        limit = self.max_model_len
        ok = limit is None or is_int(limit, 1)
        require(where + "max_model_len", limit, ok, "None or an integer >= 1")
        named = isinstance(self.model, str) and bool(self.model)
        if method.drafts_with == "class":
            path = "the dotted path of a Proposer, such as package.module.Class"
            require(where + "model", self.model, drafting.names_a_class(self.model), path)
        elif method.has_weights:
            allowed = f"the name, folder or hub id of a {self.method} drafter"
            require(where + "model", self.model, named, allowed)
        else:
            ok = self.model in (None, self.method, f"[{self.method}]")
            require(where + "model", self.model, ok, f"nothing: {self.method} has no weights")

    @property
    def synthetic_rates(self) -> tuple[float, ...]:
        """Share of verifications that keep each draft under `synthetic`; else empty."""
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        return acceptance.synthetic_rates(rates, length, self._depth)

    @property
    def _depth(self) -> int:
        """Most drafts that can be accepted in one verification."""
        if self.choices is None:
            most = self.num_speculative_tokens
            return most if self.tree_top_k is None else min(self.tree_depth, most)
        return max(len(path) for path in self.choices)

    def _check_drafting(self, has_weights: bool) -> None:
        unset = {name: getattr(self, name) for name in trees.OF_CHAINS}
        own = {**unset, "choices": self.choices}
        trees.check_dynamic(self.method, self.tree_top_k, self.tree_depth, own)
        if self.choices is not None:
            count = self.num_speculative_tokens
            paths = trees.check_choices(self.method, self.choices, count, unset)
            object.__setattr__(self, "choices", paths)
        drafting.check_suffix(
            self.suffix_decoding_max_tree_depth,
            self.suffix_decoding_max_cached_requests,
            self.suffix_decoding_max_spec_factor,
            self.suffix_decoding_min_token_prob,
        )
        most = self.num_speculative_tokens
        least, confidence = self.min_speculative_tokens, self.draft_confidence_threshold
        drafting.check_lengths(self.method, most, least, confidence, has_weights)
        drafting.check_gain(self.method, self.draft_expected_gain, has_weights)

    def _check_load(self) -> None:
        most = self.num_speculative_tokens
        drafting.check_off_from(self.disable_by_batch_size)
        schedule = self.num_speculative_tokens_per_batch_size
        if schedule is not None:
            where = "speculative_config.disable_by_batch_size"
            off = self.disable_by_batch_size
            require(where, off, off is None, "nothing beside num_speculative_tokens_per_batch_size")
            read = drafting.read_schedule(schedule, most)
            object.__setattr__(self, "num_speculative_tokens_per_batch_size", read)

    @property
    def each(self) -> "tuple[SpeculativeConfig, ...]":
        """The drafters: those of the list, or this one alone."""
        return self.drafters or (self,)

    @property
    def padded_to(self) -> int:
        """As in `DraftLimits`: what verification can add to a sequence, or 0."""
        return 0 if self.disable_padded_drafter_batch else self.num_speculative_tokens + 1

    @property
    def label(self) -> str:
        """What this drafter is called."""
        return self.name or self.method


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
    if model == "suffix":
        return "suffix"
    if drafting.names_a_class(model):
        return "custom_class"
    if isinstance(model, str) and model:
        return head_method(model) or "draft_model"
    raise ConfigError("speculative_config.method", None, ", ".join(method_names()))
