"""Steps that are begun before the tokens they follow are known, so that a device that works by
itself need not wait for the host: the step after a plain one, and the step over chains of drafts.

Owns the step that was begun. The scheduler says whether it is known what that does. Invariant: a
sequence that ends meanwhile has a row too many, which nobody reads: its key and value are behind
the tokens that count, on a page that is its own until a later step writes there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple, final

from torch import Tensor

from foretoken.models.tensors import CHAIN_WATCH, Draft, ModelOutput
from foretoken.runtime.batch import Batch
from foretoken.runtime.faults import draws_of
from foretoken.runtime.runner import Runner
from foretoken.runtime.scheduling.scheduler import Scheduler
from foretoken.runtime.sequence import SequenceState
from foretoken.runtime.verifier import Verifier
from foretoken.types import Request


class BegunStep(NamedTuple):
    """A step that the device has been given."""

    batch: Batch
    output: ModelOutput

    @property
    def living(self) -> list[int]:
        """Spans whose sequences have not ended since it was planned."""
        running, spans = SequenceState.RUNNING, self.batch.spans
        return [place for place, span in enumerate(spans) if span.sequence.state is running]

    def arrived(self) -> "BegunStep":
        """With its tokens, which are waited for, as if it had been planned without those that
        ended."""
        batch, output, kept = self.batch, self.output.arrived(), self.living
        if len(kept) == len(batch.spans):
            return BegunStep(batch, output)
        assert output.chosen_R is not None, "begun where tokens are drawn on the device"
        spans = tuple(batch.spans[place] for place in kept)
        chosen_R = [output.chosen_R[place] for place in kept]
        return BegunStep(replace(batch, spans=spans), replace(output, chosen_R=chosen_R))


class _Guess(NamedTuple):
    """A step that was begun with drafts that nobody had read."""

    draws: bytes
    output: ModelOutput


@final
class ChainAhead:
    """Begins the step that verifies chains before these are read, where each sequence has as many
    drafts as it may have; the device takes them where it drafted them.

    Whether the drafts of the step became those is asked afterwards: what was begun for others is
    never looked at, and the step overwrites what that has stored.
    """

    def __init__(self, verifier: Verifier, runner: Runner) -> None:
        """Begin steps of `runner`."""
        self._verifier, self._runner = verifier, runner
        self._batch = Batch(spans=())
        self._guess: _Guess | None = None
        self._ids: list[tuple[int, ...]] = []
        self._wrong = self._right = 0

    @contextmanager
    def expecting(self, batch: Batch) -> Iterator[None]:
        """Inside, the drafts of this batch are made."""
        self._batch, self._guess, self._ids = batch, None, []
        # Where drafters are asked whose chains are not what is verified, nothing is begun soon.
        hopeful = self._wrong <= 4 + self._right // 8
        if not (self._runner.draws and hopeful) or self._runner.leads:
            yield
            return
        token = CHAIN_WATCH.set(self)
        try:
            yield
        finally:
            CHAIN_WATCH.reset(token)

    def launched(self, tokens_KB: Tensor) -> None:
        """Begin the step, if these are its drafts as far as one can see."""
        steps, count = tokens_KB.shape
        wanted = [(span.length, span.draft_budget) for span in self._batch.spans]
        if self._guess is not None or wanted != [(1, steps)] * count:
            return
        guess = self._batch.with_draft(Draft(ids=((0,) * steps,) * count))
        draws = draws_of(self._verifier, guess)
        if draws is not None:
            self._guess = _Guess(draws, self._runner.run(guess, draws, tokens_KB))

    def read(self, ids: list[list[int]]) -> None:
        """What it was begun with."""
        if self._guess is not None and not self._ids:
            self._ids = [tuple(one) for one in ids]

    def run(self, batch: Batch, draws: bytes | None) -> ModelOutput:
        """Run the step, if it is not the one that was begun."""
        guess, self._guess = self._guess, None
        if guess is not None:
            chains = all(span.draft_parents is None for span in batch.spans)
            if chains and guess.draws == draws and [s.draft_ids for s in batch.spans] == self._ids:
                self._right += 1
                return guess.output
            self._wrong += 1
        return self._runner.run(batch, draws)


@final
class StepAhead:
    """Begins steps, one at a time."""

    def __init__(
        self,
        scheduler: Scheduler,
        verifier: Verifier,
        runner: Runner,
        most_drafts: Callable[[Request], int],
    ) -> None:
        """Begin none where a request may have drafts, which follow tokens that are known."""
        self._scheduler, self._verifier, self._runner = scheduler, verifier, runner
        self.chains = ChainAhead(verifier, runner)
        self._most_drafts = most_drafts
        self._begun: BegunStep | None = None

    def take(self) -> BegunStep | None:
        """The step that was begun, which is in flight then; None: there is none, or all that it was
        for has ended."""
        begun, self._begun = self._begun, None
        if begun is None or not begun.living:
            return None
        self._scheduler.resume()
        return begun

    def begin(self, step: BegunStep) -> None:
        """Begin the one after this, whose tokens nobody has read, if it is known what that does."""
        requests = (span.sequence.request for span in step.batch.spans)
        waits = step.output.wait is None or self._runner.leads
        if waits or any(map(self._most_drafts, requests)):
            return
        batch = self._scheduler.follow(step.batch)
        draws = None if batch is None else draws_of(self._verifier, batch)
        if batch is not None and draws is not None:
            self._begun = BegunStep(batch, self._runner.run(batch, draws))

    def drop(self) -> None:
        """Forget what was begun."""
        self._begun = None
