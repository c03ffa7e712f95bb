"""One step's drafts from several drafters: asking them, setting offers aside, putting it together.

Knows neither policies nor costs beyond seconds. Invariants: a drafter is asked only for spans
whose request allows it and never for more than its max_drafts; nothing is cut from an
offer, it is taken whole or not at all; what is put together has one drafter per span.
"""

import logging
import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from foretoken.control.floor import AcceptanceFloor
from foretoken.models.tensors import Draft
from foretoken.proposers.base import Context, Proposer
from foretoken.proposers.custom import DraftCheck, read_only, shown
from foretoken.runtime.draft_tree import tree_of
from foretoken.runtime.sequence import Sequence
from foretoken.types import DraftingTime

logger = logging.getLogger("foretoken")

PREDICTION = "prediction"
GRAMMAR = "grammar"
OWN = frozenset({PREDICTION, GRAMMAR})
"""Drafters that every engine has, for the requests that bring what they need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A drafter and its lengths."""

    proposer: Proposer
    max_drafts: int
    """Most drafts per span."""
    least: int = 0
    """It is not asked where there is room for fewer; looked-up drafts that are shorter, which
    follow from committed text alone, are not checked."""
    floor: AcceptanceFloor | None = None
    """Says when it rests for being accepted too rarely; None: never."""
    check: DraftCheck | None = None
    """Checks what a drafter of the user's own gives; None: its drafts are believed."""

    def propose(self, context: Context) -> Draft:
        """Ask the drafter. Raises ConfigError: one of the user's own gave what is no draft."""
        if self.check is None:
            return self.proposer.propose(context)
        return self.check.checked(self.proposer.propose(read_only(context)), context)

    def num_missing(self, sequence: Sequence) -> int:
        """As the drafter's `num_missing`."""
        return self.proposer.num_missing(self._seen(sequence))

    def feed(self, sequence: Sequence, rows: int, window: int | None) -> None:
        """Have the drafter catch up with a sequence, as its `feed` says."""
        self.proposer.feed([self._seen(sequence)], rows, window)

    def _seen(self, sequence: Sequence) -> Sequence:
        return sequence if self.check is None else shown(sequence)

    def release(self, request_id: str) -> None:
        """Have the drafter forget a request; the user's own may fail in it without harm."""
        try:
            self.proposer.release(request_id)
        except Exception:
            if self.check is None:
                raise
            logger.exception("proposer %r, release of %s", self.check.name, request_id)


class Offer(NamedTuple):
    """One drafter's draft of one span."""

    name: str
    ids: tuple[int, ...]
    probs_KV: Tensor | None
    promise: float | None
    """Drafts that it expects to be accepted; None: no opinion."""
    parents: tuple[int, ...] | None = None
    """The nodes that those of a tree come after, as in `Draft.parents`; None: a chain."""


class StepOffers:
    """Where the offers of a step are collected."""

    def __init__(self, members: Mapping[str, Member], context: Context) -> None:
        self.members = members
        self.spans = context.spans
        self.plan = context.plan
        self.times: dict[str, DraftingTime] = {}
        """What each drafter did, and how long it took."""
        self._taken: dict[int, Offer] = {}

    @property
    def open(self) -> list[int]:
        """Indices of spans that want a draft and have none."""
        spans = self.spans
        return [i for i, s in enumerate(spans) if s.draft_budget > 0 and i not in self._taken]

    def request_id(self, index: int) -> str:
        return self.spans[index].sequence.request.request_id

    def allowed(self, name: str, index: int) -> bool:
        """Whether the request of a span lets this drafter draft; its own ones always may."""
        if name in OWN:
            return True
        own = self.spans[index].sequence.request.params.own_policy
        return own is None or own.drafter is None or own.drafter == name

    def ask(
        self, name: str, indices: Iterable[int], lengths: Seq[int] | None = None
    ) -> dict[int, Offer]:
        """The drafter's offers for those of the spans that it may serve.

        Args:
            name: of the drafter.
            indices: of the spans.
            lengths: planned drafts of each span of the step, by this drafter where it serves the
                span; None: as many as its budget has and the drafter may.
        """
        member = self.members[name]
        spans = {
            i: self.spans[i].clipped(member.max_drafts if lengths is None else lengths[i])
            for i in indices
            if self.allowed(name, i)
        }
        asked = {i: s for i, s in spans.items() if s.draft_budget >= max(member.least, 1)}
        if not asked:
            return {}
        began = time.perf_counter()
        draft = member.propose(Context(tuple(asked.values())))
        seconds = time.perf_counter() - began
        self._note(name, len(asked), draft, seconds)
        # Only a draft that follows from known text may be set aside for being short. A drawn one
        # is taken whole: dropping it for what it turned out to be would bias the output.
        least = member.least if member.proposer.looks_up else 0
        offers = dict(zip(asked, _offers(name, draft), strict=True))
        return {i: offer for i, offer in offers.items() if len(offer.ids) >= max(least, 1)}

    def _note(self, name: str, sequences: int, draft: Draft, seconds: float) -> None:
        now, before = timed_draft(name, sequences, draft, seconds), self.times.get(name)
        if before is not None:
            now = DraftingTime(
                name,
                before.sequences + now.sequences,
                max(before.depth, now.depth),
                before.num_drafts + now.num_drafts,
                before.seconds + now.seconds,
            )
        self.times[name] = now

    def take(self, offers: Mapping[int, Offer]) -> None:
        """Make these the drafts of their spans."""
        self._taken.update(offers)

    def draft(self) -> Draft:
        """Everything that was taken."""
        taken = self._taken
        nothing = Offer("", (), None, None)
        each = [taken.get(i, nothing) for i in range(len(self.spans))]
        return Draft(
            ids=tuple(offer.ids for offer in each),
            probs_KV=_joined(each),
            parents=tuple(offer.parents for offer in each),
            drafters=tuple(offer.name for offer in each),
            one_hot=tuple(offer.probs_KV is None for offer in each),
            promises=tuple(offer.promise for offer in each),
        )


def timed_draft(name: str, sequences: int, draft: Draft, seconds: float) -> DraftingTime:
    """What a drafter did that was asked for so many sequences, and how long it took."""
    counts = [len(ids) for ids in draft.ids]
    depths = counts
    if draft.parents is not None:
        shapes = zip(counts, draft.parents, strict=True)
        depths = [num if shape is None else tree_of(shape).depth for num, shape in shapes]
    return DraftingTime(name, sequences, max(depths, default=0), sum(counts), seconds)


def _offers(name: str, draft: Draft) -> list[Offer]:
    draft.check()
    offers, start = [], 0
    for index, ids in enumerate(draft.ids):
        end = start + len(ids)
        probs_KV = None if draft.probs_KV is None else draft.probs_KV[start:end]
        if draft.is_one_hot(index):
            probs_KV = None
        promise = None if draft.promises is None else draft.promises[index]
        parents = None if draft.parents is None else draft.parents[index]
        offers.append(Offer(name, ids, probs_KV, promise, parents))
        start = end
    return offers


def _joined(offers: list[Offer]) -> Tensor | None:
    """Distributions of all drafts; those without one get a row that has all mass on the draft."""
    drawn = [offer.probs_KV for offer in offers if offer.probs_KV is not None and offer.ids]
    if not drawn:
        return None
    parts = []
    for offer in offers:
        if offer.probs_KV is not None:
            parts.append(offer.probs_KV)
        elif offer.ids:
            rows_KV = drawn[0].new_zeros(len(offer.ids), drawn[0].shape[1])
            ids_K1 = torch.tensor(offer.ids, device=rows_KV.device)[:, None]
            parts.append(rows_KV.scatter_(1, ids_K1, 1.0))
    return torch.cat(parts)
