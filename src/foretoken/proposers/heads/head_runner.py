"""Runs a head over paged keys and values of its own, under the target's slots.

Knows pages, positions and features, not requests or drafts. A row is a slot: the features at a
position and the token after it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from foretoken.backend import backend_for
from foretoken.kv.features import FeatureView
from foretoken.kv.store import KVStore, write
from foretoken.layers.embedding import Embedding
from foretoken.layers.rope import RotaryTable, Rotation
from foretoken.models.captured import CapturedSteps
from foretoken.models.rollout import MOST_ROWS, CompiledRollout, MaskSlots
from foretoken.models.tensors import ModelInput, RolledOut, RolloutPlan, SpanLayout
from foretoken.ops.attention import Geometry
from foretoken.ops.attention.base import Attend, Attention
from foretoken.ops.logits import NEVER
from foretoken.ops.quantize_kv import quantize_kv
from foretoken.proposers.heads.base import DraftHead
from foretoken.proposers.heads.linears import HeadLinears, serve_linears
from foretoken.proposers.heads.parts import Attend as HeadAttend
from foretoken.proposers.heads.parts import HeadShape
from foretoken.runtime.runner import positions_of, slots_of
from foretoken.shape import RopeShape
from foretoken.shape.memory_formula import KVPerToken


class CompiledHead(Protocol):
    """A network with its own keys and values, bound to the compiled kernels."""

    @property
    def rollout(self) -> CompiledRollout | CapturedSteps:
        """Drafts whole chains."""

    def mix(self, features_TF: Tensor) -> Tensor:
        """What the layers begin with, [T, D], from the target's features."""

    def forward(self, inputs: ModelInput, hidden_TD: Tensor, store: KVStore) -> Tensor:
        """One pass over slots; the network's outputs [T, D]."""

    def logits(self, outputs_BD: Tensor) -> Tensor:
        """float32 logits over the network's own ids, [B, N]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerParts:
    """What a runner has around its network, for a compiled twin to be bound to."""

    attention: Attention
    rotary: RotaryTable
    geometry: Geometry
    features: FeatureView
    vocab_size: int
    """Ids of the target."""
    linears: HeadLinears


class PagedHead(DraftHead, ABC):
    """A head whose layers keep keys and values, one slot for each pair of features and next token.

    It is given how to attend: training (rows of a batch) and serving (pages) differ only in that.
    """

    @property
    @abstractmethod
    def layer_shape(self) -> HeadShape:
        """Sizes of its decoder layers."""

    @property
    def target_ids(self) -> Tensor | None:
        """The target's id of each of its logits, int64 ascending; None: they are the target's."""
        return None

    @abstractmethod
    def use_embedding(self, embedding: Embedding) -> None:
        """Embed tokens with the target's table, shared and not trained."""

    @abstractmethod
    def mix(self, features: Tensor) -> Tensor:
        """What the layers begin with, [..., D], from the target's features [..., F]."""

    @abstractmethod
    def forward(
        self, tokens: Tensor, hidden: Tensor, rotation: Rotation, attends: Sequence[HeadAttend]
    ) -> Tensor:
        """One pass over slots.

        Args:
            tokens: of the slot after each feature's, int64 [...].
            hidden: `mix` of the target's features, or its own recycled output, [..., D].
            rotation: of the slots' positions.
            attends: one per layer.

        Returns [..., D], to be recycled, and to be turned into logits.
        """

    def logits(self, output: Tensor) -> Tensor:
        """Its own logits from what `forward` returned; asked only where it has `tops`."""
        raise AssertionError("the target's head makes the logits")

    def compiled(self, parts: RunnerParts) -> CompiledHead | None:
        """The network on kernels, or None if some part has none."""
        return None

    def drop_matrices(self) -> None:
        """Free all linear maps: from now on a compiled twin runs them."""

    def kept(self, kv_cache_dtype: str) -> KVPerToken:
        """Keys and values of all layers."""
        shape = self.layer_shape
        heads = 2 * shape.num_hidden_layers * shape.num_key_value_heads
        return KVPerToken(heads * shape.head_dim, shape.head_dim, kv_cache_dtype)


@dataclass(frozen=True, slots=True)
class HeadPages:
    """Where a network keeps its keys and values: under the numbers of the target's pages."""

    num_pages: int
    page_size: int
    kv_store_dtype: torch.dtype | None = None
    """How they are stored; None: in the network's type."""

    def geometry(self, shape: HeadShape, like: Tensor) -> Geometry:
        """What attention needs to know, in the type and on the device of `like`."""
        return Geometry(
            num_heads=shape.num_attention_heads,
            num_kv_heads=shape.num_key_value_heads,
            head_dim=shape.head_dim,
            page_size=self.page_size,
            dtype=like.dtype,
            device=like.device,
            kv_store_dtype=self.kv_store_dtype,
        )


class HeadRunner:
    """A network with keys and values of its own, its store of them, and the features it reads."""

    def __init__(
        self,
        net: PagedHead,
        features: FeatureView,
        *,
        target_logits: Callable[[Tensor], Tensor],
        vocab_size: int,
        pages: HeadPages,
        make: HeadLinears | None = None,
    ) -> None:
        """Run `net`, in the type and on the device of `features`, with its embedding in place.

        Args:
            net: the network.
            features: what the target's runner keeps at the network's points.
            target_logits: the target's head, for networks without one.
            vocab_size: of the target.
            pages: as many as the target has.
            make: how its matrices become linears; default: as they are.
        """
        self.net = net.eval().requires_grad_(False)
        self.features = features
        self.page_size = pages.page_size
        shape = net.layer_shape
        like = features.slots_SF
        self.device = like.device
        self.store = KVStore(
            shape,
            num_pages=pages.num_pages,
            page_size=pages.page_size,
            dtype=pages.kv_store_dtype or like.dtype,
            device=like.device,
        )
        geometry = pages.geometry(shape, like)
        self._group = geometry.group
        self._attention = backend_for(like.device).attention(geometry, batch_invariant=False)
        self.max_positions = positions = shape.max_position_embeddings
        rope = RopeShape(theta=shape.rope_theta, rotary_dim=shape.head_dim)
        self._rotary = RotaryTable(rope, max_positions=positions, like=like)
        parts = RunnerParts(
            attention=self._attention,
            rotary=self._rotary,
            geometry=geometry,
            features=features,
            vocab_size=vocab_size,
            linears=make or HeadLinears(),
        )
        self.kernels: CompiledHead | None = net.compiled(parts)
        if self.kernels is None and make is not None:
            serve_linears(net, net.tops, make)
        self._has_top = bool(net.tops)
        self._target_logits = target_logits
        self._vocab_size = vocab_size
        self._target_ids = net.target_ids
        if self._target_ids is not None and self._target_ids.shape[0] == vocab_size:
            self._target_ids = None

    def mixed_features(self, layouts: Sequence[SpanLayout]) -> Tensor:
        """What the network makes of the target's features of these slots, [T, D]."""
        return self.mix(self.features.read(slots_of(layouts, self.page_size, self.device)))

    def mix(self, features_TF: Tensor) -> Tensor:
        """What the network makes of features, [T, D]."""
        return (self.kernels or self.net).mix(features_TF)

    def forward(
        self, layouts: Sequence[SpanLayout], token_ids: Sequence[int], hidden_TD: Tensor
    ) -> Tensor:
        """One pass over slots laid end to end; the network's outputs [T, D].

        Args:
            layouts: where the slots lie; their pages must cover them.
            token_ids: of the token after each slot's position.
            hidden_TD: mixed features or the network's own outputs.
        """
        assert sum(layout.num_tokens for layout in layouts) == len(token_ids) == len(hidden_TD)
        inputs = ModelInput(
            tokens_T=torch.tensor(token_ids, device=self.device),
            positions_T=positions_of(layouts, self.device),
            slots_T=slots_of(layouts, self.page_size, self.device),
            spans=tuple(layouts),
            rows_R=None,
        )
        if self.kernels is not None:
            return self.kernels.forward(inputs, hidden_TD, self.store)
        attend = self._attention.plan([layout.window for layout in layouts])
        stores = self.store.layers
        attends = [self._paged(layer_SKh, inputs.slots_T, attend) for layer_SKh in stores]
        rotation = self._rotary.at(inputs.positions_T)
        return self.net.forward(inputs.tokens_T, hidden_TD, rotation, attends)

    def logits(self, outputs_BD: Tensor) -> Tensor:
        """float32 logits over the target's vocabulary, [B, V]; ids it cannot draft get -inf."""
        if not self._has_top:
            return self._target_logits(outputs_BD)
        own = (self.kernels or self.net).logits(outputs_BD).float()
        if self._target_ids is None:
            return own
        full = own.new_full((own.shape[0], self._vocab_size), NEVER)
        return full.index_copy_(1, self._target_ids, own)

    def roll_out(
        self,
        layouts: Sequence[SpanLayout],
        token_ids: Sequence[Sequence[int]],
        plan: RolloutPlan,
        stream_TD: Tensor | None,
    ) -> RolledOut | None:
        """Feed slots and draft several tokens after each span, or None: one by one.

        Args:
            layouts: where the slots lie; the pages must cover `plan.steps` from each last one on.
            token_ids: of the token after each slot's position.
            plan: how many tokens, and how each is chosen.
            stream_TD: the network's own outputs; None: the target's features of these slots.
        """
        kernels = self.kernels
        if kernels is None or sum(layout.num_tokens for layout in layouts) > MOST_ROWS:
            return None
        if stream_TD is None and not kernels.rollout.reads_features:
            stream_TD = self.mixed_features(layouts)
        return kernels.rollout(layouts, token_ids, plan, self.store, stream_TD)

    def draft_at_once(
        self,
        layouts: Sequence[SpanLayout],
        token_ids: Sequence[int],
        plan: RolloutPlan,
        masks: Callable[[int], MaskSlots],
    ) -> RolledOut | None:
        """Draft several tokens in one pass over features and the mask slots behind them, or None.

        Spans end in `plan.steps` - 1 mask slots, which `masks` gives, and the pages cover no more.
        """
        kernels = self.kernels
        if kernels is None or not kernels.rollout.reads_features or len(token_ids) > MOST_ROWS:
            return None
        found = masks(plan.steps - 1)
        return kernels.rollout(layouts, [token_ids], plan, self.store, masks=found)

    def _paged(self, layer_SKh: Tensor, slots_T: Tensor | slice, attend: Attend) -> HeadAttend:
        """Attention over the store, which wants query heads group-major."""
        group = self._group

        def apply(q_THh: Tensor, k_TKh: Tensor, v_TKh: Tensor) -> Tensor:
            kv_TKh = torch.cat((k_TKh, v_TKh), dim=1)
            write(layer_SKh, slots_T, quantize_kv(kv_TKh, layer_SKh.dtype))
            if group == 1:
                return attend(q_THh, layer_SKh)
            rows, heads, size = q_THh.shape
            grouped = q_THh.view(rows, heads // group, group, size).transpose(1, 2)
            out = attend(grouped.reshape(rows, heads, size), layer_SKh)
            back = out.view(rows, group, heads // group, size).transpose(1, 2)
            return back.reshape(rows, heads * size)

        return apply
