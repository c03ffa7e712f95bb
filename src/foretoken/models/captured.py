"""A decoder's step as nine launches a layer, recorded once for each size of step and played again.

`GpuDecoder` launches the kernels over kept memory; `CapturedSteps` fills the numbers of a step,
records what it launches where the step is small enough, and plays it. What is recorded and what is
launched one by one are the same kernels on the same numbers, so the bits are the same. The twin of
a CUDA graph on a CPU is a list of calls (`ops.twin_kernels`). Owns the memory between layers; the
weights belong to the layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from foretoken.kernels.gpu_kernels import (
    GpuKernels,
    Kept,
    Partials,
    QueryKeyNorm,
    Recorder,
    Rotary,
)
from foretoken.kv.features import FINAL, FeatureStore, FeatureView
from foretoken.kv.store import KVStore
from foretoken.layers.attention import AttentionBlock
from foretoken.layers.decoder_layer import Layer, LayerKind, Scaled
from foretoken.layers.embedding import Embedding
from foretoken.layers.mlp import GatedMLP
from foretoken.layers.norm import RMSNorm
from foretoken.models.rollout import MaskSlots
from foretoken.models.step_buffers import (
    DevicePass,
    PassRows,
    StepBuffers,
    StepKey,
)
from foretoken.models.tensors import ModelOutput, RolledOut, RolloutPlan, SpanLayout
from foretoken.ops.activation import COMPILED
from foretoken.ops.attention.base import SpanWindow
from foretoken.ops.attention.gpu import (
    GpuAttention,
    UnitPlan,
    layer_of,
    most_partials,
    plan_rows,
    run_attention,
)
from foretoken.ops.drawing_gpu import Draws, read_rows
from foretoken.ops.linear.gpu import GpuLinear
from foretoken.shape.memory_formula import RECORDED_ROWS


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
    beside: "BesideParts | None" = None
    """Of a head that takes embedded tokens beside a stream, which goes on from token to token."""

    @property
    def vocab_size(self) -> int:
        """Ids that tokens are chosen from."""
        return self.head.weights.outputs if self.beside is None else self.beside.vocab_size


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
class _Bound:
    """The matrices of a layer."""

    qkv: GpuLinear
    out: GpuLinear
    gate_up: GpuLinear
    down: GpuLinear


class Workspace:
    """Memory between the kernels of a pass of up to so many rows."""

    def __init__(
        self, parts: DecoderParts, bound: Sequence[_Bound], partials: Partials, rows: int
    ) -> None:
        self.partials = partials
        like, geometry = parts.embedding, parts.layers[0].attention.geometry
        hidden, heads = like.shape[1], geometry.num_heads * geometry.head_dim
        inner = bound[0].down.weights.inputs

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
            self.gathered_TF = empty(rows, parts.beside.features.width)
            self.mixed_TD = empty(RECORDED_ROWS + 1, hidden)
            """Of a recorded pass; the last is 0."""
            self.every_T = torch.arange(rows, dtype=torch.int32, device=like.device)
            self.masks_KD = empty(rows + 1, hidden, dtype=torch.float32)
            """Number 0 is 0."""
        self.q_TA, self.attended_TA = empty(rows, heads), empty(rows, heads)
        self.gated_TF = empty(rows, inner)
        most = 0
        several = [one for layer in bound for one in (layer.qkv, layer.out, layer.down)]
        if parts.beside is not None and parts.beside.mixer is not None:
            several.append(parts.beside.mixer)
        for one in several:
            most = max(most, one.weights.outputs * max(one.most_parts, rows))
        self.parts = empty(most, dtype=torch.float32)


@final
class GpuDecoder:
    """Launches the kernels of one pass."""

    def __init__(self, parts: DecoderParts, kernels: GpuKernels) -> None:
        self.parts, self.kernels = parts, kernels
        self.bound = [_bind(layer) for layer in parts.layers]
        self.names_N = None if parts.beside is None else parts.beside.ids_N.int()
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
        gathered_TF, stream_TD, at = work.gathered_TF[:rows], work.streams[0][:rows], 0
        for columns in parts.features.pieces:
            width = columns.stop - columns.start
            rows_SF = parts.features.slots_SF[:, columns]
            kernels.take_rows(rows_SF, one.slots_T, gathered_TF[:, at : at + width])
            at += width
        masked = len(one.mask_T) > 0
        mixed_TD = work.mixed_TD[:rows] if masked else stream_TD
        sums_PTD = self._run(parts.mixer, gathered_TF, work)
        kernels.add_parts(sums_PTD, parts.mixer.bias_N, None, mixed_TD)
        if masked:
            # A row's own features, those of its anchor or none, and its mask.
            kernels.take_rows(work.mixed_TD, one.anchor_T, stream_TD)
            mask_TD = work.parts[: stream_TD.numel()].view_as(stream_TD)
            kernels.take_rows(work.masks_KD, one.mask_T, mask_TD)
            eps = self.parts.norm.eps
            kernels.add_norm(mask_TD[None], None, stream_TD, None, work.normed_TD[:rows], eps)

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
    ) -> None:
        """From tokens to the stream and its norm, in `work.normed_TD`; keys, values and features
        are kept. The stream of a head is there before."""
        parts, kernels, rows = self.parts, self.kernels, len(one.tokens_T)
        normed_TD = work.normed_TD[:rows]

        def add(
            linear: GpuLinear | None,
            x_TK: Tensor,
            norm: RMSNorm | None,
            after: RMSNorm | None = None,
            **kept: Kept | None,
        ) -> None:
            """The stream goes on, and is normed for the next layer."""
            if linear is None and norm is None and not any(kept.values()):
                return
            kernels.add_norm(
                None if linear is None else self._run(linear, x_TK, work),
                None if linear is None else linear.bias_N,
                stream_TD,
                None if norm is None else norm.weight_D,
                normed_TD,
                parts.norm.eps,
                after_D=None if after is None else after.weight_D,
                **kept,
            )

        if parts.beside is None:
            table = parts.embedding.floats()
            kernels.embed(one.tokens_T, table, parts.scale, stream_TD)
            add(None, stream_TD, parts.layers[0].attention_norm, kept=_kept(features, 0, one))
        following = [layer.attention_norm for layer in parts.layers[1:]] + [parts.norm]
        for index, (layer, bound) in enumerate(zip(parts.layers, self.bound, strict=True)):
            x_TD = stream_TD if layer.attention_norm is None else normed_TD
            if layer.beside_norm is not None:
                x_TD = self._first(one, work, stream_TD)
            attended_TA = self._attend(index, x_TD, one, work, store)
            after = _after(layer.after_attention)
            add(bound.out, attended_TA, layer.mlp_norm, after)
            x_TD = stream_TD if layer.mlp_norm is None else normed_TD
            gated_TF, gate_up = work.gated_TF[:rows], bound.gate_up
            activation = COMPILED[_mlp(layer).activate]
            kernels.gate_up(x_TD, gate_up.weights, gate_up.bias_N, activation, gated_TF)
            last = index + 1 == len(parts.layers)
            add(
                bound.down,
                gated_TF,
                following[index],
                _after(layer.after_mlp),
                kept=None if last else _kept(features, index + 1, one),
                kept_normed=_kept(features, FINAL, one) if last else None,
            )

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
        block, bound, kernels = _block(self.parts.layers[index]), self.bound[index], self.kernels
        kind, rows = self.parts.layers[index].kind, len(x_TD)
        shape, norms = _attention(self.parts.kinds[kind]).shape, block.norms
        q_THh = work.q_TA[:rows].view(rows, shape.num_heads, shape.head_dim)
        norm = None
        if norms is not None:
            norm = QueryKeyNorm(
                norms.query.weight_D, norms.key.weight_D, norms.query.eps, norms.whole
            )
        layer, attended_TA = layer_of(store.layers[index]), work.attended_TA[:rows]
        kernels.turn_and_write(
            self._run(bound.qkv, x_TD, work),
            bound.qkv.bias_N,
            norm,
            self.rotary[kind],
            one.attention.places_T,
            one.slots_T,
            q_THh,
            layer,
        )
        on = (q_THh, layer, work.partials, attended_TA)
        run_attention(kernels, shape, one.attention, one.pieces, on, block.sinks_H)
        return attended_TA

    @staticmethod
    def _run(linear: GpuLinear, x_TK: Tensor, work: Workspace) -> Tensor:
        """The layer's parts, in the workspace."""
        rows, outputs = len(x_TK), linear.weights.outputs
        parts = linear.num_parts(rows)
        parts_PTN = work.parts[: parts * rows * outputs].view(parts, rows, outputs)
        linear.run(x_TK, parts_PTN)
        return parts_PTN


@dataclass(frozen=True, slots=True)
class _Recorded:
    """What plays a step again, and where its results are."""

    play: Callable[[], None]
    logits_RV: Tensor
    tokens_KR: Tensor
    chances_KR: Tensor


@final
class CapturedSteps:
    """Steps and chains of drafts of one decoder over one store."""

    def __init__(self, decoder: GpuDecoder, recorder: Recorder | None) -> None:
        """Launch with `decoder`; without a recorder everything is launched one by one."""
        self._decoder, self._recorder = decoder, recorder
        self._recorded: dict[tuple[Any, ...], _Recorded] = {}
        self._buffers: StepBuffers | None = None
        self._work: Workspace | None = None
        self._long: Workspace | None = None
        self._store: KVStore | None = None
        self._logits_RV: Tensor | None = None

    @property
    def parts(self) -> DecoderParts:
        """What it runs."""
        return self._decoder.parts

    def _of(self, store: KVStore) -> StepBuffers:
        """The numbers of steps over this store; what was recorded over another is forgotten."""
        if self._buffers is None or store is not self._store:
            self._recorded.clear()
            self._store = store
            scratch = store.num_pages * store.page_size
            device, kernels = self.parts.embedding.device, self._decoder.kernels
            self._buffers = StepBuffers(device, scratch, on_gpu=kernels.on_gpu)
        return self._buffers

    def _plan(self, spans: Sequence[SpanWindow]) -> UnitPlan:
        decoder = self._decoder
        return plan_rows(spans, decoder.kernels, decoder.shape, decoder.most_partials)

    def run(
        self,
        layouts: Sequence[SpanLayout],
        token_ids: Sequence[Sequence[int]],
        rows: Sequence[int],
        store: KVStore,
        features: FeatureStore | None = None,
        draws: bytes | None = None,
    ) -> ModelOutput:
        """Run a step.

        Args:
            layouts: where each span lies.
            token_ids: the tokens of each span.
            rows: which of the step's tokens need logits.
            store: keys and values.
            features: where hidden states are kept, if anywhere.
            draws: how each row's token is drawn (`pack_rows`), if it may be: nothing edits its
                logits and nothing is left out.
        """
        plan = self._plan([layout.window for layout in layouts])
        tokens = list(chain.from_iterable(token_ids))
        how = None if draws is None else read_rows(draws)
        buffers = self._of(store)
        key = buffers.fill([PassRows(plan=plan, tokens=tokens, logits=rows, draws=how)])
        found = self._play(_Way("embedded", draws=how is not None), key, store, features)
        count = len(rows)
        tokens_R = buffers.read(found.tokens_KR[0, :count]) if how is not None else None
        work = self._workspace(key)
        return ModelOutput(
            logits_RV=found.logits_RV[:count], hidden_RD=work.hidden_TD[:count], chosen_R=tokens_R
        )

    @property
    def reads_features(self) -> bool:
        """Whether a head's stream begins with features of fed slots, where it is not given."""
        return self.parts.beside is not None and self.parts.beside.mixer is not None

    def outputs(
        self,
        layouts: Sequence[SpanLayout],
        token_ids: Sequence[int],
        stream_TD: Tensor,
        store: KVStore,
    ) -> Tensor:
        """One pass of a head over slots, from this stream on; its outputs before the last norm."""
        plan = self._plan([layout.window for layout in layouts])
        buffers = self._of(store)
        key = buffers.fill([PassRows(plan=plan, tokens=token_ids, logits=(), draws=None)])
        work = self._workspace(key)
        work.given_TD[: len(token_ids)].copy_(stream_TD)
        self._play(_Way("given"), key, store, None)
        return work.streams[0][: len(token_ids)].clone()

    def __call__(
        self,
        layouts: Sequence[SpanLayout],
        token_ids: Sequence[Sequence[int]],
        plan: RolloutPlan,
        store: KVStore,
        stream_TD: Tensor | None = None,
        masks: MaskSlots | None = None,
    ) -> RolledOut | None:
        """Draft several tokens after each sequence, without waiting for the device in between;
        None: some rows are filtered, or there is too much to feed.

        Args:
            layouts: where the tokens to be fed stand; the pages must cover as many positions from
                the last one of each as there are steps.
            token_ids: those tokens.
            plan: how many tokens, and how each is chosen.
            store: keys and values.
            stream_TD: where the stream of a head begins; None: with the features.
            masks: draft all tokens in the first pass, whose spans end in that many mask slots.
        """
        draws, rows = read_rows(plan.rows), sum(layout.num_tokens for layout in layouts)
        if max(rows, len(layouts) * plan.steps) > RECORDED_ROWS or draws.filtered_R.any():
            return None
        tokens, buffers = list(chain.from_iterable(token_ids)), self._of(store)
        if masks is None:
            key = buffers.fill(self._chain(layouts, tokens, plan, draws))
            begin = "embedded" if self.parts.beside is None else "features"
        else:
            key = buffers.fill([self._masked(layouts, tokens, plan, draws, masks)])
            begin = "features"
            rows_KD = self._workspace(key).masks_KD[1 : plan.steps]
            rows_KD.copy_(masks.rows_KD)
        if stream_TD is not None:
            begin = "given"
            self._workspace(key).given_TD[: len(stream_TD)].copy_(stream_TD)
        way = _Way(begin, draws=True, chances=plan.stop is not None, keeps=plan.keeps_logits)
        found = self._play(way, key, store, None)
        made_KR = found.tokens_KR
        if way.chances:
            made_KR = torch.cat((made_KR, found.chances_KR.view(torch.int32)))
        width = len(layouts) * (plan.steps if masks is not None else 1)
        read = np.array(buffers.read(made_KR), np.int32).reshape(made_KR.shape)[:, :width]
        rolled = _rolled_out(read.reshape(-1, len(layouts)), plan)
        logits_KV = None
        if plan.keeps_logits:
            whole = found.logits_RV[: sum(one.logits for one in key)]
            logits_KV = self._over_all_ids(whole.unflatten(0, (len(key), -1))[:, :width])
        stream_BD = None
        if self.parts.beside is not None and masks is None:
            stream_BD = self._workspace(key).streams[plan.steps % 2][: len(layouts)]
        return replace(rolled, logits_KV=logits_KV, stream_BD=stream_BD)

    def _chain(
        self, layouts: Sequence[SpanLayout], tokens: list[int], plan: RolloutPlan, draws: Draws
    ) -> list[PassRows]:
        """A pass over what is to be fed, then one over each draft but the last."""
        count = len(layouts)
        logits = np.array([layout.num_tokens for layout in layouts]).cumsum() - 1
        windows, passes = [layout.window for layout in layouts], []
        for step in range(plan.steps):
            how = draws.part(slice(step * count, (step + 1) * count))
            units = self._plan(windows)
            passes.append(PassRows(plan=units, tokens=tokens, logits=logits, draws=how))
            tokens, logits = [], np.arange(count)
            windows = [SpanWindow(one.end, 1, one.page_table) for one in windows]
        return passes

    def _masked(
        self,
        layouts: Sequence[SpanLayout],
        tokens: list[int],
        plan: RolloutPlan,
        draws: Draws,
        masks: MaskSlots,
    ) -> PassRows:
        """One pass, in which every sequence has a row of logits for each of its drafts."""
        units, extra = self._plan([layout.window for layout in layouts]), plan.steps - 1
        at = 0
        numbers, anchors, newest = list[int](), list[int](), list[int]()
        for layout in layouts:
            known = layout.num_tokens - extra
            newest.append(at + known - 1)
            numbers += [0] * known + list(range(1, plan.steps))
            anchor = newest[-1] if masks.anchored else RECORDED_ROWS
            anchors += [*range(at, at + known), *[anchor] * extra]
            at += layout.num_tokens
        logits = [row + step for step in range(plan.steps) for row in newest]
        both = (numbers, anchors)
        return PassRows(plan=units, tokens=tokens, logits=logits, draws=draws, masks=both)

    def _over_all_ids(self, logits_KBN: Tensor) -> Tensor:
        """Copies of these, [rows, V]; ids that a head cannot draft get -inf."""
        logits_RN, beside = logits_KBN.flatten(0, 1), self.parts.beside
        if beside is None or beside.ids_N.shape[0] == beside.vocab_size:
            return logits_RN.clone()
        full = logits_RN.new_full((len(logits_RN), beside.vocab_size), -torch.inf)
        return full.index_copy_(1, beside.ids_N, logits_RN)

    def _workspace(self, keys: StepKey) -> Workspace:
        """The one that recorded steps have, or a larger one."""
        most, decoder = max(max(key.rows, key.logits) for key in keys), self._decoder
        if self._work is None:
            device = decoder.parts.embedding.device
            partials = Partials.empty(decoder.most_partials, decoder.shape, device)
            self._work = Workspace(decoder.parts, decoder.bound, partials, RECORDED_ROWS)
        if most <= RECORDED_ROWS:
            return self._work
        if self._long is None or self._long.rows < most:
            self._long = None
            self._long = Workspace(decoder.parts, decoder.bound, self._work.partials, most)
        return self._long

    def _logits_for(self, rows: int) -> Tensor:
        """Room for logits, the same for all steps; what was recorded for less is forgotten."""
        if self._logits_RV is None or self._logits_RV.shape[0] < rows:
            self._recorded.clear()
            vocabulary = self._decoder.parts.head.weights.outputs
            device = self._decoder.parts.embedding.device
            self._logits_RV = torch.empty(rows, vocabulary, device=device)
        return self._logits_RV

    def _play(
        self, way: "_Way", keys: StepKey, store: KVStore, features: FeatureStore | None
    ) -> _Recorded:
        """Launch the passes, as they were recorded if they were."""
        assert self._buffers is not None, "filled before"
        columns = None if features is None else tuple(features.columns)
        key = (way, keys, columns, self._buffers.generation)
        found = self._recorded.get(key)
        if found is not None:
            found.play()
            return found
        passes, work = self._buffers.passes(keys), self._workspace(keys)
        logits, device = keys[-1].logits, self._decoder.parts.embedding.device
        logits_RV = self._logits_for(sum(one.logits for one in keys) if way.keeps else logits)
        tokens_KR = torch.zeros(len(keys), logits, dtype=torch.int32, device=device)
        chances_KR = torch.zeros(len(keys), logits, device=device)

        def launch() -> None:
            decoder = self._decoder
            for number, one in enumerate(passes):
                if number:
                    one = one._replace(tokens_T=tokens_KR[number - 1])
                stream_TD = work.streams[number % len(work.streams)][: len(one.tokens_T)]
                if not number and way.begin == "features":
                    decoder.mix(one, work)
                elif not number and way.begin == "given":
                    every_T = work.every_T[: len(stream_TD)]
                    decoder.kernels.take_rows(work.given_TD, every_T, stream_TD)
                decoder.body(one, work, store, features, stream_TD)
                count = len(one.rows_R)
                if not count:
                    continue
                at = number * count if way.keeps else 0
                own_RV = logits_RV[at : at + count]
                decoder.logits(one, work, own_RV)
                if way.chances:
                    decoder.kernels.chance(own_RV, chances_KR[number])
                if way.draws:
                    how = (one.keys_R2, one.temperature_R)
                    decoder.kernels.draw(own_RV, *how, tokens_KR[number], decoder.names_N)
                if len(work.streams) > 1 and not len(one.mask_T):
                    next_RD = work.streams[(number + 1) % 2][:count]
                    decoder.kernels.take_rows(stream_TD, one.rows_R, next_RD)

        most = max(one.rows for one in keys)
        if self._recorder is None or most > RECORDED_ROWS or any(one.pieces for one in keys):
            launch()
            return _Recorded(launch, logits_RV, tokens_KR, chances_KR)
        found = _Recorded(self._recorder.record(launch), logits_RV, tokens_KR, chances_KR)
        self._recorded[key] = found
        found.play()
        return found


class _Way(NamedTuple):
    """What is recorded, beside the sizes."""

    begin: str
    """`embedded`: with the tokens. Of heads: `given`, or with `features`."""
    draws: bool = False
    chances: bool = False
    """Whether the chance of each best id is wanted, too."""
    keeps: bool = False
    """Whether the logits of all passes are."""


def _rolled_out(read_XB: Any, plan: RolloutPlan) -> RolledOut:
    """Tokens of each sequence, less those that a rule ends; rows behind the tokens are chances."""
    steps = plan.steps
    ids = read_XB[:steps].T.tolist()
    going = None
    if plan.stop is not None:
        chances_KB = read_XB[steps:].view(np.float32)
        unsure_KB = chances_KB < plan.stop.least_sure
        unsure_KB[: plan.stop.least] = False
        lengths = np.where(unsure_KB.any(0), unsure_KB.argmax(0), steps).tolist()
        ids = [tokens[:length] for tokens, length in zip(ids, lengths, strict=True)]
        going = [row for row, length in enumerate(lengths) if length == steps]
    return RolledOut(ids=ids, logits_KV=None, going=going)


def capture(
    parts: DecoderParts, kernels: GpuKernels, recorder: Recorder | None
) -> CapturedSteps | None:
    """Steps of a decoder by the GPU's kernels; None: it has a part that they do not know."""
    norms = [parts.norm]
    for layer in parts.layers:
        if not _is_known(layer):
            return None
        own = (layer.attention_norm, layer.mlp_norm, layer.after_attention, layer.after_mlp)
        norms += [norm for norm in (*own, layer.beside_norm) if isinstance(norm, RMSNorm)]
    known = all(isinstance(kind.attention, GpuAttention) for kind in parts.kinds)
    if not known or len({norm.eps for norm in norms}) > 1 or parts.head.most_parts > 1:
        return None
    return CapturedSteps(GpuDecoder(parts, kernels), recorder)


def _is_known(layer: Layer) -> bool:
    """Whether each part of the layer is one that the kernels have."""
    attention, mlp = layer.attention, layer.mlp
    if not isinstance(attention, AttentionBlock) or not isinstance(mlp, GatedMLP):
        return False
    if not attention.kernels_know or mlp.activate not in COMPILED:
        return False
    if layer.input is not None or layer.scale is not None:
        return False
    if isinstance(layer.after_attention, Scaled) or isinstance(layer.after_mlp, Scaled):
        return False
    linears = (attention.qkv, attention.out, mlp.gate_up, mlp.down)
    return all(isinstance(linear, GpuLinear) for linear in linears)


def _block(layer: Layer) -> AttentionBlock:
    assert isinstance(layer.attention, AttentionBlock), type(layer.attention).__name__
    return layer.attention


def _mlp(layer: Layer) -> GatedMLP:
    assert isinstance(layer.mlp, GatedMLP), type(layer.mlp).__name__
    return layer.mlp


def _after(norm: RMSNorm | Scaled | None) -> RMSNorm | None:
    assert not isinstance(norm, Scaled), norm
    return norm


def _bind(layer: Layer) -> _Bound:
    attention, mlp = _block(layer), _mlp(layer)
    found = {
        "qkv": attention.qkv,
        "out": attention.out,
        "gate_up": mlp.gate_up,
        "down": mlp.down,
    }
    return _Bound(**{name: one for name, one in found.items() if isinstance(one, GpuLinear)})


def _attention(kind: LayerKind) -> GpuAttention:
    assert isinstance(kind.attention, GpuAttention), type(kind.attention).__name__
    return kind.attention


def _kept(features: FeatureStore | None, point: int, one: DevicePass) -> Kept | None:
    """Where a point's rows go, if it is wanted."""
    columns = None if features is None else features.columns.get(point)
    if features is None or columns is None:
        return None
    return Kept(features.slots_SF[:, columns], one.slots_T)
