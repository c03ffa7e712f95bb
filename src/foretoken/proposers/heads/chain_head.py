"""Heads that draft chains from their own outputs: EAGLE and EAGLE-3, and what P-EAGLE starts from.

Slot i of the head pairs the target's features at position i with the token at i + 1; it lies under
the target's page tables. A call feeds every slot whose features came since the last one (after a
pause all that were missed, after a prefix hit those that no request filled), which gives the first
draft; further drafts continue from the head's own outputs, one slot a draft, and are overwritten
when true features come. P-EAGLE goes on in a way of its own (`eagle3/parallel.py`).

Source: Li et al. 2024, 2025 (EAGLE to EAGLE-3).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import Any, Protocol, final

import torch
from torch import Tensor

from foretoken.kv.store import KVStore, write
from foretoken.layers.rope import Rotation
from foretoken.models.gpu.captured import CapturedSteps
from foretoken.models.rollout import MOST_ROWS, CompiledRollout
from foretoken.models.tensors import ModelInput, RolledOut, RolloutPlan, SpanLayout
from foretoken.ops.attention.base import Attend as PagedAttend
from foretoken.ops.quantize_kv import quantize_kv
from foretoken.proposers.base import Proposer
from foretoken.proposers.heads.base import HeadServingContext
from foretoken.proposers.heads.paged_head import (
    PagedContext,
    PagedHead,
    PagedRunner,
    RunnerParts,
    serve_paged,
)
from foretoken.proposers.heads.parts import Attend
from foretoken.proposers.kv_progress import MadeOf, Stretches
from foretoken.proposers.steps import DraftSteps, StateSteps
from foretoken.proposers.tree import SpanTree, newest_tokens
from foretoken.runtime.batch import Span
from foretoken.runtime.runner import positions_of, slots_of
from foretoken.runtime.sequence import Sequence as RunningSequence


class ChainHead(PagedHead, ABC):
    """A head with one slot for each pair of features and next token."""

    @abstractmethod
    def mix(self, features: Tensor) -> Tensor:
        """What the layers begin with, [..., D], from the target's features [..., F]."""

    @abstractmethod
    def forward(
        self, tokens: Tensor, hidden: Tensor, rotation: Rotation, attends: Sequence[Attend]
    ) -> Tensor:
        """One pass over slots.

        Args:
            tokens: of the slot after each feature's, int64 [...].
            hidden: `mix` of the target's features, or its own recycled output, [..., D].
            rotation: of the slots' positions.
            attends: one per layer.

        Returns [..., D], to be recycled, and to be turned into logits.
        """


class CompiledChains(Protocol):
    """A network bound to the compiled kernels; its methods are as the network's."""

    @property
    def rollout(self) -> CompiledRollout | CapturedSteps:
        """Drafts whole chains."""

    def mix(self, features_TF: Tensor) -> Tensor: ...

    def forward(self, inputs: ModelInput, hidden_TD: Tensor, store: KVStore) -> Tensor: ...

    def logits(self, outputs_BD: Tensor) -> Tensor: ...


Compile = Callable[[Any, RunnerParts], CompiledChains | None]
"""(network, what is around it) -> the network on kernels, or None if some part has none."""
MakeSteps = Callable[["ChainRunner", list[Span], Stretches, list[int]], DraftSteps]
"""(runner, spans, what is to be fed, depths) -> steps, as of `DraftNetwork.steps`."""


def serve_chains(
    head: ChainHead,
    site: HeadServingContext,
    compile_with: Compile | None = None,
    steps: MakeSteps | None = None,
) -> Proposer:
    """The drafter over a head; by default in PyTorch, further drafts from its own outputs."""
    head.use_embedding(site.engine.target.model.embedding)
    runner = ChainRunner(head, PagedContext.of(site), compile_with, steps)
    return serve_paged(runner, site, MadeOf.PAIR)


@final
class ChainRunner(PagedRunner):
    """Runs slots; a row is the features at a position and the token after it."""

    net: ChainHead
    kernels: CompiledChains | None

    def __init__(
        self,
        net: ChainHead,
        context: PagedContext,
        compile_with: Compile | None = None,
        steps: MakeSteps | None = None,
    ) -> None:
        """As `PagedRunner`; on kernels if `compile_with` finds some.

        Args:
            net: the network.
            context: what it reads and writes.
            compile_with: binds it to kernels; None: it has none.
            steps: how it drafts; None: `RecurrentSteps`.
        """
        self._compile_with, self._make_steps = compile_with, steps or RecurrentSteps
        super().__init__(net, context)
        self.drafts_blocks = net.parallel

    def _compile(self, parts: RunnerParts) -> CompiledChains | None:
        self._group, self._attention = parts.geometry.group, parts.attention()
        return None if self._compile_with is None else self._compile_with(self.net, parts)

    def steps(self, spans: list[Span], fed: Stretches, depths: list[int]) -> DraftSteps:
        return self._make_steps(self, spans, fed, depths)

    def feed(self, sequences: Sequence[RunningSequence], fed: Stretches) -> None:
        self.true_outputs(sequences, fed)

    def true_outputs(self, sequences: Sequence[RunningSequence], fed: Stretches) -> Tensor:
        """The outputs of a pass over slots with true features, [T, D]."""
        layouts, tokens = fed.layouts(sequences), chain.from_iterable(fed.tokens(sequences, 1))
        return self.forward(layouts, list(tokens), self.mixed_features(layouts))

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
        attends = [self._attend(layer_SKh, inputs.slots_T, attend) for layer_SKh in stores]
        rotation = self._rotary.at(inputs.positions_T)
        return self.net.forward(inputs.tokens_T, hidden_TD, rotation, attends)

    def own_logits(self, outputs_ND: Tensor) -> Tensor:
        kernels = self.kernels
        return super().own_logits(outputs_ND) if kernels is None else kernels.logits(outputs_ND)

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

    def _attend(self, layer_SKh: Tensor, slots_T: Tensor | slice, attend: PagedAttend) -> Attend:
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


@final
class RecurrentSteps(StateSteps):
    """One pass over the true features, then one slot a token, or a node, from its own outputs."""

    rolls_out = True

    def __init__(
        self, runner: ChainRunner, spans: list[Span], fed: Stretches, depths: Sequence[int] = ()
    ) -> None:
        super().__init__(spans)
        self.runner, self._fed = runner, fed
        self._fed_nodes: list[dict[int, int]] = [{} for _ in spans]
        """Of trees: the slots of the nodes that were fed."""

    def begin(self) -> Tensor:
        outputs_TD = self.runner.true_outputs(self.sequences, self._fed)
        ends = accumulate(e - s for s, e in zip(self._fed.starts, self._fed.ends, strict=True))
        return outputs_TD[[end - 1 for end in ends]]

    def logits(self, states_BD: Tensor) -> Tensor:
        return self.runner.logits(states_BD)

    def advance(self, states_BD: Tensor, active: list[int], drafted: list[list[int]]) -> Tensor:
        newest = [tokens[-1] for tokens in drafted]
        return self.runner.forward(self._newest(active, drafted), newest, states_BD)

    def grow(self, states_FD: Tensor, trees: Sequence[SpanTree]) -> Tensor:
        layouts = [self._frontier(tree) for tree in trees]
        return self.runner.forward(layouts, newest_tokens(trees), states_FD)

    def roll_out(
        self, active: list[int], drafted: list[list[int]], plan: RolloutPlan
    ) -> RolledOut | None:
        if drafted[0]:
            layouts, tokens = self._newest(active, drafted), [one[-1:] for one in drafted]
            found = self.runner.roll_out(layouts, tokens, plan, self.states_of(active))
        else:
            layouts, tokens = self._fed.layouts(self.sequences), self._fed.tokens(self.sequences, 1)
            found = self.runner.roll_out(layouts, tokens, plan, None)
        # A call that left a choice open goes on later from its newest outputs.
        if found is not None and found.stream_BD is not None:
            self.keep(active, found.stream_BD)
        return found

    def _newest(self, active: list[int], drafted: list[list[int]]) -> list[SpanLayout]:
        """Slots of the newest drafts."""
        return [
            SpanLayout(
                start=self.sequences[i].num_tokens + len(tokens) - 2,
                num_tokens=1,
                page_table=self.sequences[i].page_table,
            )
            for i, tokens in zip(active, drafted, strict=True)
        ]

    def _frontier(self, tree: SpanTree) -> SpanLayout:
        """Slots of the newest nodes: behind those that were fed before, each on its own branch."""
        growth, fed = tree.growth, self._fed_nodes[tree.index]
        sequence, known = self.sequences[tree.index], len(fed)
        for node in growth.frontier:
            fed[node] = len(fed)
        return SpanLayout(
            start=sequence.num_tokens - 1,
            num_tokens=len(growth.frontier),
            page_table=sequence.page_table,
            paths=tuple(tuple(fed[n] for n in growth.path(node)) for node in growth.frontier),
            known=known,
        )
