"""Runs a block head over paged keys and values of its own, under the target's slots.

Knows pages, positions and features, not requests or drafts. Two things are run: places, of which
only the context's keys and values are kept, and blocks, whose keys and values stand behind the
context until the next thing is written there.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.kv.features import FeatureView
from foretoken.kv.store import KVStore, write
from foretoken.layers.rope import RotaryTable
from foretoken.models.rollout import MOST_ROWS
from foretoken.models.tensors import RolledOut, RolloutPlan, SpanLayout
from foretoken.ops.linear import Linear
from foretoken.ops.logits import NEVER
from foretoken.ops.quantize_kv import dequantize, quantize_kv
from foretoken.proposers.heads.dflash.compiled import BlockSite, CompiledBlocks, compile_blocks
from foretoken.proposers.heads.dflash.head import BlockHead
from foretoken.proposers.heads.dflash.layers import BlockView
from foretoken.proposers.heads.linears import HeadLinears, serve_linears
from foretoken.proposers.heads.paged_head import HeadPages
from foretoken.proposers.heads.parts import Attend
from foretoken.runtime.runner import positions_of, slots_of

_PIECE: Final = 512
"""Places that are fed at once: what lies between the matrices stays small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetTop:
    """What makes the target's logits of hidden states."""

    logits: Callable[[Tensor], Tensor]
    """float32 [N, V] of [N, D]."""
    vocab_size: int
    linear: Linear | None = None
    """What does all of that alone, if anything does."""


_SPARED: Final = 64
"""Blocks of one pass that may have rows past their sequences' pages; more are cut short."""


@final
class _Spares:
    """Pages of a head's store behind those that the target has too: for the rows of whole blocks
    past the pages of their sequence. Nothing stays there from one pass to the next."""

    def __init__(self, net: BlockHead, pages: HeadPages) -> None:
        self._size, self._first = pages.page_size, pages.num_pages
        self._each = -(-net.shape.block_size // self._size) if net.is_whole else 0
        self.count = _SPARED * self._each

    def behind(self, table: list[int], index: int, end: int) -> list[int]:
        """The page table of block `index` of a pass, up to place `end` if there are spares."""
        missing = -(-end // self._size) - len(table)
        if missing <= 0 or index >= _SPARED:
            return table
        assert missing <= self._each, (missing, self._each)
        first = self._first + index * self._each
        return [*table, *range(first, first + missing)]


@final
class BlockRunner:
    """A block head, its store of keys and values, and the features it reads."""

    def __init__(
        self,
        net: BlockHead,
        features: FeatureView,
        *,
        top: TargetTop,
        pages: HeadPages,
        make: HeadLinears | None = None,
    ) -> None:
        """Run `net`, in the type and on the device of `features`, with its embedding in place.

        Args:
            net: the network.
            features: what the target's runner keeps at the network's points.
            top: makes the logits of networks without a head.
            pages: as many as the target has.
            make: how its matrices become linears; default: as they are.
        """
        self.net = net.eval().requires_grad_(False)
        self.features, self.page_size = features, pages.page_size
        layer, like = net.shape.layer, features.slots_SF
        self.device = like.device
        self._spares = _Spares(net, pages)
        self.store = KVStore(
            layer,
            num_pages=pages.num_pages + self._spares.count,
            page_size=pages.page_size,
            dtype=pages.kv_store_dtype or like.dtype,
            device=like.device,
        )
        self.max_positions = positions = layer.max_position_embeddings
        self._rotary = RotaryTable(net.shape.rope, max_positions=positions, like=like)
        self._top, self._target_ids = top, net.target_ids
        site = BlockSite(
            features=features,
            store=self.store,
            rotary=self._rotary,
            linears=make or HeadLinears(),
            head=top.linear,
            vocab_size=top.vocab_size,
        )
        self.kernels: CompiledBlocks | None = compile_blocks(net, site)
        if self.kernels is None and make is not None:
            serve_linears(net, net.tops, make)

    def block(self, index: int, start: int, drafts: int, table: list[int]) -> SpanLayout:
        """Where block `index` of a pass lies that begins at `start`, for so many drafts.

        A head that drafts in whole blocks has all of their rows, if there is room.
        """
        shape, end = self.net.shape, start + self.net.shape.first_row + drafts
        if self.net.is_whole:
            most = min(start + shape.block_size, self.max_positions)
            table = self._spares.behind(table, index, most)
            end = max(end, min(most, len(table) * self.page_size))
        return SpanLayout(start=start, num_tokens=end - start, page_table=table)

    def feed(self, layouts: Sequence[SpanLayout]) -> None:
        """Keep keys and values of the context at these places, whose features are known."""
        for piece in _pieces(layouts, _PIECE):
            if self.kernels is not None:
                self.kernels.run(piece, self._context(piece), (), ())
                continue
            slots = slots_of(piece, self.page_size, self.device)
            context_TD = self.net.context(self.features.read(slots))
            rotation = self._rotary.at(positions_of(piece, self.device))
            for layer, layer_SKh in zip(self.net.decoder_layers, self.store.layers, strict=True):
                kv_TKh = torch.cat(layer.self_attn.keys_values(context_TD, rotation), dim=1)
                write(layer_SKh, slots, quantize_kv(kv_TKh, layer_SKh.dtype))

    def run(
        self,
        context: Sequence[SpanLayout],
        blocks: Sequence[SpanLayout],
        token_ids: Sequence[int],
    ) -> Tensor:
        """Feed places, then one pass over blocks laid end to end; their outputs [T, D], valid until
        the next pass.

        Args:
            context: places whose keys and values are not there yet.
            blocks: where each block lies; all places before it are there by then.
            token_ids: the newest token and masks of each.
        """
        assert sum(layout.num_tokens for layout in blocks) == len(token_ids), len(token_ids)
        if self.kernels is not None:
            context = self._few(context)
            return self.kernels.run(context, self._context(context), blocks, token_ids)
        self.feed(context)
        paged = PagedBlocks(blocks, self.page_size, self.device)
        views, stores = self.net.shape.views, self.store.layers
        attends = [paged.over(view, one) for view, one in zip(views, stores, strict=True)]
        rotation = self._rotary.at(positions_of(blocks, self.device))
        tokens_T = torch.tensor(token_ids, device=self.device)
        outputs_TD: Tensor = self.net(tokens_T, rotation, attends)
        return outputs_TD

    def draft(
        self,
        context: Sequence[SpanLayout],
        blocks: Sequence[SpanLayout],
        token_ids: Sequence[int],
        plan: RolloutPlan,
    ) -> RolledOut | None:
        """The same, and `plan.steps` tokens of each block; None: some part has no kernel."""
        if self.kernels is None or not self.kernels.drafts:
            return None
        rows = self._few(context), blocks, token_ids
        return self.kernels.draft(*rows, plan, self.net.shape.first_row)

    @property
    def drafts_at_once(self) -> bool:
        """Whether `draft` can do it."""
        return self.kernels is not None and self.kernels.drafts

    def logits(self, outputs_ND: Tensor) -> Tensor:
        """float32 logits over the network's own ids, [N, Vd]."""
        if self.net.shape.own_head:
            return self.net.logits(outputs_ND)
        return self._top.logits(outputs_ND)

    def spread(self, own_NV: Tensor) -> Tensor:
        """Logits over the target's vocabulary, [N, V]; ids that it cannot draft get -inf."""
        if self._target_ids is None:
            return own_NV
        full = own_NV.new_full((own_NV.shape[0], self._top.vocab_size), NEVER)
        return full.index_copy_(1, self._target_ids, own_NV)

    def _few(self, context: Sequence[SpanLayout]) -> Sequence[SpanLayout]:
        """What is left for a pass over blocks, after much was fed ahead of it."""
        if sum(layout.num_tokens for layout in context) <= MOST_ROWS:
            return context
        self.feed(context)
        return ()

    def _context(self, layouts: Sequence[SpanLayout]) -> Tensor:
        """Context rows of places by the kernels, [T, D]."""
        assert self.kernels is not None, "asked only where there are some"
        if not layouts:
            return self.features.slots_SF.new_empty(0, self.net.shape.layer.hidden_size)
        slots = slots_of(layouts, self.page_size, self.device)
        return self.kernels.context(self.features.read(slots))


def _pieces(layouts: Sequence[SpanLayout], most: int) -> Iterator[list[SpanLayout]]:
    """The same places in order, at most so many at a time."""
    piece, left = list[SpanLayout](), most
    for layout in layouts:
        at, end = layout.start, layout.start + layout.num_tokens
        while at < end:
            count = min(left, end - at)
            piece.append(replace(layout, start=at, num_tokens=count))
            at, left = at + count, left - count
            if not left:
                yield piece
                piece, left = [], most
    if piece:
        yield piece


@final
class PagedBlocks:
    """How the rows of some blocks attend, in PyTorch's operations."""

    def __init__(self, layouts: Sequence[SpanLayout], page_size: int, device: torch.device) -> None:
        """For one pass over these blocks, laid end to end."""
        self._layouts, self._page_size, self._device = layouts, page_size, device
        self._slots = slots_of(layouts, page_size, device)
        self._seen: dict[BlockView, list[tuple[Tensor | slice, Tensor]]] = {}

    def over(self, view: BlockView, layer_SKh: Tensor) -> Attend:
        """The rows write their keys and values to a layer's store, then see what `view` says."""
        if view not in self._seen:
            self._seen[view] = [self._keys(view, layout) for layout in self._layouts]
        seen = self._seen[view]

        def attend(q_THh: Tensor, k_TKh: Tensor, v_TKh: Tensor) -> Tensor:
            write(
                layer_SKh, self._slots, quantize_kv(torch.cat((k_TKh, v_TKh), 1), layer_SKh.dtype)
            )
            sizes, parts = [layout.num_tokens for layout in self._layouts], []
            for q_RHh, (slots, mask_RL) in zip(q_THh.split(sizes), seen, strict=True):
                kept_KLh = dequantize(layer_SKh[slots], q_RHh.dtype).transpose(0, 1)
                keys_KLh, values_KLh = kept_KLh.chunk(2)
                out_HRh = F.scaled_dot_product_attention(
                    q_RHh.transpose(0, 1)[None],
                    keys_KLh[None],
                    values_KLh[None],
                    attn_mask=mask_RL,
                    enable_gqa=True,
                )
                parts.append(out_HRh[0].transpose(0, 1).flatten(1))
            return torch.cat(parts)

        return attend

    def _keys(self, view: BlockView, layout: SpanLayout) -> tuple[Tensor | slice, Tensor]:
        """Slots of the keys that some row of a block sees, and which of them each row does."""
        first, end = layout.start, layout.start + layout.num_tokens
        low = 0 if view.window is None else max(0, first - view.window + 1)
        keys = SpanLayout(start=low, num_tokens=end - low, page_table=layout.page_table)
        rows_R1 = torch.arange(first, end, device=self._device)[:, None]
        keys_L = torch.arange(low, end, device=self._device)
        seen_RL = keys_L <= rows_R1 if view.causal else (keys_L < end).expand(end - first, -1)
        if view.window is not None:
            seen_RL = seen_RL & ((rows_R1 - keys_L).abs() < view.window)
        return slots_of([keys], self._page_size, self._device), seen_RL
