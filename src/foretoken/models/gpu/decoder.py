"""A decoder's pass as a GPU's launches, nine a layer, twelve of a mixture, over memory that is
kept between them.

Who records them and plays them again is `models.gpu.captured`. The weights belong to the layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from foretoken.kernels.gpu_kernels import (
    AttentionCall,
    ExpertPairs,
    GpuKernels,
    Kept,
    Partials,
    QueryKeyNorm,
    Rotary,
)
from foretoken.kv.features import FINAL, FeatureStore, FeatureView
from foretoken.kv.store import KVStore
from foretoken.layers.attention import AttentionBlock
from foretoken.layers.decoder_layer import Layer, LayerKind, Scaled
from foretoken.layers.embedding import Embedding
from foretoken.layers.mixture import Mixture
from foretoken.layers.mlp import GatedMLP
from foretoken.layers.norm import RMSNorm
from foretoken.models.gpu.mixture import GpuMixture, as_gpu, bind_mixture, knows_mixture
from foretoken.models.gpu.step_buffers import DevicePass
from foretoken.ops.activation import COMPILED
from foretoken.ops.attention.gpu import GpuAttention, layer_of, most_partials, run_attention
from foretoken.ops.gpu.drawing import choose
from foretoken.ops.linear.gpu import GpuLinear
from foretoken.shape.memory_formula import RECORDED_ROWS
from foretoken.shape.mixtures.experts import Experts


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderParts:
    """What a decoder consists of."""

    embedding: Embedding
    scale: float
    """Of embeddings."""
    layers: tuple[Layer, ...]
    kinds: tuple[LayerKind, ...]
    norm: RMSNorm
    head: GpuLinear
    """One part."""
    softcap: float | None
    """Of logits."""
    experts: Experts | None = None
    """Of layers that have a mixture."""
    beside: "BesideParts | None" = None
    """Of a head that takes embedded tokens beside a stream, which goes on from token to token."""
    blocks: "BlockParts | None" = None
    """Of a head that drafts in blocks."""

    @property
    def around(self) -> "BesideParts | BlockParts | None":
        """Of a head."""
        return self.blocks if self.beside is None else self.beside


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideParts:
    """What stands around the layers of such a head."""

    mixer: GpuLinear | None
    """Makes the stream of features; None: it is given."""
    features: FeatureView
    ids_N: Tensor
    """int64, ascending: the token of each of the head's outputs."""
    vocab_size: int
    """Tokens of the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockParts:
    """What stands around the layers of such a head."""

    mixer: GpuLinear
    """Makes context rows of features, before `context_norm`."""
    context_norm: RMSNorm
    features: FeatureView
    whole: tuple[bool, ...]
    """Of each kind of layers, whether a row sees all of its block."""
    ids_N: Tensor | None
    """int64, ascending: the token of each of the head's outputs; None: their numbers."""
    vocab_size: int
    """Tokens of the target."""
    shorts_VR: Tensor | None = None
    """A short embedding of each token; None: no row depends on the one before."""
    follow: GpuLinear | None = None
    """Makes of that what is added to the logits of the row after the token."""
    judge: GpuLinear | None = None
    """How sure a draft is, of an output and a short embedding, before a bias and a sigmoid; None:
    as its best token is probable."""
    judge_bias: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    """The matrices of a layer."""

    qkv: GpuLinear
    out: GpuLinear
    mlp: "_BoundMLP | GpuMixture"


@dataclass(frozen=True, slots=True, kw_only=True)
class _BoundMLP:
    """Those of a plain MLP."""

    gate_up: GpuLinear
    down: GpuLinear
    activation: int

    @property
    def inner(self) -> int:
        """Numbers between them."""
        return self.down.weights.inputs


class _Part(NamedTuple):
    """What part of a layer gives, as `GpuKernels.add_norm` adds it."""

    sums_PTD: Tensor | None = None
    bias_D: Tensor | None = None
    weights_TP: Tensor | None = None


class Workspace:
    """Memory between the kernels of a pass of up to so many rows."""

    def __init__(
        self, parts: DecoderParts, bound: Sequence[_Bound], partials: Partials, rows: int
    ) -> None:
        self.partials = partials
        like, geometry = parts.embedding, parts.layers[0].attention.geometry
        hidden, heads = like.shape[1], geometry.num_heads * geometry.head_dim
        inner = max(layer.mlp.inner for layer in bound)

        def empty(*size: int, dtype: torch.dtype = like.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=like.device)

        self.rows = rows
        self.normed_TD, self.hidden_TD = empty(rows, hidden), empty(rows, hidden)
        self.streams = [empty(rows, hidden)]
        """Two where one pass goes on with rows of the other."""
        if parts.beside is not None:
            self.streams.append(empty(rows, hidden))
            self.given_TD = empty(rows, hidden)
            """Where a stream begins that is given; what runs twice begins there twice."""
            self.embedded_TD, self.both_TX = empty(rows, hidden), empty(rows, 2 * hidden)
            self.mixed_TD = empty(RECORDED_ROWS + 1, hidden)
            """Of a recorded pass; the last is 0."""
            self.masks_KD = empty(rows + 1, hidden, dtype=torch.float32)
            """Number 0 is 0."""
        if parts.blocks is not None:
            shorts_VR = parts.blocks.shorts_VR
            self.judged_TX = empty(rows, hidden + (0 if shorts_VR is None else shorts_VR.shape[1]))
            """An output, and the short embedding of the token before."""
        if parts.around is not None:
            self.gathered_TF = empty(rows, parts.around.features.width)
            self.every_T = torch.arange(rows, dtype=torch.int32, device=like.device)
        self.q_TA, self.attended_TA = empty(rows, heads), empty(rows, heads)
        self.gated = empty(rows * inner)
        most = 0
        several = [one for layer in bound for one in (layer.qkv, layer.out)]
        several += [one.mlp.down for one in bound if isinstance(one.mlp, _BoundMLP)]
        mixtures = [one.mlp for one in bound if isinstance(one.mlp, GpuMixture)]
        several += [one.router for one in mixtures]
        if parts.around is not None and parts.around.mixer is not None:
            several.append(parts.around.mixer)
        for one in several:
            most = max(most, one.outputs * max(one.most_parts, rows))
        if mixtures and parts.experts is not None:
            self.pairs = ExpertPairs.empty(rows, parts.experts, like.device)
            most = max(most, parts.experts.results * rows * hidden)
        self.parts = empty(most, dtype=torch.float32)


@final
class GpuDecoder:
    """Launches the kernels of one pass."""

    def __init__(self, parts: DecoderParts, kernels: GpuKernels) -> None:
        self.parts, self.kernels = parts, kernels
        self.bound = [_bind(layer, parts.experts) for layer in parts.layers]
        ids_N = None if parts.around is None else parts.around.ids_N
        self.names_N = None if ids_N is None else ids_N.int()
        self.num_mixtures = sum(isinstance(one.mlp, GpuMixture) for one in self.bound)
        self.shape = _attention(parts.kinds[0]).shape
        """Of attention; kinds of layers differ in windows alone."""
        positions = parts.kinds[0].rotary.cos.shape[0]
        self.most_partials = most_partials(kernels, self.shape, positions)
        self.rotary = [
            Rotary(
                kind.rotary.cos.squeeze(1),
                kind.rotary.sin.squeeze(1),
                None if kind.rotary.query_scale is None else kind.rotary.query_scale.flatten(),
            )
            for kind in parts.kinds
        ]

    def mix(self, one: DevicePass, work: Workspace) -> None:
        """The stream of a head's first pass, of features of the rows' slots and of masks."""
        parts, kernels, rows = self.parts.beside, self.kernels, len(one.tokens_T)
        assert parts is not None and parts.mixer is not None, "asked where features are read"
        stream_TD, masked = work.streams[0][:rows], len(one.mask_T) > 0
        mixed_TD = work.mixed_TD[:rows] if masked else stream_TD
        self._mix(parts.mixer, parts.features, one.slots_T, work, mixed_TD)
        if masked:
            # A row's own features, those of its anchor or none, and its mask.
            kernels.take_rows(work.mixed_TD, one.anchor_T, stream_TD)
            mask_TD = work.parts[: stream_TD.numel()].view_as(stream_TD)
            kernels.take_rows(work.masks_KD, one.mask_T, mask_TD)
            eps = self.parts.norm.eps
            kernels.add_norm(mask_TD[None], None, stream_TD, None, work.normed_TD[:rows], eps)

    def _mix(
        self,
        mixer: GpuLinear,
        features: FeatureView,
        slots_T: Tensor,
        work: Workspace,
        mixed_TD: Tensor,
    ) -> None:
        """Features of these slots, mixed."""
        gathered_TF, at = work.gathered_TF[: len(slots_T)], 0
        for columns in features.pieces:
            width = columns.stop - columns.start
            rows_SF = features.slots_SF[:, columns]
            self.kernels.take_rows(rows_SF, slots_T, gathered_TF[:, at : at + width])
            at += width
        sums_PTD = self._run(mixer, gathered_TF, work)
        self.kernels.add_parts(sums_PTD, mixer.bias_N, None, mixed_TD)

    def read_context(self, one: DevicePass, work: Workspace) -> None:
        """What each layer of a block head makes keys and values of, behind the rows of blocks."""
        blocks, rows, fed = self.parts.blocks, len(one.tokens_T), len(one.features_T)
        assert blocks is not None, "asked of block heads"
        if fed:
            mixed_TD, norm = work.hidden_TD[:fed], blocks.context_norm
            self._mix(blocks.mixer, blocks.features, one.features_T, work, mixed_TD)
            context_TD = work.normed_TD[rows : rows + fed]
            self.kernels.add_norm(None, None, mixed_TD, norm.weight_D, context_TD, norm.eps)

    def write_context(self, one: DevicePass, work: Workspace, store: KVStore) -> None:
        """Keys and values of a context alone."""
        for index in range(len(self.parts.layers)):
            self._write(index, work.normed_TD[: len(one.slots_T)], one, work, store)

    def draft_blocks(
        self,
        one: DevicePass,
        work: Workspace,
        steps: int,
        logits_RV: Tensor,
        tokens_R: Tensor,
        chances_R: Tensor | None,
    ) -> None:
        """Choose the tokens of blocks' rows, one row of each block after the other.

        Args:
            one: with rows of logits step by step, B of each.
            work: their outputs are in `hidden_TD`.
            steps: rows of each block.
            logits_RV: what the head made of them, and B rows more.
            tokens_R: results.
            chances_R: how sure each is, before a sigmoid if the head judges; None: nobody asks.
        """
        blocks, kernels, count = self.parts.blocks, self.kernels, len(one.newest_B)
        assert blocks is not None, "asked of block heads"
        before_B, width = one.newest_B, work.hidden_TD.shape[1]
        for step in range(steps):
            own = slice(step * count, (step + 1) * count)
            own_BV, output_BD, both_BX = logits_RV[own], work.hidden_TD[own], work.judged_TX[:count]
            if blocks.shorts_VR is not None and blocks.follow is not None:
                kernels.take_rows(blocks.shorts_VR, before_B, both_BX[:, width:])
                added_BV = logits_RV[steps * count :][:count]
                blocks.follow.run(both_BX[:, width:], added_BV[None])
                kernels.add_parts(added_BV[None], None, own_BV, own_BV)
            if chances_R is not None and blocks.judge is not None:
                kernels.take_rows(output_BD, work.every_T[:count], both_BX[:, :width])
                blocks.judge.run(both_BX, chances_R[own].view(1, count, 1))
            elif chances_R is not None:
                kernels.chance(own_BV, chances_R[own])
            how, names_N = (one.keys_R2[own], one.how_R4[own]), self.names_N
            choose(kernels, own_BV, how, tokens_R[own], names_N, filtered=one.filtered)
            before_B = tokens_R[own]

    def _first(self, one: DevicePass, work: Workspace, stream_TD: Tensor) -> Tensor:
        """What the first layer of a head reads: embedded tokens and the stream, both normed."""
        kernels, layer, rows = self.kernels, self.parts.layers[0], len(stream_TD)
        assert layer.beside_norm is not None and layer.attention_norm is not None, "of a head"
        embedded_TD, both_TX = work.embedded_TD[:rows], work.both_TX[:rows]
        own_TD, beside_TD = both_TX.chunk(2, 1)
        kernels.embed(one.tokens_T, self.parts.embedding.floats(), 1.0, embedded_TD)
        eps = layer.beside_norm.eps
        kernels.add_norm(None, None, embedded_TD, layer.beside_norm.weight_D, own_TD, eps)
        kernels.add_norm(None, None, stream_TD, layer.attention_norm.weight_D, beside_TD, eps)
        if layer.from_norm:
            kernels.take_rows(beside_TD, work.every_T[:rows], stream_TD)
        return both_TX

    def body(
        self,
        one: DevicePass,
        work: Workspace,
        store: KVStore,
        features: FeatureStore | None,
        stream_TD: Tensor,
        read_L: Tensor,
    ) -> None:
        """From tokens to the stream and its norm, in `work.normed_TD`; keys, values and features
        are kept, and how many experts each mixture read. The stream of a head is there before."""
        parts, kernels, rows = self.parts, self.kernels, len(one.tokens_T)
        normed_TD = work.normed_TD[:rows]

        def add(
            part: _Part, norm: RMSNorm | None, after: RMSNorm | None = None, **kept: Kept | None
        ) -> None:
            """The stream goes on, and is normed for the next layer."""
            if part.sums_PTD is None and norm is None and not any(kept.values()):
                return
            kernels.add_norm(
                part.sums_PTD,
                part.bias_D,
                stream_TD,
                None if norm is None else norm.weight_D,
                normed_TD,
                parts.norm.eps,
                after_D=None if after is None else after.weight_D,
                weights_TP=part.weights_TP,
                **kept,
            )

        if parts.beside is None:
            table = parts.embedding.floats()
            kernels.embed(one.tokens_T, table, parts.scale, stream_TD)
            add(_Part(), parts.layers[0].attention_norm, kept=_kept(features, 0, one))
        following = [layer.attention_norm for layer in parts.layers[1:]] + [parts.norm]
        for index, (layer, bound) in enumerate(zip(parts.layers, self.bound, strict=True)):
            # With what is fed behind the rows.
            x_TD = work.normed_TD[: len(one.slots_T)] if layer.attention_norm else stream_TD
            if layer.beside_norm is not None:
                x_TD = self._first(one, work, stream_TD)
            attended_TA = self._attend(index, x_TD, one, work, store)
            out = _Part(self._run(bound.out, attended_TA, work), bound.out.bias_N)
            add(out, layer.mlp_norm, _after(layer.after_attention))
            x_TD = stream_TD if layer.mlp_norm is None else normed_TD
            last = index + 1 == len(parts.layers)
            add(
                self._mixed(index, x_TD, one, work, read_L[index : index + 1]),
                following[index],
                _after(layer.after_mlp),
                kept=None if last else _kept(features, index + 1, one),
                kept_normed=_kept(features, FINAL, one) if last else None,
            )

    def _mixed(
        self, index: int, x_TD: Tensor, one: DevicePass, work: Workspace, read_1: Tensor
    ) -> _Part:
        """What a layer's MLP or mixture gives."""
        mlp = self.bound[index].mlp
        if isinstance(mlp, GpuMixture):
            room = work.pairs, work.gated, work.parts
            y_STD, weights_TS = mlp.run(self.kernels, x_TD, one.live_1, read_1, room)
            return _Part(y_STD, weights_TP=weights_TS)
        gated_TF = work.gated[: len(x_TD) * mlp.inner].view(len(x_TD), mlp.inner)
        gate_up = mlp.gate_up
        self.kernels.gate_up(x_TD, gate_up.weights, gate_up.bias_N, mlp.activation, gated_TF)
        return _Part(self._run(mlp.down, gated_TF, work), mlp.down.bias_N)

    def logits(self, one: DevicePass, work: Workspace, logits_RV: Tensor) -> None:
        """The head over the rows that are asked for, which are left in `work.hidden_TD`."""
        count = len(one.rows_R)
        self.kernels.take_rows(work.normed_TD, one.rows_R, work.hidden_TD[:count])
        self.parts.head.run(work.hidden_TD[:count], logits_RV[None])
        if self.parts.softcap is not None:
            self.kernels.cap(logits_RV, self.parts.softcap)

    def _attend(
        self, index: int, x_TD: Tensor, one: DevicePass, work: Workspace, store: KVStore
    ) -> Tensor:
        """Attention of one layer, before its output projection."""
        kind, blocks = self.parts.layers[index].kind, self.parts.blocks
        rows, shape = len(one.tokens_T), _attention(self.parts.kinds[kind]).shape
        q_THh = self._write(index, x_TD, one, work, store)[:rows]
        layer, attended_TA = layer_of(store.layers[index]), work.attended_TA[:rows]
        step, sinks_H = one.attention, _block(self.parts.layers[index]).sinks_H
        if blocks is not None and not blocks.whole[kind]:
            step = step._replace(lasts_T=None)
        on = AttentionCall(q_THh, layer, shape, step, work.partials, attended_TA, sinks_H)
        run_attention(self.kernels, on, one.pieces)
        return attended_TA

    def _write(
        self, index: int, x_TD: Tensor, one: DevicePass, work: Workspace, store: KVStore
    ) -> Tensor:
        """The queries of one layer; keys and values are stored."""
        block, bound, rows = _block(self.parts.layers[index]), self.bound[index], len(x_TD)
        kind, norms = self.parts.layers[index].kind, block.norms
        shape = _attention(self.parts.kinds[kind]).shape
        q_THh = work.q_TA[:rows].view(rows, shape.num_heads, shape.head_dim)
        norm = None
        if norms is not None:
            norm = QueryKeyNorm(
                norms.query.weight_D, norms.key.weight_D, norms.query.eps, norms.whole
            )
        self.kernels.turn_and_write(
            self._run(bound.qkv, x_TD, work),
            bound.qkv.bias_N,
            norm,
            self.rotary[kind],
            one.places_T,
            one.slots_T,
            q_THh,
            layer_of(store.layers[index]),
        )
        return q_THh

    @staticmethod
    def _run(linear: GpuLinear, x_TK: Tensor, work: Workspace) -> Tensor:
        """The layer's parts, in the workspace."""
        rows, outputs = len(x_TK), linear.outputs
        parts = linear.num_parts(rows)
        parts_PTN = work.parts[: parts * rows * outputs].view(parts, rows, outputs)
        linear.run(x_TK, parts_PTN)
        return parts_PTN


def knows(parts: DecoderParts) -> bool:
    """Whether a GPU's kernels have all parts of a decoder."""
    norms = [parts.norm]
    for layer in parts.layers:
        if not _is_known(layer, parts.experts):
            return False
        own = (layer.attention_norm, layer.mlp_norm, layer.after_attention, layer.after_mlp)
        norms += [norm for norm in (*own, layer.beside_norm) if isinstance(norm, RMSNorm)]
    known = all(isinstance(kind.attention, GpuAttention) for kind in parts.kinds)
    return known and len({norm.eps for norm in norms}) == 1 and parts.head.most_parts == 1


def _is_known(layer: Layer, experts: Experts | None) -> bool:
    """Whether each part of the layer is one that the kernels have."""
    attention, mlp = layer.attention, layer.mlp
    if not isinstance(attention, AttentionBlock) or not attention.kernels_know:
        return False
    if layer.input is not None or layer.scale is not None:
        return False
    if isinstance(layer.after_attention, Scaled) or isinstance(layer.after_mlp, Scaled):
        return False
    linears = [attention.qkv, attention.out]
    if isinstance(mlp, GatedMLP):
        linears += [mlp.gate_up, mlp.down]
        known = mlp.activate in COMPILED
    else:
        known = isinstance(mlp, Mixture) and experts is not None and knows_mixture(mlp, experts)
    return known and all(isinstance(linear, GpuLinear) for linear in linears)


def _block(layer: Layer) -> AttentionBlock:
    assert isinstance(layer.attention, AttentionBlock), type(layer.attention).__name__
    return layer.attention


def _after(norm: RMSNorm | Scaled | None) -> RMSNorm | None:
    assert not isinstance(norm, Scaled), norm
    return norm


def _bind(layer: Layer, experts: Experts | None) -> _Bound:
    attention, mlp = _block(layer), layer.mlp
    bound: _BoundMLP | GpuMixture
    if isinstance(mlp, GatedMLP):
        gate_up, down = as_gpu(mlp.gate_up), as_gpu(mlp.down)
        bound = _BoundMLP(gate_up=gate_up, down=down, activation=COMPILED[mlp.activate])
    else:
        assert isinstance(mlp, Mixture) and experts is not None, type(mlp).__name__
        bound = bind_mixture(mlp, experts)
    return _Bound(qkv=as_gpu(attention.qkv), out=as_gpu(attention.out), mlp=bound)


def _attention(kind: LayerKind) -> GpuAttention:
    assert isinstance(kind.attention, GpuAttention), type(kind.attention).__name__
    return kind.attention


def _kept(features: FeatureStore | None, point: int, one: DevicePass) -> Kept | None:
    """Where a point's rows go, if it is wanted."""
    columns = None if features is None else features.columns.get(point)
    if features is None or columns is None:
        return None
    return Kept(features.slots_SF[:, columns], one.slots_T)
