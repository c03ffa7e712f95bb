"""The step after the one that runs, begun before its tokens are known, so that a device that works
by itself need not wait for the host.

Owns the step that was begun. The scheduler says whether it is known what that does. Invariant: a
sequence that ends meanwhile has a row too many, which nobody reads: its key and value are behind
the tokens that count, on a page that is its own until a later step writes there.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, final

from foretoken.models.tensors import ModelOutput
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
