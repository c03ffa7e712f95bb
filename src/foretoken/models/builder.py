"""Builds a decoder of our own layers from a checkpoint, whose tensors have Hugging Face's names.

The shape says which parts the model has and its family how they are stored; this file knows how
they are fused.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from foretoken.backend import Backend, LinearSpec
from foretoken.config.reader import require
from foretoken.kernels.linear import TYPES, Packed
from foretoken.layers.attention import AttentionBlock, HeadNorms
from foretoken.layers.decoder_layer import Layer, LayerKind, Scaled
from foretoken.layers.embedding import Embedding
from foretoken.layers.gathered import GatheredLinear, GatheredMixture
from foretoken.layers.gathered_gpu import OutputsLinear, SegmentsLinear
from foretoken.layers.layer_inputs import LayerInput, LayerInputs
from foretoken.layers.mixture import Expert, Mixture, MixtureBeside, Router, inner_activation
from foretoken.layers.mlp import GatedMLP
from foretoken.layers.norm import RMSNorm
from foretoken.layers.rope import RotaryTable
from foretoken.models.base import LoadOptions, check_bits
from foretoken.models.compiled_layers import compile_layers
from foretoken.models.decoder import Decoder
from foretoken.models.gpu.captured import CapturedSteps, capture
from foretoken.models.gpu.decoder import DecoderParts
from foretoken.models.rollout import RolloutParts, compile_rollout
from foretoken.models.stages import Stages
from foretoken.models.weight_cache import PackedLayers, WeightSource
from foretoken.ops.activation import ACTIVATIONS
from foretoken.ops.attention import Geometry
from foretoken.ops.linear import KernelLinear, Linear, RowProbe
from foretoken.ops.linear.gpu import GpuLinear
from foretoken.ops.mixture_kernel import ExpertCounter, MixtureKernel, MixtureParts, find_kernel
from foretoken.quant import Weights, join
from foretoken.quant.arrange import (
    change_columns,
    change_rows,
    halve_heads,
    join_rows,
    split_rows,
)
from foretoken.shape import ModelFamily, ModelShape, RopeShape
from foretoken.shape.memory_formula import copies_of
from foretoken.shape.mixtures.experts import Experts

logger = logging.getLogger("foretoken")
Use: TypeAlias = Literal["gate", "sums", "head"]
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

    def halved(self, heads: int) -> "Part":
        """Its outputs, of so many heads whose turned dimensions alternate, half by half."""
        if self.bias is None:
            return Part(halve_heads(self.weight, heads), None)
        bias = halve_heads(self.bias, heads)
        assert isinstance(bias, Tensor), type(bias)
        return Part(halve_heads(self.weight, heads), bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnHeads:
    """The heads of a layer, and which of them a process computes."""

    total_keys: int
    size: int
    queries: int
    """Query heads of a key head."""
    own_keys: range
    own_queries: range
    """Which query heads of each of those."""
    by_key: bool
    """Whether attention has them as they are stored."""

    def rows(self, size: int) -> range:
        """Of a matrix with so many for each query head."""
        first = self.own_keys.start * self.queries + self.own_queries.start
        return range(first * size, (first + len(self.own_keys) * len(self.own_queries)) * size)

    @property
    def key_rows(self) -> range:
        """Of the matrix of keys, or of values."""
        return range(self.own_keys.start * self.size, self.own_keys.stop * self.size)

    def reordered(self, rows: Tensor) -> Tensor:
        """Those of its query heads as attention wants them."""
        keys, queries = len(self.own_keys), len(self.own_queries)
        return rows if self.by_key else group_major(rows, keys, queries)


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
    experts_read: ExpertCounter = field(default_factory=ExpertCounter)
    """What layers with experts tell when they run."""
    fixed: Counter[int] = field(default_factory=Counter)
    """How many of them round their rows to so many bits."""

    def linear(
        self,
        parts: Sequence[Weights],
        bias_N: Tensor | None = None,
        *,
        adds_residual: bool = False,
        use: Use | None = None,
        is_table: bool = False,
        of_outputs: int = 0,
    ) -> Linear:
        """The parts, one over the other; the rest as for `LinearSpec`.

        `use`: whether it is a head, or a gate with what it gates, or keeps its sums. Parts that are
        quantized differently run side by side. Of a table only rows are read.
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
                    keeps_sums=use == "sums",
                    packed=packed,
                    is_gate=use == "gate",
                    is_head=use == "head",
                    quantization=self.options.quantization,
                    x_bits=self.options.x_bits,
                    of_outputs=of_outputs,
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

    def choosing(self, name: str, outputs: int, *, wide: bool, bias: bool = False) -> Linear:
        """A small matrix that decides or weighs: it is never rounded.

        Args:
            name: of its module.
            outputs: it has.
            wide: whether it is float32, whatever the model's type.
            bias: whether it has one.
        """
        source, dtype = self.checkpoint, torch.float32 if wide else self.options.dtype
        weight = source.keep(f"{name}.weight", (outputs, self.shape.hidden_size), dtype)
        bias_N = source.keep(f"{name}.bias", (outputs,), dtype) if bias else None
        [(weights, packed)] = self._joined([weight])
        made = self.backend.linear(
            LinearSpec(
                weights=weights,
                dtype=dtype,
                bias_N=bias_N,
                is_wide=dtype != self.options.dtype,
                packed=packed,
                probe=self.probe,
            )
        )
        if self.packed is not None:
            self.packed.made([made])
        return made

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
        shape, heads = self.shape, self._heads_of(self.shape.window(layer))
        size, kv_size = heads.size, heads.total_keys * heads.size
        query_size = shape.num_attention_heads * size
        if shape.kv_layer(layer) != layer:
            return self._reading(prefix, self.geometry(shape.window(layer)))
        one = shape.keys_are_values and shape.window(layer) is None
        sizes = {"q": query_size, "k": kv_size} | ({} if one else {"v": kv_size})
        whole = self.parts(prefix, sizes, bias=shape.qkv_bias)
        whole = [*whole, *whole[1:]][:3]
        if self.family.pairs_on_disk:
            counts = (shape.num_attention_heads, heads.total_keys)
            turned = [part.halved(count) for part, count in zip(whole, counts, strict=False)]
            whole = [*turned, whole[2]]
        q = whole[0].cut(heads.rows(size))
        k, v = (part.cut(heads.key_rows) for part in whole[1:])
        bias_N = None
        if q.bias is not None and k.bias is not None and v.bias is not None:
            bias_N = torch.cat([heads.reordered(q.bias), k.bias, v.bias])
        sinks_H, gate = None, None
        if shape.sinks:
            name, count = f"{prefix}.sinks", shape.num_attention_heads
            every = self.checkpoint.keep(name, (count,), torch.float32)
            own = heads.rows(1)
            sinks_H = heads.reordered(every[own.start : own.stop]).contiguous()
        if shape.output_gate:
            stored = self.checkpoint.matrix(f"{prefix}.gate_proj", (query_size, shape.hidden_size))
            mine = Part(stored, None).cut(heads.rows(size))
            gate = self.linear([change_rows(mine.weight, heads.reordered)])
        return AttentionBlock(
            qkv=self.linear(
                [change_rows(q.weight, heads.reordered), k.weight, v.weight],
                bias_N,
                of_outputs=query_size + 2 * kv_size,
            ),
            out=self._out(prefix, heads),
            geometry=self.geometry(shape.window(layer)),
            norms=self._head_norms(prefix, heads),
            sinks_H=sinks_H,
            gate=gate,
        )

    def _out(self, prefix: str, heads: OwnHeads) -> Linear:
        """From the heads back to the stream."""
        shape = self.shape
        width = shape.num_attention_heads * heads.size
        out = self._down(f"{prefix}.o_proj", width, bias=shape.out_bias)
        size = self.options.share.size
        made = self._back(
            # A rank has some key heads, so of each block of as many queries it has some.
            Part(self._columns_by_group(out.weight, heads), out.bias),
            len(heads.own_queries),
            copies_of(heads.total_keys, size),
        )
        if isinstance(made, SegmentsLinear):
            allowed = (
                f"a number that cuts {heads.total_keys} key heads, of {heads.queries} x "
                f"{heads.size} inputs each, where it cuts {made.segments} segments of "
                f"{made.weights.segment} on a GPU"
            )
            cuts_alike = made.own_inputs == heads.rows(heads.size)
            require("tensor_parallel_size", size, cuts_alike, allowed)
        return made

    def _reading(self, prefix: str, geometry: Geometry) -> AttentionBlock:
        """That of a layer that reads the keys and values of another one."""
        shape, heads = self.shape, self._heads_of(geometry.window)
        for unused in ("k_proj", "v_proj", "k_norm", "v_norm"):
            self.checkpoint.ignore(f"{prefix}.{unused}")
        sizes = {"q": shape.num_attention_heads * heads.size}
        [q] = self.parts(prefix, sizes, bias=shape.qkv_bias)
        bias_N = None if q.bias is None else heads.reordered(q.bias)
        norm = self.norm(f"{prefix}.q_norm", heads.size) if shape.head_norms else None
        return AttentionBlock(
            qkv=self.linear([change_rows(q.weight, heads.reordered)], bias_N),
            out=self._out(prefix, heads),
            geometry=geometry,
            norms=None if norm is None else HeadNorms(norm, norm),
            keeps=False,
        )

    def _head_norms(self, prefix: str, heads: OwnHeads) -> HeadNorms | None:
        """Norms of queries and keys, if there are any."""
        shape, names = self.shape, (f"{prefix}.q_norm", f"{prefix}.k_norm")
        if shape.head_norms:
            query, key = (self.norm(name, heads.size) for name in names)
            value = None
            if shape.value_norms:
                value = RMSNorm(torch.ones_like(key.weight_D), shape.rms_norm_eps)
            return HeadNorms(query, key, after_turning=shape.norms_after_turning, value=value)
        if not shape.whole_norms:
            return None
        assert self.options.share.size == 1, "these norms reach over all heads"
        query = self.norm(names[0], shape.query_size, heads.reordered)
        key = self.norm(names[1], shape.kv_size)
        return HeadNorms(query, key, whole=True)

    def _heads_of(self, window: int | None) -> OwnHeads:
        """Heads of the layers with this window that are computed here."""
        keys, share = self.shape.heads(window), self.options.share
        queries = self.shape.num_attention_heads // keys.heads
        return OwnHeads(
            total_keys=keys.heads,
            size=keys.size,
            queries=queries,
            own_keys=share.key_heads(keys.heads),
            own_queries=share.queries(keys.heads, queries),
            by_key=self._on_gpu,
        )

    @property
    def _on_gpu(self) -> bool:
        """Whether a GPU's kernels take the model's type."""
        kernels = self.backend.gpu
        return kernels is not None and self.options.dtype in kernels.types

    def _columns_by_group(self, weights: Weights, heads: OwnHeads) -> Weights:
        """The output projection for heads in attention's order, those of all ranks."""
        if heads.queries == 1 or heads.by_key:
            return weights

        def reordered(rows: Tensor) -> Tensor:
            return group_major(rows, heads.total_keys, heads.queries)

        changed = change_columns(weights, reordered, heads.size)
        if changed is None:
            changed = change_columns(self._floats(weights), reordered, heads.size)
        assert changed is not None, "floats have no groups"
        return changed

    def _down(self, name: str, width: int, *, bias: bool, keeps_sums: bool = False) -> Part:
        """A projection from `width` back to the hidden state; the outputs that are made here, all
        where ranks have some inputs."""
        hidden, source = self.shape.hidden_size, self.checkpoint
        weight = source.matrix(name, (hidden, width))
        whole = Part(weight, source.take(f"{name}.bias", (hidden,)) if bias else None)
        if self._by_segments and not keeps_sums:
            return whole
        return whole.cut(self.options.share.of(hidden))

    @property
    def _by_segments(self) -> bool:
        """Whether ranks have some inputs of what goes back to the stream."""
        return self._on_gpu and self.options.share.size > 1

    def _back(
        self, part: Part, blocks: int, copies: int = 1, *, keeps_sums: bool = False
    ) -> Linear:
        """The layer of such a projection; `blocks` and `copies` as for `GatheredLinear`,
        `keeps_sums` for those whose results are added to others before the stream."""
        shape = self.shape
        alone = shape.sandwich_norms or shape.branch_scale != 1.0 or keeps_sums
        use: Use | None = "sums" if keeps_sums else None
        own = self.linear([part.weight], part.bias, adds_residual=not alone, use=use)
        group = self.options.group
        if self._by_segments and not keeps_sums and group is not None:
            assert isinstance(own, GpuLinear), type(own).__name__
            return SegmentsLinear(own, group)
        return self._gathered(own, shape.hidden_size, blocks, copies)

    def _gathered(self, own: Linear, outputs: int, blocks: int = 0, copies: int = 1) -> Linear:
        """A layer with so many outputs, of which `own` makes this rank's."""
        group, size = self.options.group, self.options.share.size
        if group is None or size == 1:
            return own
        if isinstance(own, GpuLinear) and not blocks and outputs % size == 0:
            return OutputsLinear(own, group)
        return GatheredLinear(group, own, self.options.share.of(outputs), blocks, copies)

    def mlp(self, prefix: str, inner: int) -> GatedMLP:
        """gate and up as one matrix, and down."""
        bias = self.shape.mlp_bias
        gate_up, down = self._up_and_down(prefix, inner, bias=bias)
        return GatedMLP(gate_up=gate_up, down=down, activate=ACTIVATIONS[self.shape.hidden_act])

    def _up_and_down(
        self,
        prefix: str,
        inner: int,
        *,
        bias: bool,
        gated: bool = True,
        keeps_sums: bool = False,
    ) -> tuple[Linear, Linear]:
        """The matrices of an MLP, each of which this rank has its share of."""
        sizes = {"gate": inner, "up": inner} if gated else {"up": inner}
        whole = self.parts(prefix, sizes, bias=bias)
        down, own = None, self.options.share.of(inner)
        if self._by_segments and not keeps_sums:
            down = self._back(self._down(f"{prefix}.down_proj", inner, bias=bias), 1)
            assert isinstance(down, SegmentsLinear), type(down).__name__
            own = down.own_inputs
        mine = [part.cut(own) for part in whole]
        biases = [part.bias for part in mine if part.bias is not None]
        bias_N = torch.cat(biases) if biases else None
        gate_up = self.linear([part.weight for part in mine], bias_N, use="gate" if gated else None)
        if down is None:
            back = self._down(f"{prefix}.down_proj", inner, bias=bias, keeps_sums=keeps_sums)
            down = self._back(back, 1, keeps_sums=keeps_sums)
        return gate_up, down

    def mixture(self, prefix: str, experts: Experts) -> Mixture:
        """Router, experts, and what is beside them."""
        routing, name = experts.routing, f"{prefix}.gate"
        bias_E = None
        if routing.choice_bias:
            stored = f"{name}.e_score_correction_bias"
            bias_E = self.checkpoint.keep(stored, (experts.count,), torch.float32)
        scale_E = None
        if routing.expert_scales:
            stored = f"{name}.per_expert_scale"
            scale_E = self.checkpoint.keep(stored, (experts.count,), torch.float32)
        router = Router(
            linear=self.choosing(name, experts.count, wide=routing.wide, bias=routing.bias),
            used=experts.used,
            routing=routing,
            choice_bias_E=bias_E,
            scale_E=scale_E,
        )
        shared, shared_gate = None, None
        if experts.shared_width:
            beside, width = f"{prefix}.shared_expert", experts.shared_width
            gate_up, down = self._up_and_down(beside, width, bias=False, keeps_sums=True)
            activate = ACTIVATIONS[self.shape.hidden_act]
            shared = GatedMLP(gate_up=gate_up, down=down, activate=activate)
        if experts.shared == "gated":
            shared_gate = self.choosing(f"{prefix}.shared_expert_gate", 1, wide=False)
        pairs = [
            self._up_and_down(
                f"{prefix}.experts.{number}",
                experts.width,
                bias=experts.biases,
                gated=experts.is_gated,
                keeps_sums=True,
            )
            for number in range(experts.count)
        ]
        parts = MixtureParts(
            router=router.linear,
            choice_bias_E=bias_E,
            scale_E=scale_E,
            pairs=[(up, _own(down)) for up, down in pairs],
            shared=None if shared is None else (shared.gate_up, _own(shared.down), shared.activate),
            shared_gate=shared_gate,
        )
        kernel = find_kernel(experts, parts)
        self.experts_read.layers += 1
        return Mixture(
            router=router,
            experts=tuple(Expert(*pair) for pair in pairs),
            counter=self.experts_read,
            activate=inner_activation(experts),
            shared=shared,
            shared_gate=shared_gate,
            kernel=None if kernel is None else self._gathered_mixture(kernel),
        )

    def _gathered_mixture(self, own: MixtureKernel) -> MixtureKernel | GatheredMixture:
        """A mixture of which `own` has this rank's part."""
        group, share = self.options.group, self.options.share
        if group is None or share.size == 1:
            return own
        return GatheredMixture(group, own, share.of(self.shape.hidden_size))

    def layer(self, index: int, kind: int) -> Layer:
        """One decoder layer."""
        prefix, width = f"model.layers.{index}", self.shape.hidden_size
        before, between = f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm"
        mlp_norm, norms_before = between, self.shape.norms_before
        after_attention: RMSNorm | Scaled | None = None
        after_mlp: RMSNorm | Scaled | None = None
        if self.shape.branch_scale != 1.0:
            after_attention = after_mlp = Scaled(self.shape.branch_scale)
        if self.shape.sandwich_norms:
            mlp_norm = f"{prefix}.pre_feedforward_layernorm"
            after_attention = self.norm(between, width)
            after_mlp = self.norm(f"{prefix}.post_feedforward_layernorm", width)
        experts = self.shape.experts
        mlp: GatedMLP | Mixture | MixtureBeside
        if experts is None or not experts.layers[index]:
            mlp = self.mlp(f"{prefix}.mlp", self.shape.inner(index))
        elif experts.shared == "beside":
            mlp, norms_before = self._beside(prefix, index, experts), False
        else:
            mlp = self.mixture(f"{prefix}.mlp", experts)
        return Layer(
            kind=kind,
            attention_norm=self.norm(before, width) if self.shape.norms_before else None,
            attention=self.attention(f"{prefix}.self_attn", index),
            mlp_norm=self.norm(mlp_norm, width) if norms_before else None,
            mlp=mlp,
            after_attention=after_attention,
            after_mlp=after_mlp,
            input=self._layer_input(prefix) if self.shape.layer_inputs else None,
            scale=self._one(f"{prefix}.layer_scalar") if self.shape.layer_scalars else None,
        )

    def _one(self, name: str) -> Tensor:
        return self.checkpoint.keep(name, (1,))

    def _router_norm(self, name: str) -> RMSNorm:
        """Of the rows that a router reads: their norm times a scale and hidden_size ** -0.5."""
        hidden = self.shape.hidden_size
        scale_D = self.checkpoint.keep(f"{name}.scale", (hidden,))
        return RMSNorm(scale_D * hidden**-0.5, self.shape.rms_norm_eps)

    def _beside(self, prefix: str, index: int, experts: Experts) -> MixtureBeside:
        """A plain MLP and experts, each between norms."""
        width, feedforward = self.shape.hidden_size, f"{prefix}.{{}}_feedforward_layernorm"
        pre, post = feedforward.format("pre"), feedforward.format("post")
        return MixtureBeside(
            mlp=self.mlp(f"{prefix}.mlp", self.shape.inner(index)),
            mlp_norm=self.norm(pre, width),
            after_mlp=self.norm(f"{post}_1", width),
            mixture=self.mixture(f"{prefix}.mlp", experts),
            router_norm=self._router_norm(f"{prefix}.mlp.gate"),
            mixture_norm=self.norm(f"{pre}_2", width),
            after_mixture=self.norm(f"{post}_2", width),
        )

    def _layer_input(self, prefix: str) -> LayerInput:
        hidden, width = self.shape.hidden_size, self.shape.layer_inputs
        source = self.checkpoint
        gate = source.matrix(f"{prefix}.per_layer_input_gate", (width, hidden))
        back = source.matrix(f"{prefix}.per_layer_projection", (hidden, width))
        return LayerInput(
            gate=self.linear([gate]),
            activate=ACTIVATIONS[self.shape.hidden_act],
            projection=self.linear([back]),
            norm=self.norm(f"{prefix}.post_per_layer_input_norm", hidden),
        )

    def _layer_inputs(self) -> LayerInputs | None:
        """What makes the inputs of all layers."""
        shape, source = self.shape, self.checkpoint
        if not shape.layer_inputs:
            return None
        everything = shape.num_hidden_layers * shape.layer_inputs
        name = "model.embed_tokens_per_layer.weight"
        # Few rows are read of it: it stays where the file is mapped.
        table_VI = source.take(name, (shape.vocab_size, everything))
        matrix = source.matrix("model.per_layer_model_projection", (everything, shape.hidden_size))
        return LayerInputs(
            table=Embedding(table_VI),
            table_scale=table_VI.new_tensor(shape.layer_inputs**0.5),
            projection=self.linear([matrix]),
            norm=self.norm("model.per_layer_projection_norm", shape.layer_inputs),
            layers=shape.num_hidden_layers,
        )

    def geometry(self, window: int | None) -> Geometry:
        """Heads, types and kind of the attention of layers with this window."""
        shape, options, heads = self.shape, self.options, self._heads_of(window)
        return Geometry(
            num_heads=len(heads.own_keys) * len(heads.own_queries),
            num_kv_heads=len(heads.own_keys),
            by_key=heads.by_key,
            first_kv_head=heads.own_keys.start,
            head_dim=heads.size,
            page_size=options.page_size,
            dtype=options.dtype,
            device=options.device,
            window=window,
            softcap=shape.attention_softcap,
            scale=shape.attention_scale,
            kv_store_dtype=options.kv_store_dtype,
            has_sinks=shape.sinks,
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
        for drafting in range(shape.draft_layers):
            self.checkpoint.ignore(f"model.layers.{len(everywhere) + drafting}")
        layers = [self.layer(i, different.index(shape.view(i))) for i in own]
        norm, inputs = self.norm("model.norm", shape.hidden_size), self._layer_inputs()
        self.checkpoint.finish()
        like = torch.empty(0, dtype=embedding.dtype, device=embedding.device)
        kinds = tuple(self.kind(view, like) for view in different)
        scale = shape.embedding_scale
        stages = self._stages()
        top, whole = (None, None) if own.start else self._heads(head)
        stores = [shape.kv_layer(layer) - own.start for layer in own]
        compiled = compile_layers(layers, kinds, stores)
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
            layer_inputs=inputs,
            experts_read=self.experts_read if self.experts_read.layers else None,
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
            experts=self.shape.experts,
            ranks=self.options.group if self.options.share.size > 1 else None,
        )
        promised = self.options.batch_invariant
        return capture(parts, kernels, kernels.recorder(), keeps_bits=promised)

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
        packed = self.linear([table], use="head", is_table=not tied)
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
        own = self.linear([part.weight], use="head")
        if options.share.size == 1:
            return own, own
        whole = options.keeps_head and not options.share.rank
        alone = self.linear([weights], use="head") if whole else None
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


def _own(linear: Linear) -> Linear:
    """What of it is on this rank."""
    return linear.own if isinstance(linear, GatheredLinear) else linear
