"""Heads that need one hidden state of the target and keep nothing: MLP speculator and Medusa.

The state is that of the newest computed token, read from the feature store; rollback, preemption
and prefix hits therefore need no care. Where every part of a network has a kernel, a whole chain is
one call into C; trees, and everything else, run in PyTorch.
"""

import ctypes
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence as Seq
from typing import Any, final

import torch
from torch import Tensor

from foretoken.kernels.structures import FtHeadCall, address_of
from foretoken.models.rollout import DraftCall
from foretoken.models.tensors import Draft, RolledOut, RolloutPlan
from foretoken.ops.linear import KernelLinear
from foretoken.proposers.base import Context, Proposer
from foretoken.proposers.heads.base import DraftHead, HeadServingContext
from foretoken.proposers.heads.linears import serve_linears
from foretoken.proposers.steps import DraftSteps
from foretoken.proposers.tree import SpanTree
from foretoken.runtime.batch import Span
from foretoken.runtime.runner import slot_of
from foretoken.runtime.sequence import Sequence


class StatelessHead(DraftHead, ABC):
    """A head that drafts from one hidden state of each sequence."""

    @property
    @abstractmethod
    def max_drafts(self) -> int:
        """Most drafts on a branch."""

    @abstractmethod
    def steps(self, hidden_BD: Tensor, spans: Seq[Span]) -> DraftSteps:
        """The steps of one draft, given the hidden states of the newest computed tokens."""

    def compiled(self, features_SD: Tensor) -> "StatelessCall | None":
        """Whole chains by one call into C, once it serves; None: some part has no kernel.

        `features_SD` has the hidden states of all slots. The network must stay as it is.
        """
        return None

    def prepare(self, site: HeadServingContext) -> None:
        """Exchange its linear maps for those that serve."""
        serve_linears(self, self.tops, site.linears)


def serve_stateless(head: StatelessHead, site: HeadServingContext) -> Proposer:
    """Chains or trees from the newest hidden states. Raises ConfigError: the trees are deeper than
    the head."""
    head.prepare(site)
    site.drafting.check_depth(head.max_drafts)
    rows_SF = site.view.rows_SF
    return StatelessProposer(head, site, None if rows_SF is None else head.compiled(rows_SF))


class StatelessProposer(Proposer):
    """Drafts from the newest hidden state of each sequence."""

    def __init__(
        self, head: StatelessHead, site: HeadServingContext, compiled: "StatelessCall | None"
    ) -> None:
        """Draft with `head`, whose linear maps serve; chains with `compiled` where there is one."""
        self.name = head.method
        self.head = head
        self.compiled = compiled
        self._site = site
        self._page_size = site.engine.target.page_size

    @torch.inference_mode()
    def propose(self, context: Context) -> Draft:
        wanted = context.wanted
        if self._site.gaps:
            wanted = [i for i in wanted if self._has_state(context.spans[i].sequence)]
        if not wanted:
            return Draft.empty(len(context.spans))
        drafting, count = self._site.drafting, len(context.spans)
        wanting = [context.spans[i] for i in wanted]
        spans = list(drafting.clipped(wanting, self.head.max_drafts))
        return drafting.draft(_StatelessSteps(self, spans), spans, wanted, count, self.name)[0]

    def release(self, request_id: str) -> None:
        self._site.drafting.sampler.release(request_id)

    def _has_state(self, sequence: Sequence) -> bool:
        """Whether the features of the newest computed token were kept."""
        assert self._site.gaps is not None, "asked only where there are some"
        newest = sequence.num_tokens - 2
        return self._site.gaps.known_from(sequence.page_table, newest, newest + 1) == newest

    def newest_slots(self, spans: Seq[Span]) -> list[int]:
        """Where the newest computed tokens' features are: those before the newest ones."""
        sequences = (span.sequence for span in spans)
        return [slot_of(s.num_tokens - 2, s.page_table, self._page_size) for s in sequences]

    def newest_states(self, spans: Seq[Span]) -> Tensor:
        """Hidden states of the newest computed tokens, [B, D]."""
        view = self._site.view
        return view.read(torch.tensor(self.newest_slots(spans), device=view.slots_SF.device))


@final
class _StatelessSteps(DraftSteps):
    """All drafts in one call into C where it can; else the head's own steps, token by token."""

    all_or_none = True

    def __init__(self, proposer: StatelessProposer, spans: list[Span]) -> None:
        self._proposer, self._spans = proposer, spans
        self._steps: DraftSteps | None = None
        self._call = proposer.compiled
        self.rolls_out = self._call is not None

    def first(self) -> Tensor:
        states_BD = self._proposer.newest_states(self._spans)
        self._steps = self._proposer.head.steps(states_BD, self._spans)
        return self._steps.first()

    def after(self, active: list[int], drafted: list[list[int]]) -> Tensor:
        assert self._steps is not None, "a rollout drafts everything or nothing"
        return self._steps.after(active, drafted)

    def after_nodes(self, trees: Seq[SpanTree]) -> Tensor:
        assert self._steps is not None, "begun by `first`"
        return self._steps.after_nodes(trees)

    def roll_out(
        self, active: list[int], drafted: list[list[int]], plan: RolloutPlan
    ) -> RolledOut | None:
        assert self._call is not None, "asked only where there is one"
        newest = [span.sequence.token_ids[-1] for span in self._spans]
        return self._call(self._proposer.newest_slots(self._spans), newest, plan)


_I64, _PTR = ctypes.c_int64, ctypes.c_void_p


def draft_function(part: KernelLinear, name: str) -> Any:
    """The C function that drafts with a network which has `part` in it."""
    return part.library.function(name, (_PTR, _PTR), _I64)


@final
class StatelessCall:
    """A network bound to its call into C. Owns the buffers, which are kept between calls."""

    def __init__(
        self,
        function: Any,
        struct: Any,
        features_SD: Tensor,
        *,
        widest: int,
        kept: tuple[Any, ...],
        one_pass: bool = False,
    ) -> None:
        """Draft from the target's hidden states of all slots.

        Args:
            function: of the library of kernels.
            struct: the network in C's memory, with the number of its logits as `vocabulary`.
            features_SD: hidden states by slot.
            widest: values of the widest state.
            kept: what the struct points to.
            one_pass: whether all tokens come of one pass, so that every step has a state and
                logits of its own, whatever is kept.
        """
        assert features_SD.stride(1) == 1, features_SD.stride()
        self.one_pass = one_pass
        self._struct, self._kept = struct, kept
        self._widest, self._vocabulary = widest, struct.vocabulary
        self._features_SD = features_SD
        self._run = function
        self._values = features_SD.new_empty(0)
        self._logits_KV = torch.empty(0, struct.vocabulary)
        stride = features_SD.stride(0) * features_SD.element_size()
        self._call = FtHeadCall(features=features_SD.data_ptr(), feature_bytes=stride)

    def __call__(self, slots: Seq[int], fed: Seq[int], plan: RolloutPlan) -> RolledOut:
        """Draft up to `plan.steps` tokens for each sequence.

        Args:
            slots: where the newest computed token of each has its hidden state.
            fed: the newest tokens.
            plan: how many tokens, and how each is chosen.
        """
        call, count, steps, widest = self._call, len(slots), plan.steps, self._widest
        # Buffers only grow: a step allocates nothing once the largest batch was seen.
        rows = count * steps if self.one_pass or plan.keeps_logits else count
        if rows > self._logits_KV.shape[0]:
            self._logits_KV = torch.empty(rows, self._vocabulary)
        needed = count * widest * ((steps if self.one_pass else 1) + 2)
        if needed > self._values.shape[0]:
            self._values = self._values.new_empty(needed)
        slots_B, fed_B = array("q", slots), array("q", fed)
        room = 2 * count * widest * self._values.element_size()
        call.room = self._values.data_ptr()
        call.state = call.room + room
        call.slots, call.fed = address_of(slots_B), address_of(fed_B)
        call.logits = self._logits_KV.data_ptr()
        call.rows, call.steps, call.keeps_logits = count, steps, plan.keeps_logits
        drafts = DraftCall(call, plan, count)
        done = self._run(ctypes.addressof(self._struct), ctypes.addressof(call))
        return drafts.drafted(done, self._logits_KV, of_all=rows > count)
