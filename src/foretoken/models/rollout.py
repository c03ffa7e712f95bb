"""Drafting of several tokens in one call into C (native/rollout.h).

A one-layer draft model spends more time in Python around its arithmetic than in it, and all the
more after a step of the target, which empties the caches. Owns the buffers of a call, kept between
calls; the layers, their order and roundings are `CompiledLayers`'.
"""

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, final

import torch
from torch import Tensor

from foretoken.kernels.structures import (
    UNIT_INTS,
    FtRolloutCall,
    FtRolloutModel,
    FtStop,
    address_of,
)
from foretoken.kv.features import FeatureView
from foretoken.kv.store import KVStore
from foretoken.layers.embedding import Embedding
from foretoken.layers.norm import RMSNorm
from foretoken.models.compiled_layers import CompiledLayers
from foretoken.models.tensors import RolledOut, RolloutPlan, SpanLayout
from foretoken.ops.drawing import BEST, pack_rows
from foretoken.ops.linear import KernelLinear, Linear

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p

MOST_ROWS: Final = 64
"""Most rows of a first pass: more of them are worth a pass of their own."""
_BEST_ROW: Final = pack_rows((0,), BEST)


def plan_best(sequences: int, steps: int) -> RolloutPlan:
    """`steps` tokens of each sequence, each the best by the raw logits."""
    rows = _BEST_ROW * (sequences * steps)
    return RolloutPlan(steps=steps, rows=rows, keeps_logits=False, best=True)


@dataclass(frozen=True, slots=True)
class MixedFeatures:
    """A stream that begins with what a mixer makes of the target's features of fed slots."""

    mixer: KernelLinear
    features: FeatureView


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutParts:
    """What stands around the layers."""

    embedding: Embedding
    norm: RMSNorm
    head: Linear
    ids_N: Tensor | None = None
    """int64, ascending: the token of each of the head's outputs; None: their numbers."""
    vocab_size: int | None = None
    """Tokens of the target; default: as many as the head has outputs."""
    takes_beside: bool = False
    """Whether the layers take embedded tokens beside a stream that goes on from token to token."""
    mixed: MixedFeatures | None = None
    """What the stream begins with, where it is not given."""


@dataclass(frozen=True, slots=True)
class MaskSlots:
    """What stands for features that are not known yet."""

    rows_KD: Tensor
    """What stands in the first such slot of a span, the second ..."""
    anchored: bool
    """Whether they are added to the newest known ones."""


@final
class DraftCall:
    """One plan for one call into C, which writes here as long as this object lives."""

    def __init__(self, call: Any, plan: RolloutPlan, count: int) -> None:
        """Put where tokens of `count` sequences go, and how they are chosen, into `call`."""
        self._plan, self._count = plan, count
        self._tokens = array("q", bytes(8 * count * plan.steps))
        call.tokens, call.draws, call.stop = address_of(self._tokens), plan.rows, None
        if plan.stop is not None:
            self._sure = array("f", bytes(4 * count * plan.steps))
            self._lengths = array("q", bytes(8 * count))
            self._stop = FtStop(
                least_sure=plan.stop.least_sure,
                least=plan.stop.least,
                sure=address_of(self._sure),
                lengths=address_of(self._lengths),
            )
            call.stop = ctypes.addressof(self._stop)

    def drafted(
        self, done: int, logits_KV: Tensor, *, of_all: bool, stream_BD: Tensor | None = None
    ) -> RolledOut:
        """What the call drafted in `done` steps, less the tokens that the rule ended.

        Args:
            done: what the call returned.
            logits_KV: float32, where it wrote them.
            of_all: whether these are of all steps, B rows each, or of the last one alone.
            stream_BD: see `RolledOut`.
        """
        plan, count = self._plan, self._count
        made, at = self._tokens[: count * done], count * done if of_all else 0
        ids = [made[row::count].tolist() for row in range(count)]
        undecided_BV = None if done == plan.steps else logits_KV[at : at + count]
        going = None
        if plan.stop is not None:
            lengths = self._lengths.tolist()
            ids = [tokens[:length] for tokens, length in zip(ids, lengths, strict=True)]
            going = [row for row, length in enumerate(lengths) if length == done]
            if undecided_BV is not None:
                undecided_BV = undecided_BV[going] if going else None
        return RolledOut(
            ids=ids,
            logits_KV=logits_KV[: count * done] if plan.keeps_logits else None,
            undecided_BV=undecided_BV,
            stream_BD=stream_BD,
            going=going,
        )


@final
class CompiledRollout:
    """A decoder bound to the loop. `compile_rollout` makes it, where every part has its kernel."""

    def __init__(self, layers: CompiledLayers, parts: RolloutParts) -> None:
        """Bind the parts, which must stay as they are."""
        head, kind = parts.head, layers.only_kind
        assert isinstance(head, KernelLinear), "the layers are compiled"
        assert kind is not None, "of one kind"
        attention, rotary = kind
        self._layers, self._parts = layers, parts
        self._store: KVStore | None = None
        self._model = FtRolloutModel(
            decoder=layers.address,
            embedding=parts.embedding.address,
            norm=parts.norm.weight_D.data_ptr(),
            head=head.address,
            ids=None if parts.ids_N is None else parts.ids_N.data_ptr(),
            shape=attention.address,
            cos=rotary.cos.data_ptr(),
            sin=rotary.sin.data_ptr(),
            width=rotary.cos.shape[-1],
            vocabulary=parts.vocab_size or head.columns,
            num_layers=layers.num_layers,
        )
        if parts.mixed is not None:
            self._read_features(parts.mixed)
        self._run: Any = layers.library.function("ft_rollout", (_PTR, _PTR), _I64)
        self._call = FtRolloutCall()
        self._buffers = _Buffers.of(self._call, parts, (1, 8), attention.units_a_row)

    def _read_features(self, mixed: MixedFeatures) -> None:
        """Begin the stream with what the mixer makes of the features of fed slots."""
        mixer, features = mixed.mixer, mixed.features
        assert features.dtype == mixer.dtype, (features.dtype, mixer.dtype)
        assert features.width == mixer.packed.inputs, (features.width, mixer.packed.inputs)
        self._model.mixer, self._model.features = mixer.address, features.in_c

    @property
    def reads_features(self) -> bool:
        """Whether the stream begins with features of fed slots, where it is not given."""
        return self._parts.mixed is not None

    def __call__(
        self,
        layouts: Sequence[SpanLayout],
        token_ids: Sequence[Sequence[int]],
        plan: RolloutPlan,
        store: KVStore,
        stream_TD: Tensor | None = None,
        masks: MaskSlots | None = None,
    ) -> RolledOut:
        """Draft up to `plan.steps` tokens for each sequence.

        Args:
            layouts: where the tokens to be fed stand, MOST_ROWS at most; the pages must cover as
                many positions from the last one of each as there are steps.
            token_ids: those tokens; none of them may be skipped.
            plan: how many tokens, and how each is chosen.
            store: keys and values.
            stream_TD: where the stream of a head begins that continues its own outputs. None: with
                the features, or, of models, the embedded tokens.
            masks: draft all tokens in the first pass, whose spans end in that many mask slots.
        """
        spans, pages, rows = array("i"), array("i"), 0
        for layout in layouts:
            count = layout.num_tokens
            spans.extend((rows, count, layout.start, len(pages), -1, 0))
            pages.extend(layout.page_table)
            rows += count
        fed = array("q", chain.from_iterable(token_ids))
        assert len(fed) == rows <= MOST_ROWS, (len(fed), rows)
        call, steps, sequences = self._call, plan.steps, len(layouts)
        self._put_masks(masks, steps)
        buffers, states = self._buffers, sequences * (1 if masks is None else steps)
        if buffers.lacks(states, rows):
            buffers = self._buffers = buffers.grown(states, rows)
        logits_KV = buffers.logits_BV  # Not for results: the next call writes it.
        if plan.keeps_logits:
            logits_KV = logits_KV.new_empty(steps * sequences, logits_KV.shape[1])
        self._begin(buffers, stream_TD, best=plan.best)
        call.logits = logits_KV.data_ptr()
        call.spans, call.pages, call.fed = address_of(spans), address_of(pages), address_of(fed)
        call.num_spans, call.rows, call.steps = sequences, rows, steps
        call.keeps_logits = plan.keeps_logits
        if store is not self._store:
            self._store = store
            self._model.kv_stride = store.layers[0].stride(0)
        self._model.kv = self._layers.stores_of(store)
        drafts = DraftCall(call, plan, sequences)
        done = self._run(ctypes.addressof(self._model), ctypes.addressof(call))
        stream_BD = buffers.x_TD[:sequences] if self._parts.takes_beside else None
        return drafts.drafted(done, logits_KV, of_all=plan.keeps_logits, stream_BD=stream_BD)

    def _put_masks(self, masks: MaskSlots | None, steps: int) -> None:
        self._call.masks = None
        if masks is not None:
            assert masks.rows_KD.shape[0] == steps - 1 and masks.rows_KD.is_contiguous(), steps
            self._call.masks = masks.rows_KD.data_ptr() or None
            self._call.anchored = masks.anchored

    def _begin(self, buffers: "_Buffers", stream_TD: Tensor | None, *, best: bool) -> None:
        """What the stream begins with, and whether logits are those of all ids."""
        own, gathered = buffers.own_BN, None
        if stream_TD is not None:
            buffers.x_TD[: stream_TD.shape[0]] = stream_TD
        elif self.reads_features:
            gathered = buffers.gathered_TF.data_ptr()
        else:
            assert not self._parts.takes_beside, "something must begin the stream"
        self._call.gathered = gathered
        self._call.own = None if best or own is None else own.data_ptr()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Buffers:
    """What a call writes to, as large as the largest call so far."""

    call: FtRolloutCall
    parts: RolloutParts
    units_a_row: int
    x_TD: Tensor
    beside_TD: Tensor
    logits_BV: Tensor
    own_BN: Tensor | None
    gathered_TF: Tensor
    ints: Tensor

    @classmethod
    def of(
        cls,
        call: FtRolloutCall,
        parts: RolloutParts,
        size: tuple[int, int],
        units_a_row: int,
    ) -> "_Buffers":
        """For so many (sequences, rows); their addresses are put into `call`."""
        sequences, rows = size
        head, dtype = parts.head, parts.embedding.dtype
        assert isinstance(head, KernelLinear), type(head)
        hidden = parts.embedding.shape[1]
        x_TD, beside_TD = (torch.empty(rows, hidden, dtype=dtype) for _ in range(2))
        logits_BV = torch.empty(sequences, parts.vocab_size or head.columns)
        own_BN = None if parts.ids_N is None else torch.empty(sequences, head.columns)
        width = 0 if parts.mixed is None else parts.mixed.features.width
        gathered_TF = torch.empty(rows, width, dtype=dtype)
        units = -(-rows * units_a_row * UNIT_INTS // 2)
        ints = torch.empty(2 * rows + units, dtype=torch.int64)
        call.x = x_TD.data_ptr()
        call.beside = beside_TD.data_ptr() if parts.takes_beside else None
        call.positions = ints.data_ptr()
        call.slots, call.units = call.positions + 8 * rows, call.positions + 16 * rows
        return cls(
            call=call,
            parts=parts,
            units_a_row=units_a_row,
            x_TD=x_TD,
            beside_TD=beside_TD,
            logits_BV=logits_BV,
            own_BN=own_BN,
            gathered_TF=gathered_TF,
            ints=ints,
        )

    def lacks(self, sequences: int, rows: int) -> bool:
        """Whether a call of this size needs larger ones."""
        return sequences > self.logits_BV.shape[0] or rows > self.x_TD.shape[0]

    def grown(self, sequences: int, rows: int) -> "_Buffers":
        size = max(sequences, self.logits_BV.shape[0]), max(rows, self.x_TD.shape[0])
        return _Buffers.of(self.call, self.parts, size, self.units_a_row)


def compile_rollout(layers: CompiledLayers | None, parts: RolloutParts) -> CompiledRollout | None:
    """The loop, or None if some part has no kernel."""
    head, embedding = parts.head, parts.embedding
    if layers is None or layers.only_kind is None or not isinstance(head, KernelLinear):
        return None
    if head.dtype != embedding.dtype or head.out_dtype != torch.float32:
        return None
    if not layers.shares_norm(parts.norm) or not embedding.has_address:
        return None
    return CompiledRollout(layers, parts)
