"""The model families that Foretoken runs with its own layers, one record each.

A record is everything that is known of a family: how its config.json is read, which features it
always has, how its weights lie on disk, and its name in GGUF files. Whoever needs to know asks the
record, by `model_type`. `register_family` adds one, for families that live outside this package.
A reader refuses by name what would be run wrongly; defaults are those of Hugging Face's classes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import EntryPoints, entry_points
from typing import Any, Final, Literal, final

from foretoken.errors import CheckpointError, ConfigError
from foretoken.shape.fields import (
    FULL,
    SLIDING,
    Config,
    check_layer_types,
    everywhere,
    layer_count,
    positive,
    positive_or_none,
    refuse_unless,
    size,
    window_of,
    windows_by_type,
)
from foretoken.shape.rope_config import (
    RopeShape,
    check_whole_heads,
    one_rope,
    rope_of,
    theta_of,
    two_ropes,
)

ENTRY_POINTS = "foretoken.families"
"""Group of entry points in which packages name the records of their families."""
_SILU = ("silu", "silu")
_GELU = ("gelu_pytorch_tanh", "gelu_pytorch_tanh")
_NO = (False, "False")
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""What transformers' class has."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FusedTensor:
    """A stored tensor that holds what the layers want one by one."""

    stored: str
    """What its name ends with, after `model.layers.N.`."""
    parts: tuple[str, ...]
    """Names of what it holds, above one another; `{}` is the number of the expert, which its first
    dimension counts. Without it there is no such dimension."""
    alternating: bool = False
    """Whether rows of the parts alternate."""
    inputs_first: bool | None = False
    """Whether inputs come before outputs; None: as the sizes say."""
    flat: bool = False
    """Whether it has dimensions too many."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StoredView:
    """Where one of those lies."""

    expert: int | None
    part: int
    fused: FusedTensor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StoredNames:
    """How a family's files name their tensors, where not as Llama's and Qwen's do."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    """Pieces of stored names -> what stands there in ours, one after the other."""
    fused: tuple[FusedTensor, ...] = ()
    num_experts: int = 0
    """Of a layer of the model that is read."""
    hidden: int = 0
    """Its width."""

    def plain(self, name: str) -> str:
        """Our name of a tensor that is stored alone."""
        for old, new in self.renamed.items():
            name = name.replace(old, new)
        return name

    def views(self, name: str) -> dict[str, StoredView]:
        """Our names of what a fused tensor holds; empty: it is none."""
        for one in self.fused:
            if not name.endswith(f".{one.stored}"):
                continue
            prefix = name.removesuffix(one.stored)
            has_experts = "{}" in one.parts[0]
            return {
                prefix + part.format(expert): StoredView(
                    expert=expert if has_experts else None, part=at, fused=one
                )
                for expert in range(self.num_experts if has_experts else 1)
                for at, part in enumerate(one.parts)
            }
        return {}


PLAIN_NAMES: Final = StoredNames()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """A family of decoders: Llama's layers, but for what is said here."""

    model_type: str
    """Name of the family in config.json."""
    read: Callable[[Config], dict[str, Any]]
    """From config.json, whose `head_dim` is filled in, to the fields of ModelShape that depend on
    it, `rope` at least. Raises UnsupportedModelError for what the layers would run wrongly."""
    head_dim: int | None = None
    """Where config.json does not say; None: hidden_size / num_attention_heads."""
    attention_biases: Literal["never", "qkv", "config"] = "never"
    """`qkv`: always on q, k and v; `config`: on q, k, v and o, if `attention_bias` says so."""
    head_norms: bool = False
    """A norm over every query head and every key head."""
    whole_norms: bool = False
    """A norm over all query heads together, and one over all key heads."""
    norms_before: bool = True
    """Norms before attention and before the MLP."""
    sandwich_norms: bool = False
    """Norms after attention and after the MLP too."""
    norm_offset: float = 0.0
    """What has to be added to the stored weights of norms."""
    fused_on_disk: bool = False
    """Whether q, k and v are stored as one matrix, and gate and up too."""
    pairs_on_disk: bool = False
    """Whether the rows of q and k are stored in the order of interleaved rotary positions."""
    names: StoredNames = PLAIN_NAMES
    """What its tensors are called."""
    ties_head: bool = False
    """Whether the output head is the embedding table where config.json does not say."""
    gguf: str | None = None
    """Name of the architecture in GGUF files, for families from outside this package; those of its
    own have a row each in `gguf_architectures`."""
    gguf_turns_heads: bool = False
    """Whether those have the rows of q and k in the order of interleaved rotary positions."""
    planned_alike: tuple[str, ...] = ()
    """Other model types with the same attention, which are planned for but not run."""

    def shape_fields(self, config: Config) -> dict[str, Any]:
        """ModelShape's fields that depend on the family. Raises UnsupportedModelError: a feature
        that is not run; CheckpointError: a field is missing or wrong."""
        head_dim = self.head_dim_of(config)
        own = self.read({**config, "head_dim": head_dim})
        if "experts" not in own:
            refuse_unless(config, {"num_experts": (0, "0")})
        out_bias = self.attention_biases == "config" and bool(config.get("attention_bias"))
        return {
            "head_dim": head_dim,
            "tie_word_embeddings": bool(config.get("tie_word_embeddings", self.ties_head)),
            "qkv_bias": out_bias or self.attention_biases == "qkv",
            "out_bias": out_bias,
            "head_norms": self.head_norms,
            "whole_norms": self.whole_norms,
            "norms_before": self.norms_before,
            "sandwich_norms": self.sandwich_norms,
            **own,
        }

    def head_dim_of(self, config: Config) -> int:
        """The size of a head."""
        usual = size(config, "hidden_size") // size(config, "num_attention_heads")
        return size(config, "head_dim", self.head_dim or usual)


def find_family(model_type: object) -> ModelFamily | None:
    """The family of this name; None: it has no record. Raises ConfigError: an installed package
    names a record for it that is none."""
    if not isinstance(model_type, str):
        return None
    if model_type not in _BY_NAME and model_type in _plugins().names:
        record = _plugins()[model_type].load()
        if not isinstance(record, ModelFamily) or record.model_type != model_type:
            where = f"the family {model_type!r} of an installed package"
            raise ConfigError(where, record, f"a ModelFamily of model_type {model_type!r}")
        register_family(record)
    return _BY_NAME.get(model_type)


def family_alike(model_type: object) -> ModelFamily | None:
    """The family of this name, or one that this model type has the attention of."""
    alike = (family for family in _BY_NAME.values() if model_type in family.planned_alike)
    return find_family(model_type) or next(alike, None)


def families() -> tuple[ModelFamily, ...]:
    """All families, in the order in which they were registered."""
    return tuple(_BY_NAME.values())


def family_names() -> str:
    """Model types of all families, for messages."""
    return ", ".join(_BY_NAME)


def register_family(family: ModelFamily) -> None:
    """Make a family known to this process: it is loaded, planned and quantized from now on.

    A package registers its families without being imported first by naming their records as entry
    points: group `foretoken.families`, name the model type, value `module:record`.

    Raises:
        ConfigError: there is another family of this name.
    """
    if _BY_NAME.get(family.model_type, family) != family:
        allowed = f"a name other than {family_names()}"
        raise ConfigError("model_type", family.model_type, allowed)
    _BY_NAME[family.model_type] = family


@cache
def _plugins() -> EntryPoints:
    return entry_points(group=ENTRY_POINTS)


def _llama(config: Config) -> dict[str, Any]:
    refuse_unless(config, {"hidden_act": _SILU, "sliding_window": (None, "none")})
    check_layer_types(config, {FULL})
    return {"mlp_bias": bool(config.get("mlp_bias")), "rope": one_rope(config)}


def _mistral(config: Config) -> dict[str, Any]:
    refuse_unless(config, {"hidden_act": _SILU})
    window = window_of(config)
    check_layer_types(config, {FULL if window is None else SLIDING})
    return {"windows": everywhere(config, window), "rope": one_rope(config)}


def _ministral3(config: Config) -> dict[str, Any]:
    """Queries grow with their position, beyond the context that the model was made for first."""
    refuse_unless(config, {"hidden_act": _SILU})
    given = rope_of(config) or _MINISTRAL3_ROPE
    check_whole_heads(config, given)
    rope = RopeShape.read(config, given, head_dim=config["head_dim"], theta=theta_of(config))
    beta = positive_or_none(given, "llama_4_scaling_beta")
    if beta is not None:
        original = size(given, "original_max_position_embeddings")
        rope = replace(rope, query_growth=beta, original_positions=original)
    return {
        "windows": everywhere(config, window_of(config)),
        "rope": rope,
        "rms_norm_eps": positive(config, "rms_norm_eps", 1e-5),
    }


def _smollm3(config: Config) -> dict[str, Any]:
    """Some layers do not turn their heads."""
    refuse_unless(config, {"hidden_act": _SILU})
    layers, interval = layer_count(config), size(config, "no_rope_layer_interval", 4)
    turned = config.get("no_rope_layers")
    if turned is None:
        turned = [(layer + 1) % interval for layer in range(layers)]
    if len(turned) != layers:
        raise CheckpointError("config.json no_rope_layers", turned, "one per layer")
    window = window_of(config) if config.get("use_sliding_window") else None
    usual = [FULL if one or window is None else SLIDING for one in turned]
    given = config.get("layer_types") or usual
    windows = windows_by_type(config, usual if window is None else given, window)
    theta = positive(config, "rope_theta", 2e6)
    return {
        "mlp_bias": bool(config.get("mlp_bias")),
        "windows": windows,
        "turned": tuple(bool(one) for one in turned),
        "rope": one_rope({**config, "rope_theta": theta}),
    }


def _olmo2(config: Config) -> dict[str, Any]:
    refuse_unless(config, {"hidden_act": _SILU})
    theta = positive(config, "rope_theta", 5e5)
    return {
        "rope": one_rope({**config, "rope_theta": theta}),
        "rms_norm_eps": positive(config, "rms_norm_eps", 1e-5),
    }


def _olmo3(config: Config) -> dict[str, Any]:
    """Scaled positions are those of the layers that see all."""
    refuse_unless(config, {"hidden_act": _SILU})
    window = size(config, "sliding_window", 4096)
    usual = [SLIDING if (i + 1) % 4 else FULL for i in range(layer_count(config))]
    theta = positive(config, "rope_theta", 5e5)
    return {
        "windows": windows_by_type(config, config.get("layer_types") or usual, window),
        "rms_norm_eps": positive(config, "rms_norm_eps", 1e-5),
        **two_ropes(config, theta, local_theta=theta),
    }


def _qwen(config: Config) -> dict[str, Any]:
    """Upper layers may have a window, if it is switched on."""
    refuse_unless(config, {"hidden_act": _SILU})
    window = window_of(config) if config.get("use_sliding_window") else None
    layers, first = layer_count(config), config.get("max_window_layers")
    first = 28 if first is None else first
    usual = [SLIDING if window is not None and i >= first else FULL for i in range(layers)]
    windows = windows_by_type(config, config.get("layer_types") or usual, window)
    return {"windows": windows, "rope": one_rope(config)}


def _phi3(config: Config) -> dict[str, Any]:
    refuse_unless(config, {"hidden_act": _SILU})
    rope = dict(rope_of(config))
    if (rope.get("rope_type") or rope.get("type")) == "yarn":
        rope["rope_type"] = "longrope"  # What early Phi-3 configs called it.
    return {
        "windows": everywhere(config, window_of(config)),
        "rope": RopeShape.read(config, rope, head_dim=config["head_dim"], theta=theta_of(config)),
    }


def _gemma2(config: Config) -> dict[str, Any]:
    return {
        **_gemma(config, period=2),
        "rope": one_rope(config),
        "attention_softcap": positive_or_none(config, "attn_logit_softcapping"),
    }


def _gemma3(config: Config) -> dict[str, Any]:
    refuse_unless(config, {"attn_logit_softcapping": (None, "none")})
    fields = _gemma(config, period=size(config, "sliding_window_pattern", 6))
    theta = positive(config, "rope_theta", 1e6)
    local_theta = positive(config, "rope_local_base_freq", 1e4)
    return {**fields, **two_ropes(config, theta, local_theta)}


def _gemma1(config: Config) -> dict[str, Any]:
    """Old files have `gelu` where its tangent form is meant."""
    act = config.get("hidden_act")
    refuse_unless(
        {**config, "hidden_act": _GELU[0] if act == "gelu" else act},
        {"hidden_act": _GELU, "hidden_activation": _GELU, "use_bidirectional_attention": _NO},
    )
    return {
        "hidden_act": _GELU[0],
        "embedding_scale": size(config, "hidden_size") ** 0.5,
        "rope": one_rope(config),
    }


def _gemma(config: Config, period: int) -> dict[str, Any]:
    refuse_unless(
        config, {"hidden_activation": _GELU, "use_bidirectional_attention": _NO, "mlp_bias": _NO}
    )
    layers = layer_count(config)
    usual = [SLIDING if (i + 1) % period else FULL for i in range(layers)]
    return {
        "hidden_act": _GELU[0],
        "embedding_scale": size(config, "hidden_size") ** 0.5,
        "attention_scale": positive(config, "query_pre_attn_scalar", 256.0) ** -0.5,
        "logit_softcap": positive_or_none(config, "final_logit_softcapping"),
        "windows": windows_by_type(config, config.get("layer_types") or usual, window_of(config)),
    }


_FAMILIES = (
    ModelFamily(  # Touvron et al. 2023.
        model_type="llama",
        read=_llama,
        attention_biases="config",
    ),
    ModelFamily(  # Jiang et al. 2023, arXiv 2310.06825.
        model_type="mistral",
        read=_mistral,
    ),
    ModelFamily(  # Mistral AI 2025: Llama's layers, yarn, queries as in Llama 4.
        model_type="ministral3",
        read=_ministral3,
        head_dim=128,
    ),
    ModelFamily(  # Hugging Face 2025; no positions in some layers: Yang et al., arXiv 2501.18795.
        model_type="smollm3",
        read=_smollm3,
        attention_biases="config",
        ties_head=True,
    ),
    ModelFamily(  # Team OLMo 2024, arXiv 2501.00656.
        model_type="olmo2",
        read=_olmo2,
        attention_biases="config",
        whole_norms=True,
        norms_before=False,
        sandwich_norms=True,
    ),
    ModelFamily(  # Team OLMo 2025.
        model_type="olmo3",
        read=_olmo3,
        attention_biases="config",
        whole_norms=True,
        norms_before=False,
        sandwich_norms=True,
    ),
    ModelFamily(  # Qwen Team 2024, arXiv 2407.10671.
        model_type="qwen2",
        read=_qwen,
        attention_biases="qkv",
    ),
    ModelFamily(  # Qwen Team 2025, arXiv 2505.09388.
        model_type="qwen3",
        read=_qwen,
        head_dim=128,
        attention_biases="config",
        head_norms=True,
    ),
    ModelFamily(  # Abdin et al. 2024, arXiv 2404.14219. Phi-4-mini turns part of each head.
        model_type="phi3",
        read=_phi3,
        fused_on_disk=True,
    ),
    ModelFamily(  # Gemma Team 2024, arXiv 2403.08295.
        model_type="gemma",
        read=_gemma1,
        head_dim=256,
        attention_biases="config",
        norm_offset=1.0,
        ties_head=True,
    ),
    ModelFamily(  # Gemma Team 2024, arXiv 2408.00118. Norms are stored less 1.
        model_type="gemma2",
        read=_gemma2,
        head_dim=256,
        attention_biases="config",
        sandwich_norms=True,
        norm_offset=1.0,
        ties_head=True,
    ),
    ModelFamily(  # Gemma Team 2025, arXiv 2503.19786.
        model_type="gemma3_text",
        read=_gemma3,
        head_dim=256,
        attention_biases="config",
        head_norms=True,
        sandwich_norms=True,
        norm_offset=1.0,
        ties_head=True,
    ),
)
_BY_NAME: dict[str, ModelFamily] = {family.model_type: family for family in _FAMILIES}
