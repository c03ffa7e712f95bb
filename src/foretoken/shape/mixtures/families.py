"""The families of mixtures of experts, one record each, and what of them is refused.

Their readers and records are as those of `shape/families.py`, which knows them once this module is
imported. Everything that experts differ in is said by `shape/mixtures/experts.py`.
"""

from collections.abc import Mapping
from typing import Any, Final

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.shape.families import FusedTensor, ModelFamily, StoredNames, register_family
from foretoken.shape.fields import (
    FULL,
    SLIDING,
    Config,
    everywhere,
    layer_count,
    positive,
    positive_or_none,
    refuse_unless,
    size,
    window_of,
    windows_by_type,
)
from foretoken.shape.mixtures.experts import Experts, Routing
from foretoken.shape.rope_config import RopeShape, one_rope, rope_of, theta_of

_SILU = ("silu", "silu")
_YES = (True, "true")
_SIGMOID = ("sigmoid", "sigmoid")
_LATENT = "latent attention"
_RECURRENT = "recurrent layers"
REFUSED: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_vl_v2", "glm4_moe_lite",
         "kimi_k2", "kimi_k25", "kimi_vl"),
        _LATENT,
    ),
    "deepseek_v4": "compressed and sparse attention",
    "kimi_linear": f"{_LATENT} and {_RECURRENT}",
    **dict.fromkeys(("llama4", "llama4_text"), "chunked attention, and experts that weigh inputs"),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text", "granitemoehybrid", "lfm2_moe"),
        _RECURRENT,
    ),
}  # fmt: skip
"""Model types whose layers are not built, and what is in them."""


def refuse(config: Config) -> None:
    """Raise UnsupportedModelError for a model whose layers are not built, with the reason."""
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in REFUSED:
        allowed = "a decoder with plain attention in every layer, with or without experts"
        raise UnsupportedModelError("model_type", f"{kind}, with {REFUSED[kind]}", allowed)


def _fields(
    config: Config,
    experts: Experts,
    *,
    used: str = "num_experts_per_tok",
    eps: float = 1e-5,
    theta: float | None = None,
    partly: bool = False,
) -> dict[str, Any]:
    """What all of them have.

    Args:
        config: of the model.
        experts: as its family reads them; their numbers are checked here.
        used: how config.json calls the number of experts of a token.
        eps: of norms, where it does not say.
        theta: of positions, likewise; None: the usual one.
        partly: whether part of a head may be turned alone.
    """
    refuse_unless(config, {"hidden_act": _SILU})
    experts.check(used)
    return {
        "experts": experts,
        "rope": one_rope(config, theta=theta, partly=partly),
        "rms_norm_eps": positive(config, "rms_norm_eps", eps),
    }


def _or(value: Any, usual: Any) -> Any:
    """What stands there; `usual` where nothing does."""
    return usual if value is None else value


def _or_none(config: Config, name: str, usual: int) -> int:
    """A size that may be 0."""
    return 0 if _or(config.get(name), usual) == 0 else size(config, name, usual)


def _count(config: Config, name: str, usual: int | None = None) -> int:
    """How many experts a layer has, which transformers 5 calls otherwise for some families."""
    names = (name, "num_experts", "num_local_experts", "n_routed_experts")
    found = next((one for one in names if config.get(one) is not None), name)
    return size(config, found, usual)


def _numbers(
    config: Config, name: str, count: int | None = None, used: int | None = None
) -> dict[str, Any]:
    """The same, and how many of them a token has."""
    used = size(config, "num_experts_per_tok", used)
    return {"count": _count(config, name, count), "used": used}


def _from(config: Config, first: str, usual: int) -> tuple[bool, ...]:
    """Experts in all layers but the first ones."""
    return tuple(layer >= _or(config.get(first), usual) for layer in range(layer_count(config)))


def _normalized(config: Config, *, usual: bool) -> Any:
    return "normalized" if _or(config.get("norm_topk_prob"), usual) else "kept"


def _qwen_experts(config: Config, **more: Any) -> Experts:
    """In every `decoder_sparse_step`-th layer, but for those of a list."""
    step, plain = size(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    layers = range(layer_count(config))
    return Experts(
        **_numbers(config, "num_experts"),
        width=size(config, "moe_intermediate_size"),
        layers=tuple((layer + 1) % step == 0 and layer not in plain for layer in layers),
        routing=Routing(weights=_normalized(config, usual=False)),
        **more,
    )


def _qwen3_moe(config: Config) -> dict[str, Any]:
    window = window_of(config) if config.get("use_sliding_window") else None
    fields = _fields(config, _qwen_experts(config), eps=1e-6)
    return {**fields, "windows": everywhere(config, window)}


def _qwen2_moe(config: Config) -> dict[str, Any]:
    """A shared expert behind a gate of its own; windows in every other of the lower layers."""
    window = window_of(config) if config.get("use_sliding_window") else None
    first = size(config, "max_window_layers", 28)
    usual = [
        SLIDING if window is not None and (i + 1) % 2 and i < first else FULL
        for i in range(layer_count(config))
    ]
    width = size(config, "shared_expert_intermediate_size", 5632)
    return {
        **_fields(config, _qwen_experts(config, shared="gated", shared_width=width), eps=1e-6),
        "qkv_bias": bool(_or(config.get("qkv_bias"), True)),
        "windows": windows_by_type(config, config.get("layer_types") or usual, window),
    }


def _everywhere(config: Config, routing: Routing, **more: Any) -> Experts:
    """Experts in all layers, whose width has the name of that of plain MLPs."""
    width, layers = size(config, "intermediate_size"), (True,) * layer_count(config)
    return Experts(width=width, layers=layers, routing=routing, **more)


def _mixtral(config: Config) -> dict[str, Any]:
    counts = _numbers(config, "num_local_experts", 8, 2)
    experts = _everywhere(config, Routing(weights="normalized"), **counts)
    windows = everywhere(config, window_of(config))
    return {**_fields(config, experts, theta=1e6), "windows": windows}


def _olmoe(config: Config) -> dict[str, Any]:
    refuse_unless(config, {"clip_qkv": (None, "none")})
    routing = Routing(weights=_normalized(config, usual=False))
    return _fields(config, _everywhere(config, routing, **_numbers(config, "num_experts", 64, 8)))


_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""What transformers' class has."""


def _gpt_oss(config: Config) -> dict[str, Any]:
    """Sinks in attention; every other layer with a window, the first one too."""
    refuse_unless(config, {"swiglu_alpha": (1.702, "1.702")})
    usual = [FULL if i % 2 else SLIDING for i in range(layer_count(config))]
    window = size(config, "sliding_window", 128)
    positions = config.get("rope_parameters") or config.get("rope_scaling") or _GPT_OSS_ROPE
    biased = bool(_or(config.get("attention_bias"), True))
    experts = _everywhere(
        config,
        Routing(score="none", weights="softmax", bias=True),
        **_numbers(config, "num_local_experts", 128, 4),
        activation="clamped",
        limit=positive(config, "swiglu_limit", 7.0),
        biases=True,
    )
    return {
        **_fields({**config, "rope_parameters": positions}, experts, theta=150000.0),
        "sinks": True,
        "qkv_bias": biased,
        "out_bias": biased,
        "windows": windows_by_type(config, config.get("layer_types") or usual, window),
    }


def _granitemoe(config: Config) -> dict[str, Any]:
    """Four multipliers: of embeddings, scores, what is added to the stream, and logits."""
    shared = _or_none(config, "shared_intermediate_size", 0)
    experts = _everywhere(
        config,
        Routing(score="none", weights="softmax"),
        **_numbers(config, "num_local_experts", 8, 2),
        shared="always" if shared else "none",
        shared_width=shared,
    )
    return {
        **_fields(config, experts, eps=1e-6),
        "embedding_scale": positive(config, "embedding_multiplier", 1.0),
        "attention_scale": positive(config, "attention_multiplier", 1.0),
        "branch_scale": positive(config, "residual_multiplier", 1.0),
        "logit_scale": 1.0 / positive(config, "logits_scaling", 1.0),
    }


def _grouped(config: Config, *, first: int, normalized: bool) -> Experts:
    """Sigmoid scores, a bias for the choice, which may be within groups first (DeepSeek-AI 2024,
    arXiv 2412.19437)."""
    width = size(config, "moe_intermediate_size")
    return Experts(
        **_numbers(config, "n_routed_experts"),
        width=width,
        layers=_from(config, "first_k_dense_replace", first),
        routing=Routing(
            score="sigmoid",
            choice_bias=True,
            groups=size(config, "n_group", 1),
            groups_used=size(config, "topk_group", 1),
            weights=_normalized(config, usual=normalized),
            eps=1e-20,
            scale=positive(config, "routed_scaling_factor", 1.0),
            wide=True,
        ),
        shared="always",
        shared_width=size(config, "n_shared_experts", 1) * width,
    )


def _glm4_moe(config: Config) -> dict[str, Any]:
    """Half of a head is turned; norms over heads and biases of q, k and v where config.json says
    so."""
    share = _or(config.get("partial_rotary_factor"), 0.5)
    experts = _grouped(config, first=1, normalized=True)
    return {
        **_fields({**config, "partial_rotary_factor": share}, experts, partly=True),
        "qkv_bias": bool(config.get("attention_bias")),
        "head_norms": bool(config.get("use_qk_norm")),
    }


def _dots1(config: Config) -> dict[str, Any]:
    window, layers = window_of(config), layer_count(config)
    first = size(config, "max_window_layers", 62)
    usual = [SLIDING if window is not None and i >= first else FULL for i in range(layers)]
    return {
        **_fields(config, _grouped(config, first=0, normalized=False), eps=1e-6),
        "windows": windows_by_type(config, config.get("layer_types") or usual, window),
    }


def _ernie4_5_moe(config: Config) -> dict[str, Any]:
    """Experts between two layers, in every so many-th."""
    refuse_unless(config, {"use_bias": (False, "False")})
    layers, step = layer_count(config), size(config, "moe_layer_interval", 1)
    first = _or(config.get("moe_layer_start_index"), 1)
    last = _or(config.get("moe_layer_end_index"), -1)
    last = layers - 1 if last == -1 else last
    width = size(config, "moe_intermediate_size", 1536)
    shared = _or_none(config, "moe_num_shared_experts", 2)
    experts = Experts(
        count=_count(config, "moe_num_experts", 64),
        used=size(config, "moe_k", 6),
        width=width,
        layers=tuple(first <= i <= last and (i + 1) % step == 0 for i in range(layers)),
        routing=Routing(
            choice_bias=True,
            weights="normalized",
            floor=positive(config, "moe_norm_min", 1e-12),
            wide=True,
        ),
        shared="always" if shared else "none",
        shared_width=shared * width,
    )
    return _fields(config, experts, used="moe_k", theta=5e5)


def _hunyuan_v1_moe(config: Config) -> dict[str, Any]:
    """Heads are turned first, then normed."""
    given = config.get("moe_topk")
    if isinstance(given, list) and given and given == given[:1] * len(given):
        given = given[0]
    experts = _everywhere(
        config,
        Routing(weights="normalized", wide=True),
        count=size(config, "num_experts"),
        used=size({"moe_topk": given}, "moe_topk", 1),
        shared="always",
        shared_width=size(config, "intermediate_size"),
    )
    fields = _fields(_stretched(config), experts, used="moe_topk")
    return {**fields, "norms_after_turning": True}


def _stretched(config: Config) -> Config:
    """What Hunyuan calls dynamic is another base of the frequencies, the same for all lengths."""
    rope = rope_of(config)
    alpha = positive_or_none(rope, "alpha")
    if alpha is None:
        return config
    head_dim, theta = config["head_dim"], positive(rope, "rope_theta", theta_of(config))
    base = theta * alpha ** (head_dim / (head_dim - 2))
    plain = {"rope_type": "default", "rope_theta": base}
    return {**config, "rope_scaling": None, "rope_parameters": plain}


def _minimax_m2(config: Config) -> dict[str, Any]:
    per_layer, none = ("per_layer", "per_layer"), (0, "0")
    alike = {"scoring_func": _SIGMOID, "use_routing_bias": _YES, "use_qk_norm": _YES}
    alike |= {"qk_norm_type": per_layer, "shared_intermediate_size": none}
    refuse_unless(config, alike)
    turned = positive_or_none(config, "rotary_dim")
    share = config.get("partial_rotary_factor")
    if turned is not None and share is None:
        # A little more, since readers multiply by the size and drop what is behind the point.
        share = (turned + 0.1) / config["head_dim"]
    routing = Routing(score="sigmoid", choice_bias=True, weights="normalized")
    experts = _everywhere(config, routing, **_numbers(config, "num_local_experts", 256, 8))
    partly = {**config, "partial_rotary_factor": share}
    return _fields(partly, experts, eps=1e-6, theta=5e6, partly=True)


def _hy_v3(config: Config) -> dict[str, Any]:
    alike = dict.fromkeys(("route_norm", "qk_norm", "moe_router_use_sigmoid"), _YES)
    refuse_unless(config, {"mlp_bias": (False, "False"), **alike})
    layers, kinds = _from(config, "first_k_dense_replace", 1), config.get("mlp_layer_types")
    if kinds is not None:
        if len(kinds) != len(layers) or set(kinds) - {"dense", "sparse"}:
            allowed = f"dense or sparse for each of {len(layers)} layers"
            raise CheckpointError("config.json mlp_layer_types", kinds, allowed)
        layers = tuple(kind == "sparse" for kind in kinds)
    width = size(config, "moe_intermediate_size", 1536)
    experts = Experts(
        **_numbers(config, "num_experts", 192, 8),
        width=width,
        layers=layers,
        routing=Routing(
            score="sigmoid",
            choice_bias=True,
            weights="normalized",
            eps=1e-20,
            scale=positive(config, "router_scaling_factor", 2.826),
            wide=True,
        ),
        shared="always",
        shared_width=size(config, "num_shared_experts", 1) * width,
    )
    return _fields(config, experts, theta=11_158_840.0)


def _afmoe(config: Config) -> dict[str, Any]:
    """A gate behind attention; positions only in the layers with a window."""
    groups = dict.fromkeys(("n_group", "topk_group"), (1, "1"))
    refuse_unless(config, {"score_func": _SIGMOID, "route_norm": _YES, **groups})
    period = size(config, "global_attn_every_n_layers", 4)
    usual = [SLIDING if (i + 1) % period else FULL for i in range(layer_count(config))]
    window = size(config, "sliding_window", 1024)
    windows = windows_by_type(config, config.get("layer_types") or usual, window)
    width = size(config, "moe_intermediate_size", 1408)
    experts = Experts(
        **_numbers(config, "num_experts", 64, 6),
        width=width,
        layers=_from(config, "num_dense_layers", 1),
        routing=Routing(
            score="sigmoid",
            choice_bias=True,
            weights="normalized",
            eps=1e-20,
            scale=positive(config, "route_scale", 1.0),
        ),
        shared="always",
        shared_width=size(config, "num_shared_experts", 2) * width,
    )
    return {
        **_fields(config, experts),
        "windows": windows,
        "turned": tuple(one is not None for one in windows),
        "output_gate": True,
        "embedding_scale": size(config, "hidden_size") ** 0.5 if config.get("mup_enabled") else 1.0,
    }


def _gemma4(config: Config) -> dict[str, Any]:
    """Heads of two sizes, values that are normed, layers that share keys and values; inputs of each
    layer by a table; experts beside the plain MLP."""
    gelu = ("gelu_pytorch_tanh", "gelu_pytorch_tanh")
    refuse_unless(config, {"hidden_activation": gelu})
    if config.get("use_bidirectional_attention") not in (None, False, "vision"):
        given = config["use_bidirectional_attention"]
        raise UnsupportedModelError("use_bidirectional_attention", given, "vision, or none")
    layers = layer_count(config)
    types = list(
        config.get("layer_types") or [SLIDING if (i + 1) % 6 else FULL for i in range(layers)]
    )
    windows = windows_by_type(config, [*types[:-1], FULL], size(config, "sliding_window", 512))
    heads, own = _wide_heads(config, windows), config.get("rope_parameters") or {}
    full = {"partial_rotary_factor": 0.25, **(own.get(FULL) or {})}
    refuse_unless(full, {"rope_type": ("proportional", "proportional")})
    share = positive(full, "partial_rotary_factor")
    sharing, inputs = (config.get(n) or 0 for n in ("num_kv_shared_layers", _LAYER_INPUTS))
    if sharing >= layers or not set(windows) <= set(windows[: layers - sharing]):
        allowed = f"fewer than {layers}, with a layer of each kind before them"
        raise CheckpointError("config.json num_kv_shared_layers", sharing, allowed)
    given = config.get("vocab_size_per_layer_input", config["vocab_size"])
    if inputs and given != config["vocab_size"]:
        raise UnsupportedModelError("vocab_size_per_layer_input", given, "vocab_size")
    local = own.get(SLIDING) or {}
    fields: dict[str, Any] = {
        "hidden_act": gelu[0],
        "embedding_scale": size(config, "hidden_size") ** 0.5,
        "attention_scale": 1.0,
        "logit_softcap": positive_or_none(config, "final_logit_softcapping"),
        "windows": windows,
        "rope": RopeShape(
            theta=positive(full, "rope_theta", 1e6),
            rotary_dim=heads[1],
            turned_pairs=int(share * heads[1] // 2),
        ),
        "local_rope": RopeShape.read(config, local, head_dim=config["head_dim"], theta=1e4),
        "wide": heads,
        "value_norms": True,
        "keys_are_values": bool(config.get("attention_k_eq_v")),
        "kv_sharing_layers": sharing,
        "wider_sharing": 2 if config.get("use_double_wide_mlp") else 1,
        "layer_inputs": inputs,
        "layer_scalars": True,
        "experts": None,
    }
    if config.get("enable_moe_block"):
        experts = Experts(
            count=_count(config, "num_experts"),
            used=size(config, "top_k_experts"),
            width=size(config, "moe_intermediate_size"),
            layers=(True,) * layers,
            routing=Routing(weights="normalized", expert_scales=True),
            activation="gelu_pytorch_tanh",
            shared="beside",
        )
        experts.check("top_k_experts")
        fields["experts"] = experts
    return fields


_LAYER_INPUTS = "hidden_size_per_layer_input"


def _wide_heads(config: Config, windows: tuple[int | None, ...]) -> tuple[int, int]:
    """Key heads of the layers that see all, and their size: said once, or layer by layer."""
    usual = size(config, "num_key_value_heads", size(config, "num_attention_heads"))
    if config.get("attention_k_eq_v"):
        usual = size(config, "num_global_key_value_heads", usual)
    head_dim = size(config, "global_head_dim", 512)
    each = config.get("per_layer_config")
    if each is None:
        return usual, head_dim
    named = {int(name): one for name, one in each.items() if name.isdigit()}
    full = [named.get(i) or {} for i, window in enumerate(windows) if window is None]
    found = {
        (
            size(one, "num_key_value_heads", size(config, "num_key_value_heads")),
            size(one, "head_dim", config["head_dim"]),
        )
        for one in full
    }
    if len(found) != 1 or len(each) != len(full):
        allowed = "the same for every layer that sees all, and for no other"
        raise CheckpointError("config.json per_layer_config", each, allowed)
    return found.pop()


_W_NAMES = {".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}
_SHARED = {".shared_experts.": ".shared_expert."}
_BIAS = "mlp.gate.e_score_correction_bias"


def _parts(kind: str, *names: str) -> tuple[str, ...]:
    return tuple(f"mlp.experts.{{}}.{name}_proj.{kind}" for name in names)


def _fused(name: str, ending: str, kind: str, *parts: str) -> FusedTensor:
    return FusedTensor(
        stored=f"mlp.experts.{name}_proj{ending}",
        parts=_parts(kind, *parts),
        alternating=len(parts) > 1,
        inputs_first=kind == "weight",
    )


_QWEN3_VL_NAMES = StoredNames(
    fused=tuple(
        FusedTensor(
            stored=f"mlp.experts.{name}_proj", parts=_parts("weight", *parts), inputs_first=None
        )
        for name, parts in (("gate_up", ("gate", "up")), ("down", ("down",)))
    )
)
"""Beside a vision tower, published with inputs first; alone each expert has its tensors."""
_ENDINGS = (("", "weight"), ("_bias", "bias"), ("_blocks", "blocks"), ("_scales", "scales"))
_GPT_OSS_NAMES = StoredNames(
    renamed={".mlp.router.": ".mlp.gate."},
    fused=(
        *(_fused("gate_up", *ending, "gate", "up") for ending in _ENDINGS),
        *(_fused("down", *ending, "down") for ending in _ENDINGS),
    ),
)
_GRANITE_NAMES = StoredNames(
    renamed={
        ".block_sparse_moe.router.layer.": ".mlp.gate.",
        ".shared_mlp.output_linear.": ".mlp.shared_expert.down_proj.",
    },
    fused=(
        FusedTensor(
            stored="block_sparse_moe.input_linear.weight", parts=_parts("weight", "gate", "up")
        ),
        FusedTensor(stored="block_sparse_moe.output_linear.weight", parts=_parts("weight", "down")),
        FusedTensor(
            stored="shared_mlp.input_linear.weight",
            parts=("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
        ),
    ),
)
MIXTURES: Final = (
    ModelFamily(  # Jiang et al. 2024, arXiv 2401.04088.
        model_type="mixtral",
        read=_mixtral,
        names=StoredNames(renamed={".block_sparse_moe.": ".mlp.", **_W_NAMES}),
    ),
    ModelFamily(  # Qwen Team 2024: a shared expert behind a gate.
        model_type="qwen2_moe",
        read=_qwen2_moe,
    ),
    ModelFamily(  # Qwen Team 2025, arXiv 2505.09388.
        model_type="qwen3_moe",
        read=_qwen3_moe,
        names=_QWEN3_VL_NAMES,
        attention_biases="config",
        head_norms=True,
    ),
    ModelFamily(  # Muennighoff et al. 2024, arXiv 2409.02060.
        model_type="olmoe",
        read=_olmoe,
        attention_biases="config",
        whole_norms=True,
    ),
    ModelFamily(  # OpenAI 2025, arXiv 2508.10925.
        model_type="gpt_oss",
        read=_gpt_oss,
        head_dim=64,
        names=_GPT_OSS_NAMES,
    ),
    ModelFamily(  # IBM 2024.
        model_type="granitemoe",
        read=_granitemoe,
        attention_biases="config",
        names=_GRANITE_NAMES,
    ),
    ModelFamily(  # IBM 2025: a shared expert beside the others.
        model_type="granitemoeshared",
        read=_granitemoe,
        attention_biases="config",
        names=_GRANITE_NAMES,
    ),
    ModelFamily(  # GLM Team 2025, arXiv 2508.06471.
        model_type="glm4_moe",
        read=_glm4_moe,
        names=StoredNames(renamed=_SHARED),
    ),
    ModelFamily(  # rednote-hilab 2025, arXiv 2506.05767.
        model_type="dots1",
        read=_dots1,
        attention_biases="config",
        head_norms=True,
        names=StoredNames(renamed=_SHARED),
    ),
    ModelFamily(  # Baidu 2025.
        model_type="ernie4_5_moe",
        read=_ernie4_5_moe,
        pairs_on_disk=True,
        ties_head=True,
        names=StoredNames(
            renamed=_SHARED,
            fused=(
                FusedTensor(
                    stored="mlp.moe_statics.e_score_correction_bias", parts=(_BIAS,), flat=True
                ),
            ),
        ),
    ),
    ModelFamily(  # Tencent 2025.
        model_type="hunyuan_v1_moe",
        read=_hunyuan_v1_moe,
        attention_biases="config",
        head_norms=True,
        names=StoredNames(
            renamed={
                ".mlp.gate.wg.": ".mlp.gate.",
                ".mlp.shared_mlp.": ".mlp.shared_expert.",
                ".query_layernorm.": ".q_norm.",
                ".key_layernorm.": ".k_norm.",
            }
        ),
    ),
    ModelFamily(  # MiniMax 2025.
        model_type="minimax_m2",
        read=_minimax_m2,
        head_dim=128,
        whole_norms=True,
        names=StoredNames(
            renamed={
                ".block_sparse_moe.e_score_": ".mlp.gate.e_score_",
                ".block_sparse_moe.": ".mlp.",
                **_W_NAMES,
            }
        ),
    ),
    ModelFamily(  # Tencent 2026.
        model_type="hy_v3",
        read=_hy_v3,
        head_dim=128,
        attention_biases="config",
        head_norms=True,
        names=StoredNames(
            renamed={
                ".mlp.router.gate.": ".mlp.gate.",
                ".mlp.expert_bias": f".{_BIAS}",
                ".mlp.shared_mlp.": ".mlp.shared_expert.",
            }
        ),
    ),
    ModelFamily(  # Gemma Team 2026.
        model_type="gemma4_text",
        read=_gemma4,
        head_dim=256,
        attention_biases="config",
        head_norms=True,
        sandwich_norms=True,
        ties_head=True,
        names=StoredNames(
            renamed={".router.proj.": ".mlp.gate.", ".router.": ".mlp.gate."},
            fused=(
                FusedTensor(stored="experts.gate_up_proj", parts=_parts("weight", "gate", "up")),
                FusedTensor(stored="experts.down_proj", parts=_parts("weight", "down")),
            ),
        ),
    ),
    ModelFamily(  # Arcee AI 2025.
        model_type="afmoe",
        read=_afmoe,
        head_dim=128,
        attention_biases="config",
        head_norms=True,
        sandwich_norms=True,
        names=StoredNames(
            renamed={
                ".mlp.router.gate.": ".mlp.gate.",
                ".mlp.expert_bias": f".{_BIAS}",
                ".pre_mlp_layernorm.": ".pre_feedforward_layernorm.",
                ".post_mlp_layernorm.": ".post_feedforward_layernorm.",
                **_SHARED,
            }
        ),
    ),
)
for _family in MIXTURES:
    register_family(_family)
