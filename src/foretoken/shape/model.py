"""ModelShape: sizes and features of a decoder, and the bytes and operations that follow."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from foretoken.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from foretoken.shape.families import family_names, find_family
from foretoken.shape.field_kinds import check_kinds
from foretoken.shape.fields import (
    MOST_LAYERS,
    Config,
    dtype_name,
    eos_ids,
    layer_count,
    positive,
    read_json,
    size,
)
from foretoken.shape.gguf import about_gguf, gguf_config, gguf_scheme
from foretoken.shape.memory_formula import WeightCounts, Widths, kv_element_bytes, kv_token_bytes
from foretoken.shape.mixtures.experts import Experts
from foretoken.shape.mixtures.families import refuse
from foretoken.shape.multimodal import find_multimodal, placeholders, text_config
from foretoken.shape.rope_config import RopeShape
from foretoken.shape.safetensors_header import stored_dtype
from foretoken.shape.stored import CheckpointQuantization, stored_scheme
from foretoken.shape.transformers_config import transformers_fields


class KeyHeads(NamedTuple):
    """Key heads of a layer, and so many value heads."""

    heads: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder; field names as in Hugging Face configs where they have one."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    """Positions that the model was made to reach, rope scaling included."""
    rms_norm_eps: float
    rope: RopeShape | None
    """None: the model is run through transformers, which knows its positions."""
    tie_word_embeddings: bool
    dtype: str
    """Type of the checkpoint's floats: `float32`, `bfloat16` or `float16`."""
    eos_token_ids: tuple[int, ...]
    """End-of-sequence ids of config.json and generation_config.json."""
    windows: tuple[int | None, ...] = ()
    """Per layer: positions that a token sees, its own included; None: all. Empty: all see all."""
    local_rope: RopeShape | None = None
    """Positions of the layers with a window, where they have others than `rope`."""
    turned: tuple[bool, ...] = ()
    """Per layer: whether it has positions at all. Empty: all have."""
    hidden_act: str = "silu"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    """A norm over every query head and every key head."""
    whole_norms: bool = False
    """A norm over all query heads together, and one over all key heads."""
    norms_before: bool = True
    """Norms before attention and before the MLP."""
    sandwich_norms: bool = False
    """Norms after attention and after the MLP too."""
    attention_scale: float | None = None
    """None: head_dim ** -0.5."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    branch_scale: float = 1.0
    """What attention and MLP are multiplied by before they are added to the stream."""
    logit_scale: float = 1.0
    sinks: bool = False
    """Whether each head has a number that its scores share the softmax with, without a value."""
    output_gate: bool = False
    """Whether what attention gives is multiplied by the sigmoid of a projection of its input."""
    norms_after_turning: bool = False
    """Whether norms over heads come after their positions."""
    wide: KeyHeads | None = None
    """Of the layers that see all, where they have others than those with a window."""
    value_norms: bool = False
    """Whether values are normed too, without weights."""
    keys_are_values: bool = False
    """Whether the layers that see all have one projection for both."""
    kv_sharing_layers: int = 0
    """The last layers, which read the keys and values of the last one before them that sees as
    much."""
    wider_sharing: int = 1
    """What the inner width of these is multiplied by."""
    layer_inputs: int = 0
    """Numbers that each layer gets of each token beside the stream, by a table; 0: none."""
    layer_scalars: bool = False
    """Whether each layer's result is multiplied by a number."""
    experts: Experts | None = None
    """None: every layer has a plain MLP."""
    draft_layers: int = 0
    """Layers behind the last one, which draft: they are not read."""
    stored_parameters: int | None = None
    """Counted in the weight files, for models that are run through transformers."""
    inside: str | None = None
    """The model type of the checkpoint around it, which can see or hear; None: it stands alone."""
    placeholders: tuple[tuple[str, int], ...] = ()
    """Tokens that stand for pictures and sounds, which are not read: config.json's name, id."""
    stored: CheckpointQuantization | None = None
    """How the checkpoint's matrices were quantized before; None: they are floats."""

    @classmethod
    def from_config(cls, folder: Path) -> Self:
        """Read `folder`/config.json, or the metadata of a GGUF file.

        Raises:
            ModelNotFoundError: there is no config.json.
            CheckpointError: it is no valid JSON, or a field is missing or of the wrong type.
            UnsupportedModelError: a model type or feature that is not run.
        """
        if folder.suffix == ".gguf":
            with about_gguf(folder):
                return cls._from_dict(folder, gguf_config(folder), stored=gguf_scheme(folder))
        file = folder / "config.json"
        if not file.is_file():
            raise ModelNotFoundError("model", str(folder), "a folder with a config.json")
        config = read_json(file)
        generation = folder / "generation_config.json"
        more = read_json(generation) if generation.is_file() else {}
        check_kinds(config)
        check_kinds(more, generation.name)
        both = eos_ids(config) | eos_ids(more)
        return cls._from_dict(folder, {**config, "eos_token_id": sorted(both)}, stored=None)

    @classmethod
    def from_fields(cls, config: Config) -> Self:
        """The shape that the fields of a config.json describe, of a family of our own.

        Raises:
            CheckpointError, UnsupportedModelError: as `from_config`.
        """
        kind = config.get("model_type")
        refuse(config)
        if find_family(kind) is None and find_multimodal(kind) is None:
            raise UnsupportedModelError("model_type", kind, family_names())
        return cls._from_dict(None, config, stored=None)

    @classmethod
    def _from_dict(
        cls, folder: Path | None, config: Config, *, stored: CheckpointQuantization | None
    ) -> Self:
        check_kinds(config)
        refuse(config)
        around = find_multimodal(config.get("model_type"))
        standing_for = () if around is None else placeholders(config)
        if around is not None:
            config = text_config(config, folder)
        refuse(config)
        eos = sorted(eos_ids(config))
        family = find_family(config.get("model_type"))
        if family is not None:
            fields = {**_sizes(config), **family.shape_fields(config)}
            fields["stored"] = stored or stored_scheme(config)
            fields["inside"] = None if around is None else around.model_type
            fields["placeholders"] = standing_for
            fields["draft_layers"] = _draft_layers(config)
            if fields.get("wide") is not None:
                fields["wide"] = KeyHeads(*fields["wide"])
            positions = fields["rope"].context(fields["max_position_embeddings"])
            fields["max_position_embeddings"] = positions
        else:
            assert folder is not None, "a family of our own"
            fields = transformers_fields(folder, config)
        dtype = dtype_name(config, lambda: None if folder is None else stored_dtype(folder))
        shape = cls(**{**fields, "eos_token_ids": tuple(eos), "dtype": dtype})
        shape._check()
        if shape.stored is not None and shape.stored.method == "mxfp4":
            return replace(shape, stored=shape.stored.experts_alone(shape._share_of_experts()))
        return shape

    def _share_of_experts(self) -> float:
        """Of the numbers in matrices."""
        return self.expert_parameters() / self.weight_counts().matrices

    def _check(self) -> None:
        for one in self._kinds_of_heads:
            if self.num_attention_heads % one.heads:
                allowed = f"a divisor of num_attention_heads, {self.num_attention_heads}"
                raise CheckpointError("config.json num_key_value_heads", one.heads, allowed)
        for one in self._kinds_of_heads if self.rope is not None else ():
            if one.size % 2:
                raise UnsupportedModelError("head_dim", one.size, "an even number")

    @property
    def is_own(self) -> bool:
        """Whether our own layers run it; else transformers does."""
        return self.rope is not None

    @property
    def counts_distances(self) -> bool:
        """Whether only distances between positions matter, so that a text may begin anywhere.

        Not where angles depend on the position itself, nor where it is unknown what is done.
        """
        kinds = (self.rope, self.local_rope)
        return self.is_own and all(kind is None or kind.counts_distances for kind in kinds)

    @property
    def query_size(self) -> int:
        """Width of all query heads, of the widest layers."""
        return self.num_attention_heads * max(one.size for one in self._kinds_of_heads)

    @property
    def kv_size(self) -> int:
        """Width of all key heads, and of all value heads, of the widest layers."""
        return max(one.heads * one.size for one in self._kinds_of_heads)

    @property
    def _kinds_of_heads(self) -> tuple[KeyHeads, ...]:
        own = KeyHeads(self.num_key_value_heads, self.head_dim)
        return (own,) if self.wide is None else (own, self.wide)

    def heads(self, window: int | None) -> KeyHeads:
        """Key heads of the layers with this window."""
        return self._kinds_of_heads[-1 if window is None else 0]

    @property
    def kv_sizes(self) -> tuple[KeyHeads, ...]:
        """Of the layers that keep keys and values, which come first."""
        keeping = range(self.num_hidden_layers - self.kv_sharing_layers)
        return tuple(self.heads(self.window(layer)) for layer in keeping)

    def kv_layer(self, layer: int) -> int:
        """Whose keys and values a layer reads: its own, or those of one before."""
        keeping = self.num_hidden_layers - self.kv_sharing_layers
        if layer < keeping:
            return layer
        alike = (one for one in range(keeping) if self.window(one) == self.window(layer))
        return max(alike)

    def inner(self, layer: int) -> int:
        """Inner width of the plain MLP of a layer."""
        shares = layer >= self.num_hidden_layers - self.kv_sharing_layers
        return self.intermediate_size * (self.wider_sharing if shares else 1)

    @property
    def widths(self) -> Widths:
        """Of its activations."""
        return Widths(
            hidden=self.hidden_size,
            query=self.query_size,
            kv=self.kv_size,
            inner=self._inner,
            vocabulary=self.vocab_size,
            mixed=0 if self.experts is None else self.experts.results * self.hidden_size,
        )

    @property
    def _inner(self) -> int:
        """Of an MLP, or of what experts keep of a row until it is added up."""
        plain = self.intermediate_size * self.wider_sharing
        if self.experts is None:
            return plain
        mixed = self.experts.width + self.experts.shared_width
        return max(plain, mixed + self.experts.used * self.hidden_size)

    def window(self, layer: int) -> int | None:
        """Positions that a token of this layer sees; None: all up to its own."""
        return self.windows[layer] if self.windows else None

    def view(self, layer: int) -> tuple[int | None, RopeShape]:
        """Window and positions of a layer, of a model of our own: layers with the same are of one
        kind."""
        assert self.rope is not None, f"{self.model_type} has rotary positions"
        window = self.window(layer)
        if self.turned and not self.turned[layer]:
            return window, self.rope.unturned
        has_own = window is not None and self.local_rope is not None
        return window, (self.local_rope or self.rope) if has_own else self.rope

    def layer_parameters(self) -> int:
        """Weights of the first layer, biases and norms included, without chosen experts."""
        if self.stored_parameters is not None:
            return (self.stored_parameters - self._table_parameters()) // self.num_hidden_layers
        counts = self._layer_counts(0)
        return counts.matrices + counts.rest

    def _layer_counts(self, layer: int) -> WeightCounts:
        """Of one layer, without the experts that routers choose from."""
        hidden, keys = self.hidden_size, self.heads(self.window(layer))
        query, kv = self.num_attention_heads * keys.size, keys.heads * keys.size
        kept = 0 if self.kv_layer(layer) != layer else 2
        if kept and self.keys_are_values and self.window(layer) is None:
            kept = 1
        outputs = (1 + self.output_gate) * query + kept * kv + hidden
        matrices = hidden * (outputs - hidden + query)
        rest = self.qkv_bias * (query + kept * kv) + self.out_bias * hidden
        rest += self.sinks * self.num_attention_heads + self.layer_scalars
        rest += 2 * (self.norms_before + self.sandwich_norms) * hidden
        rest += self.head_norms * (1 + (kept > 0)) * keys.size + self.whole_norms * (query + kv)
        mixed = self.experts if self.experts is not None and self.experts.layers[layer] else None
        inners = [] if mixed is None else [mixed.shared_width]
        if mixed is None or mixed.shared == "beside":
            inners.append(self.inner(layer))
        for inner in filter(None, inners):
            matrices += 3 * hidden * inner
            outputs += 2 * inner + hidden
            rest += self.mlp_bias * (2 * inner + hidden)
        if mixed is not None:
            rest += mixed.router_parameters(hidden)
        if self.layer_inputs:
            matrices += 2 * hidden * self.layer_inputs
            outputs += self.layer_inputs + hidden
            rest += hidden
        return WeightCounts(0, 0, matrices, rest, outputs)

    def expert_parameters(self) -> int:
        """Weights of all experts that routers choose from."""
        experts = self.experts
        if experts is None:
            return 0
        each = experts.expert_parameters(self.hidden_size)
        return experts.num_layers * experts.count * each

    def _dense_counts(self) -> WeightCounts:
        """Of all layers but for those experts, and of what makes their inputs."""
        layers = [self._layer_counts(layer) for layer in range(self.num_hidden_layers)]
        inputs = self.num_hidden_layers * self.layer_inputs
        return WeightCounts(
            table=self.vocab_size * inputs,
            head=0,
            matrices=sum(one.matrices for one in layers) + self.hidden_size * inputs,
            rest=sum(one.rest for one in layers) + self.layer_inputs + self.hidden_size,
            outputs=sum(one.outputs for one in layers) + inputs,
        )

    def weight_counts(self) -> WeightCounts:
        """All weights by how they are stored; the head always has a copy of its own."""
        table = self.vocab_size * self.hidden_size
        if not self.is_own:
            left = self.parameter_count() - self._table_parameters()
            return WeightCounts(table, table, left, 0, head_outputs=self.vocab_size)
        dense, experts = self._dense_counts(), self.expert_counts()
        return WeightCounts(
            table=table + dense.table,
            head=table,
            matrices=dense.matrices + experts.matrices,
            rest=dense.rest + self.expert_parameters() - experts.matrices,
            outputs=dense.outputs + experts.outputs,
            head_outputs=self.vocab_size,
        )

    def expert_counts(self) -> WeightCounts:
        """Of those the experts that routers choose from, biases aside."""
        experts, hidden = self.experts, self.hidden_size
        if experts is None:
            return WeightCounts(0, 0, 0, 0)
        everywhere, up = experts.num_layers * experts.count, 1 + experts.is_gated
        matrices = everywhere * (up + 1) * hidden * experts.width
        return WeightCounts(0, 0, matrices, 0, everywhere * (up * experts.width + hidden))

    def _table_parameters(self) -> int:
        return self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)

    def parameter_count(self) -> int:
        """All weights; tied embeddings count once."""
        if self.stored_parameters is not None:
            return self.stored_parameters
        dense = self._dense_counts()
        layers = dense.table + dense.matrices + dense.rest + self.expert_parameters()
        return self._table_parameters() + layers

    def weight_bytes(self, dtype_bytes: int) -> int:
        """Bytes of the weights on disk."""
        return self.parameter_count() * dtype_bytes

    def expert_share(self, rows: float) -> float:
        """Share of its experts that so many rows read, if they choose independently and evenly."""
        return 0.0 if self.experts is None else self.experts.touched(rows) / self.experts.count

    def step_bytes(self, dtype_bytes: int, rows: float = 1) -> int:
        """Bytes of weights that a step of so many rows reads: all but the embedding table, the
        head, and of a mixture the experts that some row chooses."""
        head = self.vocab_size * self.hidden_size
        if self.stored_parameters is not None:
            return (self.stored_parameters - self._table_parameters() + head) * dtype_bytes
        experts, dense = self.expert_share(rows) * self.expert_parameters(), self._dense_counts()
        return (head + dense.matrices + dense.rest + round(experts)) * dtype_bytes

    @property
    def widest_window(self) -> int | None:
        """Positions that some layer sees and no layer with a window sees more; None: all layers see
        all."""
        return max(filter(None, self.windows), default=None)

    def kv_bytes_per_token(
        self, dtype_bytes: int, kv_cache_dtype: str = "auto", *, windowed: bool | None = None
    ) -> int:
        """Bytes of keys and values that are written of one token.

        Args:
            dtype_bytes: of the model's type.
            kv_cache_dtype: `auto`, that type, or `int8`.
            windowed: of layers with a window alone, or of the others alone; None: of all.
        """
        sizes = [
            one
            for layer, one in enumerate(self.kv_sizes)
            if windowed is None or windowed == (self.window(layer) is not None)
        ]
        return round(
            sum(
                kv_token_bytes(
                    2 * one.heads * one.size,
                    kv_element_bytes(dtype_bytes, kv_cache_dtype, one.size),
                )
                for one in sizes
            )
        )

    def _seen(self, context: int) -> Iterator[tuple[int, KeyHeads]]:
        """Keys that a token at the end of `context` positions attends to, by layer, and heads."""
        for layer in range(self.num_hidden_layers):
            window = self.window(layer)
            yield min(context, window or context), self.heads(window)

    def kv_read_bytes(self, context: int, dtype_bytes: int, kv_cache_dtype: str = "auto") -> float:
        """Bytes of keys and values that a step reads for a sequence of `context` tokens."""
        return sum(
            keys
            * 2
            * one.heads
            * one.size
            * kv_element_bytes(dtype_bytes, kv_cache_dtype, one.size)
            for keys, one in self._seen(context)
        )

    def attended(self, context: int) -> int:
        """Keys that a token at the end of `context` positions attends to, times the width of all
        query heads, summed over layers."""
        return self.num_attention_heads * sum(keys * one.size for keys, one in self._seen(context))

    def flops_per_token(self, context: int) -> int:
        """Multiply-adds count two; attention over `context` tokens included."""
        return round(token_flops(self.step_bytes(1), self.attended(context)))


def token_flops(weights: float, attended: float) -> float:
    """Operations of one row of a forward pass; a multiply-add counts two.

    Args:
        weights: those that the row is multiplied with, the output head included.
        attended: over all layers, the keys that the row attends to times the width of all query
            heads: once for the scores, once for the values.
    """
    return 2.0 * (weights + 2.0 * attended)


def _sizes(config: Config) -> dict[str, Any]:
    """What every family has; a family may say otherwise."""
    heads = size(config, "num_attention_heads")
    return {
        "model_type": config["model_type"],
        "vocab_size": size(config, "vocab_size"),
        "hidden_size": size(config, "hidden_size"),
        "intermediate_size": size(config, "intermediate_size"),
        "num_hidden_layers": layer_count(config),
        "num_attention_heads": heads,
        "num_key_value_heads": size(config, "num_key_value_heads", heads),
        "max_position_embeddings": size(config, "max_position_embeddings"),
        "rms_norm_eps": positive(config, "rms_norm_eps", 1e-6),
    }


def _draft_layers(config: Config) -> int:
    """Layers behind the last that a checkpoint may have."""
    for name in ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers"):
        given = config.get(name)
        if isinstance(given, int) and given > 0:
            return size(config, name, most=MOST_LAYERS)
    return 0
