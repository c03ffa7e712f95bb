"""Runs spans through a model: builds the step's index tensors and asks for the logits wanted.

Knows pages and positions, not requests or sampling. The same runner drives targets and draft
models, each over a KV store of its own.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from foretoken.kv.features import FeatureGaps, FeatureStore, GapRecord
from foretoken.kv.free_runs import Run
from foretoken.kv.shared_pages import DraftPages, SharedPages
from foretoken.kv.store import KVStore
from foretoken.models import LoadOptions, Model, load_model
from foretoken.models.tensors import (
    ModelInput,
    ModelOutput,
    RolledOut,
    RolloutPlan,
    SpanLayout,
    StepDraws,
)
from foretoken.ops.attention.base import contiguous_start
from foretoken.runtime.batch import Batch
from foretoken.runtime.rank0_driver import Forget, Forward, Leader, Move, Said, wait_for_loading


class Runner:
    """A model and its KV store."""

    def __init__(
        self,
        model: Model,
        store: KVStore,
        points: Sequence[int] = (),
        *,
        readers: Mapping[str, Sequence[int]] | None = None,
        generations: Sequence[int] = (),
    ) -> None:
        """Run `model` over `store`; keep the hidden states at `points` of every computed token.

        Args:
            model: what runs.
            store: its keys and values.
            points: where hidden states are taken.
            readers: who reads which of them, by name: those that rest in a step get none.
            generations: of the page pool, as `GapRecord` wants them.
        """
        self.model = model
        self.store = store
        self.page_size = store.page_size
        self.page_bytes = store.page_bytes
        """Of the keys and values of a page, on all ranks together."""
        self.window_bytes = store.window_bytes
        """Of that, what layers with a window keep."""
        self.features = _feature_store(model, store, points) if points else None
        self._readers = {name: frozenset(read) for name, read in (readers or {}).items() if read}
        self.gaps = {name: FeatureGaps() for name in self._readers}
        """What was computed while a reader of features rested, by its name."""
        self._generations = generations
        self._records: dict[frozenset[str], GapRecord] = {}
        """The same by who rested together."""
        self._writers: dict[frozenset[str], FeatureStore | None] = {}
        self._feature_pages: DraftPages | None = None
        self._kept = self.features
        """Where the features of the newest step went."""
        self._leader: Leader | None = None

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.model.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the model."""
        return self.model.embedding.dtype

    @property
    def draws(self) -> bool:
        """Whether tokens may be drawn in the same call, where nothing edits logits."""
        return self.model.runs_steps

    @property
    def leads(self) -> bool:
        """Whether other ranks are told what is run."""
        return self._leader is not None

    def lead(self, leader: Leader) -> None:
        """From now on tell the ranks that have the rest of the model what is run."""
        self._leader = leader

    def share_features(self, shared: SharedPages) -> None:
        """From now on keep features only where there is memory for them."""
        features, size = self.features, self.page_size
        assert features is not None, "asked only where some are kept"
        self._feature_pages = shared.add(
            self._readers, size * features.slot_bytes, lambda runs: features.give_back(runs, size)
        )
        self._feature_pages.forget = self._lose_features

    @classmethod
    def load(
        cls,
        folder: Path,
        options: LoadOptions,
        *,
        num_pages: int,
        points: Sequence[int] = (),
        readers: Mapping[str, Sequence[int]] | None = None,
        generations: Sequence[int] = (),
    ) -> Self:
        """Load a checkpoint and allocate its KV store, and that of hidden states at `points`.

        Raises:
            ModelError: the checkpoint is not supported or broken.
            RankLostError: another rank left, died or was late.
        """
        model, group = load_model(folder, options), options.group
        here, keys = options.layers(model.shape.num_hidden_layers), model.shape.num_key_value_heads
        windows = model.shape.windows[here.start : here.stop]
        store = KVStore(
            replace(model.shape, num_hidden_layers=len(here), windows=windows),
            num_pages=num_pages,
            page_size=options.page_size,
            dtype=options.kv_store_dtype or options.dtype,
            device=options.device,
            kv_heads=options.share.key_heads(keys) if options.share.size > 1 else None,
        )
        runner = cls(model, store, points, readers=readers, generations=generations)
        if group is not None:
            own = (store.page_bytes, store.window_bytes)
            runner.page_bytes, runner.window_bytes = wait_for_loading(group, own)
        return runner

    def run(
        self, batch: Batch, draws: bytes | None = None, drafts_KB: Tensor | None = None
    ) -> ModelOutput:
        """The engine's step: every span with its drafts; rows span by span, in position order.

        Args:
            batch: the step.
            draws: how each row's token is drawn, if that is known before (`Verifier.draws`).
            drafts_KB: `StepDraws.drafts_KB`, beside draws.
        """
        layouts = [
            SpanLayout(
                start=span.start,
                num_tokens=span.num_tokens,
                page_table=span.sequence.page_table,
                paths=None if span.tree is None else span.tree.window_paths(span.length),
            )
            for span in batch.spans
        ]
        rows: list[int] = []
        end = 0
        for span in batch.spans:
            end += span.num_tokens
            rows.extend(range(end - span.prompt_rows - span.sample_rows, end))
        if self.features is not None:
            self._kept = self._features_of(batch)
        token_ids = [span.input_ids for span in batch.spans]
        how = None if draws is None else StepDraws(draws, batch.follows, drafts_KB)
        return self._forward(layouts, token_ids, rows, self._kept, how)

    def _features_of(self, batch: Batch) -> FeatureStore | None:
        """Where the step's features go: those of readers that do not rest, if there is memory."""
        pages, resting = self._feature_pages, batch.plan.resting
        if not resting and pages is None:
            return self.features
        without = resting.intersection(self._readers)
        if pages is not None and len(without) < len(self._readers):
            size, wanted = self.page_size, list[int]()
            for span in batch.spans:
                end = span.start + span.num_tokens
                wanted += span.sequence.page_table[span.start // size : -(-end // size)]
            if not pages.take(wanted):
                without = frozenset(self._readers)
        if not without:
            return self.features
        record = self._record_of(without)
        for span in batch.spans:
            start = span.start
            record.add(span.sequence.page_table, start, start + span.num_tokens)
        return self._features_without(without)

    def _record_of(self, readers: frozenset[str]) -> GapRecord:
        """Of what these readers lack, and nobody else."""
        if readers not in self._records:
            record = self._records[readers] = GapRecord(self._generations, self.page_size)
            for name in readers:
                self.gaps[name].records.append(record)
        return self._records[readers]

    def _features_without(self, without: frozenset[str]) -> FeatureStore | None:
        """Writes what the others read; None: there are none."""
        assert self.features is not None, "asked only where some are kept"
        if without not in self._writers:
            awake = [read for name, read in self._readers.items() if name not in without]
            wanted = frozenset[int]().union(*awake)
            self._writers[without] = self.features.only(wanted) if wanted else None
        return self._writers[without]

    def _lose_features(self, pages: Collection[int]) -> None:
        self._record_of(frozenset(self._readers)).lose(pages)

    def settle(self, batch: Batch, accepted: Sequence[tuple[int, ...] | None]) -> None:
        """Move what was computed for the accepted branches of trees to where a chain has it.

        Args:
            batch: the step that was run.
            accepted: per span the nodes that stay, from the root down; None: a chain.
        """
        source: list[int] = []
        target: list[int] = []
        for span, path in zip(batch.spans, accepted, strict=True):
            first, table = span.start + span.length, span.sequence.page_table
            for depth, node in enumerate(path or ()):
                if depth != node:
                    source.append(slot_of(first + node, table, self.page_size))
                    target.append(slot_of(first + depth, table, self.page_size))
        if not source:
            return
        with self._leading(Move(source, target)):
            self._move(source, target)

    @torch.inference_mode()
    def _move(self, source: Sequence[int], target: Sequence[int]) -> None:
        source_N = torch.tensor(source, device=self.device)
        target_N = torch.tensor(target, device=self.device)
        self.store.move(source_N, target_N)
        if self._kept is not None:
            self._kept.move(source_N, target_N)

    def give_back(self, runs: Iterable[Run], windowed: bool | None = None) -> None:
        """Give the memory of pages back to the system, on all ranks: that of layers with a window,
        or of the others, or (None) of all."""
        pages = Forget(tuple(runs), windowed)
        with self._leading(pages):
            self.store.give_back(pages.runs, windowed)

    def obey(self, said: Said) -> None:
        """Do what the runner of rank 0 does now, over this rank's share."""
        if isinstance(said, Move):
            self._move(said.source, said.target)
        elif isinstance(said, Forget):
            self.store.give_back(said.runs, said.windowed)
        else:
            assert isinstance(said, Forward), said
            self._compute(said.layouts, said.token_ids, said.rows, None)

    def _leading(self, said: Said) -> AbstractContextManager[None]:
        """Inside, all ranks do the same."""
        return nullcontext() if self._leader is None else self._leader.leading(said)

    def forward_last(
        self, layouts: Sequence[SpanLayout], token_ids: Sequence[Sequence[int]]
    ) -> Tensor:
        """float32 logits after the last token of each span, [B, V]."""
        rows, end = [], 0
        for layout in layouts:
            end += layout.num_tokens
            rows.append(end - 1)
        return self.forward(layouts, token_ids, rows).logits_RV

    def roll_out(
        self, layouts: Sequence[SpanLayout], token_ids: Sequence[Sequence[int]], plan: RolloutPlan
    ) -> RolledOut | None:
        """Several tokens of each sequence, or None: see `Model.roll_out`."""
        if self.features is not None:
            return None
        return self.model.roll_out(layouts, token_ids, plan, self.store)

    def logits_at(
        self, layouts: Sequence[SpanLayout], token_ids: Sequence[Sequence[int]], rows: Sequence[int]
    ) -> Tensor:
        """float32 logits after some of the tokens, by index over all spans, [R, V]."""
        return self.forward(layouts, token_ids, rows).logits_RV

    def forward(
        self, layouts: Sequence[SpanLayout], token_ids: Sequence[Sequence[int]], rows: Sequence[int]
    ) -> ModelOutput:
        """Run spans laid end to end.

        Args:
            layouts: where each span lies; its pages must cover it.
            token_ids: the tokens of each span.
            rows: which of the step's tokens need logits, in order.
        """
        found = self._forward(layouts, token_ids, rows, self.features)
        if not self.draws:
            return found
        # Of a recorded step they are valid until the next one.
        return replace(found, logits_RV=found.logits_RV.clone(), hidden_RD=found.hidden_RD.clone())

    def _forward(
        self,
        layouts: Sequence[SpanLayout],
        token_ids: Sequence[Sequence[int]],
        rows: Sequence[int],
        features: FeatureStore | None,
        draws: StepDraws | None = None,
    ) -> ModelOutput:
        with self._leading(Forward(layouts, token_ids, rows)):
            return self._compute(layouts, token_ids, rows, features, draws)

    @torch.inference_mode()
    def _compute(
        self,
        layouts: Sequence[SpanLayout],
        token_ids: Sequence[Sequence[int]],
        rows: Sequence[int],
        features: FeatureStore | None,
        draws: StepDraws | None = None,
    ) -> ModelOutput:
        whole = self.model.step(layouts, token_ids, rows, self.store, features, draws)
        if whole is not None:
            return whole
        inputs = self._inputs(layouts, token_ids, rows)
        hidden_TD = self.model.hidden(inputs, self.store, features)
        if inputs.rows_R is not None:
            hidden_TD = hidden_TD.index_select(0, inputs.rows_R)
        return ModelOutput(
            logits_RV=self.model.logits(hidden_TD),
            hidden_RD=hidden_TD,
            experts_read=self.model.take_experts_read(),
        )

    def _inputs(
        self, layouts: Sequence[SpanLayout], token_ids: Sequence[Sequence[int]], rows: Sequence[int]
    ) -> ModelInput:
        device = self.device
        tokens = torch.tensor(list(chain.from_iterable(token_ids)), device=device)
        total = sum(layout.num_tokens for layout in layouts)
        assert tokens.shape[0] == total, (tokens.shape[0], total)
        whole = len(rows) == total
        return ModelInput(
            tokens_T=tokens,
            positions_T=positions_of(layouts, device),
            slots_T=slots_of(layouts, self.page_size, device),
            spans=tuple(layouts),
            rows_R=None if whole else torch.tensor(rows, dtype=torch.int64, device=device),
        )


def _feature_store(model: Model, store: KVStore, points: Sequence[int]) -> FeatureStore:
    like, hidden = model.embedding, model.shape.hidden_size
    return FeatureStore(points, hidden, store.num_slots, dtype=like.dtype, device=like.device)


def positions_of(layouts: Sequence[SpanLayout], device: torch.device) -> Tensor:
    """Positions of the spans' tokens, laid end to end, int64 [T]."""
    parts = []
    for layout in layouts:
        if layout.paths is None:
            end = layout.start + layout.num_tokens
            parts.append(torch.arange(layout.start, end, device=device))
        else:
            parts.append(torch.tensor(layout.positions, device=device))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def slot_of(place: int, page_table: Sequence[int], page_size: int) -> int:
    """Where the token at a place of a sequence is kept."""
    return page_table[place // page_size] * page_size + place % page_size


def slots_of(layouts: Sequence[SpanLayout], page_size: int, device: torch.device) -> Tensor | slice:
    """Where the spans' keys and values go; a slice for one span in neighbouring slots."""
    if len(layouts) == 1:
        layout = layouts[0]
        first = layout.first // page_size
        last = (layout.first + layout.num_tokens - 1) // page_size
        pages = layout.page_table[first : last + 1]
        page = contiguous_start(pages, len(pages))
        if page is not None:
            slot = page * page_size + layout.first % page_size
            return slice(slot, slot + layout.num_tokens)
    slots = chain.from_iterable(_runs(layout, page_size) for layout in layouts)
    every = list(chain.from_iterable(slots))
    return torch.tensor(every, dtype=torch.int64, device=device)


def _runs(layout: SpanLayout, size: int) -> Iterator[range]:
    """The slots of a span, one run per page."""
    at, end = layout.first, layout.first + layout.num_tokens
    while at < end:
        stop = min(end, (at // size + 1) * size)
        first = layout.page_table[at // size] * size + at % size
        yield range(first, first + stop - at)
        at = stop
