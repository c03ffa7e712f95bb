"""Runs a model over spans: index tensors, attention plan, forward, logits of the rows asked for.

Drives targets and draft models alike, each over its own KV store and the same page tables. Knows
token ids and positions, not why a row is wanted. Invariant: rows come span by span, in order of
position.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from foretoken.kv.store import KVStore
from foretoken.models import Model, load_model
from foretoken.models.tensors import ModelInput, ModelOutput, SpanLayout
from foretoken.ops.attention import choose_attention
from foretoken.runtime.batch import Batch


class Runner:
    """A model, its KV store and its attention."""

    def __init__(self, model: Model, store: KVStore, *, batch_invariant: bool) -> None:
        """Use `model` over `store`; choosing the attention may take a moment."""
        self.model = model
        self.store = store
        geometry = model.geometry(store.page_size)
        self._attention = choose_attention(geometry, batch_invariant=batch_invariant)
        self._device = model.device
        self._is_cpu = model.device.type == "cpu"

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        batch_invariant: bool,
        num_pages: int,
        page_size: int,
    ) -> Self:
        """Load the checkpoint in `folder` and allocate its KV; raises as `load_model`."""
        model = load_model(folder, dtype=dtype, device=device, batch_invariant=batch_invariant)
        store = KVStore(
            model.shape, num_pages=num_pages, page_size=page_size, dtype=dtype, device=device
        )
        return cls(model, store, batch_invariant=batch_invariant)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.store.page_size

    def run(self, batch: Batch) -> ModelOutput:
        """Forward of a step; rows are each span's prompt rows and sample rows, its last ones."""
        layouts: list[SpanLayout] = []
        token_ids: list[list[int]] = []
        rows: list[int] = []
        first = 0
        for span in batch.spans:
            count = span.num_tokens
            table = span.sequence.page_table
            layouts.append(SpanLayout(start=span.start, num_tokens=count, page_table=table))
            token_ids.append(span.input_ids)
            first += count
            rows.extend(range(first - span.prompt_rows - span.sample_rows, first))
        return self.forward(layouts, token_ids, rows)

    def forward_last(self, spans: Sequence[SpanLayout], token_ids: list[list[int]]) -> Tensor:
        """float32 logits [B, V] of each span's last token."""
        rows, first = [], 0
        for span in spans:
            first += span.num_tokens
            rows.append(first - 1)
        return self.forward(spans, token_ids, rows).logits_RV

    @torch.inference_mode()
    def forward(
        self,
        spans: Sequence[SpanLayout],
        token_ids: list[list[int]],
        rows: list[int] | None = None,
    ) -> ModelOutput:
        """Run `spans`, one list of token ids each, laid end to end.

        Args:
            spans: where the tokens lie; their pages must cover them.
            token_ids: num_tokens ids per span.
            rows: indices into the concatenated tokens that need logits; None: all.
        """
        inputs = self._inputs(spans, token_ids, rows)
        plan = self._attention.plan(spans)
        hidden_RD = self.model(inputs, self.store.layers, plan)
        return ModelOutput(logits_RV=self.model.logits(hidden_RD), hidden_RD=hidden_RD)

    def _inputs(
        self, spans: Sequence[SpanLayout], token_ids: list[list[int]], rows: list[int] | None
    ) -> ModelInput:
        flat = token_ids[0] if len(token_ids) == 1 else [t for ids in token_ids for t in ids]
        total = sum(span.num_tokens for span in spans)
        assert len(flat) == total, (len(flat), total)
        positions = [torch.arange(s.start, s.start + s.num_tokens) for s in spans]
        slots = [self._slots(span) for span in spans]
        first_slot = slots[0] if len(slots) == 1 and isinstance(slots[0], int) else None
        pieces = [self._slot_range(slot, s) for slot, s in zip(slots, spans, strict=True)]
        every_row = rows is None or len(rows) == total
        return ModelInput(
            tokens_T=self._move(torch.tensor(flat)),
            positions_T=self._move(_join(positions)),
            slots_T=self._move(_join(pieces)),
            spans=tuple(spans),
            rows_R=None if every_row else self._move(torch.tensor(rows, dtype=torch.int64)),
            first_slot=first_slot,
        )

    def _slots(self, span: SpanLayout) -> int | Tensor:
        """First slot of the span if its slots lie side by side, else all of them."""
        size, table = self.store.page_size, span.page_table
        low, high = span.start // size, (span.start + span.num_tokens - 1) // size
        assert high < len(table), (high, len(table))
        pages = table[low : high + 1]
        if len(pages) == 1 or pages == list(range(pages[0], pages[0] + len(pages))):
            return pages[0] * size + span.start % size
        positions = torch.arange(span.start, span.start + span.num_tokens)
        pages_P = torch.tensor(pages)
        return pages_P[positions // size - low] * size + positions % size

    def _slot_range(self, slots: int | Tensor, span: SpanLayout) -> Tensor:
        if isinstance(slots, Tensor):
            return slots
        return torch.arange(slots, slots + span.num_tokens)

    def _move(self, tensor: Tensor) -> Tensor:
        return tensor if self._is_cpu else tensor.to(self._device, non_blocking=True)


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
