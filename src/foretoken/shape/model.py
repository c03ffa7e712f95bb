"""ModelShape: sizes and features of a decoder, and the bytes and operations that follow."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

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
from foretoken.shape.stored import CheckpointQuantization, stored_scheme
from foretoken.shape.transformers_config import transformers_fields


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
        return cls._from_dict(Path(), config, stored=None)

    @classmethod
    def _from_dict(
        cls, folder: Path, config: Config, *, stored: CheckpointQuantization | None
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
            positions = fields["rope"].context(fields["max_position_embeddings"])
            fields["max_position_embeddings"] = positions
        else:
            fields = transformers_fields(folder, config)
        shape = cls(**{**fields, "eos_token_ids": tuple(eos), "dtype": dtype_name(config)})
        shape._check()
        if shape.stored is not None and shape.stored.method == "mxfp4":
            return replace(shape, stored=shape.stored.experts_alone(shape._share_of_experts()))
        return shape

    def _share_of_experts(self) -> float:
        """Of the numbers in matrices."""
        return self.expert_parameters() / self.weight_counts().matrices

    def _check(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            allowed = f"a divisor of num_attention_heads, {self.num_attention_heads}"
            given = self.num_key_value_heads
            raise CheckpointError("config.json num_key_value_heads", given, allowed)
        if self.rope is not None and self.head_dim % 2:
            raise UnsupportedModelError("head_dim", self.head_dim, "an even number")

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
        """Width of all query heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.num_key_value_heads * self.head_dim

    @property
    def widths(self) -> Widths:
        """Of its activations."""
        return Widths(
            hidden=self.hidden_size,
            query=self.query_size,
            kv=self.kv_size,
            inner=self._inner,
            vocabulary=self.vocab_size,
        )

    @property
    def _inner(self) -> int:
        """Of an MLP, or of what experts keep of a row until it is added up."""
        if self.experts is None:
            return self.intermediate_size
        mixed = self.experts.width + self.experts.shared_width
        return max(self.intermediate_size, mixed + self.experts.used * self.hidden_size)

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
        """Weights of one layer with a plain MLP, biases and norms included."""
        if self.stored_parameters is not None:
            return (self.stored_parameters - self._table_parameters()) // self.num_hidden_layers
        hidden, inner = self.hidden_size, self.intermediate_size
        attention = hidden * (2 + self.output_gate) * self.query_size + hidden * 2 * self.kv_size
        attention += self.qkv_bias * (self.query_size + 2 * self.kv_size) + self.out_bias * hidden
        attention += self.sinks * self.num_attention_heads
        mlp = 3 * hidden * inner + self.mlp_bias * (2 * inner + hidden)
        norms = 2 * (self.norms_before + self.sandwich_norms) * hidden
        norms += self.head_norms * 2 * self.head_dim
        norms += self.whole_norms * (self.query_size + self.kv_size)
        return attention + mlp + norms

    def expert_parameters(self) -> int:
        """Weights of all experts that routers choose from."""
        experts = self.experts
        if experts is None:
            return 0
        each = experts.expert_parameters(self.hidden_size)
        return experts.num_layers * experts.count * each

    def _dense_parameters(self) -> int:
        """Weights of all layers but for those experts."""
        everywhere, experts = self.num_hidden_layers * self.layer_parameters(), self.experts
        if experts is None:
            return everywhere
        instead = 3 * self.hidden_size * self.intermediate_size
        return everywhere + experts.num_layers * (
            experts.other_parameters(self.hidden_size) - instead
        )

    def weight_counts(self) -> WeightCounts:
        """All weights by how they are stored; the head always has a copy of its own."""
        table = self.vocab_size * self.hidden_size
        everything, layers = self.parameter_count(), self.num_hidden_layers
        if not self.is_own:
            left = everything - self._table_parameters()
            return WeightCounts(table, table, left, 0, head_outputs=self.vocab_size)
        hidden, inner, experts = self.hidden_size, self.intermediate_size, self.experts
        heads = (2 + self.output_gate) * self.query_size + 2 * self.kv_size
        matrices = layers * hidden * heads
        outputs = layers * (heads - self.query_size + hidden)
        plain = layers - (0 if experts is None else experts.num_layers)
        matrices += plain * 3 * hidden * inner
        outputs += plain * (2 * inner + hidden)
        if experts is not None:
            mixed, of_experts = experts.num_layers, self.expert_counts()
            matrices += of_experts.matrices + mixed * 3 * hidden * experts.shared_width
            outputs += of_experts.outputs
            outputs += mixed * (2 * experts.shared_width + hidden * (experts.shared_width > 0))
        rest = everything - self._table_parameters() - matrices
        return WeightCounts(table, table, matrices, rest, outputs, head_outputs=self.vocab_size)

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
        layers = self._dense_parameters() + self.expert_parameters()
        return self._table_parameters() + layers + self.hidden_size

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
        experts = self.expert_share(rows) * self.expert_parameters()
        layers = self._dense_parameters() + round(experts)
        return (head + layers + self.hidden_size) * dtype_bytes

    def kv_bytes_per_token(self, dtype_bytes: int, kv_cache_dtype: str = "auto") -> int:
        """Bytes of keys and values that are kept of one token, all layers. Layers with a window
        keep all tokens too: pages belong to sequences, not to layers."""
        each = kv_element_bytes(dtype_bytes, kv_cache_dtype, self.head_dim)
        return round(kv_token_bytes(2 * self.num_hidden_layers * self.kv_size, each))

    def tokens_seen(self, context: int) -> int:
        """Keys that a token at the end of `context` positions attends to, summed over layers."""
        layers = range(self.num_hidden_layers)
        return sum(min(context, self.window(layer) or context) for layer in layers)

    def kv_read_bytes(self, context: int, dtype_bytes: int) -> int:
        """Bytes of keys and values that a step reads for a sequence of `context` tokens."""
        return 2 * self.tokens_seen(context) * self.kv_size * dtype_bytes

    def flops_per_token(self, context: int) -> int:
        """Multiply-adds count two; attention over `context` tokens included."""
        return round(token_flops(self.step_bytes(1), self.tokens_seen(context) * self.query_size))


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
