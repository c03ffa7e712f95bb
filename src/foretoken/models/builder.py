"""Builds a decoder of our own layers from a checkpoint, whose tensors have Hugging Face's names.

The shape says which parts the model has and its family how they are stored; this file knows how
they are fused.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from foretoken.backend import Backend, LinearSpec
from foretoken.kernels.linear import TYPES, Packed
from foretoken.layers.attention import AttentionBlock, HeadNorms
from foretoken.layers.decoder_layer import Layer, LayerKind
from foretoken.layers.embedding import Embedding
from foretoken.layers.gathered import GatheredLinear
from foretoken.layers.mlp import GatedMLP
from foretoken.layers.norm import RMSNorm
from foretoken.layers.rope import RotaryTable
from foretoken.models.base import LoadOptions, check_bits
from foretoken.models.captured import CapturedSteps, DecoderParts, capture
from foretoken.models.compiled_layers import compile_layers
from foretoken.models.decoder import Decoder
from foretoken.models.rollout import RolloutParts, compile_rollout
from foretoken.models.stages import Stages
from foretoken.models.weight_cache import PackedLayers, WeightSource
from foretoken.ops.activation import ACTIVATIONS
from foretoken.ops.attention import Geometry
from foretoken.ops.linear import KernelLinear, Linear, RowProbe
from foretoken.ops.linear.gpu import GpuLinear
from foretoken.quant import Weights, join
from foretoken.quant.arrange import change_columns, change_rows, join_rows, split_rows
from foretoken.shape import ModelFamily, ModelShape, RopeShape
from foretoken.shape.memory_formula import copies_of

logger = logging.getLogger("foretoken")
_FUSED = {("q", "k", "v"): "qkv", ("gate", "up"): "gate_up"}


def group_major(rows: Tensor, key_heads: int, queries: int) -> Tensor:
    """Reorder query heads in the first dimension as attention wants them (ops/attention/base).

    Args:
        rows: of all query heads; a head may have head_dim rows or any other number.
        key_heads: how many there are.
        queries: query heads of each.
    """
    heads = rows.unflatten(0, (key_heads, queries, -1))
    reordered: Tensor = heads.transpose(0, 1).flatten(0, 2)
    return reordered


class Part(NamedTuple):
    """One projection as stored, or some of its outputs."""

    weight: Weights
    bias: Tensor | None

    def cut(self, outputs: range) -> "Part":
        """Neighbouring outputs of it."""
        if len(outputs) == self.weight.shape[0]:
            return self
        kept = slice(outputs.start, outputs.stop)
        bias = None if self.bias is None else self.bias[kept]
        return Part(change_rows(self.weight, lambda rows: rows[kept]), bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """One load: where tensors come from and how linears are made."""

    shape: ModelShape
    family: ModelFamily
    checkpoint: WeightSource
    options: LoadOptions
    backend: Backend
    probe: RowProbe | None
    """None: rows need not keep their bits."""
    packed: PackedLayers | None = None
    """Where layers may be ready, and who wants to know of those that are made."""
    held: Counter[str] = field(default_factory=Counter)
    """How the matrices made so far are kept, and how many are."""
    fixed: Counter[int] = field(default_factory=Counter)
    """How many of them round their rows to so many bits."""

    def linear(
        self,
        parts: Sequence[Weights],
        bias_N: Tensor | None = None,
        *,
        adds_residual: bool = False,
        is_gate: bool = False,
        is_head: bool = False,
        is_table: bool = False,
    ) -> Linear:
        """The parts, one over the other; the rest as for `LinearSpec`.

        Parts that are quantized differently run side by side. Of a table only rows are read.
        """
        joined = self._joined(parts)
        made, at = list[Linear](), 0
        for weights, packed in joined:
            rows = weights.shape[0]
            linear = self.backend.linear(
                LinearSpec(
                    weights=weights,
                    dtype=self.options.dtype,
                    bias_N=None if bias_N is None else bias_N[at : at + rows],
                    adds_residual=adds_residual and len(joined) == 1,
                    packed=packed,
                    is_gate=is_gate,
                    is_head=is_head,
                    quantization=self.options.quantization,
                    x_bits=self.options.x_bits,
                    probe=self.probe,
                )
            )
            made.append(linear)
            at += rows
            self.held[linear.kept] += 1
            if not is_table:
                self.fixed[linear.fixed_bits] += 1
        if self.packed is not None:
            self.packed.made(made)
        return join(made)

    def _joined(self, parts: Sequence[Weights]) -> list[tuple[Weights, Packed | None]]:
        """As few matrices as the parts give, each as it was packed before, if it was."""
        ready = None if self.packed is None else self.packed.ready()
        if ready is None:
            joined = join_rows(parts)
            if len(joined) > 1 and self.backend.gpu is not None:
                # Whole steps there read one matrix: what is stored in several ways becomes floats.
                joined = [torch.cat([self._floats(part) for part in joined])]
            return [(weights, None) for weights in joined]
        return [(torch.empty(one.outputs, one.inputs, device="meta"), one) for one in ready]

    def _floats(self, weights: Weights) -> Tensor:
        return weights if isinstance(weights, Tensor) else weights.dequantized(self.options.dtype)

    def norm(
        self, name: str, width: int, arrange: Callable[[Tensor], Tensor] = lambda rows: rows
    ) -> RMSNorm:
        """An RMS norm; with an offset its weights are kept in float32.

        Args:
            name: of its module.
            width: of its rows.
            arrange: puts its weights in the order of the rows.
        """
        weight_D = arrange(self.checkpoint.keep(f"{name}.weight", (width,))).contiguous()
        if self.family.norm_offset:
            weight_D = weight_D.float() + self.family.norm_offset
        return RMSNorm(weight_D, self.shape.rms_norm_eps)

    def parts(self, prefix: str, rows: dict[str, int], *, bias: bool) -> list[Part]:
        """Projections of the hidden state, name -> rows, from one stored matrix or several."""
        width, source = self.shape.hidden_size, self.checkpoint
        if not self.family.fused_on_disk:
            names = [(f"{prefix}.{name}_proj", count) for name, count in rows.items()]
            weights = [source.matrix(name, (count, width)) for name, count in names]
            if not bias:
                return [Part(weight, None) for weight in weights]
            biases = [source.take(f"{name}.bias", (count,)) for name, count in names]
            return [Part(*pair) for pair in zip(weights, biases, strict=True)]
        name, sizes = f"{prefix}.{_FUSED[tuple(rows)]}_proj", list(rows.values())
        weights = split_rows(source.matrix(name, (sum(sizes), width)), sizes)
        if not bias:
            return [Part(weight, None) for weight in weights]
        both = source.take(f"{name}.bias", (sum(sizes),)).split(sizes)
        return [Part(*pair) for pair in zip(weights, both, strict=True)]

    def attention(self, prefix: str, layer: int) -> AttentionBlock:
        """q, k, v as one matrix, o, and per-head norms where the family has them."""
        shape, keys, queries = self.shape, self._key_heads, self._own_queries
        sizes = {"q": shape.query_size, "k": shape.kv_size, "v": shape.kv_size}
        whole = self.parts(prefix, sizes, bias=shape.qkv_bias)
        size, first = shape.head_dim, keys.start * self._queries + queries.start
        q = whole[0].cut(range(first * size, (first + len(keys) * len(queries)) * size))
        k, v = (part.cut(range(keys.start * size, keys.stop * size)) for part in whole[1:])

        def reordered(rows: Tensor) -> Tensor:
            return group_major(rows, len(keys), len(queries))

        bias_N = None
        if q.bias is not None and k.bias is not None and v.bias is not None:
            bias_N = torch.cat([reordered(q.bias), k.bias, v.bias])
        out = self._down(f"{prefix}.o_proj", shape.query_size, bias=shape.out_bias)
        return AttentionBlock(
            qkv=self.linear([change_rows(q.weight, reordered), k.weight, v.weight], bias_N),
            # A rank has some key heads, so of each block of as many queries it has some.
            out=self._back(
                Part(self._columns_by_group(out.weight), out.bias),
                len(queries),
                copies_of(shape.num_key_value_heads, self.options.share.size),
            ),
            geometry=self.geometry(self.shape.window(layer)),
            norms=self._head_norms(prefix),
        )

    def _head_norms(self, prefix: str) -> HeadNorms | None:
        """Norms of queries and keys, if there are any."""
        shape, names = self.shape, (f"{prefix}.q_norm", f"{prefix}.k_norm")
        if shape.head_norms:
            query, key = (self.norm(name, shape.head_dim) for name in names)
            return HeadNorms(query, key)
        if not shape.whole_norms:
            return None
        assert self.options.share.size == 1, "these norms reach over all heads"

        def reordered(rows: Tensor) -> Tensor:
            return group_major(rows, shape.num_key_value_heads, self._queries)

        query = self.norm(names[0], shape.query_size, reordered)
        key = self.norm(names[1], shape.kv_size)
        return HeadNorms(query, key, whole=True)

    @property
    def _key_heads(self) -> range:
        """Numbers of the key heads that are computed here."""
        return self.options.share.key_heads(self.shape.num_key_value_heads)

    @property
    def _own_queries(self) -> range:
        """Which query heads of each of them are."""
        return self.options.share.queries(self.shape.num_key_value_heads, self._queries)

    @property
    def _queries(self) -> int:
        """Query heads of a key head."""
        return self.shape.num_attention_heads // self.shape.num_key_value_heads

    def _columns_by_group(self, weights: Weights) -> Weights:
        """The output projection for heads in attention's order, those of all ranks."""
        shape = self.shape
        if self._queries == 1:
            return weights

        def reordered(rows: Tensor) -> Tensor:
            return group_major(rows, shape.num_key_value_heads, self._queries)

        changed = change_columns(weights, reordered, shape.head_dim)
        if changed is None:
            changed = change_columns(self._floats(weights), reordered, shape.head_dim)
        assert changed is not None, "floats have no groups"
        return changed

    def _down(self, name: str, width: int, *, bias: bool) -> Part:
        """A projection from `width` back to the hidden state; the outputs that are made here."""
        hidden, source = self.shape.hidden_size, self.checkpoint
        weight = source.matrix(name, (hidden, width))
        whole = Part(weight, source.take(f"{name}.bias", (hidden,)) if bias else None)
        return whole.cut(self.options.share.of(hidden))

    def _back(self, part: Part, blocks: int, copies: int = 1) -> Linear:
        """The layer of such a projection; `blocks` and `copies` as for `GatheredLinear`."""
        adds_residual = not self.shape.sandwich_norms
        own = self.linear([part.weight], part.bias, adds_residual=adds_residual)
        return self._gathered(own, self.shape.hidden_size, blocks, copies)

    def _gathered(self, own: Linear, outputs: int, blocks: int = 0, copies: int = 1) -> Linear:
        """A layer with so many outputs, of which `own` makes this rank's."""
        group = self.options.group
        if group is None or self.options.share.size == 1:
            return own
        return GatheredLinear(group, own, self.options.share.of(outputs), blocks, copies)

    def mlp(self, prefix: str) -> GatedMLP:
        """gate and up as one matrix, and down."""
        inner, bias = self.shape.intermediate_size, self.shape.mlp_bias
        whole = self.parts(prefix, {"gate": inner, "up": inner}, bias=bias)
        gate, up = (part.cut(self.options.share.of(inner)) for part in whole)
        bias_N = None
        if gate.bias is not None and up.bias is not None:
            bias_N = torch.cat([gate.bias, up.bias])
        return GatedMLP(
            gate_up=self.linear([gate.weight, up.weight], bias_N, is_gate=True),
            down=self._back(self._down(f"{prefix}.down_proj", inner, bias=bias), 1),
            activate=ACTIVATIONS[self.shape.hidden_act],
        )

    def layer(self, index: int, kind: int) -> Layer:
        """One decoder layer."""
        prefix, width = f"model.layers.{index}", self.shape.hidden_size
        before, between = f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm"
        mlp_norm, after_attention, after_mlp = between, None, None
        norms_before = self.shape.norms_before
        if self.shape.sandwich_norms:
            mlp_norm = f"{prefix}.pre_feedforward_layernorm"
            after_attention = self.norm(between, width)
            after_mlp = self.norm(f"{prefix}.post_feedforward_layernorm", width)
        return Layer(
            kind=kind,
            attention_norm=self.norm(before, width) if norms_before else None,
            attention=self.attention(f"{prefix}.self_attn", index),
            mlp_norm=self.norm(mlp_norm, width) if norms_before else None,
            mlp=self.mlp(f"{prefix}.mlp"),
            after_attention=after_attention,
            after_mlp=after_mlp,
        )

    def geometry(self, window: int | None) -> Geometry:
        """Heads, types and kind of the attention of layers with this window."""
        shape, options = self.shape, self.options
        keys, queries = self._key_heads, self._own_queries
        return Geometry(
            num_heads=len(keys) * len(queries),
            num_kv_heads=len(keys),
            first_kv_head=keys.start,
            head_dim=shape.head_dim,
            page_size=options.page_size,
            dtype=options.dtype,
            device=options.device,
            window=window,
            softcap=shape.attention_softcap,
            scale=shape.attention_scale,
            kv_store_dtype=options.kv_store_dtype,
        )

    def kind(self, view: tuple[int | None, RopeShape], like: Tensor) -> LayerKind:
        """The attention and positions of layers with this window and these positions."""
        shape, options = self.shape, self.options
        window, rope = view
        attention = self.backend.attention(
            self.geometry(window), batch_invariant=options.batch_invariant
        )
        limit = shape.max_position_embeddings
        positions = min(options.max_model_len or limit, limit)
        return LayerKind(attention, RotaryTable(rope, max_positions=positions, like=like))

    def model(self) -> Decoder:
        """Embedding, layers, last norm and head; nothing may be left over.

        Raises:
            CheckpointError: tensors are missing, unused or misshapen.
        """
        shape = self.shape
        embedding, head = self._ends()
        everywhere = range(shape.num_hidden_layers)
        different = list(dict.fromkeys(map(shape.view, everywhere)))
        own = self.options.layers(len(everywhere))
        for other in set(everywhere).difference(own):
            self.checkpoint.ignore(f"model.layers.{other}")
        layers = [self.layer(i, different.index(shape.view(i))) for i in own]
        norm = self.norm("model.norm", shape.hidden_size)
        self.checkpoint.finish()
        like = torch.empty(0, dtype=embedding.dtype, device=embedding.device)
        kinds = tuple(self.kind(view, like) for view in different)
        scale = shape.embedding_scale
        stages = self._stages()
        top, whole = (None, None) if own.start else self._heads(head)
        compiled = compile_layers(layers, kinds)
        rollout = None
        if top is not None and stages is None and scale == 1.0:
            parts = RolloutParts(embedding=embedding, norm=norm, head=top)
            rollout = compile_rollout(compiled, parts)
        captured = None
        if top is not None and stages is None:
            captured = self._captured(layers, kinds, (embedding, norm, top))
        check_bits(self.options, self.fixed)
        self._log_held()
        return Decoder(
            shape=shape,
            embedding=embedding,
            embedding_scale=None if scale == 1.0 else like.new_tensor(scale),
            kinds=kinds,
            layers=tuple(layers),
            norm=norm,
            top=top,
            head=whole,
            compiled=compiled,
            rollout=rollout,
            stages=stages,
            captured=captured,
        )

    def _captured(
        self,
        layers: Sequence[Layer],
        kinds: tuple[LayerKind, ...],
        ends: tuple[Embedding, RMSNorm, Linear],
    ) -> CapturedSteps | None:
        """Whole steps, where a GPU's kernels have all parts."""
        embedding, norm, head = ends
        kernels = self.backend.gpu
        if kernels is None or not isinstance(head, GpuLinear) or embedding.is_packed:
            return None
        parts = DecoderParts(
            embedding=embedding,
            scale=float(torch.tensor(self.shape.embedding_scale, dtype=embedding.dtype)),
            layers=tuple(layers),
            kinds=kinds,
            norm=norm,
            head=head,
            softcap=self.shape.logit_softcap,
        )
        return capture(parts, kernels, kernels.recorder())

    def _ends(self) -> tuple[Embedding, Weights | KernelLinear]:
        """The embedding, and what the output head is made of: itself, where the embedding reads
        from it."""
        source, name = self.checkpoint, "model.embed_tokens"
        size = (self.shape.vocab_size, self.shape.hidden_size)
        tied = self.shape.tie_word_embeddings
        if tied:
            source.ignore("lm_head.weight")
        if not self._packs_tables:
            table_VD = source.keep(f"{name}.weight", size)
            stored = self.shape.stored is not None
            found = source.matrix(name, size) if tied and stored else table_VD
            head = table_VD if isinstance(found, Tensor) else found
            return Embedding(table_VD), head if tied else source.matrix("lm_head", size)
        shares = tied and not self.options.quantization  # a head that is rounded is another one
        table = source.matrix(name, size) if shares else source.table(name, size)
        if isinstance(table, Tensor) and not (shares or table.is_meta):
            return Embedding(table), table if tied else source.matrix("lm_head", size)
        packed = self.linear([table], is_head=True, is_table=not tied)
        assert isinstance(packed, KernelLinear), type(packed)
        return Embedding(packed), packed if tied else source.matrix("lm_head", size)

    @property
    def _packs_tables(self) -> bool:
        """Whether kernels here give rows of a packed table. Processes that share the output head
        need floats beside it: none of them has all of the head."""
        options = self.options
        kernels = self.backend.library is not None and options.dtype in TYPES
        return kernels and options.share.size == 1

    def _stages(self) -> Stages | None:
        """Who has which layers, where they are not all here."""
        group, options = self.options.group, self.options
        if group is None or not options.by_layers:
            return None
        return Stages(group, self.shape.num_hidden_layers, options.points)

    def _heads(self, weights: Weights | KernelLinear) -> tuple[Linear, Linear | None]:
        """What makes a step's logits, and what makes them without other ranks."""
        if isinstance(weights, KernelLinear):
            return weights, weights
        options, outputs = self.options, self.shape.vocab_size
        part = Part(weights, None).cut(options.share.of(outputs))
        own = self.linear([part.weight], is_head=True)
        if options.share.size == 1:
            return own, own
        whole = options.keeps_head and not options.share.rank
        alone = self.linear([weights], is_head=True) if whole else None
        return self._gathered(own, outputs), alone

    def _log_held(self) -> None:
        """Say once what a quantized checkpoint became."""
        stored = self.shape.stored
        if stored is None:
            return
        counts = "; ".join(f"{count} as {label}" for label, count in self.held.most_common())
        logger.info("%s: matrices are kept %s", stored.describe(), counts)
        if stored.rounds_activations and self.options.x_bits != 8:
            logger.warning("%s: activations are not rounded to 8 bits here", stored.describe())
