"""The engine's proposer: what is certain first, then the drafters in the way the policy says.

Owns who is asked, not how anyone drafts. Requests that name a drafter get that one alone. Before
any drafter come the tokens that a grammar forces, then the prediction, which the user vouches for.
"""

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import final

from foretoken.control.plan import DraftOutcome
from foretoken.models.tensors import Draft
from foretoken.proposers.base import Context, Proposer
from foretoken.proposers.choose.offers import (
    GRAMMAR,
    OWN,
    PREDICTION,
    Member,
    StepOffers,
    timed_draft,
)
from foretoken.proposers.choose.policy import Policy
from foretoken.proposers.lookup.grammar import ForcedProposer
from foretoken.proposers.lookup.prediction import PredictionProposer
from foretoken.runtime.batch import Batch, Span
from foretoken.runtime.grammar import Grammars
from foretoken.runtime.verifier import Verification
from foretoken.types import DraftingTime

MOST_PREDICTED = 128


@final
class Drafters(Proposer):
    """All drafters of an engine behind the one question that a proposer is asked."""

    name = "drafters"

    def __init__(
        self, members: Mapping[str, Member], policy: Policy, grammars: Grammars | None = None
    ) -> None:
        """Draft with `members`, by name, in order; no name is one of OWN.

        Without `grammars`, tokens that they force are not drafted.
        """
        assert not OWN & members.keys(), tuple(members)
        self.members = dict(members)
        self._all_names = self._names = tuple(members)
        self._policy = policy
        own = {PREDICTION: Member(proposer=PredictionProposer(), max_drafts=MOST_PREDICTED)}
        if grammars is not None:
            own[GRAMMAR] = Member(proposer=ForcedProposer(grammars), max_drafts=MOST_PREDICTED)
        self._everyone = {**self.members, **own}
        floors = {name: member.floor for name, member in members.items()}
        self._floors = {name: floor for name, floor in floors.items() if floor is not None}

    def use_only(self, name: str | None) -> None:
        """Ask this drafter alone from now on; None: as at the start."""
        assert name is None or name in self.members, name
        self._names = self._all_names if name is None else (name,)

    def propose(self, context: Context) -> Draft:
        self.times = ()
        wanted = [span for span in context.spans if span.draft_budget > 0]
        if context.plan.feeds:
            self._feed(context)
        if not wanted:
            return Draft.empty(len(context.spans))
        if len(self._names) == 1 and not any(_is_particular(span) for span in wanted):
            [name] = self._names
            # What is looked up is weighed at the price of the step.
            if context.plan.forecast is None or not self.members[name].proposer.looks_up:
                return self._ask_only(name, context)
        step = StepOffers(self._everyone, context)
        if GRAMMAR in self._everyone:
            forced = [i for i in step.open if context.spans[i].sequence.request.params.structured]
            if forced:
                step.take(self._policy.fit(step, step.ask(GRAMMAR, forced)))
        predicted = [i for i in step.open if context.spans[i].sequence.request.prediction_ids]
        if predicted:
            step.take(self._policy.fit(step, step.ask(PREDICTION, predicted)))
        if not context.plan.rests:
            self._policy.fill(step, self._awake())
        self.times = tuple(step.times.values())
        return step.draft()

    def _feed(self, context: Context) -> None:
        """Have drafters catch up as the plan says."""
        for name in dict.fromkeys(feed.drafter for feed in context.plan.feeds):
            feeds = [feed for feed in context.plan.feeds if feed.drafter == name]
            began = time.perf_counter()
            member = self.members[name]
            for feed in feeds:
                member.feed(context.spans[feed.place].sequence, feed.rows, feed.window)
            took = time.perf_counter() - began
            self.times = (*self.times, DraftingTime(name, len(feeds), 0, 0, took))

    def _awake(self) -> tuple[str, ...]:
        """Who may be asked now; the same tuple as ever where nobody can rest."""
        if not self._floors:
            return self._names
        resting = {name for name, floor in self._floors.items() if floor.rests}
        return tuple(name for name in self._names if name not in resting)

    @property
    def max_drafts(self) -> dict[str, int]:
        """Most drafts of each drafter per sequence and step, by name."""
        return {name: member.max_drafts for name, member in self.members.items()}

    @property
    def block_drafters(self) -> frozenset[str]:
        """Names of those that draft blocks."""
        each = self.members.items()
        return frozenset(name for name, member in each if member.proposer.drafts_blocks)

    @property
    def num_bytes(self) -> int:
        return sum(member.proposer.num_bytes for member in self._everyone.values())

    @property
    def prefix_tokens(self) -> tuple[int, int]:
        each = [member.proposer.prefix_tokens for member in self.members.values()]
        return sum(queried for queried, _ in each), sum(hit for _, hit in each)

    def observe(self, outcomes: Seq[DraftOutcome]) -> None:
        """Tell all that learn what became of a step's drafts."""
        if len(self._names) > 1:
            self._policy.observe(outcomes)
        for name, floor in self._floors.items():
            floor.observe(name, outcomes)

    def release(self, request_id: str) -> None:
        for member in self._everyone.values():
            member.release(request_id)
        self._policy.release(request_id)

    def _ask_only(self, name: str, context: Context) -> Draft:
        """The usual case: one drafter, whose max_drafts no budget exceeds; nothing to choose or to
        put together."""
        member = self.members[name]
        if member.floor is not None and member.floor.rests:
            return Draft.empty(len(context.spans))
        if member.least:
            step = StepOffers(self._everyone, context)
            step.take(step.ask(name, step.open))
            self.times = tuple(step.times.values())
            return step.draft()
        began = time.perf_counter()
        draft = member.propose(context)
        took = time.perf_counter() - began
        self.times = (*self.times, timed_draft(name, sum(map(bool, draft.ids)), draft, took))
        return replace(draft, drafter=name)


def draft_outcomes(batch: Batch, verification: Verification) -> list[DraftOutcome]:
    """What became of each draft that was checked."""
    return [
        DraftOutcome(
            span.sequence.request.request_id,
            span.drafter,
            found.num_drafted,
            found.num_accepted,
            span.promise,
        )
        for span, found in zip(batch.spans, verification.spans, strict=True)
        if found is not None and found.num_drafted
    ]


def _is_particular(span: Span) -> bool:
    """Whether the request has wishes of its own about who drafts."""
    request = span.sequence.request
    own = request.params.own_policy
    return request.brings_drafts or (own is not None and own.drafter is not None)
