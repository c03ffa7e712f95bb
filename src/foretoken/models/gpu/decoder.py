"""A decoder's pass as a GPU's launches, nine a layer, twelve of a mixture, over memory that is
kept between them.

Who records them and plays them again is `models.gpu.captured`. The weights belong to the layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from foretoken.kernels.gpu_kernels import (
    AddNorm,
    AttentionCall,
    AttentionShape,
    Devices,
    ExpertPairs,
    GpuKernels,
    Heads,
    Kept,
    Partials,
    QueryKeyNorm,
    Rotary,
)
from foretoken.kv.features import FINAL, FeatureStore, FeatureView
from foretoken.kv.store import KVStore
from foretoken.layers.decoder_layer import Layer, LayerKind, Scaled
from foretoken.layers.embedding import Embedding
from foretoken.layers.mixture import Mixture
from foretoken.layers.mlp import GatedMLP
from foretoken.layers.norm import RMSNorm
from foretoken.models.gpu.mixture import GpuMixture, GpuMLP, bind_mixture, bind_mlp
from foretoken.models.gpu.step_buffers import DevicePass
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
    ranks: Devices | None = None
    """Compute the model together; None: this device alone does."""
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
    """A layer as kernels read it."""

    layer: Layer
    shape: AttentionShape
    qkv: GpuLinear
    out: GpuLinear
    norm: QueryKeyNorm | None
    mlp: GpuMLP | GpuMixture
    after_attention: RMSNorm | None
    after_mlp: RMSNorm | None


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
        several = [one for layer in bound for one in (layer.qkv, layer.out)]
        if parts.around is not None and parts.around.mixer is not None:
            several.append(parts.around.mixer)
        sizes = [one.outputs * max(one.most_parts, rows) for one in several]
        most = max(*sizes, *(layer.mlp.results(rows, hidden) for layer in bound))
        if parts.experts is not None:
            self.pairs = ExpertPairs.empty(rows, parts.experts, like.device)
        self.parts = empty(most, dtype=torch.float32)


@final
class GpuDecoder:
    """Launches the kernels of one pass."""

    def __init__(self, parts: DecoderParts, kernels: GpuKernels, bound: Sequence[_Bound]) -> None:
        self.parts, self.kernels, self.bound = parts, kernels, bound
        ids_N = None if parts.around is None else parts.around.ids_N
        self.names_N = None if ids_N is None else ids_N.int()
        self.mixtures = [one.mlp for one in bound if isinstance(one.mlp, GpuMixture)]
        self.shape = bound[0].shape
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

    def why_bits_differ(self) -> str | None:
        """What of its experts gives a row other bits in other company; None: nothing does. Kernels
        of other layers were asked when the device was."""
        like_XD = self.parts.embedding.floats()
        found = (one.why_bits_differ(self.kernels, like_XD) for one in self.mixtures[:1])
        return next(found, None)

    def mix(self, one: DevicePass, work: Workspace) -> None:
        """The stream of a head's first pass, of features of the rows' slots and of masks."""
        kernels, rows = self.kernels, len(one.tokens_T)
        stream_TD, masked = work.streams[0][:rows], len(one.mask_T) > 0
        mixed_TD = work.mixed_TD[:rows] if masked else stream_TD
        self._mix(one.slots_T, work, mixed_TD)
        if masked:
            # A row's own features, those of its anchor or none, and its mask.
            kernels.take_rows(work.mixed_TD, one.anchor_T, stream_TD)
            mask_TD = work.parts[: stream_TD.numel()].view_as(stream_TD)
            kernels.take_rows(work.masks_KD, one.mask_T, mask_TD)
            eps = self.parts.norm.eps
            normed_TD = work.normed_TD[:rows]
            kernels.add_norm(AddNorm(mask_TD[None], None, stream_TD, None, normed_TD, eps))

    def _mix(self, slots_T: Tensor, work: Workspace, mixed_TD: Tensor) -> None:
        """Features of these slots, mixed."""
        around, (gathered_TF, at) = self.parts.around, (work.gathered_TF[: len(slots_T)], 0)
        assert around is not None and around.mixer is not None, "asked where features are read"
        for columns in around.features.pieces:
            width = columns.stop - columns.start
            rows_SF = around.features.slots_SF[:, columns]
            self.kernels.take_rows(rows_SF, slots_T, gathered_TF[:, at : at + width])
            at += width
        sums_PTD = self._run(around.mixer, gathered_TF, work)
        self.kernels.add_parts(sums_PTD, around.mixer.bias_N, None, mixed_TD)

    def read_context(self, one: DevicePass, work: Workspace) -> None:
        """What each layer of a block head makes keys and values of, behind the rows of blocks."""
        blocks, rows, fed = self.parts.blocks, len(one.tokens_T), len(one.features_T)
        assert blocks is not None, "asked of block heads"
        if fed:
            mixed_TD, norm = work.hidden_TD[:fed], blocks.context_norm
            self._mix(one.features_T, work, mixed_TD)
            self._norm(norm, mixed_TD, work.normed_TD[rows : rows + fed])

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
        self._norm(layer.beside_norm, embedded_TD, own_TD)
        self._norm(layer.attention_norm, stream_TD, beside_TD)
        if layer.from_norm:
            kernels.take_rows(beside_TD, work.every_T[:rows], stream_TD)
        return both_TX

    def _norm(self, norm: RMSNorm, stream_TD: Tensor, normed_TD: Tensor) -> None:
        on = AddNorm(None, None, stream_TD, norm.weight_D, normed_TD, norm.eps)
        self.kernels.add_norm(on)

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
        nothing = AddNorm(None, None, stream_TD, None, normed_TD, parts.norm.eps)

        def add(on: AddNorm, norm: RMSNorm | None, after: RMSNorm | None = None) -> None:
            """The stream goes on, and is normed for the next layer."""
            if on.parts_PTD is not None or norm is not None or on.kept or on.kept_normed:
                weight_D, after_D = (None if one is None else one.weight_D for one in (norm, after))
                kernels.add_norm(on._replace(weight_D=weight_D, after_D=after_D))

        if parts.beside is None:
            table = parts.embedding.floats()
            kernels.embed(one.tokens_T, table, parts.scale, stream_TD)
            first = nothing._replace(kept=_kept(features, 0, one))
            add(first, parts.layers[0].attention_norm)
        following = [layer.attention_norm for layer in parts.layers[1:]] + [parts.norm]
        for index, bound in enumerate(self.bound):
            layer = bound.layer
            # With what is fed behind the rows.
            x_TD = work.normed_TD[: len(one.slots_T)] if layer.attention_norm else stream_TD
            if layer.beside_norm is not None:
                x_TD = self._first(one, work, stream_TD)
            attended_TA = self._attend(index, x_TD, one, work, store)
            sums_PTD = self._run(bound.out, attended_TA, work)
            out = nothing._replace(parts_PTD=sums_PTD, bias_D=bound.out.bias_N)
            add(out, layer.mlp_norm, bound.after_attention)
            x_TD = stream_TD if layer.mlp_norm is None else normed_TD
            mlp = bound.mlp
            if isinstance(mlp, GpuMixture):
                room, read_1 = (work.pairs, work.gated, work.parts), read_L[index : index + 1]
                sums_PTD, weights_TP = mlp.run(kernels, x_TD, one.live_1, read_1, room)
                out = nothing._replace(parts_PTD=sums_PTD, weights_TP=weights_TP)
            else:
                sums_PTD = self._run(mlp.down, mlp.gated(kernels, x_TD, work.gated), work)
                out = nothing._replace(parts_PTD=sums_PTD, bias_D=mlp.down.bias_N)
            if index + 1 < len(self.bound):
                out = out._replace(kept=_kept(features, index + 1, one))
            else:
                out = out._replace(kept_normed=_kept(features, FINAL, one))
            add(out, following[index], bound.after_mlp)

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
        bound, blocks = self.bound[index], self.parts.blocks
        rows, layer = len(one.tokens_T), layer_of(store.layers[index])
        q_THh = self._write(index, x_TD, one, work, store)[:rows]
        step, attended_TA = one.attention, work.attended_TA[:rows]
        if blocks is not None and not blocks.whole[bound.layer.kind]:
            step = step._replace(lasts_T=None)
        sinks_H = bound.layer.attention.sinks_H
        on = AttentionCall(q_THh, layer, bound.shape, step, work.partials, attended_TA, sinks_H)
        run_attention(self.kernels, on, one.pieces)
        return attended_TA

    def _write(
        self, index: int, x_TD: Tensor, one: DevicePass, work: Workspace, store: KVStore
    ) -> Tensor:
        """The queries of one layer; keys and values are stored."""
        bound, rows = self.bound[index], len(x_TD)
        q_THh = work.q_TA[:rows].view(rows, bound.shape.num_heads, bound.shape.head_dim)
        heads = Heads(
            self._run(bound.qkv, x_TD, work),
            bound.qkv.bias_N,
            bound.norm,
            self.rotary[bound.layer.kind],
            one.places_T,
            one.slots_T,
            q_THh,
            layer_of(store.layers[index]),
        )
        self.kernels.turn_and_write(heads)
        return q_THh

    @staticmethod
    def _run(linear: GpuLinear, x_TK: Tensor, work: Workspace) -> Tensor:
        """The layer's parts, in the workspace."""
        rows, outputs = len(x_TK), linear.outputs
        parts = linear.num_parts(rows)
        parts_PTN = work.parts[: parts * rows * outputs].view(parts, rows, outputs)
        linear.run(x_TK, parts_PTN)
        return parts_PTN


def bind(parts: DecoderParts, kernels: GpuKernels) -> GpuDecoder | None:
    """A decoder for these kernels; None: it has a part that they do not know."""
    bound, norms = list[_Bound](), [parts.norm]
    for layer in parts.layers:
        own = _bind(layer, parts)
        if own is None:
            return None
        bound.append(own)
        every = (layer.attention_norm, layer.mlp_norm, layer.beside_norm)
        norms += filter(None, (*every, own.after_attention, own.after_mlp))
    known = len({norm.eps for norm in norms}) == 1 and parts.head.most_parts == 1
    return GpuDecoder(parts, kernels, bound) if known else None


def _bind(layer: Layer, parts: DecoderParts) -> _Bound | None:
    block, mlp, norms = layer.attention, layer.mlp, layer.attention.norms
    attend = parts.kinds[layer.kind].attention
    after, after_mlp, qkv, out = layer.after_attention, layer.after_mlp, block.qkv, block.out
    if (
        not block.kernels_know
        or not isinstance(attend, GpuAttention)
        or not (isinstance(qkv, GpuLinear) and isinstance(out, GpuLinear))
        or not (layer.input is None and layer.scale is None)
        or isinstance(after, Scaled)
        or isinstance(after_mlp, Scaled)
    ):
        return None
    made: GpuMLP | GpuMixture | None = None
    if isinstance(mlp, GatedMLP):
        made = bind_mlp(mlp)
    elif isinstance(mlp, Mixture) and parts.experts is not None:
        made = bind_mixture(mlp, parts.experts, parts.ranks)
    if made is None:
        return None
    norm = None
    if norms is not None:
        weights = norms.query.weight_D, norms.key.weight_D
        norm = QueryKeyNorm(*weights, norms.query.eps, norms.whole)
    return _Bound(
        layer=layer, shape=attend.shape, qkv=qkv, out=out, norm=norm, mlp=made,
        after_attention=after, after_mlp=after_mlp,
    )  # fmt: skip


def _kept(features: FeatureStore | None, point: int, one: DevicePass) -> Kept | None:
    """Where a point's rows go, if it is wanted."""
    columns = None if features is None else features.columns.get(point)
    if features is None or columns is None:
        return None
    return Kept(features.slots_SF[:, columns], one.slots_T)
