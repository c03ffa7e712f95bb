"""A decoder's steps, recorded once for each size of step and played again.

`CapturedSteps` fills the numbers of a step, records what `GpuDecoder` launches where the step is
small enough, and plays it. What is recorded and what is launched one by one are the same kernels on
the same numbers, so the bits are the same. The twin of a CUDA graph on a CPU is a list of calls
(`ops.gpu.twin_kernels`). Owns the memory between layers.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from foretoken.kernels.gpu_kernels import GpuKernels, Partials, Recorder
from foretoken.kv.features import FeatureStore
from foretoken.kv.store import KVStore
from foretoken.models.gpu.decoder import DecoderParts, GpuDecoder, Workspace, bind
from foretoken.models.gpu.step_buffers import DevicePass, PassRows, StepBuffers, StepKey, bucket
from foretoken.models.rollout import MaskSlots
from foretoken.models.tensors import (
    CHAIN_WATCH,
    Arrived,
    ModelOutput,
    RolledOut,
    RolloutPlan,
    SpanLayout,
    StepDraws,
)
from foretoken.ops.attention.base import SpanWindow
from foretoken.ops.attention.gpu import UnitPlan, lay_out, plan_rows
from foretoken.ops.gpu.drawing import Draws, choose, read_rows
from foretoken.shape.memory_formula import RECORDED_ROWS

logger = logging.getLogger("foretoken")


class _Made(NamedTuple):
    """Where the results of a step are."""

    logits_RV: Tensor
    tokens_KR: Tensor
    chances_KR: Tensor
    read_L: Tensor
    """How many experts each layer read."""
    ints: Tensor
    """Tokens, and behind them that."""


_On = tuple[Workspace, KVStore, FeatureStore | None]


@final
class CapturedSteps:
    """Steps and chains of drafts of one decoder over one store."""

    def __init__(self, decoder: GpuDecoder, recorder: Recorder | None) -> None:
        """Launch with `decoder`; without a recorder everything is launched one by one."""
        self._decoder, self._recorder = decoder, recorder
        self._recorded: dict[tuple[Any, ...], tuple[Callable[[], None], _Made]] = {}
        self._buffers: StepBuffers | None = None
        self._work: Workspace | None = None
        self._long: Workspace | None = None
        self._store: KVStore | None = None
        self._logits_RV: Tensor | None = None
        self._drawn_R: Tensor | None = None
        """Tokens of the last step."""

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

    def _plan(self, spans: Sequence[SpanWindow], *, whole: bool = False) -> UnitPlan:
        decoder = self._decoder
        room = decoder.most_partials
        return plan_rows(spans, decoder.kernels, decoder.shape, room, whole=whole)

    def run(
        self,
        layouts: Sequence[SpanLayout],
        token_ids: Sequence[Sequence[int]],
        rows: Sequence[int],
        store: KVStore,
        features: FeatureStore | None = None,
        draws: StepDraws | None = None,
    ) -> ModelOutput:
        """Run a step, as `models.base.Model.step` is asked to."""
        plan = self._plan([layout.window for layout in layouts])
        tokens = list(chain.from_iterable(token_ids))
        how = None if draws is None else read_rows(draws.rows)
        buffers = self._of(store)
        key = buffers.fill([PassRows(plan=plan, tokens=tokens, logits=rows, draws=how)])
        if draws is not None and draws.follows:
            assert self._drawn_R is not None, "there was a step before"
            tokens_T = buffers.tokens(key)
            # Not recorded: what is recorded runs twice at first, and draws other tokens.
            self._decoder.kernels.take_rows(self._drawn_R[:, None], tokens_T, tokens_T[:, None])
        if draws is not None and draws.drafts_KB is not None:
            steps, count = draws.drafts_KB.shape
            places_BK = buffers.tokens(key)[: len(tokens)].view(count, steps + 1)[:, 1:]
            places_BK.copy_(draws.drafts_KB.T)
        found = self._play(_Way("embedded", draws=how is not None), key, store, features)
        count = len(rows)
        work = self._workspace(key)
        output = ModelOutput(logits_RV=found.logits_RV[:count], hidden_RD=work.hidden_TD[:count])
        if how is None:
            return output
        self._drawn_R, read = found.tokens_KR[0], buffers.send(found.ints)

        def wait() -> Arrived:
            numbers = read()
            experts = sum(numbers[key[-1].logits :]) / max(len(self._decoder.mixtures), 1)
            return Arrived(numbers[:count], experts)

        return replace(output, wait=wait)

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
        """Draft several tokens after each sequence, without waiting for the device in between; as
        `models.base.Model.roll_out`.

        Args:
            layouts, token_ids, plan, store: as there.
            stream_TD: where the stream of a head begins; None: with the features.
            masks: draft all tokens in the first pass, whose spans end in that many mask slots.
        """
        draws, rows = read_rows(plan.rows), sum(layout.num_tokens for layout in layouts)
        if max(rows, len(layouts) * plan.steps) > RECORDED_ROWS:
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
        width = len(layouts) * (plan.steps if masks is not None else 1)
        rolled = self._rolled(found, (len(key), key[0].logits), width, len(layouts), plan)
        if self.parts.beside is None or masks is not None:
            return rolled
        stream_BD = self._workspace(key).streams[plan.steps % 2][: len(layouts)]
        return replace(rolled, stream_BD=stream_BD)

    def _rolled(
        self, made: _Made, sizes: tuple[int, int], width: int, count: int, plan: RolloutPlan
    ) -> RolledOut:
        """What was drafted for `count` sequences, which is waited for: of so many rows of so many
        tokens the first `width` of each."""
        assert self._buffers is not None, "filled before"
        total = sizes[0] * sizes[1]
        drafted = made.tokens_KR.view(-1)[:total]
        if plan.stop is not None:
            chances = made.chances_KR.view(-1)[:total]
            drafted = torch.cat((drafted, chances.view(torch.int32)))
        wait, watch = self._buffers.send(drafted), CHAIN_WATCH.get()
        if watch is not None and plan.stop is None and not plan.keeps_logits:
            watch.launched(drafted.view(sizes)[:, :width].reshape(-1, count))
        read = np.array(wait(), np.int32).reshape(-1, sizes[1])
        rolled = _rolled_out(self._judged(read[:, :width].reshape(-1, count), plan), plan)
        if not plan.keeps_logits:
            if watch is not None:
                watch.read(rolled.ids)
            return rolled
        own_KBN = made.logits_RV[:total].unflatten(0, sizes)[:, :width]
        return replace(rolled, logits_KV=self._over_all_ids(own_KBN))

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

    def feed(self, context: Sequence[SpanLayout], store: KVStore) -> None:
        """Keep a block head's keys and values of places whose features are known."""
        self._play(_Way("feed"), self._of(store).fill([self._blocks(context, (), ())]), store, None)

    def block_outputs(
        self,
        context: Sequence[SpanLayout],
        blocks: Sequence[SpanLayout],
        token_ids: Sequence[int],
        store: KVStore,
    ) -> Tensor:
        """Feed places and run blocks; their outputs after the last norm, [T, D]."""
        key = self._of(store).fill([self._blocks(context, blocks, token_ids)])
        self._play(_Way("blocks"), key, store, None)
        return self._workspace(key).normed_TD[: len(token_ids)].clone()

    def draft_blocks(
        self,
        context: Sequence[SpanLayout],
        blocks: Sequence[SpanLayout],
        token_ids: Sequence[int],
        plan: RolloutPlan,
        store: KVStore,
        first_row: int,
    ) -> RolledOut:
        """The same, and draft several tokens of each block.

        Args:
            context: places whose keys and values are not there yet.
            blocks: where each block lies.
            token_ids: the newest token and masks of each.
            plan: how many tokens, and how each is chosen.
            store: keys and values.
            first_row: the row of a block that gives the first.
        """
        draws, steps, count = read_rows(plan.rows), plan.steps, len(blocks)
        firsts = np.array([0, *(block.num_tokens for block in blocks)]).cumsum()[:-1]
        # Rows of each step are padded: what follows from a step's tokens is of as many.
        logits_KB = np.zeros((steps, bucket(count)), np.int64)
        logits_KB[:, :count] = firsts + first_row + np.arange(steps)[:, None]
        rows = replace(
            self._blocks(context, blocks, token_ids),
            logits=logits_KB.ravel(),
            draws=draws.padded(steps, bucket(count)),
            newest=[token_ids[first] for first in firsts],
        )
        key = self._of(store).fill([rows])
        way = _Way("blocks", draws=True, chances=plan.stop is not None, steps=steps)
        found = self._play(way, key, store, None)
        return self._rolled(found, (steps, bucket(count)), count, count, plan)

    def _judged(self, read_XB: Any, plan: RolloutPlan) -> Any:
        """The same, with chances where a head's judgements stood."""
        blocks = self.parts.blocks
        if plan.stop is not None and blocks is not None and blocks.judge is not None:
            judged_KB = read_XB[plan.steps :].view(np.float32)
            judged_KB[:] = 0.5 + 0.5 * np.tanh(0.5 * (judged_KB + np.float32(blocks.judge_bias)))
        return read_XB

    def _blocks(
        self,
        context: Sequence[SpanLayout],
        blocks: Sequence[SpanLayout],
        token_ids: Sequence[int],
    ) -> PassRows:
        """One pass over blocks, which feeds places behind its rows."""
        parts = self.parts.blocks
        assert parts is not None, "asked of block heads"
        whole, size = any(parts.whole), self._decoder.shape.page_size
        return PassRows(
            plan=self._plan([block.window for block in blocks], whole=whole),
            tokens=token_ids,
            logits=(),
            draws=None,
            fed=lay_out([layout.window for layout in context], size),
            whole=whole,
        )

    def _over_all_ids(self, logits_KBN: Tensor) -> Tensor:
        """Copies of these, [rows, V]; ids that a head cannot draft get -inf."""
        logits_RN, around = logits_KBN.flatten(0, 1), self.parts.around
        ids_N = None if around is None else around.ids_N
        if around is None or ids_N is None or ids_N.shape[0] == around.vocab_size:
            return logits_RN.clone()
        full = logits_RN.new_full((len(logits_RN), around.vocab_size), -torch.inf)
        return full.index_copy_(1, ids_N, logits_RN)

    def _workspace(self, keys: StepKey) -> Workspace:
        """The one that recorded steps have, or a larger one."""
        most, decoder = _most(keys), self._decoder
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
            vocabulary = self._decoder.parts.head.outputs
            device = self._decoder.parts.embedding.device
            self._logits_RV = torch.empty(rows, vocabulary, device=device)
        return self._logits_RV

    def _play(
        self, way: "_Way", keys: StepKey, store: KVStore, features: FeatureStore | None
    ) -> _Made:
        """Launch the passes, as they were recorded if they were."""
        assert self._buffers is not None, "filled before"
        columns = None if features is None else tuple(features.columns)
        key = (way, keys, columns, self._buffers.generation)
        known = self._recorded.get(key)
        if known is not None:
            play, made = known
            play()
            return made
        logits, device = keys[-1].logits, self._decoder.parts.embedding.device
        room = sum(one.logits for one in keys) if way.keeps else logits
        count, layers = len(keys) * logits, len(self.parts.layers)
        both = torch.zeros(count + layers, dtype=torch.int32, device=device)
        made = _Made(
            self._logits_for(room + keys[-1].newest),
            both[:count].view(len(keys), logits),
            torch.zeros(len(keys), logits, device=device),
            both[count:],
            both,
        )
        passes, on = self._buffers.passes(keys), (self._workspace(keys), store, features)

        def launch() -> None:
            if way.begin in ("blocks", "feed"):
                self._launch_blocks(way, passes[0], on, made)
            else:
                self._launch(way, passes, on, made)

        is_long = _most(keys) > RECORDED_ROWS or any(one.pieces for one in keys)
        if self._recorder is None or is_long:
            launch()
            return made
        play = self._recorder.record(launch)
        self._recorded[key] = play, made
        play()
        return made

    def _launch(self, way: "_Way", passes: Sequence[DevicePass], on: _On, made: _Made) -> None:
        """Passes one after the other, each over the tokens that the one before has drawn."""
        decoder, (work, store, features) = self._decoder, on
        for number, one in enumerate(passes):
            if number:
                one = one._replace(tokens_T=made.tokens_KR[number - 1])
            stream_TD = work.streams[number % len(work.streams)][: len(one.tokens_T)]
            if not number and way.begin == "features":
                decoder.mix(one, work)
            elif not number and way.begin == "given":
                every_T = work.every_T[: len(stream_TD)]
                decoder.kernels.take_rows(work.given_TD, every_T, stream_TD)
            decoder.body(one, work, store, features, stream_TD, made.read_L)
            count = len(one.rows_R)
            if not count:
                continue
            at = number * count if way.keeps else 0
            own_RV = made.logits_RV[at : at + count]
            decoder.logits(one, work, own_RV)
            if way.chances:
                decoder.kernels.chance(own_RV, made.chances_KR[number])
            if way.draws:
                choose(
                    decoder.kernels, own_RV, (one.keys_R2, one.how_R4), made.tokens_KR[number],
                    decoder.names_N, filtered=one.filtered,
                )  # fmt: skip
            if len(work.streams) > 1 and not len(one.mask_T):
                next_RD = work.streams[(number + 1) % 2][:count]
                decoder.kernels.take_rows(stream_TD, one.rows_R, next_RD)

    def _launch_blocks(self, way: "_Way", one: DevicePass, on: _On, made: _Made) -> None:
        """What a block head reads, and one pass over its blocks, if there are some."""
        decoder, (work, store, features) = self._decoder, on
        decoder.read_context(one, work)
        if way.begin == "feed":
            decoder.write_context(one, work, store)
            return
        stream_TD = work.streams[0][: len(one.tokens_T)]
        decoder.body(one, work, store, features, stream_TD, made.read_L)
        if way.steps:
            decoder.logits(one, work, made.logits_RV[: len(one.rows_R)])
            chances_R = made.chances_KR[0] if way.chances else None
            decoder.draft_blocks(one, work, way.steps, made.logits_RV, made.tokens_KR[0], chances_R)


class _Way(NamedTuple):
    """What is recorded, beside the sizes."""

    begin: str
    """`embedded`: with the tokens. Of heads: `given`, or with `features`; of those that draft in
    `blocks` also `feed`: there are none."""
    draws: bool = False
    chances: bool = False
    """Whether the chance of each best id is wanted, too."""
    keeps: bool = False
    """Whether the logits of all passes are."""
    steps: int = 0
    """Tokens of each block."""


def _most(keys: StepKey) -> int:
    """Rows that there is to be room for."""
    return max(max(key.rows + key.fed, key.logits) for key in keys)


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
    parts: DecoderParts,
    kernels: GpuKernels,
    recorder: Recorder | None,
    *,
    keeps_bits: bool = False,
) -> CapturedSteps | None:
    """Steps of a decoder by the GPU's kernels; None: it has a part that they do not know, or rows
    are to keep their bits, and its experts do not keep them on this device, which is said."""
    decoder = bind(parts, kernels)
    why = decoder.why_bits_differ() if decoder is not None and keeps_bits else None
    if why is not None:
        words = "GPU: layers of this model run one by one, slowly, and keep bits: the probe of its"
        logger.warning("%s experts failed (%s)", words, why)
    return None if decoder is None or why is not None else CapturedSteps(decoder, recorder)
