"""Drafting with a head that keeps keys and values of its own: EAGLE, EAGLE-3 and P-EAGLE.

Slot i of the head pairs the target's features at position i with the token at i + 1; it lies under
the target's page tables. A call feeds every slot whose features came since the last one (after a
pause all that were missed, after a prefix hit those that no request filled), which gives the first
draft; further drafts continue from the head's own outputs and are overwritten when true features
come. What further drafts continue from is the business of the head's steps: here from the outputs,
one slot a draft; P-EAGLE has a way of its own.

Source: Li et al. 2024, 2025 (EAGLE to EAGLE-3).
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import final

from torch import Tensor

from foretoken.models.tensors import RolledOut, RolloutPlan, SpanLayout
from foretoken.ops.quantize_kv import kv_store_dtype
from foretoken.proposers.heads.base import HeadServingContext
from foretoken.proposers.heads.paged_head import HeadPages, HeadRunner, PagedHead
from foretoken.proposers.kv_progress import MadeOf, Stretches
from foretoken.proposers.kv_proposer import DraftNetwork, KVProposer, KVSteps
from foretoken.proposers.tree import LevelRows, SpanTree, TreeSteps, newest_tokens
from foretoken.runtime.batch import Span
from foretoken.runtime.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFeed:
    """Slots of several spans to be fed in one pass."""

    layouts: list[SpanLayout]
    tokens: list[int]
    """The token after each slot's position."""

    @classmethod
    def of(cls, sequences: Seq[Sequence], fed: Stretches) -> "SlotFeed":
        """A stretch of each sequence's slots."""
        layouts, tokens = [], []
        for sequence, start, end in zip(sequences, fed.starts, fed.ends, strict=True):
            layouts.append(
                SpanLayout(start=start, num_tokens=end - start, page_table=sequence.page_table)
            )
            tokens.extend(sequence.token_ids[start + 1 : end + 1])
        return cls(layouts=layouts, tokens=tokens)

    @property
    def last_rows(self) -> list[int]:
        """The row of each sequence's last slot."""
        rows, end = [], 0
        for layout in self.layouts:
            end += layout.num_tokens
            rows.append(end - 1)
        return rows


MakeHeadSteps = Callable[[HeadRunner, list[Span], Stretches], KVSteps]
"""(runner, spans, what is still to be fed of each) -> the steps of one draft."""


def build_paged(
    head: PagedHead, site: HeadServingContext, make_steps: MakeHeadSteps | None = None
) -> KVProposer:
    """The drafter over a head; by default further drafts continue from its own outputs."""
    config, engine = site.config, site.engine
    target = engine.target.model
    head.use_embedding(target.embedding)
    runner = HeadRunner(
        head,
        site.view,
        target_logits=target.draft_logits,
        vocab_size=engine.vocab_size,
        pages=HeadPages(
            num_pages=engine.pool.num_pages,
            page_size=engine.target.page_size,
            kv_store_dtype=kv_store_dtype(config.kv_cache_dtype),
        ),
        make=site.linears if config.quantization else None,
    )
    if runner.kernels is not None:
        head.drop_matrices()
    progress = site.progress(runner.store, MadeOf.PAIR, max_positions=runner.max_positions)
    return KVProposer(
        head.method,
        HeadNetwork(runner, make_steps or RecurrentSteps, drafts_blocks=head.parallel),
        site.sampler,
        progress,
        trees=site.trees,
        confidence=site.confidence,
    )


@final
class HeadNetwork(DraftNetwork):
    """A head over its runner."""

    def __init__(
        self, runner: HeadRunner, make_steps: MakeHeadSteps, *, drafts_blocks: bool
    ) -> None:
        """Draft with the steps that `make_steps` makes."""
        self._runner, self._make_steps = runner, make_steps
        self.drafts_blocks = drafts_blocks

    def steps(self, spans: list[Span], fed: Stretches) -> KVSteps:
        """Those of the head's kind."""
        return self._make_steps(self._runner, spans, fed)

    def feed(self, sequences: Seq[Sequence], fed: Stretches) -> None:
        """Slots with true features."""
        slots = SlotFeed.of(sequences, fed)
        hidden_TD = self._runner.mixed_features(slots.layouts)
        self._runner.forward(slots.layouts, slots.tokens, hidden_TD)


@final
class RecurrentSteps(KVSteps):
    """One pass over the true features, then one slot a token from the head's own outputs."""

    rolls_out = True

    def __init__(self, runner: HeadRunner, spans: list[Span], fed: Stretches) -> None:
        """Nothing is run yet."""
        self.runner, self._fed = runner, fed
        self._sequences = [span.sequence for span in spans]
        self._rows = list(range(len(spans)))
        self._output_BD: Tensor | None = None

    def feed(self) -> Tensor:
        """The outputs at the newest true slot of each span, [B, D]."""
        feed = SlotFeed.of(self._sequences, self._fed)
        hidden_TD = self.runner.mixed_features(feed.layouts)
        outputs_TD = self.runner.forward(feed.layouts, feed.tokens, hidden_TD)
        return outputs_TD[feed.last_rows]

    def trees(self) -> TreeSteps:
        """A slot a node."""
        return _RecurrentTrees(self.runner, self._sequences, self.feed)

    def roll_out(
        self, active: list[int], drafted: list[list[int]], plan: RolloutPlan
    ) -> RolledOut | None:
        """The first pass too, if nothing was run before."""
        stream_BD = None
        if drafted[0]:
            layouts, tokens, stream_BD = self._newest(active, drafted)
        else:
            feed = SlotFeed.of(self._sequences, self._fed)
            layouts, tokens = feed.layouts, feed.tokens
        found = self.runner.roll_out(layouts, [tokens], plan, stream_BD)
        # A call that left a choice open goes on later from its newest outputs.
        if found is not None:
            self._output_BD, self._rows = found.stream_BD, active
        return found

    def first(self) -> Tensor:
        """Logits after the pass over the true features."""
        self._output_BD = self.feed()
        return self.runner.logits(self._output_BD)

    def after(self, active: list[int], drafted: list[list[int]]) -> Tensor:
        """Logits after a pass over one slot of each span, from the newest outputs."""
        layouts, newest, stream_BD = self._newest(active, drafted)
        self._output_BD, self._rows = self.runner.forward(layouts, newest, stream_BD), active
        return self.runner.logits(self._output_BD)

    def _newest(
        self, active: list[int], drafted: list[list[int]]
    ) -> tuple[list[SpanLayout], list[int], Tensor]:
        """Slots of the newest drafts, these, and the outputs that they came from."""
        assert self._output_BD is not None, "the first slots were fed before"
        stream_BD = self._output_BD
        # Spans that ended have rows in the newest outputs, which no one continues.
        if len(active) < len(self._rows):
            stream_BD = stream_BD[[self._rows.index(i) for i in active]]
        layouts = [
            SpanLayout(
                start=self._sequences[i].num_tokens + len(tokens) - 2,
                num_tokens=1,
                page_table=self._sequences[i].page_table,
            )
            for i, tokens in zip(active, drafted, strict=True)
        ]
        return layouts, [tokens[-1] for tokens in drafted], stream_BD


@final
class _RecurrentTrees(TreeSteps):
    """A slot a node, behind the true ones; each node attends to its own branch."""

    def __init__(
        self, runner: HeadRunner, sequences: Seq[Sequence], first: Callable[[], Tensor]
    ) -> None:
        """Begin with `first`: the outputs at the newest true slot of each sequence, [B, D]."""
        self._runner, self._sequences, self._first = runner, sequences, first
        self._rows = LevelRows(len(sequences))
        self._fed: list[dict[int, int]] = [{} for _ in sequences]
        self._output_FD: Tensor

    def first(self) -> Tensor:
        self._output_FD = self._first()
        return self._runner.logits(self._output_FD)

    def after(self, trees: Seq[SpanTree]) -> Tensor:
        hidden_FD = self._output_FD[self._rows.advance(trees)]
        layouts = [self._layout(tree) for tree in trees]
        self._output_FD = self._runner.forward(layouts, newest_tokens(trees), hidden_FD)
        return self._runner.logits(self._output_FD)

    def _layout(self, tree: SpanTree) -> SpanLayout:
        """Where the frontier lies: behind the nodes that were fed before."""
        growth, fed = tree.growth, self._fed[tree.index]
        sequence = self._sequences[tree.index]
        known = len(fed)
        for node in growth.frontier:
            fed[node] = len(fed)
        return SpanLayout(
            start=sequence.num_tokens - 1,
            num_tokens=len(growth.frontier),
            page_table=sequence.page_table,
            paths=tuple(tuple(fed[n] for n in growth.path(node)) for node in growth.frontier),
            known=known,
        )
