"""One drafter: its keys in `speculative_config`, or in an entry of `drafters`.

Knows what belongs together, and asks the table of methods what a method can do. Torch-free.
"""

import ast
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Self

from foretoken.config.method_registry import (
    DraftingMethod,
    built_methods,
    find_method,
    method_names,
)
from foretoken.config.published import head_method, packaged_drafter
from foretoken.config.quantization import (
    AUTO_X_BITS,
    DRAFT_MODEL_X_BITS,
    Activations,
    KVCacheDtype,
    PrecisionConfig,
    check_quantization,
)
from foretoken.config.reader import (
    Allowed,
    at_least,
    between,
    check_fields,
    defaults_of,
    flat,
    grouped,
    is_int,
    keys_of,
    read,
    require,
    words,
)
from foretoken.errors import ConfigError

logger = logging.getLogger("foretoken")

WHERE = "speculative_config."
MOST_DRAFTS = 128
TREE_DEPTH = 5
_RESERVED = ("prediction", "grammar")
_PATHS = f"1 to {MOST_DRAFTS} different paths such as [[0], [0, 0], [1]], each beginning too"
_BELOW_ONE = Allowed("a number in [0, 1)", lambda share: 0 <= share < 1)
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\.[A-Z_]\w*")


@dataclass(frozen=True, slots=True, kw_only=True)
class StopConfig:
    """Where a chain of drafts ends before its budget is used up."""

    min_speculative_tokens: Annotated[int, at_least(0)] = 0
    """Shorter drafts are not checked. A draft model is not started where there is no room for as
    many, and its confidence threshold does not stop it before."""
    draft_confidence_threshold: Annotated[float, _BELOW_ONE] = 0.0
    """Draft no further where the drafter gives its best next token less probability than this
    (chains of draft models and heads); a token that was drawn is always checked. In [0, 1)."""
    min_acceptance: Annotated[float, _BELOW_ONE] = 0.0
    """The drafter rests while less than this share of its recent draft tokens was accepted, and
    is tried again from time to time; in [0, 1). It holds beside `adaptive_speculation`."""

    def __post_init__(self) -> None:
        check_fields(self, WHERE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeConfig:
    """Whether a tree is drafted, and of which shape."""

    choices: Sequence[Sequence[int]] | None = None
    """Draft a tree of this shape instead of a chain (draft_model and heads): paths of ranks, each
    with its beginnings, such as [[0], [0, 0], [1]]; num_speculative_tokens is their number."""
    tree_top_k: Annotated[int, between(1, 32)] | None = None
    """Draft a tree that grows by confidence (EAGLE-2; draft_model and heads): so many nodes a level
    get as many children; the num_speculative_tokens best (default: top_k * depth) are checked."""
    tree_depth: Annotated[int, between(1, 32)] = TREE_DEPTH
    """With tree_top_k: most drafts on a branch."""

    def __post_init__(self) -> None:
        """Check ranges; `choices` become sorted tuples."""
        if self.choices is not None:
            object.__setattr__(self, "choices", _read_choices(self.choices))
        check_fields(self, WHERE)
        if self.tree_top_k is None:
            allowed = f"{TREE_DEPTH}: only trees with a tree_top_k have a depth"
            require(WHERE + "tree_depth", self.tree_depth, self.tree_depth == TREE_DEPTH, allowed)
        else:
            allowed = "nothing beside tree_top_k"
            require(WHERE + "choices", self.choices, self.choices is None, allowed)

    @property
    def num_nodes(self) -> int | None:
        """Drafts of a tree where nobody says how many; None for chains."""
        if self.choices is not None:
            return len(self.choices)
        if self.tree_top_k is not None:
            return min(MOST_DRAFTS, self.tree_top_k * self.tree_depth)
        return None

    def depth_of(self, num_drafts: int) -> int:
        """Most drafts that one verification can accept, of so many."""
        if self.choices is not None:
            return max(len(path) for path in self.choices)
        return num_drafts if self.tree_top_k is None else min(self.tree_depth, num_drafts)


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyConfig:
    """How a draft model with another tokenizer than the target's is put to use."""

    use_heterogeneous_vocab: bool = False
    """For a draft_model with another tokenizer: it drafts only tokens that both have. Exact under
    sampling, with any rule."""
    use_string_matching: bool = False
    """The same through text, for tokenizers that share too little: the draft continues the text
    greedily in its own tokens, and the target's tokens of that text are the draft."""

    def __post_init__(self) -> None:
        """Check that at most one of them is set."""
        check_fields(self, WHERE)
        both = self.use_heterogeneous_vocab and self.use_string_matching
        allowed = "one of use_heterogeneous_vocab and use_string_matching"
        require(WHERE + "use_string_matching", True, not both, allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """One drafter. Raises ConfigError: a value is out of range or two values contradict each other;
    NotYetError: a method or a value of vLLM that is not built yet."""

    method: str
    """`draft_model`, `parallel` (PARD), `eagle`, `eagle3`, `dflash`, `dspark`, `mlp`, `medusa`,
    `ngram`, `suffix`, `custom_class`, or one that was registered; inferred from `model` when left
    out. Not of one drafter: `auto`, look-ups and what ships for the target compete, beside no other
    key of a drafter but `num_speculative_tokens`; or what `drafters` lists."""
    model: str | None = None
    """The drafter's weights: packaged name, local folder or GGUF file, or Hugging Face id (left
    out: the one that ships for the target, if one does); the dotted path of a `Proposer`,
    `package.module.Class` (custom_class)."""
    revision: str | None = None
    """Branch, tag or commit of the draft's Hugging Face id."""
    name: str | None = None
    """What requests, provenance and metrics call this drafter; default: its method."""
    num_speculative_tokens: Annotated[int, between(1, MOST_DRAFTS)] = 5
    """Most draft tokens per verification, 1 to 128; for suffix the default is the tree depth."""
    parallel_drafting: bool = False
    """All drafts in one pass over mask tokens: of a draft_model that was trained for it (PARD), or
    of a P-EAGLE head, which does so in any case."""
    draft_sample_method: Annotated[str, words("auto", "greedy", "probabilistic")] = "auto"
    """`greedy`: the draft's best token. `probabilistic`: drawn from its distribution. `auto`:
    greedy at temperature 0; with a seed, drawn with the target's own noise, so that both agree
    often; otherwise probabilistic."""
    max_model_len: Annotated[int, at_least(1)] | None = None
    """No drafts beyond this many tokens; default: the draft model's context."""
    quantization: str | None = None
    """`int8` or `int4`: round a drafter's weights while loading. `auto`, draft models:
    int8 if draft steps, timed at load, are faster with it. It never changes the output."""
    activations: Activations = "auto"
    """What a drafter's integer weights are multiplied with: activations of 16 bits (`int16`) or of
    8 (`int8`). `auto`: 8 for draft models, 16 for heads. It never changes the output."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """`int8`: the drafter's own keys and values (draft models, EAGLE) as LLM keeps the target's."""
    stop: StopConfig = flat(StopConfig)
    """Where chains end."""
    tree: TreeConfig = flat(TreeConfig)
    """Which trees are drafted."""
    vocabulary: VocabularyConfig = flat(VocabularyConfig)
    """What is done about another tokenizer."""
    own: Any = None
    """The settings that only this method has, an instance of its record's `settings`."""

    @classmethod
    def from_keys(
        cls, given: Mapping[str, Any], *, target: str | None = None, max_drafts: int | None = None
    ) -> Self:
        """A drafter from keys that are known and not None.

        Args:
            given: the keys.
            target: the name of the target; a drafter without a model is the one shipped for it.
            max_drafts: the number of drafts where none is given and no shape of a tree says it.
        """
        named = given.get("method") or _method_of(given.get("model"))
        method = find_method(named)
        if given.get("parallel_drafting") is True and method.under_parallel_drafting is not None:
            method = find_method(method.under_parallel_drafting)
        found = grouped(cls, given)
        own = _own_settings(method, given)
        found |= {"method": method.name, "own": own}
        if found.get("model") is None:
            in_parallel = given.get("parallel_drafting") is True
            found["model"] = packaged_drafter(method, target, in_parallel=in_parallel)
        if "num_speculative_tokens" not in found:
            nodes = found["tree"].num_nodes
            key = method.default_drafts_key
            usual = method.default_drafts if key is None else int(getattr(own, key))
            found["num_speculative_tokens"] = nodes or max_drafts or usual
        return cls(**found)

    def __post_init__(self) -> None:
        """Check ranges and what belongs together."""
        method = find_method(self.method)
        if self.own is None and method.settings is not None:
            object.__setattr__(self, "own", method.settings())
        check_fields(self, WHERE)
        allowed = f"a name of its own: {' and '.join(_RESERVED)} are drafted without a drafter"
        require(WHERE + "name", self.name, self.name not in _RESERVED, allowed)
        self._check_model(method)
        self._check_chain(method)
        self._check_tree(method)
        for name in keys_of(VocabularyConfig):
            value = getattr(self.vocabulary, name)
            allowed = f"False: {method.name} has no tokenizer of its own"
            require(WHERE + name, value, not value or method.own_tokenizer, allowed)
        self._check_precision(method)
        if self.parallel_drafting and method.under_parallel_drafting is None:
            can = ", ".join(method_names(lambda one: one.under_parallel_drafting is not None))
            raise ConfigError(WHERE + "parallel_drafting", True, f"False; only {can} can")

    def _check_precision(self, method: DraftingMethod) -> None:
        """Whether its weights, activations, keys and values can be kept so."""
        where, scheme = WHERE + "quantization", self.quantization
        without = f"{method.name} has no weights"
        if scheme is not None and scheme not in method.quantizations:
            require(where, scheme, method.has_weights, f"None: {without}")
            if method.drafts_with == "head":
                schemes = ", ".join(("None", *method.quantizations))
                raise ConfigError(
                    where, scheme, f"{schemes}: {method.name} heads are rounded at load"
                )
            check_quantization(where, scheme)
        where, given = WHERE + "activations", self.activations
        if given != "auto":
            require(where, given, method.has_weights, f"auto: {without}")
            ok = method.drafts_with == "model" or scheme is not None
            require(where, given, ok, "auto, or beside quantization: it is for integer weights")
        kept = self.kv_cache_dtype
        allowed = f"auto: {method.name} keeps no keys and values of its own"
        require(WHERE + "kv_cache_dtype", kept, kept == "auto" or method.own_kv, allowed)

    def _check_model(self, method: DraftingMethod) -> None:
        where, model = WHERE + "model", self.model
        if method.drafts_with == "class":
            path = "the dotted path of a Proposer, such as package.module.Class"
            require(where, model, _names_a_class(model), path)
        elif method.has_weights:
            allowed = f"the name, folder or hub id of a drafter for method {method.name}"
            require(where, model, bool(model), allowed)
        else:
            ok = model in (None, method.name, f"[{method.name}]")
            require(where, model, ok, f"nothing: {method.name} has no weights")

    def _check_chain(self, method: DraftingMethod) -> None:
        stop, most = self.stop, self.num_speculative_tokens
        least = stop.min_speculative_tokens
        allowed = f"0 to num_speculative_tokens ({most})"
        require(WHERE + "min_speculative_tokens", least, least <= most, allowed)
        if method.has_weights:
            return
        threshold = stop.draft_confidence_threshold
        instead = method.threshold_key or "a method with weights"
        where = WHERE + "draft_confidence_threshold"
        require(where, threshold, threshold == 0, f"0; use {instead}")

    def _check_tree(self, method: DraftingMethod) -> None:
        tree, count = self.tree, self.num_speculative_tokens
        name = "tree_top_k" if tree.choices is None else "choices"
        if tree.num_nodes is None:
            return
        if not method.trees:
            allowed = ", ".join(method_names(lambda one: one.trees))
            raise ConfigError(WHERE + name, getattr(tree, name), f"nothing but for {allowed}")
        of_chains = {spec.name: getattr(self.stop, spec.name) for spec in fields(StopConfig)}
        del of_chains["min_acceptance"]
        of_chains["use_string_matching"] = self.vocabulary.use_string_matching
        for key, value in of_chains.items():
            require(WHERE + key, value, not value, f"nothing beside {name}: it is for chains")
        if tree.choices is not None:
            allowed = f"left out, or the number of choices ({tree.num_nodes})"
            require(WHERE + "num_speculative_tokens", count, count == tree.num_nodes, allowed)

    @property
    def depth(self) -> int:
        """Most drafts that can be accepted in one verification."""
        return self.tree.depth_of(self.num_speculative_tokens)

    @property
    def precision(self) -> PrecisionConfig:
        """How its weights, activations, keys and values are kept."""
        is_model = find_method(self.method).drafts_with == "model"
        return PrecisionConfig(
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            activations=self.activations,
            of_draft=True,
            auto_x_bits=DRAFT_MODEL_X_BITS if is_model else AUTO_X_BITS,
        )

    @property
    def usual_acceptance(self) -> float:
        """Chance that one of its drafts is accepted, before anything was measured: by the card of
        a packaged drafter, else as usual for its method."""
        method = find_method(self.method)
        cards = (card.acceptance for card in method.packaged if card.model == self.model)
        return next((one for one in cards if one is not None), method.usual_acceptance)

    @property
    def label(self) -> str:
        """What this drafter is called."""
        return self.name or self.method


def drafter_keys() -> dict[str, Any]:
    """The keys of a dictionary for one drafter, those of single methods included, with the values
    that they have where they are not given."""
    found = dict.fromkeys(keys_of(DrafterConfig)) | defaults_of(DrafterConfig)
    del found["own"]
    for method in built_methods():
        if method.settings is not None:
            found |= defaults_of(method.settings)
    return found


def _own_settings(method: DraftingMethod, given: Mapping[str, Any]) -> Any:
    """The settings that only `method` has. Those of other methods are checked and not used."""
    found = None
    for one in built_methods():
        own = {key: given[key] for key in one.keys if key in given}
        if one.settings is None:
            continue
        make = getattr(one.settings, "from_keys", None)
        read_as = read(one.settings, own, WHERE[:-1]) if make is None else make(**own)
        if one.name == method.name:
            found = read_as
        elif not own.keys() <= set(method.keys):
            unused = ", ".join(own.keys() - set(method.keys))
            logger.info("%s is of method %s: %s does not use it", unused, one.name, method.name)
    return found


def _method_of(model: object) -> str:
    """The method that a model is for, where nobody named one."""
    looked_up = method_names(lambda one: one.drafts_with == "text")
    for name in looked_up:
        if model in (name, f"[{name}]"):
            return name
    if _names_a_class(model):
        return method_names(lambda one: one.drafts_with == "class")[0]
    if isinstance(model, str) and model:
        return head_method(model) or "draft_model"
    raise ConfigError(WHERE + "method", None, ", ".join(method_names()))


def _names_a_class(model: object) -> bool:
    """Whether `model` looks like the dotted path of a class: `package.module.Class`."""
    return isinstance(model, str) and _DOTTED.fullmatch(model) is not None


def _read_choices(given: Any) -> tuple[tuple[int, ...], ...]:
    """`choices` as sorted paths of ranks; text is read as vLLM's speculative_token_tree. Raises
    ConfigError: not paths, a path without its beginning, one given twice, or too many."""
    where, paths = WHERE + "choices", given
    if isinstance(given, str):
        try:
            paths = ast.literal_eval(given)
        except (ValueError, SyntaxError):
            paths = None
    listed = isinstance(paths, Sequence) and 1 <= len(paths) <= MOST_DRAFTS
    require(where, given, listed, _PATHS)
    for path in paths:
        ok = isinstance(path, Sequence) and len(path) > 0 and all(is_int(r, 0) for r in path)
        require(where, given, ok, _PATHS)
    found = sorted(tuple(path) for path in paths)
    known = {(), *found}
    whole = all(path[:-1] in known for path in found) and len(set(found)) == len(found)
    require(where, given, whole, _PATHS)
    return tuple(found)
