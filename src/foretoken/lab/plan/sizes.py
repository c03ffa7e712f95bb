"""From the name of a model to its sizes, for planning: weights, keys and values, experts.

A name is one of the built-in list, a folder or file, or a hub id. Only config.json (and the
tokenizer's files, if they lie beside it) is read; weights are never downloaded. A hub id that is
not in the list costs one small download. What Foretoken runs is read by `foretoken.shape`, so that
the planner and the engine count alike. For everything else this reader is more lenient: an unknown
feature becomes a note in `approximations`. Weights are counted, not read.

A head is a model of its own as far as its target makes it large: its record says how deep it is,
how wide follows from the target.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from foretoken.checkpoint import PACKAGED, find_model, hub_errors, hub_trouble
from foretoken.config.method_registry import DraftingMethod
from foretoken.errors import (
    CheckpointError,
    ConfigError,
    ModelNotFoundError,
    UnsupportedModelError,
    one_of,
)
from foretoken.lab.plain import read_table
from foretoken.lab.plan.method_plans import plan_of
from foretoken.shape import ModelShape, token_flops
from foretoken.shape.families import family_alike, find_family
from foretoken.shape.field_kinds import check_kinds
from foretoken.shape.fields import LARGEST_SIZE, MOST_LAYERS, read_json
from foretoken.shape.multimodal import find_multimodal, text_config

_AT_LEAST_ONE = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
_MOST = {"num_hidden_layers": MOST_LAYERS}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_EXPERTS_USED = ("num_experts_per_tok", "experts_per_token")
_LINEAR_LAYERS = ("linear_attention", "mamba", "recurrent", "short_conv")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanModel:
    """A model as the planner sees it: its shape, and what is beside or in place of that in a
    mixture of experts or with latent attention. Counts of weights unless a name says bytes."""

    shape: ModelShape
    name: str
    family: str
    tokenizer: str
    """Identifies the tokenizer; models with another one cannot share drafts."""
    context: int
    dense_params: int
    """Read in every step beside the head: attention, dense MLPs, routers, shared experts."""
    expert_params: int
    num_experts: int
    experts_per_token: int
    kv_elements: int
    """Keys and values of one token over all layers that keep the whole context."""
    window_elements: int
    window_size: int
    full_layers: int
    window_layers: int
    query_width: int
    """Width of all query heads of a layer; of latent attention the mean of queries and values."""
    window_query_width: int
    """The same of layers with a window."""
    matrix_outputs: int
    """Rows of all dense matrices but the head; 0 where they are not counted."""
    kv_is_shared: bool
    """Whether every tensor-parallel rank keeps all of it (latent attention)."""
    mtp_layers: int
    """Draft heads that come with the checkpoint; 0: none."""
    quantization: str
    approximations: tuple[str, ...]

    @property
    def table_params(self) -> int:
        """The embedding, the output head where it is not the same, and inputs of layers."""
        inputs = self.shape.vocab_size * self.shape.num_hidden_layers * self.shape.layer_inputs
        return self.head_params * (1 if self.shape.tie_word_embeddings else 2) + inputs

    @property
    def params(self) -> int:
        return self.table_params + self.dense_params + self.expert_params

    @property
    def head_params(self) -> int:
        """The output head, read in every step."""
        return self.shape.vocab_size * self.shape.hidden_size

    @property
    def active_params(self) -> int:
        """Weights that one token passes through, the embedding table excluded."""
        return round(self.head_params + self.dense_params + self.expert_share * self.expert_params)

    @property
    def expert_share(self) -> float:
        """Share of the experts that one token passes through; 1 where it is unknown."""
        used = self.experts_per_token or self.num_experts
        return used / self.num_experts if self.num_experts else 0.0

    def flops_per_token(self, context: float) -> float:
        """Operations of one row that attends to `context` tokens; a multiply-add counts two."""
        seen = self.full_layers * context * self.query_width
        seen += self.window_layers * min(context, self.window_size) * self.window_query_width
        return token_flops(self.active_params, seen)


def read_config(name: str, config: Mapping[str, Any], *, family: str, tokenizer: str) -> PlanModel:
    """The sizes that a config.json describes. Raises CheckpointError where one is missing."""
    check_kinds(config)
    is_known = find_multimodal(config.get("model_type")) is not None
    config = text_config(config) if is_known else config.get("text_config") or config
    shape = _engine_shape(config) or _lenient_shape(config)
    layers = shape.num_hidden_layers
    latent = _first(config, "kv_lora_rank")
    windowed = sum(window is not None for window in shape.windows)
    full = layers - windowed - sum(kind in _LINEAR_LAYERS for kind in _layer_kinds(config, layers))
    counts = _own_counts(shape) if shape.is_own else _guessed_counts(config, shape)
    if not shape.is_own:
        each = latent + _size(config, "qk_rope_head_dim") if latent else 2 * shape.kv_size
        counts |= {"kv_elements": full * each, "window_elements": windowed * each}
    return PlanModel(
        shape=shape,
        name=name,
        family=family or shape.model_type,
        tokenizer=tokenizer,
        context=_size(config, "max_position_embeddings", 4096),
        window_size=max(filter(None, shape.windows), default=0),
        full_layers=full,
        window_layers=windowed,
        kv_is_shared=latent > 0,
        mtp_layers=_first(config, "num_nextn_predict_layers", "mtp_num_hidden_layers"),
        quantization=_stored_as(config),
        approximations=tuple(_notes(config)),
        **counts,
    )


def _own_counts(shape: ModelShape) -> dict[str, int]:
    """What is counted by the engine."""
    experts, kept = shape.experts, Counter[bool]()
    for layer, heads in enumerate(shape.kv_sizes):
        kept[shape.window(layer) is not None] += 2 * heads.heads * heads.size
    return {
        "dense_params": shape.step_bytes(1, rows=0) - shape.vocab_size * shape.hidden_size,
        "expert_params": shape.expert_parameters(),
        "num_experts": 0 if experts is None else experts.count,
        "experts_per_token": 0 if experts is None else experts.used,
        "kv_elements": kept[False],
        "window_elements": kept[True],
        "query_width": shape.num_attention_heads * shape.heads(None).size,
        "window_query_width": shape.num_attention_heads * shape.head_dim,
        "matrix_outputs": shape.weight_counts().outputs,
    }


def _guessed_counts(config: Mapping[str, Any], shape: ModelShape) -> dict[str, int]:
    """The same of a model that the engine does not know."""
    hidden, layers = shape.hidden_size, shape.num_hidden_layers
    experts, latent = _first(config, *_EXPERTS), _first(config, "kv_lora_rank")
    width = _first(config, "moe_intermediate_size", "intermediate_size") if experts else 0
    dense_layers = min(_first(config, "first_k_dense_replace"), layers) if experts else layers
    # Of one layer, its MLP aside.
    attention = shape.layer_parameters() - 3 * hidden * shape.intermediate_size
    width_of_queries = shape.query_size
    if latent:
        weights, width_of_queries = _latent_params(config)
        attention += weights - hidden * 2 * (shape.query_size + shape.kv_size)
    router = hidden * experts + _first(config, "n_shared_experts") * 3 * hidden * width
    mlps = dense_layers * 3 * hidden * shape.intermediate_size + (layers - dense_layers) * router
    return {
        "dense_params": layers * attention + mlps + hidden,
        "expert_params": (layers - dense_layers) * experts * 3 * hidden * width,
        "num_experts": experts,
        "experts_per_token": _first(config, *_EXPERTS_USED),
        "query_width": width_of_queries,
        "window_query_width": width_of_queries,
        "matrix_outputs": 0 if experts or latent else shape.weight_counts().outputs,
    }


def _engine_shape(config: Mapping[str, Any]) -> ModelShape | None:
    """What the engine reads in such a config; None where the engine's families do not cover it."""
    if find_family(config.get("model_type")) is None:
        return None
    stored_alike = {key: value for key, value in config.items() if key != "quantization_config"}
    if config.get("layer_types") is not None:  # a pattern in the list of models
        stored_alike["layer_types"] = _layer_kinds(config, _size(config, "num_hidden_layers"))
    try:
        return ModelShape.from_fields(stored_alike)
    except (CheckpointError, UnsupportedModelError):
        return None


def _lenient_shape(config: Mapping[str, Any]) -> ModelShape:
    """The same of any other model, taken for a dense decoder of the family that is most like it."""
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    layers, alike = _size(config, "num_hidden_layers"), family_alike(config.get("model_type"))
    window = int(config.get("sliding_window") or 0)
    kinds = _layer_kinds(config, layers)
    head_dim = alike.head_dim if alike else None
    return ModelShape(
        model_type=str(config.get("model_type", "unknown")),
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_size(config, "intermediate_size", 0),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=_size(config, "num_key_value_heads", heads),
        head_dim=_size(config, "head_dim", head_dim or hidden // heads),
        max_position_embeddings=0,
        rms_norm_eps=0.0,
        rope=None,
        tie_word_embeddings=bool(
            config.get("tie_word_embeddings", alike is not None and alike.ties_head)
        ),
        dtype="",
        eos_token_ids=(),
        windows=tuple(window if "sliding" in k or "chunked" in k else None for k in kinds),
        qkv_bias=bool(config.get("attention_bias") or (alike and alike.attention_biases == "qkv")),
        head_norms=alike is not None and alike.head_norms,
        whole_norms=alike is not None and alike.whole_norms,
        norms_before=alike is None or alike.norms_before,
        sandwich_norms=alike is not None and alike.sandwich_norms,
    )


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    least, most = int(name in _AT_LEAST_ONE), _MOST.get(name, LARGEST_SIZE)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        allowed = f"a whole number from {least} to {most}, as the model has"
        raise CheckpointError(f"config.json: {name}", value, allowed)
    return value


def _first(config: Mapping[str, Any], *names: str) -> int:
    """The first of `names` that is set, else 0."""
    return next((_size(config, n) for n in names if config.get(n) is not None), 0)


def _layer_kinds(config: Mapping[str, Any], layers: int) -> list[str]:
    kinds = config.get("layer_types") or ["full_attention"]
    return [kinds[i % len(kinds)] for i in range(layers)]


def _latent_params(config: Mapping[str, Any]) -> tuple[int, int]:
    """Of latent attention: its weights in a layer, and the mean width of queries and values."""
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    rope, nope = _size(config, "qk_rope_head_dim"), _size(config, "qk_nope_head_dim")
    value, rank = _size(config, "v_head_dim"), _first(config, "q_lora_rank")
    query = rank * (hidden + heads * (rope + nope)) if rank else hidden * heads * (rope + nope)
    latent = _size(config, "kv_lora_rank")
    keys = hidden * (latent + rope) + latent * heads * (nope + value)
    return query + keys + heads * value * hidden, heads * (rope + nope + value) // 2


def _notes(config: Mapping[str, Any]) -> Iterator[str]:
    if set(config.get("layer_types") or ()) & set(_LINEAR_LAYERS):
        yield "recurrent layers: their state per request is not counted"
    if config.get("num_nextn_predict_layers"):
        yield "the weights of the MTP layers are not counted"
    if config.get("vision_config"):
        yield "the vision tower is not counted"
    if _first(config, *_EXPERTS) and not _first(config, *_EXPERTS_USED):
        yield "experts per token unknown: all are taken to be active"


def _stored_as(config: Mapping[str, Any]) -> str:
    quantized = config.get("quantization_config") or {}
    method = str(quantized.get("quant_method", ""))
    bits = quantized.get("bits") or quantized.get("w_bit")
    if method in ("mxfp4", "fp8"):
        return method
    if method in ("awq", "gptq", "bitsandbytes", "compressed-tensors"):
        return "int8" if bits == 8 or "int8" in str(quantized) else "int4"
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    return names.get(str(config.get("dtype") or config.get("torch_dtype")), "bf16")


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """Hub id -> entry of models.toml with its base filled in."""
    rows = read_table("foretoken.lab.plan", "models.toml")
    complete = {}
    for name, row in rows.items():
        base = rows.get(row.get("like", ""), {})
        merged = {**base, **row, "config": {**base.get("config", {}), **row["config"]}}
        if "short" in merged:
            complete[name] = merged
    return complete


def load_plan_model(name: str, field: str) -> PlanModel:
    """Sizes of a model; errors call it `field`. Raises ModelNotFoundError if it is not in the list,
    has no config.json there, and is not to be had from the hub; CheckpointError if that lacks a
    size."""
    path = Path(name).expanduser()
    file = path if path.is_file() else path / "config.json"
    if file.is_file():
        return _from_file(name, file)
    for hub_id, row in known_models().items():
        if name.lower() in (hub_id.lower(), row["short"]):
            tokenizer = row["tokenizer"]
            return read_config(hub_id, row["config"], family=row["family"], tokenizer=tokenizer)
    if name in PACKAGED:
        return _from_file(name, find_model(name) / "config.json")
    return _from_hub(name, field)


def _from_file(name: str, file: Path) -> PlanModel:
    tokenizer = _fingerprint(file.parent)
    return read_config(name, read_json(file), family="", tokenizer=tokenizer)


def _fingerprint(folder: Path) -> str:
    """Names the vocabulary beside a config.json: equal vocabularies have equal names."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return ""
    try:
        model = json.loads(file.read_text("utf-8")).get("model", {})
    except (OSError, ValueError) as error:
        allowed = f"valid JSON ({error}); fetch the model's tokenizer.json again"
        raise CheckpointError("tokenizer.json", str(file), allowed) from error
    vocabulary = json.dumps(model.get("vocab"), sort_keys=True).encode()
    return hashlib.sha256(vocabulary).hexdigest()[:12]


def _from_hub(name: str, field: str) -> PlanModel:
    from huggingface_hub import (
        get_hf_file_metadata,
        hf_hub_download,
        hf_hub_url,
        try_to_load_from_cache,
    )

    try:
        if try_to_load_from_cache(name, "config.json") is None:
            # Asks once. A download would go on asking for a minute where there is no network.
            get_hf_file_metadata(hf_hub_url(name, "config.json"))
        file = hf_hub_download(name, "config.json")
    except hub_errors() as error:
        short = one_of(name.lower(), (row["short"] for row in known_models().values()))
        why = hub_trouble(name, error)
        allowed = f"a config.json, its folder, a hub id ({why}), or one of: {short}"
        raise ModelNotFoundError(field, name, allowed) from error
    return _from_file(name, Path(file))


def head_of(target: PlanModel, method: DraftingMethod) -> PlanModel:
    """The layers of a head for this target, and the output head that it shares."""
    assert method.drafts_with == "head", method.name
    plan, shape, layers = plan_of(method), target.shape, target.shape.num_hidden_layers
    count = plan.layers
    dense, experts = target.dense_params // layers, target.expert_params // layers
    if target.num_experts and plan.own_file:
        # The target's attention, and an MLP as wide as its dense ones.
        width = 2 * shape.query_size + 2 * shape.kv_size + 3 * shape.intermediate_size
        dense, experts = shape.hidden_size * width, 0
    words = min(plan.head_vocabulary or shape.vocab_size, shape.vocab_size)
    per_layer = (target.kv_elements + target.window_elements) // layers
    return replace(
        target,
        shape=replace(shape, vocab_size=words, num_hidden_layers=count, windows=()),
        dense_params=count * dense,
        expert_params=count * experts,
        num_experts=target.num_experts if experts else 0,
        kv_elements=count * per_layer if method.own_kv else 0,
        window_elements=0,
        full_layers=count,
        window_layers=0,
    )


def stage_of(target: PlanModel, method: DraftingMethod) -> PlanModel:
    """One stage of a head without keys and values: a square matrix and an output head."""
    return replace(
        head_of(target, method), dense_params=target.shape.hidden_size**2, expert_params=0,
        num_experts=0, full_layers=0,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """How the weights of a model are stored: a row of quantizations.toml."""

    name: str
    nominal_bytes: float
    """Per weight, scales and zero points ignored."""
    stored_bytes: float
    """Per weight of a quantized matrix, scales and zero points included."""
    compute: str
    tables_too: bool = False
    experts_only: bool = False
    """Whether other matrices of a mixture stay 16 bit."""

    def dense_bytes(self, model: PlanModel) -> float:
        """Per weight of the matrices of `model` that are not of experts."""
        return 2.0 if self.experts_only and model.num_experts else self.stored_bytes


@cache
def _quantizations() -> tuple[dict[str, Quantization], dict[str, str]]:
    """Those of the table by name, and what else they are called."""
    found: dict[str, Quantization] = {}
    also: dict[str, str] = {}
    for name, row in read_table("foretoken.lab.plan", "quantizations.toml").items():
        bits = row.pop("bits")
        also |= dict.fromkeys(row.pop("also", ()), name)
        stored = row.pop("stored_bits", bits) / 8
        found[name] = Quantization(name=name, nominal_bytes=bits / 8, stored_bytes=stored, **row)
    return found, also


KV_BYTES = {"auto": 2.0, "bf16": 2.0, "fp16": 2.0, "fp32": 4.0, "fp8": 1.0, "q8_0": 8.5 / 8}
"""Bytes of one key or value element; `auto` is 16 bit."""


def find_quantization(name: str, field: str) -> Quantization:
    """The quantization that people call `name`. Raises ConfigError where there is none."""
    found, also = _quantizations()
    known = name.lower().replace("-", "_").split("_per_")[0]  # as in `fp8_per_tensor`
    known = also.get(known, known)
    if known not in found:
        raise ConfigError(field, name, one_of(name, (*found, *also)))
    return found[known]


def kv_element_bytes(name: str, field: str) -> float:
    """Bytes of one key or value element, in any engine but Foretoken. Raises ConfigError where
    nothing is called `name`."""
    known = _quantizations()[1].get(name.lower(), name.lower())
    if known not in KV_BYTES:
        only = "; int8 with --engine foretoken" if known == "int8" else ""
        raise ConfigError(field, name, one_of(name, KV_BYTES) + only)
    return KV_BYTES[known]
