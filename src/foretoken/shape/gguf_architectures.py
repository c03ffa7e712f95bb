"""Architectures of GGUF files, one row each: which family it is, and what its files say otherwise.

A row has the names of tensors that differ, and what follows from the metadata and from what is in
no file: llama.cpp has that in its code, and readers have to know it. Norms that are stored less 1
elsewhere have the 1 in these files. Drafting heads are rows of a table beside that of the models.
Torch-free.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.shape.families import ModelFamily, families, find_family
from foretoken.shape.fields import MOST_LAYERS
from foretoken.shape.gguf_file import GgufTable, Strings
from foretoken.shape.gguf_positions import rope_scaling, share_turned

Fields = dict[str, Any]
_SIZES = {
    "max_position_embeddings": "context_length",
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
}
_EXPERT_FIELDS = {
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
_REALS = ("rms_norm_eps", "rope_theta")
_PER_LAYER = (
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
)
"""Sizes that may be lists, with a number for each layer."""
_NEUTRAL = {
    "attention.scale": 0.0,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.causal": True,
    "embedding_scale": 0.0,
    "residual_scale": 0.0,
    "logit_scale": 0.0,
}
"""What no row reads, and the value that changes nothing."""
_NEUTRAL_EXPERTS = {
    "expert_weights_scale": (0.0, 1.0),
    "expert_shared_count": (0,),
    "expert_group_count": (0, 1),
}
"""The same of mixtures whose routers have no sigmoid."""
_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_up_exps": "mlp.experts.{}.gate_up_proj",
    **{
        f"ffn_{part}_{ending}": f"mlp.{module}.{part}_proj"
        for ending, module in (("exps", "experts.{}"), ("shexp", "shared_expert"))
        for part in ("gate", "up", "down")
    },
}
_ALONE = {
    "layer_output_scale.weight": "layer_scalar",
    "ffn_down_exps.scale": "mlp.gate.per_expert_scale",
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
"""Tensors whose names end here and not there with what they are."""
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA4 = {
    **_SANDWICH,
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_GEMMA4_TOPS = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_NORM_BETWEEN = {"post_attention_norm": "post_attention_layernorm"}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """One architecture."""

    name: str
    """In `general.architecture`, and before the names of metadata."""
    model_type: str
    """Of the family, where `fields` does not say."""
    turns_heads: bool = False
    """Whether the rows of q and k lie in the order of interleaved rotary positions."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Tensors of a layer that have other names than Llama's: here -> in Hugging Face's files."""
    tops: Mapping[str, str] = field(default_factory=dict)
    """The same of those outside of the layers."""
    has_experts: bool = False
    """Whether its files may hold experts."""
    varies: tuple[str, ...] = ()
    """Sizes that may differ between its layers; the first layer's are those of the model."""
    has_positions: bool = False
    """Whether `fields` says what its positions are."""
    needed: tuple[str, ...] = ()
    """Of a drafting head: tensors that a file must have, those of a layer without its number."""
    marks: Callable[[GgufTable], Fields] = lambda table: {}
    """Of a drafting head: what its config.json would say that it is."""
    reads: tuple[str, ...] = ()
    """Metadata that `fields` reads, which other rows have not."""
    fields: Callable[[GgufTable, Fields], Fields] = lambda table, sizes: {}
    """From the file and what was read of it already to more fields of a config.json."""

    def config(self, table: GgufTable) -> Fields:
        """Fields of config.json that follow from the architecture.

        Raises:
            UnsupportedModelError: a feature or positions that are not run.
            CheckpointError: metadata that differ between layers, or are of another kind.
        """
        whole, table = table, _same_everywhere(table, self.name, self.varies)
        _check_neutral(table, self.name, self.reads)
        if not self.has_experts and table.get(f"{self.name}.expert_count", int, 0):
            raise UnsupportedModelError("expert_count", self.name, "no mixture of experts")
        found = {
            name: table.get(f"{self.name}.{key}", float if name in _REALS else int)
            for name, key in _SIZES.items()
        }
        layers = found["num_hidden_layers"]
        if layers is None or not 0 < layers <= MOST_LAYERS:
            raise CheckpointError(f"{self.name}.block_count", layers, f"1 to {MOST_LAYERS}")
        found |= _heads(table, self.name, found)
        found["sliding_window"] = found["sliding_window"] or None
        found["model_type"] = self.model_type
        if not self.has_positions:
            found["rope_scaling"] = rope_scaling(table, self.name, found["rope_theta"])
        found |= self.fields(whole, found)
        return {name: one for name, one in found.items() if one is not None}

    def _own_name(self, name: str) -> str | None:
        return self.names.get(name, _LAYER.get(name, _EXPERTS.get(name)))

    def tensor_name(self, name: str) -> str:
        """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; unknown names stay. In
        those of all experts the number of one is left open, as `{}`."""
        stem, _, kind = name.rpartition(".")
        alone = re.fullmatch(r"blk\.(\d+)\.(\w+\.\w+)", name)
        if alone is not None and alone[2] in _ALONE:
            return f"model.layers.{alone[1]}.{_ALONE[alone[2]]}"
        top = self.tops.get(stem, _TOP.get(stem))
        if top is not None:
            return f"{top}.{kind}"
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        own = None if layer is None else self._own_name(layer[2])
        return name if layer is None or own is None else f"model.layers.{layer[1]}.{own}.{kind}"


def architecture_of(table: GgufTable) -> GgufArchitecture:
    """The row of a file. Raises UnsupportedModelError: none, or of no language model."""
    name = table.get("general.architecture", str)
    if name == "clip":
        given = "clip: what turns pictures or sounds into tokens of a model"
        allowed = "the file of the language model, which lies beside it"
        raise UnsupportedModelError("general.architecture", given, allowed)
    if name in _HEADS:
        given = f"{name}, a drafting head for another model"
        allowed = "a language model; the head drafts for one as the model of a speculative_config: "
        allowed += json.dumps({"model": table.path.name})
        raise UnsupportedModelError("general.architecture", given, allowed)
    rows = {**_others(), **_BY_NAME}
    if name not in rows:
        allowed = f"{', '.join(rows)} in GGUF, or the safetensors of this model"
        raise UnsupportedModelError("general.architecture", name, allowed)
    return rows[name]


def head_of(table: GgufTable) -> GgufArchitecture | None:
    """The row of a file with a drafting head; None: it holds something else."""
    return _HEADS.get(table.get("general.architecture", str))


def head_names() -> str:
    """The architectures of drafting heads, for messages."""
    return ", ".join(_HEADS)


def stored_field(name: str) -> str:
    """What the metadata call a field of config.json, after the architecture's name."""
    return _SIZES.get(name, _EXPERT_FIELDS.get(name, name))


def norm_offset(model_type: str) -> float:
    """What is in the file's norms and not in those of Hugging Face."""
    family = find_family(model_type)
    return 0.0 if family is None else family.norm_offset


def _others() -> dict[str, GgufArchitecture]:
    """Rows of families from outside this package, which have Llama's names."""

    def row(family: ModelFamily, name: str) -> GgufArchitecture:
        return GgufArchitecture(
            name=name, model_type=family.model_type, turns_heads=family.gguf_turns_heads
        )

    return {one.gguf: row(one, one.gguf) for one in families() if one.gguf is not None}


def _same_everywhere(table: GgufTable, arch: str, varies: tuple[str, ...]) -> GgufTable:
    """The table with one number where a list has the same one for every layer, or may vary."""
    changed, layers = {}, f"{arch}.block_count"
    for key in _PER_LAYER:
        name = f"{arch}.{key}"
        given = table.metadata.get(name)
        if isinstance(given, np.ndarray) and given.size == table.metadata.get(layers):
            if (given != given[0]).any() and key not in varies:
                shown = f"{', '.join(map(str, given[:6].tolist()))}, ..."
                raise CheckpointError(name, shown, "the same in every layer")
            changed[name] = given[0].item()
    return replace(table, metadata={**table.metadata, **changed})


def _check_neutral(table: GgufTable, arch: str, reads: tuple[str, ...]) -> None:
    for key, neutral in _NEUTRAL.items():
        if key in reads:
            continue
        given = table.get(f"{arch}.{key}", type(neutral), neutral)
        if given != neutral:
            raise UnsupportedModelError(f"{arch}.{key}", given, f"{neutral}, or none")


def _heads(table: GgufTable, arch: str, sizes: Fields) -> Fields:
    """Sizes of a head, as llama.cpp has them where the file does not say."""
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    size = sizes["head_dim"]
    if size is None and hidden and heads and heads > 0:
        size = hidden // heads
    values = table.get(f"{arch}.attention.value_length", int, size)
    if values != size:
        allowed = f"{size}, as attention.key_length"
        raise UnsupportedModelError(f"{arch}.attention.value_length", values, allowed)
    turned = table.get(f"{arch}.rope.dimension_count", int, size)
    partly = size is not None and 0 < turned < size
    # A little more, since readers multiply by the size and drop what is behind the point.
    return {"head_dim": size, "partial_rotary_factor": (turned + 0.1) / size if partly else None}


def _layer_types(table: GgufTable, arch: str, sizes: Fields, period: int) -> list[str] | None:
    """Which layers have a window; None: none has.

    Args:
        table: of the file, which may say so with a list, or with another period.
        arch: its architecture.
        sizes: what was read of it.
        period: the last layer of so many sees all, where the file does not say.
    """
    layers = sizes["num_hidden_layers"] or 0
    if sizes["sliding_window"] is None:
        return None
    name = f"{arch}.attention.sliding_window_pattern"
    given = table.metadata.get(name)
    if isinstance(given, np.ndarray) and len(given) >= layers:
        windowed = [bool(one) for one in given[:layers]]
    elif given is None or (isinstance(given, int) and given >= 0):
        period = period if given is None else given
        windowed = [period == 0 or (layer + 1) % period > 0 for layer in range(layers)]
    else:
        shown = f"a list of {given.size}" if isinstance(given, np.ndarray | Strings) else given
        raise CheckpointError(name, shown, f"a list of {layers}, or a number")
    return ["sliding_attention" if one else "full_attention" for one in windowed]


_SOFTMAX, _SIGMOID, _SOFTMAX_OF_CHOSEN = 1, 2, 3
"""What llama.cpp calls expert_gating_func."""


def _experts(table: GgufTable, arch: str, sizes: Fields, scoring: int = _SOFTMAX) -> Fields:
    """Numbers of experts, under the names that most families have for them; `scoring`: the only one
    that is run."""
    key = f"{arch}.expert_gating_func"
    if (given := table.get(key, int, scoring)) not in (0, scoring):
        raise UnsupportedModelError(key, given, f"{scoring}, or none")
    for key, alike in (_NEUTRAL_EXPERTS if scoring != _SIGMOID else {}).items():
        given = table.get(f"{arch}.{key}", type(alike[0]), alike[0])
        if given not in alike:
            raise UnsupportedModelError(f"{arch}.{key}", given, " or ".join(map(str, alike)))
    width = table.get(f"{arch}.expert_feed_forward_length", int, sizes["intermediate_size"])
    count, used = (table.get(f"{arch}.expert_{what}count", int, 0) for what in ("", "used_"))
    if not any("_exps." in name for name in table.tensors):
        allowed = "none, in a file without tensors of experts (blk.0.ffn_gate_exps.weight, ...)"
        raise CheckpointError(f"{arch}.expert_count", count, allowed)
    return {
        "num_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": width,
        "intermediate_size": sizes["intermediate_size"] or width,
    }


def _llama(table: GgufTable, sizes: Fields) -> Fields:
    """With experts it is a Mixtral, with a window a Mistral."""
    if table.get("llama.expert_count", int, 0):
        return {"model_type": "mixtral", **_experts(table, "llama", sizes)}
    return {"model_type": "mistral"} if sizes["sliding_window"] else {}


def _qwen3moe(table: GgufTable, sizes: Fields) -> Fields:
    return {**_experts(table, "qwen3moe", sizes), "norm_topk_prob": True}


def _olmoe(table: GgufTable, sizes: Fields) -> Fields:
    found = _experts(table, "olmoe", sizes)
    return {**found, "intermediate_size": found["moe_intermediate_size"]}


def _gpt_oss(table: GgufTable, sizes: Fields) -> Fields:
    """Every other layer has a window; correction bounds of its positions are not rounded."""
    found, rope = _experts(table, "gpt-oss", sizes, _SOFTMAX_OF_CHOSEN), sizes["rope_scaling"]
    if sizes["sliding_window"] is None:
        raise CheckpointError("gpt-oss.attention.sliding_window", None, "a number")
    return {
        **found,
        "intermediate_size": found["moe_intermediate_size"],
        "rope_scaling": None if rope is None else {**rope, "truncate": False},
    }


def _glm4moe(table: GgufTable, sizes: Fields) -> Fields:
    """The last blocks may draft, and are counted with the others."""
    found = _experts(table, "glm4moe", sizes, _SIGMOID)
    drafting = _number(table, "nextn_predict_layers", 0)
    return {
        **found,
        "num_hidden_layers": sizes["num_hidden_layers"] - drafting,
        "num_nextn_predict_layers": drafting,
        "n_routed_experts": found["num_experts"],
        "n_shared_experts": _number(table, "expert_shared_count", 1),
        "first_k_dense_replace": _number(table, "leading_dense_block_count", 1),
        "n_group": _number(table, "expert_group_count", 1),
        "topk_group": _number(table, "expert_group_used_count", 1),
        "routed_scaling_factor": table.get("glm4moe.expert_weights_scale", float, 1.0),
        "norm_topk_prob": table.get("glm4moe.expert_weights_norm", bool, True),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in table.tensors,
    }


def _number(table: GgufTable, name: str, usual: int) -> int:
    found: int = table.get(f"glm4moe.{name}", int, usual)
    return found


def _mistral3(table: GgufTable, sizes: Fields) -> Fields:
    """With a scale of queries it is a Ministral 3, else a Mistral."""
    name = "mistral3.attention.temperature_scale"
    growth, rope = table.get(name, float), sizes["rope_scaling"]
    if not growth:
        return {}
    if rope is None or rope["rope_type"] != "yarn":
        raise UnsupportedModelError(name, growth, "with rope.scaling.type yarn")
    scaled = {"original_max_position_embeddings": sizes["max_position_embeddings"], **rope}
    return {"model_type": "ministral3", "rope_scaling": {**scaled, "llama_4_scaling_beta": growth}}


def _olmo2(table: GgufTable, sizes: Fields) -> Fields:
    """OLMo 3 has windows."""
    types = _layer_types(table, "olmo2", sizes, period=4)
    return {} if types is None else {"model_type": "olmo3", "layer_types": types}


def _gemma2(table: GgufTable, sizes: Fields) -> Fields:
    """Metadata hold what transformers calls so; the scale of attention is that of the model with
    as many layers."""
    sizes = {**sizes, "sliding_window": sizes["sliding_window"] or 4096}
    return {
        "sliding_window": sizes["sliding_window"],
        "layer_types": _layer_types(table, "gemma2", sizes, period=2),
        "attn_logit_softcapping": table.get("gemma2.attn_logit_softcapping", float, 50.0),
        "final_logit_softcapping": table.get("gemma2.final_logit_softcapping", float, 30.0),
        "query_pre_attn_scalar": _query_scalar(sizes, of_27b=46),
    }


def _gemma3(table: GgufTable, sizes: Fields) -> Fields:
    """Layers with a window have positions of their own, which older files do not mention."""
    types = _layer_types(table, "gemma3", sizes, period=6)
    layers = sizes["num_hidden_layers"] or 0
    return {
        "layer_types": types or ["full_attention"] * layers,
        "rope_theta": sizes["rope_theta"] or 1e6,
        "rope_local_base_freq": table.get("gemma3.rope.freq_base_swa", float, 1e4),
        "final_logit_softcapping": table.get("gemma3.final_logit_softcapping", float),
        "query_pre_attn_scalar": _query_scalar(sizes, of_27b=62),
    }


def _by_kind(table: GgufTable, name: str, second: list[bool]) -> tuple[int | None, int | None]:
    """A size of the layers that are not of the second kind, and of those that are; None: there are
    none of these."""
    given = table.metadata.get(name)
    if not isinstance(given, np.ndarray):
        given = np.array([table.get(name, int, 0)] * len(second))
    if given.size != len(second) or given.dtype.kind not in "iu":
        raise CheckpointError(name, f"a list of {given.size}", f"{len(second)} integers")
    found: list[int | None] = []
    for kind in (False, True):
        sizes = {
            int(one) for one, is_second in zip(given, second, strict=True) if is_second == kind
        }
        if len(sizes) > 1:
            raise CheckpointError(name, sorted(sizes), "one number for each kind of layers")
        found.append(sizes.pop() if sizes else None)
    return found[0], found[1]


def _gemma4(table: GgufTable, sizes: Fields) -> Fields:
    """Sizes of the layers that see all stand first, those of the others have names of their own;
    turned pairs of the former are those whose frequencies are divided by 1."""
    layers, types = sizes["num_hidden_layers"], _layer_types(table, "gemma4", sizes, period=6)
    if types is None:
        raise CheckpointError("gemma4.attention.sliding_window", None, "a number")
    full = [kind == "full_attention" for kind in types]
    sharing = table.get("gemma4.attention.shared_kv_layers", int, 0)
    keys = _by_kind(table, "gemma4.attention.head_count_kv", full)
    shares = [layer >= layers - sharing for layer in range(layers)]
    inner = _by_kind(table, "gemma4.feed_forward_length", shares)
    if inner[1] not in (None, inner[0], 2 * (inner[0] or 0)):
        allowed = f"{inner[0]}, or twice that, in the layers that share keys"
        raise CheckpointError("gemma4.feed_forward_length", inner[1], allowed)
    experts = {}
    if table.get("gemma4.expert_count", int, 0):
        counts = _experts(table, "gemma4", sizes)
        experts = {**counts, "top_k_experts": counts["num_experts_per_tok"]}
    first = full.index(True) if True in full else 0
    head_dim, theta = sizes["head_dim"], sizes["rope_theta"] or 1e6
    own = {"num_key_value_heads": keys[1], "head_dim": head_dim}
    return {
        **experts,
        "enable_moe_block": bool(experts),
        "layer_types": types,
        "head_dim": table.get("gemma4.attention.key_length_swa", int, head_dim),
        "num_key_value_heads": keys[0] or keys[1],
        "intermediate_size": inner[0] or inner[1],
        "per_layer_config": {str(layer): own for layer, wide in enumerate(full) if wide},
        "partial_rotary_factor": None,
        "rope_theta": None,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": theta,
                "partial_rotary_factor": share_turned(table, 0.25),
            },
            "sliding_attention": {"rope_theta": table.get("gemma4.rope.freq_base_swa", float, 1e4)},
        },
        "num_kv_shared_layers": sharing,
        "use_double_wide_mlp": inner[0] is not None and inner[1] == 2 * inner[0],
        "attention_k_eq_v": f"blk.{first}.attn_v.weight" not in table.tensors,
        "hidden_size_per_layer_input": table.get("gemma4.embedding_length_per_layer_input", int, 0),
        "final_logit_softcapping": table.get("gemma4.final_logit_softcapping", float),
    }


def _query_scalar(sizes: Fields, *, of_27b: int) -> int | None:
    """What attention scores are divided by, squared: the models of 27 B have their own."""
    if sizes["num_hidden_layers"] == of_27b and sizes["num_attention_heads"]:
        return int(sizes["hidden_size"] // sizes["num_attention_heads"])
    head: int | None = sizes["head_dim"]
    return head


_ROWS = (
    GgufArchitecture(
        name="llama", model_type="llama", turns_heads=True, has_experts=True, fields=_llama
    ),
    GgufArchitecture(name="qwen3moe", model_type="qwen3_moe", has_experts=True, fields=_qwen3moe),
    GgufArchitecture(name="olmoe", model_type="olmoe", has_experts=True, fields=_olmoe),
    GgufArchitecture(
        name="gpt-oss",
        model_type="gpt_oss",
        names=_NORM_BETWEEN,
        has_experts=True,
        fields=_gpt_oss,
    ),
    GgufArchitecture(
        name="glm4moe",
        model_type="glm4_moe",
        names=_NORM_BETWEEN,
        has_experts=True,
        fields=_glm4moe,
    ),
    GgufArchitecture(name="mistral3", model_type="mistral", turns_heads=True, fields=_mistral3),
    GgufArchitecture(name="smollm3", model_type="smollm3", turns_heads=True),
    GgufArchitecture(name="olmo2", model_type="olmo2", names=_SANDWICH, fields=_olmo2),
    GgufArchitecture(name="qwen2", model_type="qwen2"),
    GgufArchitecture(name="qwen2vl", model_type="qwen2"),
    GgufArchitecture(name="qwen3", model_type="qwen3"),
    GgufArchitecture(name="qwen3vl", model_type="qwen3"),
    GgufArchitecture(name="gemma", model_type="gemma"),
    GgufArchitecture(name="gemma2", model_type="gemma2", names=_SANDWICH, fields=_gemma2),
    GgufArchitecture(name="gemma3", model_type="gemma3_text", names=_SANDWICH, fields=_gemma3),
    GgufArchitecture(
        name="gemma4",
        model_type="gemma4_text",
        names=_GEMMA4,
        tops=_GEMMA4_TOPS,
        has_experts=True,
        varies=("attention.head_count_kv", "feed_forward_length"),
        has_positions=True,
        fields=_gemma4,
    ),
    GgufArchitecture(name="phi3", model_type="phi3", names=_FUSED),
)
_BY_NAME = {row.name: row for row in _ROWS}


def _eagle3(table: GgufTable, sizes: Fields) -> Fields:
    """EAGLE-3's fields; layers are named by their inputs, as in its own config.json."""
    _refuse_partial(sizes)
    inputs = _target_layers(table, "eagle3")
    return {
        "eagle_aux_hidden_state_layer_ids": inputs,
        "target_hidden_size": _target_width(table, "eagle3", inputs),
        "norm_before_residual": table.get("eagle3.norm_before_residual", bool, False),
        "attention_bias": "blk.0.attn_q.bias" in table.tensors,
    }


def _dflash(table: GgufTable, sizes: Fields) -> Fields:
    """A block head's fields. llama.cpp names layers by their inputs, one more than the authors."""
    _refuse_partial(sizes)
    inputs, layers = _target_layers(table, "dflash"), sizes["num_hidden_layers"] or 0
    short = table.tensors.get("markov_w1.weight")
    mask = table.get("dflash.mask_token_id", int)
    return {
        "aux_hidden_state_layer_ids": inputs,
        "target_hidden_size": _target_width(table, "dflash", inputs),
        "block_size": table.get("dflash.block_size", int),
        "mask_token_id": table.get("tokenizer.ggml.mask_token_id", int, mask),
        "markov_rank": None if short is None else short.shape[0],
        "is_causal": table.get("dflash.attention.causal", bool),
        "layer_types": _head_layer_types(table, sizes, layers),
        "final_logit_softcapping": table.get("dflash.final_logit_softcapping", float) or None,
        "attention_bias": "blk.0.attn_q.bias" in table.tensors,
        "hidden_act": "silu",
    }


def _dflash_marks(table: GgufTable) -> Fields:
    """DSpark and DFlash2 are of this architecture too; their tensors say so."""
    named = "DFlashDraftModel"
    if "markov_w1.weight" in table.tensors:
        named = "Qwen3DSparkModel"
    if "selector_hidden.weight" in table.tensors:
        named = "DFlash2DraftModel"
    return {"architectures": [named]}


def _head_layer_types(table: GgufTable, sizes: Fields, layers: int) -> list[str] | None:
    """Which layers of a block head have a window, which is said of all or of each."""
    name = "dflash.attention.sliding_window_pattern"
    given = table.metadata.get(name)
    if sizes["sliding_window"] is None or not isinstance(given, bool):
        if sizes["sliding_window"] is not None and given is None:
            raise CheckpointError(name, None, f"a list of {layers}, or one value for all")
        return _layer_types(table, "dflash", sizes, period=0)
    return ["sliding_attention" if given else "full_attention"] * layers


def _refuse_partial(sizes: Fields) -> None:
    """Heads turn all of their dimensions."""
    if sizes["partial_rotary_factor"] is not None:
        given = f"{sizes['partial_rotary_factor']:.2f} of a head"
        raise UnsupportedModelError("rope.dimension_count", given, f"{sizes['head_dim']}, all")


def _target_layers(table: GgufTable, arch: str) -> list[int]:
    """The layers of the target whose inputs a head reads; older files have another word."""
    name = f"{arch}.target_layers"
    given = table.metadata.get(name, table.metadata.get(f"{arch}.extract_layers"))
    whole = isinstance(given, np.ndarray) and np.issubdtype(given.dtype, np.integer)
    if not whole or not 0 < given.size <= MOST_LAYERS:
        shown = f"a list of {given.size}" if isinstance(given, np.ndarray | Strings) else given
        raise CheckpointError(name, shown, "a list of the target's layers")
    return [int(one) for one in given]


def _target_width(table: GgufTable, arch: str, inputs: list[int]) -> int:
    """The hidden size of the target, by what the file says or by the matrix that reads it."""
    said = table.get(f"{arch}.target_hidden_size", int)
    mixer = table.tensors.get("fc.weight")
    columns = 0 if mixer is None else mixer.shape[0]
    width: int = said or columns // len(inputs)
    if columns != width * len(inputs):
        allowed = f"{len(inputs)} target layers of {width}, {width * len(inputs)} columns"
        raise CheckpointError("fc.weight", f"{columns} columns", allowed)
    return width


_LAYER_OF_A_HEAD = (
    "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up",
    "ffn_down",
)  # fmt: skip
_HEAD_ROWS = (
    GgufArchitecture(
        name="eagle3",
        model_type="llama",
        turns_heads=True,
        names={"attn_norm_2": "hidden_norm"},
        tops={"enc.output_norm": "input_norm"},
        needed=("fc", "output_norm", "output", *(f"blk.{one}" for one in _LAYER_OF_A_HEAD)),
        marks=lambda table: {"speculators_model_type": "eagle3"},
        fields=_eagle3,
    ),
    GgufArchitecture(
        name="dflash",
        model_type="qwen3",
        tops={
            "enc.output_norm": "hidden_norm",
            "markov_w1": "markov_head.markov_w1",
            "markov_w2": "markov_head.markov_w2",
            "conf_proj": "confidence_head.proj",
        },
        needed=(
            *("fc", "output_norm", "enc.output_norm", "blk.attn_q_norm", "blk.attn_k_norm"),
            *(f"blk.{one}" for one in _LAYER_OF_A_HEAD),
        ),
        marks=_dflash_marks,
        reads=("attention.causal",),
        fields=_dflash,
    ),
)
_HEADS = {row.name: row for row in _HEAD_ROWS}
