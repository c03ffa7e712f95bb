"""Drafting with block heads: one pass feeds the context that is new, and one fills a block.

Place i of the head has keys and values of the target's features at position i, under the target's
page tables; they need no later token, so all places before the newest token are right once they are
fed, whoever fed them. The block begins with the newest token, at its own position; what its rows
leave behind the context is overwritten.

Source: DFlash (arXiv 2602.06036).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, final

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.errors import UnsupportedModelError
from foretoken.kv.store import write
from foretoken.models.rollout import MOST_ROWS
from foretoken.models.tensors import RolledOut, RolloutPlan, SpanLayout
from foretoken.ops.quantize_kv import dequantize, quantize_kv
from foretoken.proposers.base import Proposer
from foretoken.proposers.heads.base import HeadServingContext
from foretoken.proposers.heads.dflash.compiled import CompiledBlocks, RecordedBlocks, compile_blocks
from foretoken.proposers.heads.dflash.network import BlockHead
from foretoken.proposers.heads.dflash.shape import BlockPass, BlockView
from foretoken.proposers.heads.paged_head import PagedContext, PagedRunner, RunnerParts, serve_paged
from foretoken.proposers.heads.parts import Attend
from foretoken.proposers.kv_progress import MadeOf, Stretches
from foretoken.proposers.steps import DepthSteps, DraftSteps
from foretoken.runtime.batch import Span
from foretoken.runtime.runner import positions_of, slots_of
from foretoken.runtime.sequence import Sequence as RunningSequence

_PIECE: Final = 512
"""Places that are fed at once: what lies between the matrices stays small."""
_SPARED: Final = 64
"""Blocks of one pass that may have rows past their sequences' pages; more are cut short."""


@final
class _Spares:
    """Pages of a head's store behind those that the target has too: for the rows of whole blocks
    past the pages of their sequence. Nothing stays there from one pass to the next."""

    def __init__(self, net: BlockHead, context: PagedContext) -> None:
        self._size, self._first = context.page_size, context.num_pages
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


def serve_blocks(head: BlockHead, site: HeadServingContext) -> Proposer:
    """The drafter over a block head. Raises ConfigError: trees that are deeper than its blocks;
    UnsupportedModelError: the head wants other logits than the target's own head makes."""
    target, shape = site.engine.target.model, head.shape
    site.drafting.check_depth(shape.max_drafts)
    cap = target.shape.logit_softcap
    if not shape.own_head and shape.logit_softcap not in (None, cap):
        allowed = f"{cap}, as the target's, whose output head it uses"
        raise UnsupportedModelError("final_logit_softcapping", shape.logit_softcap, allowed)
    head.use_embedding(target.embedding)
    same = target.shape.tie_word_embeddings and cap == shape.logit_softcap
    if same and not site.config.quantization and target.makes_draft_logits:
        head.use_head(target.embedding)
    runner = BlockRunner(head, PagedContext.of(site))
    return serve_paged(runner, site, MadeOf.FEATURES, enters=shape.rope.counts_distances)


@final
class BlockRunner(PagedRunner):
    """Runs places, of which only the context's keys and values are kept, and blocks, whose keys and
    values stand behind the context until the next thing is written there."""

    net: BlockHead
    kernels: CompiledBlocks | RecordedBlocks | None
    drafts_blocks = True

    def __init__(self, net: BlockHead, context: PagedContext) -> None:
        self._spares = _Spares(net, context)
        super().__init__(net, context)
        self.max_drafts = net.shape.max_drafts

    def spare_pages(self, context: PagedContext) -> int:
        return self._spares.count

    def _compile(self, parts: RunnerParts) -> CompiledBlocks | RecordedBlocks | None:
        return compile_blocks(self.net, parts)

    def steps(self, spans: list[Span], fed: Stretches, depths: list[int]) -> DraftSteps:
        return BlockSteps(self, spans, fed, depths)

    def feed(self, sequences: Sequence[RunningSequence], fed: Stretches) -> None:
        self.feed_context(fed.layouts(sequences))

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

    def feed_context(self, layouts: Sequence[SpanLayout]) -> None:
        """Keep keys and values of the context at these places, whose features are known."""
        for piece in _pieces(layouts, _PIECE):
            if self.kernels is not None:
                self.kernels.feed(piece)
                continue
            slots = slots_of(piece, self.page_size, self.device)
            context_TD = self.net.context(self.features.read(slots))
            rotation = self._rotary.at(positions_of(piece, self.device))
            for layer, layer_SKh in zip(self.net.decoder_layers, self.store.layers, strict=True):
                kv_TKh = torch.cat(layer.self_attn.keys_values(context_TD, rotation), dim=1)
                write(layer_SKh, slots, quantize_kv(kv_TKh, layer_SKh.dtype))

    def run(self, rows: BlockPass) -> Tensor:
        """Feed places, then one pass over blocks; their outputs [T, D], valid until the next
        pass."""
        blocks, token_ids = rows.blocks, rows.token_ids
        assert sum(layout.num_tokens for layout in blocks) == len(token_ids), len(token_ids)
        if self.kernels is not None:
            return self.kernels.run(self._few(rows))
        self.feed_context(rows.context)
        paged = PagedBlocks(blocks, self.page_size, self.device)
        views, stores = self.net.shape.views, self.store.layers
        attends = [paged.over(view, one) for view, one in zip(views, stores, strict=True)]
        rotation = self._rotary.at(positions_of(blocks, self.device))
        tokens_T = torch.tensor(token_ids, device=self.device)
        outputs_TD: Tensor = self.net(tokens_T, rotation, attends)
        return outputs_TD

    def draft(self, rows: BlockPass, plan: RolloutPlan) -> RolledOut | None:
        """The same, and `plan.steps` tokens of each block, where `drafts_at_once`; None: the
        kernels cannot choose them."""
        assert self.kernels is not None, "asked only where `drafts_at_once`"
        return self.kernels.draft(self._few(rows), plan)

    @property
    def drafts_at_once(self) -> bool:
        """Whether `draft` can do it."""
        return self.kernels is not None and self.kernels.drafts

    def _few(self, rows: BlockPass) -> BlockPass:
        """What is left for a pass over blocks, after much was fed ahead of it."""
        if rows.num_fed <= MOST_ROWS:
            return rows
        self.feed_context(rows.context)
        return rows._replace(context=())


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


@final
class BlockSteps(DepthSteps):
    """Reads the rows of one pass over blocks, each after the token that was chosen before it."""

    def __init__(
        self, runner: BlockRunner, spans: list[Span], fed: Stretches, depths: list[int]
    ) -> None:
        """Nothing is run yet; `fed` are the places of each that are to be fed first."""
        super().__init__(spans, depths)
        self.runner, self._fed = runner, fed
        self._outputs_KD: Tensor
        self.rolls_out = runner.drafts_at_once

    def roll_out(
        self, active: list[int], drafted: list[list[int]], plan: RolloutPlan
    ) -> RolledOut | None:
        return self.runner.draft(self.rows_to_run(), plan)

    def run(self) -> Tensor:
        given = self.rows_to_run()
        rows, row, unused = list[int](), 0, self.runner.net.shape.first_row
        for layout, depth in zip(given.blocks, self.depths, strict=True):
            rows.extend(range(row + unused, row + unused + depth))
            row += layout.num_tokens
        self._outputs_KD = self.runner.run(given)[rows]
        return self.runner.own_logits(self._outputs_KD)

    def at(self, spans: list[int], depth: int, previous: list[int]) -> Tensor:
        own_NV, outputs_ND = super().at(spans, depth, previous), self._outputs_at(spans, depth)
        return self.runner.spread(self.runner.net.after(own_NV, outputs_ND, self._ids(previous)))

    def sure(self, active: list[int], drafted: list[list[int]]) -> list[float] | None:
        newest = self.newest
        last = [
            tokens[-1] if tokens else newest[i] for i, tokens in zip(active, drafted, strict=True)
        ]
        outputs_ND = self._outputs_at(active, len(drafted[0]))
        found_N = self.runner.net.sure(outputs_ND, self._ids(last))
        return None if found_N is None else list(found_N.tolist())

    def rows_to_run(self) -> BlockPass:
        """What is to be fed, and a block for each sequence."""
        mask, layouts, tokens = self.runner.net.shape.mask_token_id, [], list[int]()
        for index, (sequence, depth) in enumerate(zip(self.sequences, self.depths, strict=True)):
            table = sequence.page_table
            layout = self.runner.block(index, sequence.num_tokens - 1, depth, table)
            layouts.append(layout)
            tokens += [sequence.token_ids[-1], *[mask] * (layout.num_tokens - 1)]
        return BlockPass(self._fed.layouts(self.sequences), layouts, tokens)

    def _outputs_at(self, spans: list[int], depth: int) -> Tensor:
        return self._outputs_KD[self.rows(spans, depth)]

    def _ids(self, tokens: list[int]) -> Tensor:
        return torch.tensor(tokens, device=self.runner.device)
