"""The table of drafting methods: everything that is known of a method by its word.

What the engine asks of it is here; what training and the planner ask stands with them. To add a
method, add one record: a row below, or `register_method` from a package of its own. Torch-free; the
code behind a method is named and imported only when it drafts.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, Literal, Self

from foretoken.config.reader import (
    at_least,
    between,
    check_fields,
    is_int,
    keys_of,
    require,
)
from foretoken.errors import ConfigError, NotYetError

logger = logging.getLogger("foretoken")

ENTRY_POINTS = "foretoken.methods"
"""Group of entry points in which packages name the records of their methods."""
ANCHORED = "peagle_anchored"
"""The `speculators_model_type` of our own variant of P-EAGLE, which others must not read as it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What tells the published drafters of a method from all others."""

    keys: tuple[str, ...] = ()
    """Keys that only their config.json has."""
    values: tuple[tuple[str, str], ...] = ()
    """Keys of a config.json with the value that says so."""
    architectures: tuple[str, ...] = ()
    """First of the `architectures` of a config.json."""
    tensors: tuple[frozenset[str], ...] = ()
    """Where config.json says nothing: tensors of which a file has all; the larger set counts."""

    def are_in(self, config: Mapping[str, Any]) -> bool:
        """Whether a config.json says that it is of this method."""
        named = config.get("architectures") or [""]
        return (
            any(key in config for key in self.keys)
            or any(config.get(key) == value for key, value in self.values)
            or named[0] in self.architectures
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedDrafter:
    """A drafter that ships with the package."""

    model: str
    """Its packaged name."""
    target: str = "demo"
    """The packaged model that it drafts for."""
    in_parallel: bool | None = None
    """Of methods that draft either way: whether it is the one for parallel_drafting."""
    max_drafts: int | None = None
    """Most draft tokens that it was made for; None: any number."""
    quantization: str | None = None
    """How its weights are best rounded at load."""
    acceptance: float | None = None
    """Chance that a draft is accepted where all before it were, which makes of four drafts as many
    tokens as its card says, halfway between greedy and temperature 0.8; None: as usual for the
    method."""
    cost: float | None = None
    """What four drafts take, in plain steps of its target, by its card; None: as usual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramSettings:
    """Which n-grams are looked up."""

    prompt_lookup_max: Annotated[int, at_least(1)] = 5
    """Longest n-gram looked up."""
    prompt_lookup_min: Annotated[int, at_least(1)] = 2
    """Shortest n-gram looked up. One bound alone also moves the other where they would cross."""

    @classmethod
    def from_keys(cls, **given: Any) -> Self:
        """The bounds from those that were given."""
        low: Any = given.get("prompt_lookup_min")
        high: Any = given.get("prompt_lookup_max")
        if high is None and is_int(low, 1):
            given["prompt_lookup_max"] = max(low, cls().prompt_lookup_max)
        if low is None and is_int(high, 1):
            given["prompt_lookup_min"] = min(high, cls().prompt_lookup_min)
        return cls(**given)

    def __post_init__(self) -> None:
        check_fields(self, "speculative_config.")
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        allowed = f"1 to prompt_lookup_max ({high})"
        require("speculative_config.prompt_lookup_min", low, low <= high, allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixSettings:
    """How far suffixes are compared and followed."""

    suffix_decoding_max_tree_depth: Annotated[int, between(2, 128)] = 24
    """Longest context compared, and longest draft."""
    suffix_decoding_max_cached_requests: Annotated[int, at_least(0)] = 10000
    """Past outputs to draft from, the oldest forgotten first; 0: only the request's own text."""
    suffix_decoding_max_spec_factor: Annotated[float, between(0.0, 128.0)] = 1.0
    """At most this many drafts per matching context token."""
    suffix_decoding_min_token_prob: Annotated[float, between(0.0, 1.0)] = 0.1
    """Draft no further where the text so far makes the draft less probable than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingMethod:
    """One way of drafting, by the word that users write as `method`."""

    name: str
    """The word."""
    summary: str
    """What it does, in a line."""
    source: str
    """The paper or the project that it is from."""
    drafts_with: Literal["text", "model", "head", "class"]
    """What makes the drafts: text that was there before, a draft model, a network over the
    target's hidden states, or a class of the user's own."""
    code: str | None = None
    """Dotted path of the module that implements it; None: it is not built yet."""
    own_kv: bool = False
    """Whether the drafter keeps keys and values of its own."""
    in_one_pass: bool = False
    """Whether all drafts of a step come of one pass, a row each."""
    trees: bool = False
    """Whether it drafts trees, of a given shape or growing by confidence."""
    own_tokenizer: bool = False
    """Whether the drafter may have another tokenizer than the target."""
    quantizations: tuple[str, ...] = ()
    """Words for `quantization` that round its weights at load."""
    under_parallel_drafting: str | None = None
    """The method that it is with parallel_drafting; None: it has no such setting."""
    settings: type | None = None
    """A frozen dataclass of the keys that only it has, which `config.reader` reads by its
    annotations; or its own `from_keys(**given)`, if it has one."""
    default_drafts: int = 5
    """Draft tokens per verification where nobody says how many."""
    default_drafts_key: str | None = None
    """A key of its own whose value is taken for that instead."""
    max_drafts: int = 8
    """Most draft tokens under `auto`, where control says in each step how many."""
    usual_acceptance: float = 0.6
    """Usual chance that its first draft is accepted: what control expects of it to begin with."""
    usual_cost: float = 0.3
    """What four of its drafts usually take, in plain steps of the target."""
    threshold_key: str | None = None
    """A key of its own that does what draft_confidence_threshold does for networks."""
    aliases: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Other words for it, each with the keys that it sets beside the method. Words of other
    engines are in their own table, `other_engines.toml`."""
    marks: Marks = field(default_factory=Marks)
    """How its published drafters are told from others."""
    packaged: tuple[PackagedDrafter, ...] = ()
    """Drafters of it that ship with the package."""
    extras: tuple[object, ...] = ()
    """Of a method of your own, what other parts ask: a record of
    `foretoken.training.trained_kinds` for each kind of run that trains it, and one of
    `foretoken.lab.plan.method_plans` for the planner."""

    @property
    def has_weights(self) -> bool:
        """Whether there is a model or a head to load."""
        return self.drafts_with in ("model", "head")

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that only it has."""
        return () if self.settings is None else keys_of(self.settings)

    @property
    def is_built(self) -> bool:
        """Whether it drafts here; else it is only known by its word."""
        return self.code is not None


_FLOATS_TO_INTEGERS = ("int8", "int4")

_head = partial(DraftingMethod, drafts_with="head", trees=True, quantizations=_FLOATS_TO_INTEGERS)
ROWS = (
    DraftingMethod(
        name="draft_model",
        summary="a smaller language model drafts a chain or a tree",
        source="Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318",
        usual_acceptance=0.68,
        usual_cost=0.4,
        drafts_with="model",
        code="foretoken.proposers.models.draft_model",
        own_kv=True,
        trees=True,
        own_tokenizer=True,
        quantizations=(*_FLOATS_TO_INTEGERS, "auto"),
        under_parallel_drafting="parallel",
        packaged=(PackagedDrafter(model="demo-draft", quantization="int8", acceptance=0.57),),
    ),
    DraftingMethod(
        name="parallel",
        summary="a draft model that guesses all its tokens in one pass over mask tokens (PARD)",
        source="arXiv 2504.18583",
        usual_acceptance=0.65,
        usual_cost=0.2,
        drafts_with="model",
        code="foretoken.proposers.models.pard",
        own_kv=True,
        in_one_pass=True,
        quantizations=(*_FLOATS_TO_INTEGERS, "auto"),
        under_parallel_drafting="parallel",
        aliases={"pard": {}},
        marks=Marks(keys=("pard_token",), values=(("spd_type", "pard"),)),
        packaged=(PackagedDrafter(model="demo-parallel"),),
    ),
    _head(
        name="eagle",
        summary="one decoder layer over the target's last features (EAGLE, EAGLE-2)",
        source="arXiv 2401.15077, 2406.16858",
        usual_acceptance=0.65,
        code="foretoken.proposers.heads.eagle",
        own_kv=True,
        marks=Marks(tensors=(frozenset({"fc.weight"}),)),
    ),
    _head(
        name="eagle3",
        summary="decoder layers over three hidden states of the target (EAGLE-3, P-EAGLE)",
        source="arXiv 2503.01840, 2602.01469",
        usual_acceptance=0.7,
        code="foretoken.proposers.heads.eagle3",
        own_kv=True,
        under_parallel_drafting="eagle3",
        aliases={"peagle": {"parallel_drafting": True}},
        marks=Marks(
            values=(
                ("speculators_model_type", "eagle3"),
                ("speculators_model_type", "peagle"),
                ("speculators_model_type", ANCHORED),
            ),
            architectures=("LlamaForCausalLMEagle3", "Eagle3Speculator", "PEagleSpeculator"),
            tensors=(
                frozenset({"fc.weight", "norm.weight", "lm_head.weight"}),
                frozenset({"fc.weight", "d2t"}),
            ),
        ),
        packaged=(
            PackagedDrafter(model="demo-eagle3", in_parallel=False, acceptance=0.73, cost=0.37),
            PackagedDrafter(
                model="demo-parallel", in_parallel=True, max_drafts=5, acceptance=0.65, cost=0.39
            ),
        ),
    ),
    _head(
        name="mlp",
        summary="one small stage for each token ahead (MLP speculators)",
        source="arXiv 2404.19124",
        usual_acceptance=0.5,
        usual_cost=0.1,
        code="foretoken.proposers.heads.mlp",
        aliases={"mlp_speculator": {}},
        marks=Marks(
            keys=("n_predict",),
            values=(("model_type", "mlp_speculator"),),
            architectures=("MLPSpeculatorPreTrainedModel",),
        ),
        packaged=(PackagedDrafter(model="demo-mlp", max_drafts=3, acceptance=0.45, cost=0.25),),
    ),
    _head(
        name="medusa",
        summary="one head for each token ahead (Medusa)",
        source="arXiv 2401.10774",
        usual_acceptance=0.5,
        usual_cost=0.1,
        code="foretoken.proposers.heads.medusa",
        marks=Marks(keys=("medusa_num_heads",)),
        packaged=(PackagedDrafter(model="demo-medusa", max_drafts=4, acceptance=0.34, cost=0.29),),
    ),
    DraftingMethod(
        name="ngram",
        summary="what followed the last tokens when they stood in the same text before",
        source="prompt lookup decoding, Saxena 2023",
        max_drafts=10,
        usual_acceptance=0.57,
        usual_cost=0.0,
        drafts_with="text",
        code="foretoken.proposers.lookup.ngram",
        settings=NgramSettings,
    ),
    DraftingMethod(
        name="suffix",
        summary="what most often followed the end of the text, in it and in past outputs",
        source="suffix decoding, arXiv 2411.04975",
        max_drafts=16,
        usual_cost=0.0,
        drafts_with="text",
        code="foretoken.proposers.lookup.suffix",
        settings=SuffixSettings,
        default_drafts_key="suffix_decoding_max_tree_depth",
        threshold_key="suffix_decoding_min_token_prob",
    ),
    DraftingMethod(
        name="custom_class",
        summary="a Proposer of your own, by its dotted path",
        source="docs/methods.md",
        drafts_with="class",
        code="foretoken.proposers.custom",
    ),
    DraftingMethod(
        name="mtp",
        summary="draft layers that the target's own checkpoint brings",
        source="multi-token prediction, arXiv 2404.19737, 2412.19437",
        drafts_with="head",
        own_kv=True,
        marks=Marks(values=(("speculators_model_type", "mtp"),)),
    ),
    _head(
        name="dflash",
        summary="a block of masks filled in by one pass over hidden states of several layers",
        source="DFlash, arXiv 2602.06036",
        usual_acceptance=0.7,
        code="foretoken.proposers.heads.dflash",
        own_kv=True,
        in_one_pass=True,
        default_drafts=7,
        max_drafts=16,
        packaged=(PackagedDrafter(model="demo-dflash", max_drafts=7, acceptance=0.62, cost=0.38),),
        marks=Marks(
            values=(("speculators_model_type", "dflash"),),
            architectures=("DFlashDraftModel", "DFlashSpeculator", "MuseGlimmerAssistantModel"),
        ),
    ),
    _head(
        name="dspark",
        summary="DFlash's blocks, with a small sequential part and a judgement of each draft",
        source="arXiv 2607.05147",
        usual_acceptance=0.75,
        code="foretoken.proposers.heads.dspark",
        own_kv=True,
        in_one_pass=True,
        default_drafts=7,
        max_drafts=16,
        packaged=(PackagedDrafter(model="demo-dspark", max_drafts=7, acceptance=0.68, cost=0.42),),
        marks=Marks(
            values=(("speculators_model_type", "dspark"),),
            architectures=(
                "Qwen3DSparkModel",
                "DFlashQwen3DSparkModel",
                "DSparkDraftModel",
                "DSparkSpeculator",
                "Gemma4DSparkModel",
            ),
        ),
    ),
    DraftingMethod(
        name="dflash2",
        summary="DFlash with convolutions and a choice among candidates",
        source="z-lab/dflash",
        drafts_with="head",
        own_kv=True,
        marks=Marks(
            values=(("speculators_model_type", "dflash2"),),
            architectures=("DFlash2DraftModel", "DFlash2Speculator"),
        ),
    ),
    DraftingMethod(
        name="ngram_gpu",
        summary="vLLM's look-up on the GPU; `ngram` drafts the same",
        source="vLLM",
        drafts_with="text",
    ),
    DraftingMethod(
        name="extract_hidden_states",
        summary="vLLM's way to write hidden states; `foretoken train states` does so",
        source="vLLM",
        drafts_with="head",
    ),
)
"""The methods that come with Foretoken, and those that are known and not built."""


_table: dict[str, DraftingMethod] = {row.name: row for row in ROWS}
_reserved: set[str] = set()
_NOT_METHODS = ("auto", "drafters", "grammar", "none", "prediction")
"""Words that mean something else where a method or a drafter is named."""


def reserve_keys(keys: Iterable[str]) -> None:
    """Say that these keys of speculative_config are no single method's; told by who reads them."""
    _reserved.update(keys)


def register_method(method: DraftingMethod) -> None:
    """Add a method of your own to the table; from then on it is known like any other.

    A package registers its methods without being imported first by naming their records as entry
    points: group `foretoken.methods`, name the method's word, value `module:record`.

    Raises:
        ConfigError: the word, another name for it, or a key of its own is taken already.
    """
    _check_free(method)
    _table[method.name] = method


def _check_free(method: DraftingMethod) -> None:
    """Raise ConfigError for words and keys that would hide, or be hidden by, those of others."""
    if not method.name.isidentifier():
        allowed = "a word of letters, digits and underscores"
        raise ConfigError("register_method.name", method.name, allowed)
    others = [row for row in _table.values() if row.name != method.name]
    taken = {*_NOT_METHODS, *(word for row in others for word in (row.name, *row.aliases))}
    known = _table.get(method.name)
    for word in (method.name, *method.aliases):
        if word in taken or (known is not None and known != method):
            raise ConfigError("register_method.name", word, "a word that no other method has")
    owners = dict.fromkeys(_reserved, "speculative_config itself")
    for row in others:
        if row.settings is not method.settings:
            owners |= dict.fromkeys(row.keys, f"method {row.name}")
    clashes = [f"{key} (of {owners[key]})" for key in method.keys if key in owners]
    if clashes:
        allowed = f"keys that nothing else has, such as {method.name}_size"
        raise ConfigError("register_method.settings", ", ".join(clashes), allowed)


def known_methods() -> tuple[DraftingMethod, ...]:
    """All methods, built or not, those of installed packages included.

    A package whose record is broken is left out; asking for its word is an error.
    """
    for plugin in _plugins():
        record = _record_of(plugin)
        if plugin.name not in _table and isinstance(record, DraftingMethod):
            register_method(record)
    return tuple(_table.values())


def built_methods() -> tuple[DraftingMethod, ...]:
    """The methods that can draft here."""
    return tuple(method for method in known_methods() if method.is_built)


def method_names(wanted: Callable[[DraftingMethod], bool] = lambda _: True) -> tuple[str, ...]:
    """The words of the methods that can draft here and that are `wanted`."""
    return tuple(method.name for method in built_methods() if wanted(method))


def find_method(name: object, where: str = "speculative_config.method") -> DraftingMethod:
    """The method of that word.

    Args:
        name: as the user wrote it.
        where: how messages name the field.

    Raises:
        NotYetError: it is known and not built.
        ConfigError: there is none of that word, or the package that has it is broken.
    """
    if isinstance(name, str) and name not in _table:
        for plugin in _plugins():
            if plugin.name == name:
                record = _record_of(plugin)
                if isinstance(record, ConfigError):
                    raise record
                register_method(record)
    found = _table.get(name) if isinstance(name, str) else None
    if found is None:
        raise ConfigError(where, name, ", ".join(method_names()))
    if not found.is_built:
        allowed = f"{', '.join(method_names())} ({name!r} is not yet built)"
        raise NotYetError(where, name, allowed)
    return found


@cache
def _plugins() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=ENTRY_POINTS))


@cache
def _record_of(plugin: EntryPoint) -> DraftingMethod | ConfigError:
    """The record that a package names, or what is wrong with it, which is logged once."""
    where = f"the method {plugin.name!r} of an installed package"
    try:
        record = plugin.load()
    except Exception as error:  # noqa: BLE001 - a package may fail at import in any way
        allowed = f"a record that can be imported ({type(error).__name__}: {error})"
    else:
        allowed = f"a DraftingMethod named {plugin.name!r}"
        if isinstance(record, DraftingMethod) and record.name == plugin.name:
            try:
                _check_free(record)
                return record
            except ConfigError as taken:
                allowed = str(taken)
    broken = ConfigError(where, plugin.value, allowed)
    logger.warning("%s", broken)
    return broken
