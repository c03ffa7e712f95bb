"""A decoder's step as nine launches a layer, recorded once for each size of step and played again.

`GpuDecoder` launches the kernels over kept memory; `CapturedSteps` fills the numbers of a step,
records what it launches where the step is small enough, and plays it. What is recorded and what is
launched one by one are the same kernels on the same numbers, so the bits are the same. The twin of
a CUDA graph on a CPU is a list of calls (`ops.twin_kernels`). Owns the memory between layers; the
weights belong to the layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from foretoken.kernels.gpu_kernels import (
    GpuKernels,
    QueryKeyNorm,
    Kept,
    Partials,
    Recorder,
    Rotary,
)
from foretoken.kv.features import FINAL, FeatureStore
from foretoken.kv.store import KVStore
from foretoken.layers.decoder_layer import Layer, LayerKind
from foretoken.layers.embedding import Embedding
from foretoken.layers.norm import RMSNorm
from foretoken.models.step_buffers import (
    DevicePass,
    PassRows,
    StepBuffers,
    StepKey,
    bucket,
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
from foretoken.ops.drawing_gpu import read_rows
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
        self.stream_TD, self.normed_TD, self.hidden_TD = (empty(rows, hidden) for _ in range(3))
        self.q_TA, self.attended_TA = empty(rows, heads), empty(rows, heads)
        self.gated_TF = empty(rows, inner)
        most = 0
        for one in (one for layer in bound for one in (layer.qkv, layer.out, layer.down)):
            most = max(most, one.weights.outputs * max(one.most_parts, rows))
        self.parts = empty(most, dtype=torch.float32)


@final
class GpuDecoder:
    """Launches the kernels of one pass."""

    def __init__(self, parts: DecoderParts, kernels: GpuKernels) -> None:
        self.parts, self.kernels = parts, kernels
        self.bound = [_bind(layer) for layer in parts.layers]
        self._head = parts.head
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

    def body(
        self, one: DevicePass, work: Workspace, store: KVStore, features: FeatureStore | None
    ) -> None:
        """From tokens to normed rows, in `work.normed_TD`; keys, values and features are kept."""
        parts, kernels, rows = self.parts, self.kernels, len(one.tokens_T)
        stream_TD, normed_TD = work.stream_TD[:rows], work.normed_TD[:rows]
        table = parts.embedding.floats()
        kernels.embed(one.tokens_T, table, parts.scale, stream_TD)

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

        add(None, stream_TD, parts.layers[0].attention_norm, kept=_kept(features, 0, one))
        following = [layer.attention_norm for layer in parts.layers[1:]] + [parts.norm]
        for index, (layer, bound) in enumerate(zip(parts.layers, self.bound, strict=True)):
            x_TD = stream_TD if layer.attention_norm is None else normed_TD
            attended_TA = self._attend(index, x_TD, one, work, store)
            add(bound.out, attended_TA, layer.mlp_norm, layer.after_attention)
            x_TD = stream_TD if layer.mlp_norm is None else normed_TD
            gated_TF, gate_up = work.gated_TF[:rows], bound.gate_up
            activation = COMPILED[layer.mlp.activate]
            kernels.gate_up(x_TD, gate_up.weights, gate_up.bias_N, activation, gated_TF)
            last = index + 1 == len(parts.layers)
            add(
                bound.down,
                gated_TF,
                following[index],
                layer.after_mlp,
                kept=None if last else _kept(features, index + 1, one),
                kept_normed=_kept(features, FINAL, one) if last else None,
            )

    def logits(self, one: DevicePass, work: Workspace, logits_RV: Tensor) -> None:
        """The head over the rows that are asked for, which are left in `work.hidden_TD`."""
        count = len(one.rows_R)
        self.kernels.take_rows(work.normed_TD, one.rows_R, work.hidden_TD[:count])
        self._head.run(work.hidden_TD[:count], logits_RV[None])
        if self.parts.softcap is not None:
            self.kernels.cap(logits_RV, self.parts.softcap)

    def _attend(
        self, index: int, x_TD: Tensor, one: DevicePass, work: Workspace, store: KVStore
    ) -> Tensor:
        """Attention of one layer, before its output projection."""
        block, bound, kernels = self.parts.layers[index].attention, self.bound[index], self.kernels
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
        run_attention(kernels, shape, one.attention, one.pieces, on)
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
        found = self._play(("step", how is not None), key, store, features, keeps=False)
        count = len(rows)
        tokens_R = buffers.read(found.tokens_KR[0, :count]) if how is not None else None
        work = self._workspace(key)
        return ModelOutput(
            logits_RV=found.logits_RV[:count], hidden_RD=work.hidden_TD[:count], chosen_R=tokens_R
        )

    def roll_out(
        self,
        layouts: Sequence[SpanLayout],
        token_ids: Sequence[Sequence[int]],
        plan: RolloutPlan,
        store: KVStore,
    ) -> RolledOut | None:
        """Draft several tokens after each sequence, without waiting for the device in between;
        None: some rows are filtered, or there is too much to feed."""
        count, first = len(layouts), self._plan([layout.window for layout in layouts])
        draws = read_rows(plan.rows)
        if bucket(len(first.places_T)) > RECORDED_ROWS or draws.filtered_R.any():
            return None
        ends = np.array([layout.num_tokens for layout in layouts]).cumsum() - 1
        passes = []
        for step in range(plan.steps):
            at = slice(step * count, (step + 1) * count)
            how = draws.part(at)
            windows = [
                SpanWindow(layout.window.end - 1 + step, 1, layout.page_table) for layout in layouts
            ]
            rows = self._plan(windows) if step else first
            tokens = () if step else list(chain.from_iterable(token_ids))
            logits = np.arange(count) if step else ends
            passes.append(PassRows(plan=rows, tokens=tokens, logits=logits, draws=how))
        buffers = self._of(store)
        key = buffers.fill(passes)
        stops = plan.stop is not None
        found = self._play(("chain", stops), key, store, None, keeps=plan.keeps_logits)
        made_KR = found.tokens_KR
        if stops:
            made_KR = torch.cat((made_KR, found.chances_KR.view(torch.int32)))
        read = np.array(buffers.read(made_KR), np.int32).reshape(made_KR.shape)[:, :count]
        return _rolled_out(read, plan, found.logits_RV)

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
        self,
        way: tuple[str, bool],
        keys: StepKey,
        store: KVStore,
        features: FeatureStore | None,
        *,
        keeps: bool,
    ) -> _Recorded:
        """Launch the passes, as they were recorded if they were."""
        assert self._buffers is not None, "filled before"
        columns = None if features is None else tuple(features.columns)
        key = (way, keys, keeps, columns, self._buffers.generation)
        found = self._recorded.get(key)
        if found is not None:
            found.play()
            return found
        passes, work = self._buffers.passes(keys), self._workspace(keys)
        logits, device = keys[-1].logits, self._decoder.parts.embedding.device
        logits_RV = self._logits_for(sum(one.logits for one in keys) if keeps else logits)
        tokens_KR = torch.zeros(len(keys), logits, dtype=torch.int32, device=device)
        chances_KR = torch.zeros(len(keys), logits, device=device)

        def launch() -> None:
            for number, one in enumerate(passes):
                if number:
                    one = one._replace(tokens_T=tokens_KR[number - 1])
                self._decoder.body(one, work, store, features)
                count = len(one.rows_R)
                if not count:
                    continue
                at = number * count if keeps else 0
                self._decoder.logits(one, work, logits_RV[at : at + count])
                if way[0] == "chain" and way[1]:
                    self._decoder.kernels.chance(logits_RV[at : at + count], chances_KR[number])
                if way != ("step", False):
                    self._decoder.kernels.draw(
                        logits_RV[at : at + count],
                        one.keys_R2,
                        one.temperature_R,
                        tokens_KR[number],
                    )

        most = max(one.rows for one in keys)
        if self._recorder is None or most > RECORDED_ROWS or any(one.pieces for one in keys):
            launch()
            return _Recorded(launch, logits_RV, tokens_KR, chances_KR)
        found = _Recorded(self._recorder.record(launch), logits_RV, tokens_KR, chances_KR)
        self._recorded[key] = found
        found.play()
        return found


def _rolled_out(read_XR: Any, plan: RolloutPlan, logits_RV: Tensor) -> RolledOut:
    """Tokens of each sequence, less those that a rule ends; rows behind the tokens are chances."""
    steps, count = plan.steps, read_XR.shape[1]
    ids = read_XR[:steps].T.tolist()
    going = None
    if plan.stop is not None:
        chances_KB = read_XR[steps:].view(np.float32)
        unsure_KB = chances_KB < plan.stop.least_sure
        unsure_KB[: plan.stop.least] = False
        lengths = np.where(unsure_KB.any(0), unsure_KB.argmax(0), steps).tolist()
        ids = [tokens[:length] for tokens, length in zip(ids, lengths, strict=True)]
        going = [row for row, length in enumerate(lengths) if length == steps]
    logits_KV = None
    if plan.keeps_logits:
        whole = logits_RV.unflatten(0, (steps, -1))[:, :count]
        logits_KV = whole.flatten(0, 1).clone()
    return RolledOut(ids=ids, logits_KV=logits_KV, going=going)


def capture(
    parts: DecoderParts, kernels: GpuKernels, recorder: Recorder | None
) -> CapturedSteps | None:
    """Steps of a decoder by the GPU's kernels; None: it has a part that they do not know."""
    norms = [parts.norm]
    for layer in parts.layers:
        own = (layer.attention_norm, layer.mlp_norm, layer.after_attention, layer.after_mlp)
        norms += [norm for norm in own if norm is not None]
        linears = (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)
        if not all(isinstance(linear, GpuLinear) for linear in linears):
            return None
        if layer.mlp.activate not in COMPILED or layer.beside_norm is not None:
            return None
    known = all(isinstance(kind.attention, GpuAttention) for kind in parts.kinds)
    if not known or len({norm.eps for norm in norms}) > 1 or parts.head.most_parts > 1:
        return None
    return CapturedSteps(GpuDecoder(parts, kernels), recorder)


def _bind(layer: Layer) -> _Bound:
    found = {
        "qkv": layer.attention.qkv,
        "out": layer.attention.out,
        "gate_up": layer.mlp.gate_up,
        "down": layer.mlp.down,
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
