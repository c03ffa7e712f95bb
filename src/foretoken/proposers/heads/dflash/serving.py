"""Drafting with block heads: one pass feeds the context that is new, and one fills a block.

Place i of the head has keys and values of the target's features at position i, under the target's
page tables; they need no later token, so all places before the newest token are right once they are
fed, whoever fed them. The block begins with the newest token, at its own position; what its rows
leave behind the context is overwritten.

Source: DFlash (arXiv 2602.06036).
"""

from collections.abc import Sequence as Seq
from typing import final

import torch
from torch import Tensor

from foretoken.errors import ConfigError, UnsupportedModelError
from foretoken.models.tensors import RolledOut, RolloutPlan, SpanLayout
from foretoken.ops.quantize_kv import kv_store_dtype
from foretoken.proposers.heads.base import HeadServingContext
from foretoken.proposers.heads.dflash.head import BlockHead
from foretoken.proposers.heads.dflash.runner import BlockRunner, TargetTop
from foretoken.proposers.heads.paged_head import HeadPages
from foretoken.proposers.kv_progress import MadeOf, Stretches
from foretoken.proposers.kv_proposer import DraftNetwork, KVProposer, KVSteps
from foretoken.proposers.tree import SpanTree, TreeSteps, newest_tokens
from foretoken.runtime.batch import Span
from foretoken.runtime.sequence import Sequence


def build_blocks(head: BlockHead, site: HeadServingContext) -> KVProposer:
    """The drafter over a block head.

    Raises:
        ConfigError: trees that are deeper than its blocks.
        UnsupportedModelError: the head wants other logits than the target's own head makes.
    """
    config, engine, trees, max_drafts = site.config, site.engine, site.trees, head.shape.max_drafts
    if trees is not None and trees.depth > max_drafts:
        allowed = f"at most {max_drafts}: its blocks have no more drafts"
        raise ConfigError(
            f"speculative_config.{trees.setting}", f"a depth of {trees.depth}", allowed
        )
    target, shape = engine.target.model, head.shape
    cap = target.shape.logit_softcap
    if not shape.own_head and shape.logit_softcap not in (None, cap):
        allowed = f"{cap}, as the target's, whose output head it uses"
        raise UnsupportedModelError("final_logit_softcapping", shape.logit_softcap, allowed)
    head.use_embedding(target.embedding)
    same = target.shape.tie_word_embeddings and cap == shape.logit_softcap
    if same and not config.quantization and target.makes_draft_logits:
        head.use_head(target.embedding)
    runner = BlockRunner(
        head,
        site.view,
        top=TargetTop(
            logits=target.draft_logits,
            vocab_size=engine.vocab_size,
            linear=target.head if cap is None else None,
        ),
        pages=HeadPages(
            num_pages=engine.pool.num_pages,
            page_size=engine.target.page_size,
            kv_store_dtype=kv_store_dtype(config.kv_cache_dtype),
        ),
        make=site.linears if config.quantization else None,
    )
    if runner.kernels is not None:
        head.drop_matrices()
    progress = site.progress(
        runner.store,
        MadeOf.FEATURES,
        max_positions=runner.max_positions,
        enters=shape.rope.counts_distances,
    )
    max_drafts = max_drafts if trees is None else trees.depth
    return KVProposer(
        head.method,
        BlockNetwork(runner, max_drafts),
        site.sampler,
        progress,
        trees=trees,
        confidence=site.confidence,
    )


@final
class BlockNetwork(DraftNetwork):
    """A block head over its runner."""

    drafts_blocks = True

    def __init__(self, runner: BlockRunner, max_drafts: int) -> None:
        """Draft at most `max_drafts` tokens one after the other."""
        self._runner, self._rows, self.max_drafts = runner, max_drafts, max_drafts

    def steps(self, spans: list[Span], fed: Stretches) -> KVSteps:
        """One pass over a block of each span."""
        return BlockSteps(self._runner, spans, fed, self._rows)

    def feed(self, sequences: Seq[Sequence], fed: Stretches) -> None:
        """Keys and values of places whose features are known."""
        self._runner.feed(context_layouts(sequences, fed))


def context_layouts(sequences: Seq[Sequence], fed: Stretches) -> list[SpanLayout]:
    """A stretch of each sequence's places."""
    return [
        SpanLayout(start=start, num_tokens=end - start, page_table=sequence.page_table)
        for sequence, start, end in zip(sequences, fed.starts, fed.ends, strict=True)
    ]


@final
class BlockSteps(KVSteps):
    """Reads the rows of one pass over blocks, each after the token that was chosen before it."""

    all_or_none = True

    def __init__(
        self, runner: BlockRunner, spans: list[Span], fed: Stretches, max_drafts: int
    ) -> None:
        """Nothing is run yet.

        Args:
            runner: of the head.
            spans: what drafts are wanted of.
            fed: the places of each that are to be fed first.
            max_drafts: drafts one after the other.
        """
        self.runner, self._fed = runner, fed
        self._sequences = [span.sequence for span in spans]
        self._budgets = [min(span.draft_budget, max_drafts) for span in spans]
        self._starts = [sum(self._budgets[:i]) for i in range(len(spans))]
        self._outputs_KD: Tensor
        self._logits_KV: Tensor
        self.rolls_out = runner.drafts_at_once

    def trees(self) -> TreeSteps:
        """The nodes of a level have the same row, each after a token of its own."""
        return _BlockTrees(self)

    def roll_out(
        self, active: list[int], drafted: list[list[int]], plan: RolloutPlan
    ) -> RolledOut | None:
        """All drafts; asked with nothing drafted and equal numbers wanted."""
        blocks, tokens = self._blocks()
        return self.runner.draft(self._context(), blocks, tokens, plan)

    def first(self) -> Tensor:
        """Run the pass; logits after the newest tokens."""
        self._run()
        return self.at(list(range(len(self._budgets))), 0, self._newest())

    def after(self, active: list[int], drafted: list[list[int]]) -> Tensor:
        """Logits of the next rows."""
        return self.at(active, len(drafted[0]), [tokens[-1] for tokens in drafted])

    def at(self, spans: list[int], depth: int, previous: list[int]) -> Tensor:
        """Logits after `depth` drafts of some spans, the last of which are `previous`, [N, V]."""
        rows, net = self._rows(spans, depth), self.runner.net
        previous_N = torch.tensor(previous, device=self.runner.device)
        own_NV = net.after(self._logits_KV[rows], self._outputs_KD[rows], previous_N)
        return self.runner.spread(own_NV)

    def sure(self, active: list[int], drafted: list[list[int]]) -> list[float] | None:
        """What the head thinks of its next drafts."""
        rows, newest = self._rows(active, len(drafted[0])), self._newest()
        last = [
            tokens[-1] if tokens else newest[i] for i, tokens in zip(active, drafted, strict=True)
        ]
        previous_N = torch.tensor(last, device=self.runner.device)
        found_N = self.runner.net.sure(self._outputs_KD[rows], previous_N)
        return None if found_N is None else list(found_N.tolist())

    def _rows(self, spans: list[int], depth: int) -> list[int]:
        return [self._starts[i] + depth for i in spans]

    def _newest(self) -> list[int]:
        return [sequence.token_ids[-1] for sequence in self._sequences]

    def _context(self) -> list[SpanLayout]:
        return context_layouts(self._sequences, self._fed)

    def _blocks(self) -> tuple[list[SpanLayout], list[int]]:
        """Where the blocks lie, and their tokens."""
        mask, layouts, tokens = self.runner.net.shape.mask_token_id, [], list[int]()
        every = zip(self._sequences, self._budgets, strict=True)
        for index, (sequence, count) in enumerate(every):
            start, table = sequence.num_tokens - 1, sequence.page_table
            layout = self.runner.block(index, start, count, table)
            layouts.append(layout)
            tokens += [sequence.token_ids[-1], *[mask] * (layout.num_tokens - 1)]
        return layouts, tokens

    def _run(self) -> None:
        """Feed what is new of the context, fill the blocks, and keep the rows of drafts."""
        blocks, tokens = self._blocks()
        rows, row, unused = list[int](), 0, self.runner.net.shape.first_row
        for layout, count in zip(blocks, self._budgets, strict=True):
            rows.extend(range(row + unused, row + unused + count))
            row += layout.num_tokens
        self._outputs_KD = self.runner.run(self._context(), blocks, tokens)[rows]
        self._logits_KV = self.runner.logits(self._outputs_KD)


@final
class _BlockTrees(TreeSteps):
    """Branches that differ in the tokens that were chosen."""

    def __init__(self, steps: BlockSteps) -> None:
        """Over the rows of `steps`, of which nothing was run."""
        self._steps, self._depth = steps, 0

    def first(self) -> Tensor:
        return self._steps.first()

    def after(self, trees: Seq[SpanTree]) -> Tensor:
        self._depth += 1
        owners = [tree.index for tree in trees for _ in tree.growth.frontier]
        return self._steps.at(owners, self._depth, newest_tokens(trees))
