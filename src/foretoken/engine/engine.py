"""The engine: takes requests, runs steps, gives back outputs. One step is a sentence.

Owns nothing but the order of things: what runs is the scheduler's decision, how it runs the
runner's, what is accepted the verifier's, what is drafted the proposer's. Not thread-safe.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from foretoken.config import ResolvedConfig
from foretoken.control.adaptive.controller import AdaptiveControl
from foretoken.control.budget import LivePolicy
from foretoken.control.plan import DraftPlanner
from foretoken.control.report.journal import ControlJournal
from foretoken.distributed.processes import Followers
from foretoken.engine.metrics import EngineMetrics
from foretoken.engine.requests import Intake
from foretoken.engine.timing import EngineCosts
from foretoken.errors import EngineLostError
from foretoken.kernels.threads import StepThreads
from foretoken.kv.shared_pages import SharedPages
from foretoken.proposers.base import Context, Proposer
from foretoken.proposers.choose.drafters import Drafters
from foretoken.runtime.ahead import BegunStep, StepAhead
from foretoken.runtime.batch import Batch, Verification
from foretoken.runtime.faults import draws_of, leave_out_masked, say_failure, verify_apart
from foretoken.runtime.grammar import Grammars
from foretoken.runtime.runner import Runner
from foretoken.runtime.scheduling.scheduler import Scheduler
from foretoken.runtime.verifier import Verifier
from foretoken.text.streams import TextStreams
from foretoken.text.tokenizer import Tokenizer
from foretoken.types import FinishReason, Output, Request, Speculation, StepStats
from foretoken.types.accepted import histogram_of, reached

StepObserver: TypeAlias = Callable[[Batch, Verification, StepStats], None]
"""Is told of every step: the batch with its plan and drafts, the outcome, counts and times."""


class _StepTimes(NamedTuple):
    """Seconds of a step, by their names in `StepStats`."""

    drafting_s: float
    verifying_s: float
    total_s: float
    between_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationController:
    """Who decides how far steps draft, who learns, and who can say what is going on."""

    plan: DraftPlanner
    observe: StepObserver
    live: LivePolicy
    most_drafts: Callable[[Request], int]
    """Of a request in a step, load aside."""
    release: Callable[[str], None]
    """Forgets a request that ended; unknown ids are fine."""
    control: AdaptiveControl | None = None
    costs: EngineCosts | None = None
    """What control learns of times; None: nobody does."""
    journal: ControlJournal | None = None
    """What was decided; None: nothing drafts."""

    def models(self) -> dict[str, Any] | None:
        """What control has learnt, and where its costs were from; None: it learns nothing."""
        if self.control is None or self.costs is None:
            return None
        return {"costs": self.costs.source, **self.control.models()}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What an engine is made of; `foretoken.engine.wiring` builds them."""

    config: ResolvedConfig
    tokenizer: Tokenizer | None
    intake: Intake
    scheduler: Scheduler
    proposer: Proposer
    block_drafters: frozenset[str] = frozenset()
    """Those whose drafts are masks of a block, which one pass fills in."""
    controller: SpeculationController
    observers: tuple[StepObserver, ...] = ()
    """Told about every step."""
    metrics: EngineMetrics
    runner: Runner
    verifier: Verifier
    ahead: StepAhead
    texts: TextStreams
    grammars: Grammars
    threads: StepThreads
    """Whose threads run a step."""
    shared: SharedPages | None = None
    """The memory of pages, where drafters have no part of their own."""
    followers: Followers | None = None
    """The processes that share the model with this one, if there are any."""


class Engine:
    """Lossless speculative decoding of many requests at once."""

    def __init__(self, parts: EngineParts) -> None:
        self.parts = parts
        self.make_requests = parts.intake.requests
        """Checks a prompt and its parameters; what it gives can be queued."""
        self.metrics = parts.metrics
        self.cancelled: tuple[str, ...] = ()
        """Requests of the last step, if it failed before anything of it was committed."""
        self._left_at: float | None = None
        """When the last step ended, if it left something to do."""
        self._rehearses = False
        self.metrics.watch("foretoken:drafter_bytes", lambda: parts.proposer.num_bytes)

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do."""
        return self.parts.scheduler.has_unfinished

    def set_speculation(self, policy: Speculation) -> None:
        """Narrow speculation for all requests, from the next step on; `Speculation()` undoes it.

        Raises:
            ParameterError: an unknown drafter, or more drafts than the engine was set up for.
        """
        self.parts.intake.check_policy(policy, self.parts.intake.drafters)
        assert isinstance(self.parts.proposer, Drafters), type(self.parts.proposer)
        self.parts.proposer.use_only(policy.drafter)
        self.parts.controller.live.speculation = policy

    def add_request(self, request: Request) -> None:
        """Queue a request of `make_requests`; it ends exactly once in the outputs of `step`.

        Raises:
            RequestError: it can never run, or its id is in use; nothing has been queued then.
        """
        self.parts.scheduler.add(request)
        try:
            self.parts.texts.open(request)
        except BaseException:
            self.parts.scheduler.abort(request.request_id)
            raise
        self.metrics.record_prompt(len(request.prompt_token_ids))

    def abort(self, request_id: str) -> Output | None:
        """End a request now; None if it is not there or has already ended."""
        return self._interrupted(self.parts.scheduler.abort(request_id))

    def fail(self, request_id: str, error: str) -> Output | None:
        """End a request with an error; None if it is not there or has already ended."""
        return self._interrupted(self.parts.scheduler.fail(request_id, error))

    def check(self) -> None:
        """Look whether the processes that share the model are there, without waiting for them.

        Raises:
            RankLostError: one of them died, or gives no sign of life.
        """
        if self.parts.followers is not None:
            self.parts.followers.check()

    def close(self) -> None:
        """End the processes that share the model, if there are any; nothing can be run then.

        Closing twice is fine.
        """
        if self.parts.followers is not None:
            self.parts.followers.close()

    def _interrupted(self, output: Output | None) -> Output | None:
        if output is None:
            return None
        output = self._with_text(output)
        self._release(output.request_id)
        return output

    def step(self, arrive: Callable[[], None] | None = None) -> list[Output]:
        """Run one step; new tokens and ends of the requests it touched.

        Args:
            arrive: called when drafts have been made and the target has not begun; it may add
                requests, and nothing else. Their prompts are in this step if they have room.

        If it raises with `cancelled` not empty, nothing was committed: the engine can go on once
        those requests have been ended. With `cancelled` empty it cannot.
        """
        parts, began = self.parts, time.perf_counter()
        between_s = 0.0 if self._left_at is None else began - self._left_at
        self.cancelled, self._left_at = (), None
        begun = parts.ahead.take()
        planned = begun.batch if begun is not None else parts.scheduler.schedule()
        scheduled = drafted = joined = time.perf_counter()
        if not planned.spans:
            return []
        try:
            with parts.threads:
                if begun is None:
                    if parts.shared is not None:
                        parts.shared.resting = planned.plan.resting
                    context = Context(planned.spans, planned.plan)
                    with parts.ahead.chains.expecting(planned):
                        batch = planned.with_draft(parts.proposer.propose(context))
                    drafted = time.perf_counter()
                    if arrive is not None and batch.num_drafts:
                        arrive()
                        planned = batch = parts.scheduler.join(batch)
                    joined = time.perf_counter()
                    draws = draws_of(parts.verifier, batch) if parts.runner.draws else None
                    begun = BegunStep(batch, parts.ahead.chains.run(batch, draws))
                parts.ahead.begin(begun)
                batch, computed = begun.arrived()
                verification, broken = verify_apart(parts.verifier, batch, computed)
                parts.runner.settle(batch, verification.paths)
        except BaseException as error:
            parts.ahead.drop()
            parts.scheduler.cancel(planned)
            if not isinstance(error, EngineLostError):
                running = (one.sequence for one in planned.spans if not one.sequence.finish_reason)
                self.cancelled = tuple(sequence.request.request_id for sequence in running)
            raise
        verified = time.perf_counter()
        verification, outputs = self._committed(batch, verification, broken)
        ended_at = time.perf_counter()
        self._left_at = ended_at if self.has_unfinished else None
        total_s = ended_at - began
        # A longer pause is that of whoever calls.
        between_s = min(between_s, total_s)
        times = _StepTimes(drafted - scheduled, verified - joined, total_s, between_s)
        stats = self._stats(batch, verification, outputs, times, computed.experts_read)
        self.metrics.record(stats)
        for observe in () if self._rehearses else parts.observers:
            observe(batch, verification, stats)
        for output in outputs:
            if output.finish_reason is not None:
                self._release(output.request_id)
        return outputs

    def _committed(
        self, batch: Batch, verification: Verification, broken: Mapping[str, str]
    ) -> tuple[Verification, list[Output]]:
        """What stays of a step, and the outputs of its requests, of those too that end with an
        error."""
        parts = self.parts
        verification, masked = leave_out_masked(batch, verification)
        ended = [parts.scheduler.fail(request_id, why) for request_id, why in broken.items()]
        ended += self._refuse("bad_words", masked)
        ended += self._refuse("structured_outputs", parts.grammars.take_failures())
        committed = parts.scheduler.commit(batch, verification, time.monotonic())
        committed += [output for output in ended if output is not None]
        return verification, [self._with_text(output) for output in committed]

    def rehearse(self, request: Request, most_s: float) -> None:
        """Serve a request that nobody waits for, since first runs are slow, but no step more once
        so many seconds have passed. Nobody learns from its steps: those that are served take
        longer, for all that is done around them."""
        others = self.parts.scheduler.num_running + self.parts.scheduler.num_waiting
        assert not others, f"{others} requests would not be answered"
        self.add_request(request)
        self._rehearses, until = True, time.monotonic() + most_s
        try:
            while self.has_unfinished:
                self.step()
                if time.monotonic() > until:
                    self.abort(request.request_id)
        finally:
            self._rehearses = False
        self.metrics.restart()

    def _with_text(self, output: Output) -> Output:
        """The output with its text; if that cannot be made, the request has ended with an error."""
        request_id = output.request_id
        try:
            return self.parts.texts.advance(output)
        except Exception as error:  # noqa: BLE001 - said in the output
            why = output.error or say_failure(request_id, error)
        self.parts.texts.drop(request_id)
        end = self.parts.scheduler.fail(request_id, why)
        metrics = output.metrics if end is None else end.metrics
        reason = FinishReason.ERROR
        return replace(output, finish_reason=reason, stop_reason=None, error=why, metrics=metrics)

    def _refuse(self, field: str, reasons: Mapping[str, str]) -> list[Output]:
        """Ends of requests whose parameter `field` left no right token in this step, before its
        tokens are committed."""
        ended = (self.parts.scheduler.fail(i, reason) for i, reason in reasons.items())
        return [replace(output, refused=field) for output in ended if output is not None]

    def _release(self, request_id: str) -> None:
        self.parts.proposer.release(request_id)
        self.parts.controller.release(request_id)
        self.parts.verifier.release(request_id)
        self.metrics.record_finished()

    def _stats(
        self,
        batch: Batch,
        verification: Verification,
        outputs: list[Output],
        times: _StepTimes,
        experts_read: float,
    ) -> StepStats:
        checked = [v for v in verification.spans if v is not None and v.num_drafted]
        deepest = max((span.draft_depth for span in batch.spans), default=0)
        per_pos = reached(histogram_of(v.num_accepted for v in checked))
        per_pos += [0] * (deepest - len(per_pos))
        return StepStats(
            num_sequences=self.parts.scheduler.num_running,
            num_tokens=batch.num_tokens,
            num_drafts=len(checked),
            num_draft_tokens=sum(v.num_drafted for v in checked),
            num_accepted_tokens=sum(v.num_accepted for v in checked),
            num_accepted_tokens_per_pos=tuple(per_pos),
            num_output_tokens=sum(len(o.new_token_ids) for o in outputs),
            num_waiting=self.parts.scheduler.num_waiting,
            **times._asdict(),
            num_sampled=sum(span.samples for span in batch.spans),
            drafters=self.parts.proposer.times,
            experts_read=experts_read,
        )
