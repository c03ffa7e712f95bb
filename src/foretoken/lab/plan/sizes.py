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
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from foretoken.checkpoint import PACKAGED, find_model
from foretoken.config.methods import DraftingMethod
from foretoken.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError, one_of
from foretoken.shape import ModelShape, token_flops
from foretoken.shape.families import ModelFamily, family_alike, find_family
from foretoken.shape.field_kinds import check_kinds
from foretoken.shape.fields import LARGEST_SIZE, MOST_LAYERS, read_json
from foretoken.shape.multimodal import find_multimodal, text_config

_AT_LEAST_ONE = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
_MOST = {"num_hidden_layers": MOST_LAYERS}
_LINEAR_LAYERS = ("linear_attention", "mamba", "recurrent", "short_conv")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanModel:
    """A model as the planner sees it. Counts of weights unless a name says bytes."""

    name: str
    family: str
    tokenizer: str
    """Identifies the tokenizer; models with another one cannot share drafts."""
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    context: int
    table_params: int
    dense_params: int
    """Read in every step beside the head: attention, dense MLPs, routers, shared experts."""
    expert_params: int
    num_experts: int
    experts_per_token: int
    kv_elements: int
    """Keys and values of one token over all layers that keep the whole context."""
    window_elements: int
    window: int
    full_layers: int
    window_layers: int
    query_width: int
    """Width of all query heads of a layer; of latent attention the mean of queries and values."""
    matrix_outputs: int
    """Rows of all dense matrices but the head; 0 where they are not counted."""
    kv_is_shared: bool
    """Whether every tensor-parallel rank keeps all of it (latent attention)."""
    mtp_layers: int
    """Draft heads that come with the checkpoint; 0: none."""
    quantization: str
    approximations: tuple[str, ...]

    @property
    def params(self) -> int:
        """All weights."""
        return self.table_params + self.dense_params + self.expert_params

    @property
    def head_params(self) -> int:
        """The output head, read in every step."""
        return self.vocab_size * self.hidden_size

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
        seen = self.full_layers * context + self.window_layers * min(context, self.window)
        return token_flops(self.active_params, seen * self.query_width)


def read_config(name: str, config: Mapping[str, Any], *, family: str, tokenizer: str) -> PlanModel:
    """The sizes that a config.json describes.

    Raises:
        CheckpointError: a size is missing.
    """
    check_kinds(config)
    is_known = find_multimodal(config.get("model_type")) is not None
    config = text_config(config) if is_known else config.get("text_config") or config
    reader = _SizeReader(config, _engine_shape(config))
    hidden, layers = reader.size("hidden_size"), reader.size("num_hidden_layers")
    full, window_layers = reader.attention_layers()
    return PlanModel(
        name=name,
        family=family or str(config.get("model_type", "unknown")),
        tokenizer=tokenizer,
        model_type=str(config.get("model_type", "unknown")),
        vocab_size=reader.size("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=reader.size("num_attention_heads"),
        num_kv_heads=reader.kv_heads,
        head_dim=reader.head_dim,
        intermediate_size=reader.size("intermediate_size", 0),
        context=reader.size("max_position_embeddings", 4096),
        table_params=reader.size("vocab_size") * hidden * (1 if reader.tied else 2),
        dense_params=reader.dense_params(),
        expert_params=reader.layer_kinds()[1] * reader.num_experts * reader.expert_params(),
        num_experts=reader.num_experts,
        experts_per_token=reader.experts_per_token,
        kv_elements=full * reader.kv_elements_per_layer(),
        window_elements=window_layers * reader.kv_elements_per_layer(),
        window=int(config.get("sliding_window") or 0) if window_layers else 0,
        full_layers=full,
        window_layers=window_layers,
        query_width=reader.query_width(),
        matrix_outputs=reader.matrix_outputs(),
        kv_is_shared=reader.latent > 0,
        mtp_layers=reader.first("num_nextn_predict_layers", "mtp_num_hidden_layers"),
        quantization=_stored_as(config),
        approximations=tuple(reader.notes()),
    )


def _engine_shape(config: Mapping[str, Any]) -> ModelShape | None:
    """What the engine reads in such a config; None where the engine's families do not cover it."""
    if find_family(config.get("model_type")) is None:
        return None
    stored_alike = {key: value for key, value in config.items() if key != "quantization_config"}
    try:
        return ModelShape.from_fields(stored_alike)
    except (CheckpointError, UnsupportedModelError):
        return None


@dataclass(frozen=True, slots=True)
class _SizeReader:
    """Names of fields differ between families; this is the only place that knows them."""

    config: Mapping[str, Any]
    shape: ModelShape | None
    """What the engine says, which then counts."""

    def size(self, name: str, default: int | None = None) -> int:
        value = self.config.get(name)
        if value is None:
            value = default
        least, most = int(name in _AT_LEAST_ONE), _MOST.get(name, LARGEST_SIZE)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            allowed = f"a whole number from {least} to {most}, as the model has"
            raise CheckpointError(f"config.json: {name}", value, allowed)
        return value

    def first(self, *names: str) -> int:
        """The first of `names` that is set, else 0."""
        return next((self.size(n) for n in names if self.config.get(n) is not None), 0)

    @property
    def family(self) -> ModelFamily | None:
        return family_alike(self.config.get("model_type"))

    @property
    def kv_heads(self) -> int:
        return self.size("num_key_value_heads", self.size("num_attention_heads"))

    @property
    def tied(self) -> bool:
        if self.shape is not None:
            return self.shape.tie_word_embeddings
        usual = self.family is not None and self.family.ties_head
        return bool(self.config.get("tie_word_embeddings", usual))

    def dense_params(self) -> int:
        """Weights of all layers but their routed experts, and of the last norm."""
        if self.shape is not None:
            return self.shape.step_bytes(1) - self.shape.vocab_size * self.shape.hidden_size
        hidden, layers = self.size("hidden_size"), self.size("num_hidden_layers")
        dense_layers, moe_layers = self.layer_kinds()
        router = hidden * self.num_experts + self.shared_experts * self.expert_params()
        mlps = dense_layers * 3 * hidden * self.size("intermediate_size", 0) + moe_layers * router
        return layers * (self.attention_params() + self.norms()) + mlps + hidden

    def expert_params(self) -> int:
        return 3 * self.size("hidden_size") * self.expert_width()

    def query_width(self) -> int:
        heads = self.size("num_attention_heads")
        if not self.latent:
            return heads * self.head_dim
        keys = self.size("qk_rope_head_dim") + self.size("qk_nope_head_dim")
        return heads * (keys + self.size("v_head_dim")) // 2

    @property
    def head_dim(self) -> int:
        if self.shape is not None:
            return self.shape.head_dim
        hidden, heads = self.size("hidden_size"), self.size("num_attention_heads")
        family = self.family
        known = None if family is None else family.head_dim
        return self.size("head_dim", known or hidden // heads)

    @property
    def latent(self) -> int:
        return self.first("kv_lora_rank")

    @property
    def num_experts(self) -> int:
        return self.first("num_experts", "num_local_experts", "n_routed_experts")

    @property
    def experts_per_token(self) -> int:
        return self.first("num_experts_per_tok", "experts_per_token")

    @property
    def shared_experts(self) -> int:
        return self.first("n_shared_experts")

    def expert_width(self) -> int:
        return self.first("moe_intermediate_size", "intermediate_size") if self.num_experts else 0

    def norms(self) -> int:
        """Weights of a layer's norms."""
        family, hidden = self.family, self.size("hidden_size")
        if family is None:
            return 2 * hidden
        over_heads = 2 * self.head_dim if family.head_norms else 0
        if family.whole_norms:
            over_heads = self.head_dim * (self.size("num_attention_heads") + self.kv_heads)
        return 2 * (family.norms_before + family.sandwich_norms) * hidden + over_heads

    def layer_kinds(self) -> tuple[int, int]:
        """Numbers of layers with a dense MLP and with experts."""
        layers = self.size("num_hidden_layers")
        if not self.num_experts:
            return layers, 0
        dense = min(self.first("first_k_dense_replace"), layers)
        return dense, layers - dense

    def attention_params(self) -> int:
        hidden, heads = self.size("hidden_size"), self.size("num_attention_heads")
        if self.latent:
            return self._latent_params(hidden, heads)
        query, key = heads * self.head_dim, self.kv_heads * self.head_dim
        always = self.family is not None and self.family.attention_biases == "qkv"
        biased = always or self.config.get("attention_bias")
        return hidden * (2 * query + 2 * key) + (query + 2 * key if biased else 0)

    def _latent_params(self, hidden: int, heads: int) -> int:
        rope, nope = self.size("qk_rope_head_dim"), self.size("qk_nope_head_dim")
        value, rank = self.size("v_head_dim"), self.first("q_lora_rank")
        query = rank * (hidden + heads * (rope + nope)) if rank else hidden * heads * (rope + nope)
        keys = hidden * (self.latent + rope) + self.latent * heads * (nope + value)
        return query + keys + heads * value * hidden

    def matrix_outputs(self) -> int:
        """Outputs of all matrices of a dense model; its int8 scales are one per output."""
        if self.num_experts or self.latent:
            return 0
        heads = self.size("num_attention_heads") + 2 * self.kv_heads
        rows = heads * self.head_dim + 2 * self.size("hidden_size")
        return self.size("num_hidden_layers") * (rows + 2 * self.size("intermediate_size", 0))

    def kv_elements_per_layer(self) -> int:
        """Latent attention keeps one compressed vector and the rotary part of the key."""
        if self.latent:
            return self.latent + self.size("qk_rope_head_dim")
        return 2 * self.kv_heads * self.head_dim

    def attention_layers(self) -> tuple[int, int]:
        """Numbers of layers with full and with windowed attention."""
        layers = self.size("num_hidden_layers")
        if self.shape is not None:
            windowed = sum(window is not None for window in self.shape.windows)
            return layers - windowed, windowed
        kinds = self.config.get("layer_types") or ["full_attention"]
        kinds = [kinds[i % len(kinds)] for i in range(layers)]
        windowed = sum("sliding" in kind or "chunked" in kind for kind in kinds)
        return layers - windowed - sum(kind in _LINEAR_LAYERS for kind in kinds), windowed

    def notes(self) -> list[str]:
        found = []
        if set(self.config.get("layer_types") or ()) & set(_LINEAR_LAYERS):
            found.append("recurrent layers: their state per request is not counted")
        if self.config.get("num_nextn_predict_layers"):
            found.append("the weights of the MTP layers are not counted")
        if self.config.get("vision_config"):
            found.append("the vision tower is not counted")
        if self.num_experts and not self.experts_per_token:
            found.append("experts per token unknown: all are taken to be active")
        return found


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
    text = resources.files("foretoken.lab.plan").joinpath("models.toml").read_text("utf-8")
    rows = tomllib.loads(text)
    complete = {}
    for name, row in rows.items():
        base = rows.get(row.get("like", ""), {})
        merged = {**base, **row, "config": {**base.get("config", {}), **row["config"]}}
        if "short" in merged:
            complete[name] = merged
    return complete


def load_plan_model(name: str, field: str) -> PlanModel:
    """Sizes of model `name`; `field` is how errors call it.

    Raises:
        ModelNotFoundError: not in the list, no config.json there, and not to be had from the hub.
        CheckpointError: a config.json that lacks a size.
    """
    path = Path(name).expanduser()
    file = path if path.is_file() else path / "config.json"
    if file.is_file():
        return _from_file(name, file)
    for hub_id, row in known_models().items():
        if name.lower() in (hub_id.lower(), row["short"]):
            return _from_row(hub_id, row)
    if name in PACKAGED:
        return _from_file(name, find_model(name) / "config.json")
    return _from_hub(name, field)


def _from_row(name: str, row: Mapping[str, Any]) -> PlanModel:
    return read_config(name, row["config"], family=row["family"], tokenizer=row["tokenizer"])


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
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    short = one_of(name.lower(), (row["short"] for row in known_models().values()))
    allowed = f"a config.json, its folder, a hub id that can be reached, or one of: {short}"
    try:
        file = hf_hub_download(name, "config.json")
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFoundError(field, name, allowed) from error
    return _from_file(name, Path(file))


def head_of(target: PlanModel, method: DraftingMethod) -> PlanModel:
    """The layers of a head for this target, and the output head that it shares.

    Args:
        target: what it drafts for.
        method: asserts that it drafts with a head that can be planned.
    """
    assert method.drafts_with == "head" and method.plan is not None, method.name
    layers, count = target.num_layers, method.plan.layers
    dense, experts = target.dense_params // layers, target.expert_params // layers
    if target.num_experts and method.own_file:
        dense, experts = _dense_layer(target), 0
    words = method.plan.head_vocabulary or target.vocab_size
    per_layer = (target.kv_elements + target.window_elements) // layers
    return replace(
        target,
        vocab_size=min(words, target.vocab_size),
        num_layers=count,
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
        head_of(target, method), dense_params=target.hidden_size**2, expert_params=0,
        num_experts=0, full_layers=0,
    )  # fmt: skip


def _dense_layer(target: PlanModel) -> int:
    """Weights of a layer with the target's attention and an MLP as wide as its dense ones."""
    queries, keys = target.num_heads * target.head_dim, target.num_kv_heads * target.head_dim
    return target.hidden_size * (2 * queries + 2 * keys + 3 * target.intermediate_size)
