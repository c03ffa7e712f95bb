"""The table of drafting methods: everything that is known of a method by its word.

Configuration, heads, training, the planner and the checks of launches ask here instead of keeping
lists of their own. To add a method, add one record: a row below, or `register_method` from a
package of its own. Torch-free; the code behind a method is named and imported only when it drafts.
"""

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Annotated, Any, Literal, Self

from foretoken.config.reader import (
    at_least,
    between,
    check_fields,
    is_int,
    keys_of,
    read,
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

    target: str
    """The packaged model that it drafts for."""
    model: str
    """Its packaged name."""
    in_parallel: bool | None = None
    """Of methods that draft either way: whether it is the one for parallel_drafting."""
    most_drafts: int | None = None
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
class MethodPlan:
    """What the planner assumes of a method until somebody has measured it."""

    usual_drafts: int
    """Draft tokens per verification to start with."""
    needs: str
    """What that work is."""
    acceptance: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Of a method of your own: workload -> range of the chance that a draft is accepted given that
    all before it were. The workload "" stands for all that are not named. What is published of the
    methods here stands in the planner's own table."""
    hits: Mapping[str, float] = field(default_factory=dict)
    """Workload -> share of steps that find anything to draft; 1 where not named."""
    features: int = 0
    """Layers of the target whose hidden states a head reads."""
    layers: int = 1
    """Layers of a head, each about as large as one of the target's."""
    block: int = 0
    """Most drafts of a usual head that drafts whole blocks; 0: it has no such bound."""
    head_vocabulary: int = 0
    """Words that a head usually drafts from; 0: all of the target's."""
    vllm_package: str = ""
    """A package that vLLM imports for it and does not install."""

    def package(self, engine: str) -> str:
        """What has to be installed beside an engine for it; empty: nothing."""
        return self.vllm_package if engine == "vllm" else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A kind of training run that makes drafters of a method."""

    kind: str
    """Its word in the `[head]` table of a training config."""
    command: str
    """Its word after `foretoken train`."""
    summary: str
    """What is trained, in a few words."""
    code: str
    """Dotted path of the module that trains it: its `KIND`, see `foretoken.training.heads.kind`."""
    formats: tuple[str, ...] = ()
    """Published formats that it can be written in, beside its own."""


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
        """Check ranges."""
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
    own_file: bool = True
    """Of drafters with weights: False where they are part of the target's checkpoint."""
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
    most_drafts: int = 8
    """Most draft tokens under `auto`, where control says in each step how many."""
    usual_acceptance: float = 0.6
    """Usual chance that its first draft is accepted: what control expects of it to begin with."""
    usual_cost: float = 0.3
    """What four of its drafts usually take, in plain steps of the target."""
    threshold_key: str | None = None
    """A key of its own that does what draft_confidence_threshold does for networks."""
    vllm_needs_length: bool = True
    """Whether vLLM wants num_speculative_tokens with it."""
    aliases: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Other words for it, each with the keys that it sets beside the method. Words of other
    engines are in their own table, `other_engines.toml`."""
    marks: Marks = field(default_factory=Marks)
    """How its published drafters are told from others."""
    packaged: tuple[PackagedDrafter, ...] = ()
    """Drafters of it that ship with the package."""
    demo: Mapping[str, object] | None = None
    """The speculative_config that `foretoken demo` measures; None: it does not."""
    plan: MethodPlan | None = None
    """None: the planner does not plan it."""
    trained: tuple[Trained, ...] = ()
    """The kinds of runs that train it."""

    @property
    def has_weights(self) -> bool:
        """Whether there is a model or a head to load."""
        return self.drafts_with in ("model", "head")

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that only it has."""
        return () if self.settings is None else keys_of(self.settings)

    def read_own(self, given: Mapping[str, Any]) -> Any:
        """Its own settings from those of its keys that were given; None if it has none.

        Raises:
            ConfigError: a value is not allowed.
        """
        if self.settings is None:
            return None
        make = getattr(self.settings, "from_keys", None)
        return read(self.settings, given, "speculative_config") if make is None else make(**given)

    def num_drafts(self, own: Any) -> int:
        """Draft tokens per verification where nobody says how many, with these own settings."""
        key = self.default_drafts_key
        return self.default_drafts if key is None else int(getattr(own, key))

    @property
    def is_built(self) -> bool:
        """Whether it drafts here; else it is only known by its word."""
        return self.code is not None

    def implementation(self) -> ModuleType:
        """The module that implements it, imported now.

        Raises:
            ConfigError: there is no such module.
        """
        assert self.code is not None, f"{self.name} is not built"
        try:
            return importlib.import_module(self.code)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{self.code}.".startswith(f"{error.name}."):
                raise
            allowed = f"an importable module as the code of {self.name}, not {self.code!r}"
            raise ConfigError("speculative_config.method", self.name, allowed) from error


_FLOATS_TO_INTEGERS = ("int8", "int4")
_NGRAM_HITS = {"chat": 0.20, "code": 0.40, "summarize": 0.45, "rag": 0.40, "edit": 0.85,
               "json": 0.40, "creative": 0.08, "mixed": 0.25}  # fmt: skip
_SUFFIX_HITS = {"chat": 0.30, "code": 0.50, "summarize": 0.45, "rag": 0.45, "edit": 0.85,
                "json": 0.75, "creative": 0.10, "mixed": 0.35}  # fmt: skip

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
        packaged=(
            PackagedDrafter(
                target="demo", model="demo-draft", quantization="int8", acceptance=0.57
            ),
        ),
        # What was fastest on the packaged pair, by benchmarks/methods.py.
        demo={
            "method": "draft_model",
            "model": "demo-draft",
            "num_speculative_tokens": 4,
            "quantization": "int8",
        },
        plan=MethodPlan(
            usual_drafts=5,
            needs="a second model of the same tokenizer to find and load",
        ),
        trained=(
            Trained(
                kind="draft",
                command="draft",
                summary="a small Llama that learns what the target says",
                code="foretoken.training.heads.draft",
                formats=("vllm",),
            ),
        ),
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
        packaged=(PackagedDrafter(target="demo", model="demo-parallel"),),
        demo={"model": "demo-parallel", "num_speculative_tokens": 3},
        trained=(
            Trained(
                kind="parallel",
                command="pard",
                summary="a draft model that guesses all its tokens in one pass (PARD)",
                code="foretoken.training.heads.pard",
                formats=("vllm",),
            ),
        ),
    ),
    DraftingMethod(
        name="eagle",
        summary="one decoder layer over the target's last features (EAGLE, EAGLE-2)",
        source="arXiv 2401.15077, 2406.16858",
        usual_acceptance=0.65,
        drafts_with="head",
        code="foretoken.proposers.heads.eagle",
        own_kv=True,
        trees=True,
        quantizations=_FLOATS_TO_INTEGERS,
        plan=MethodPlan(
            usual_drafts=3,
            needs="an EAGLE head trained for exactly this target",
            features=1,
        ),
        marks=Marks(tensors=(frozenset({"fc.weight"}),)),
        trained=(
            Trained(
                kind="eagle",
                command="eagle",
                summary="an EAGLE head (1 and 2) over the target's last features",
                code="foretoken.training.heads.eagle",
                formats=("vllm", "eagle"),
            ),
        ),
    ),
    DraftingMethod(
        name="eagle3",
        summary="decoder layers over three hidden states of the target (EAGLE-3, P-EAGLE)",
        source="arXiv 2503.01840, 2602.01469",
        usual_acceptance=0.7,
        drafts_with="head",
        code="foretoken.proposers.heads.eagle3",
        own_kv=True,
        trees=True,
        quantizations=_FLOATS_TO_INTEGERS,
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
            PackagedDrafter(
                target="demo", model="demo-eagle3", in_parallel=False, acceptance=0.73, cost=0.37
            ),
            PackagedDrafter(
                target="demo",
                model="demo-parallel",
                in_parallel=True,
                most_drafts=5,
                acceptance=0.65,
                cost=0.39,
            ),
        ),
        demo={"method": "eagle3", "model": "demo-eagle3", "num_speculative_tokens": 5},
        plan=MethodPlan(
            usual_drafts=3,
            needs="a head trained for exactly this target",
            features=3,
            head_vocabulary=32_000,
        ),
        trained=(
            Trained(
                kind="eagle3",
                command="eagle3",
                summary="an EAGLE-3 head, by its training-time test",
                code="foretoken.training.heads.eagle3",
                formats=("speculators", "vllm", "eagle"),
            ),
            Trained(
                kind="peagle",
                command="peagle",
                summary="a P-EAGLE head, an EAGLE-3 network that guesses all tokens in one pass",
                code="foretoken.training.heads.peagle",
                formats=("speculators", "vllm"),
            ),
        ),
    ),
    DraftingMethod(
        name="mlp",
        summary="one small stage for each token ahead (MLP speculators)",
        source="arXiv 2404.19124",
        usual_acceptance=0.5,
        usual_cost=0.1,
        drafts_with="head",
        code="foretoken.proposers.heads.mlp",
        trees=True,
        quantizations=_FLOATS_TO_INTEGERS,
        aliases={"mlp_speculator": {}},
        marks=Marks(
            keys=("n_predict",),
            values=(("model_type", "mlp_speculator"),),
            architectures=("MLPSpeculatorPreTrainedModel",),
        ),
        packaged=(
            PackagedDrafter(
                target="demo", model="demo-mlp", most_drafts=3, acceptance=0.45, cost=0.25
            ),
        ),
        demo={"method": "mlp", "model": "demo-mlp", "num_speculative_tokens": 3},
        plan=MethodPlan(
            usual_drafts=3,
            needs="an MLP speculator trained for exactly this target",
            features=1,
        ),
        trained=(
            Trained(
                kind="mlp",
                command="mlp",
                summary="an MLP speculator",
                code="foretoken.training.heads.mlp",
            ),
        ),
    ),
    DraftingMethod(
        name="medusa",
        summary="one head for each token ahead (Medusa)",
        source="arXiv 2401.10774",
        usual_acceptance=0.5,
        usual_cost=0.1,
        drafts_with="head",
        code="foretoken.proposers.heads.medusa",
        trees=True,
        quantizations=_FLOATS_TO_INTEGERS,
        marks=Marks(keys=("medusa_num_heads",)),
        packaged=(
            PackagedDrafter(
                target="demo", model="demo-medusa", most_drafts=4, acceptance=0.34, cost=0.29
            ),
        ),
        demo={"method": "medusa", "model": "demo-medusa", "num_speculative_tokens": 4},
        plan=MethodPlan(
            usual_drafts=3,
            needs="Medusa heads trained for exactly this target",
            features=1,
        ),
        trained=(
            Trained(
                kind="medusa",
                command="medusa",
                summary="Medusa heads over the target's own output head",
                code="foretoken.training.heads.medusa",
            ),
        ),
    ),
    DraftingMethod(
        name="ngram",
        summary="what followed the last tokens when they stood in the same text before",
        source="prompt lookup decoding, Saxena 2023",
        most_drafts=10,
        usual_acceptance=0.57,
        usual_cost=0.0,
        drafts_with="text",
        code="foretoken.proposers.lookup.ngram",
        settings=NgramSettings,
        demo={"method": "ngram", "num_speculative_tokens": 10},
        plan=MethodPlan(
            usual_drafts=5,
            needs="nothing to load or train",
            hits=_NGRAM_HITS,
        ),
    ),
    DraftingMethod(
        name="suffix",
        summary="what most often followed the end of the text, in it and in past outputs",
        source="suffix decoding, arXiv 2411.04975",
        most_drafts=16,
        usual_cost=0.0,
        drafts_with="text",
        code="foretoken.proposers.lookup.suffix",
        settings=SuffixSettings,
        default_drafts_key="suffix_decoding_max_tree_depth",
        threshold_key="suffix_decoding_min_token_prob",
        vllm_needs_length=False,
        plan=MethodPlan(
            usual_drafts=4,
            needs="nothing to load; vLLM imports arctic-inference for it",
            vllm_package="arctic-inference",
            hits=_SUFFIX_HITS,
        ),
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
        own_file=False,
        vllm_needs_length=False,
        marks=Marks(values=(("speculators_model_type", "mtp"),)),
        plan=MethodPlan(
            usual_drafts=1,
            needs="the checkpoint brings its own draft layers",
            features=3,
        ),
    ),
    DraftingMethod(
        name="dflash",
        summary="a block of masks filled in by one pass over hidden states of several layers",
        source="DFlash, arXiv 2602.06036",
        usual_acceptance=0.7,
        drafts_with="head",
        code="foretoken.proposers.heads.dflash",
        own_kv=True,
        in_one_pass=True,
        trees=True,
        quantizations=_FLOATS_TO_INTEGERS,
        default_drafts=7,
        most_drafts=16,
        packaged=(
            PackagedDrafter(
                target="demo", model="demo-dflash", most_drafts=7, acceptance=0.62, cost=0.38
            ),
        ),
        demo={"model": "demo-dflash", "num_speculative_tokens": 4},
        marks=Marks(
            values=(("speculators_model_type", "dflash"),),
            architectures=("DFlashDraftModel", "DFlashSpeculator", "MuseGlimmerAssistantModel"),
        ),
        plan=MethodPlan(
            usual_drafts=7,
            needs="a DFlash head trained for exactly this target",
            features=5,
            layers=5,
            block=15,
        ),
        trained=(
            Trained(
                kind="dflash",
                command="dflash",
                summary="a DFlash head, which fills in a block of drafts by one pass",
                code="foretoken.training.heads.dflash.kind",
                formats=("speculators", "vllm", "sglang"),
            ),
        ),
    ),
    DraftingMethod(
        name="dspark",
        summary="DFlash's blocks, with a small sequential part and a judgement of each draft",
        source="arXiv 2607.05147",
        usual_acceptance=0.75,
        drafts_with="head",
        code="foretoken.proposers.heads.dspark",
        own_kv=True,
        in_one_pass=True,
        trees=True,
        quantizations=_FLOATS_TO_INTEGERS,
        default_drafts=7,
        most_drafts=16,
        vllm_needs_length=False,
        packaged=(
            PackagedDrafter(
                target="demo", model="demo-dspark", most_drafts=7, acceptance=0.68, cost=0.42
            ),
        ),
        demo={"model": "demo-dspark", "num_speculative_tokens": 4},
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
        plan=MethodPlan(
            usual_drafts=7,
            needs="a DSpark head trained for exactly this target",
            features=5,
            layers=5,
            block=7,
        ),
        trained=(
            Trained(
                kind="dspark",
                command="dspark",
                summary="a DSpark head, whose drafts follow one another in a block and are judged",
                code="foretoken.training.heads.dspark",
                formats=("speculators", "vllm", "sglang"),
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
_NOT_METHODS = ("auto", "drafters", "grammar", "none", "prediction")
"""Words that mean something else where a method or a drafter is named."""


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
    # It is read by means of this table, and says which keys are not a single method's.
    from foretoken.config.speculative import general_keys

    if not method.name.isidentifier():
        allowed = "a word of letters, digits and underscores"
        raise ConfigError("register_method.name", method.name, allowed)
    others = [row for row in _table.values() if row.name != method.name]
    taken = {*_NOT_METHODS, *(word for row in others for word in (row.name, *row.aliases))}
    known = _table.get(method.name)
    for word in (method.name, *method.aliases):
        if word in taken or (known is not None and known != method):
            raise ConfigError("register_method.name", word, "a word that no other method has")
    owners = dict.fromkeys(general_keys(), "speculative_config itself")
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


def trained_kinds() -> dict[str, Trained]:
    """All kinds of training runs that make drafters, by their word in a training config."""
    return {kind.kind: kind for method in known_methods() for kind in method.trained}


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


def method_of_config(config: Mapping[str, Any]) -> DraftingMethod | None:
    """The method that a config.json is made for; None where it does not say (EAGLE, models)."""
    return next((method for method in known_methods() if method.marks.are_in(config)), None)


def method_of_tensors(has: Callable[[str], bool]) -> DraftingMethod | None:
    """The method whose drafters have these tensors; None where they are a model's.

    Args:
        has: whether a tensor of exactly this name is there.
    """
    fitting = [
        (len(names), method)
        for method in known_methods()
        for names in method.marks.tensors
        if all(map(has, names))
    ]
    return max(fitting, key=lambda found: found[0])[1] if fitting else None


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
        broken = ConfigError(where, plugin.value, allowed)
    else:
        broken = ConfigError(where, plugin.value, f"a DraftingMethod named {plugin.name!r}")
        if isinstance(record, DraftingMethod) and record.name == plugin.name:
            try:
                _check_free(record)
                return record
            except ConfigError as taken:
                broken = ConfigError(where, plugin.value, str(taken))
    logger.warning("%s", broken)
    return broken
