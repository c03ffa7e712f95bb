"""One simulated run: the real scheduler, somebody who decides, and a clock that jumps.

A step takes what the models of the machine say, and whoever decides is told that times noise;
nothing waits. Invariant: whoever decides learns nothing that an engine would not tell it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from benchmarks.simulate.arms import SimulatedArm
from benchmarks.simulate.drafting import Decoding, DraftedStep, SimulatedDrafting
from benchmarks.simulate.machine import MachineNoise, MixtureCost, SimulatedMachine
from benchmarks.simulate.traffic import SimulatedRequest, Traffic
from foretoken.control.cost import StepShape
from foretoken.control.plan import DraftOutcome
from foretoken.kv.pool import PagePool
from foretoken.runtime.batch import SpanVerification, Verification
from foretoken.runtime.scheduling.scheduler import Scheduler, SchedulerConfig
from foretoken.types import DraftingTime, Output, StepStats


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLimits:
    """How the simulated engine is set up, as the fields of `EngineConfig`."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int = 32768
    num_pages: int = 8192
    page_size: int = 32
    noise: float = 0.05
    """Standard deviation of the logarithm of step times, as whoever decides is told them."""
    wander: float = 0.0
    """The same of the speed of the machine, which changes over some hundred steps."""
    most_tokens: int = 0
    """End after so many output tokens; 0: when all requests have ended."""


class StepRecord(NamedTuple):
    at: float
    """When it ended."""
    seconds: float
    """As it was measured, noise and all."""
    sequences: int
    """That decoded."""
    drafted: int
    accepted: int
    tokens: int
    predicted: float
    """Seconds that the plan expected; 0: it expected nothing."""


class ServedRequest(NamedTuple):
    """One request of a run that was answered."""

    number: int
    kind: str
    arrival: float
    first: float
    ended: float
    tokens: int

    @property
    def ttft(self) -> float:
        return self.first - self.arrival

    @property
    def tpot(self) -> float:
        """Seconds between two later tokens."""
        return (self.ended - self.first) / max(self.tokens - 1, 1)


@final
@dataclass(frozen=True, slots=True)
class SimulatedRun:
    arm: str
    steps: list[StepRecord]
    requests: list[ServedRequest]

    @property
    def seconds(self) -> float:
        return self.steps[-1].at

    @property
    def tokens_per_s(self) -> float:
        return sum(step.tokens for step in self.steps) / self.seconds

    @property
    def full_tokens_per_s(self) -> float:
        """The same while every client had a request under way: until one finds none to send."""
        last = max(request.arrival for request in self.requests)
        until = min(request.ended for request in self.requests if request.ended > last)
        return sum(step.tokens for step in self.steps if step.at <= until) / until

    @property
    def drafting(self) -> float:
        """Share of the steps that drafted."""
        return sum(step.drafted > 0 for step in self.steps) / len(self.steps)


class _Drafted(NamedTuple):
    """What the drafters of a step took, and whether none had drafted in the step before."""

    times: tuple[DraftingTime, ...]
    is_cold: bool


class _Asked(NamedTuple):
    """A request on its way to the queue."""

    arrival: float
    simulated: SimulatedRequest


@final
class SimulatedServing:
    """A server of one machine and one arm."""

    def __init__(
        self, machine: SimulatedMachine, arm: SimulatedArm, limits: ServingLimits, *, seed: int = 0
    ) -> None:
        self._machine, self._arm, self._limits = machine, arm, limits
        self._drafting = SimulatedDrafting(machine)
        self._deciding = arm.build(machine, self._drafting.missing)
        self._noise = MachineNoise(limits.noise, seed, wander=limits.wander)
        self._had_drafts = False
        self.clock = self._began = 0.0
        self._scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                max_model_len=limits.max_model_len,
                enable_prefix_caching=False,
            ),
            PagePool(limits.num_pages, limits.page_size),
            plan_drafts=self._deciding.plan,
            clock=lambda: self.clock,
        )
        self._asked: deque[_Asked] = deque()
        self._running: dict[str, SimulatedRequest] = {}
        self._steps: list[StepRecord] = []
        self._served: list[ServedRequest] = []

    def run(self, traffic: Traffic) -> SimulatedRun:
        """Serve all of it. Whoever decides knows what was learnt in runs before; times of the run
        count from its beginning."""
        self._began, self._steps, self._served = self.clock, [], []
        waiting, times = traffic.draw(), traffic.times()
        waiting.reverse()
        tokens = 0

        def arrive() -> None:
            self._ask(traffic, waiting, times)
            self._admit()

        while waiting or self._asked or self._running:
            arrive()
            if not self._running:
                # Nobody is there: the clock goes to whoever comes next.
                if self._asked:
                    self.clock = self._queued_at(self._asked[0])
                elif times:
                    self.clock = self._began + times[traffic.requests - len(waiting)]
                else:
                    self.clock += 0.1
                continue
            tokens += self._step(arrive)
            if 0 < self._limits.most_tokens <= tokens:
                break
        return SimulatedRun(self._arm.name, self._steps, self._served)

    def _ask(self, traffic: Traffic, waiting: list[SimulatedRequest], times: list[float]) -> None:
        """Clients send what they have to send by now."""
        while waiting:
            arrival = self.clock
            if times:
                arrival = self._began + times[traffic.requests - len(waiting)]
                if arrival > self.clock:
                    return
            elif len(self._running) + len(self._asked) >= traffic.in_flight(
                self.clock - self._began
            ):
                return
            self._asked.append(_Asked(arrival, waiting.pop()))

    def _admit(self) -> None:
        """Queue what the server has read by now."""
        while self._asked and self._queued_at(self._asked[0]) <= self.clock:
            arrival, simulated = self._asked.popleft()
            request = simulated.request(arrival)
            self._scheduler.add(request)
            self._running[request.request_id] = simulated

    def _queued_at(self, asked: _Asked) -> float:
        return asked.arrival + self._machine.server.request_s

    def _step(self, arrive: Callable[[], None]) -> int:
        """One step, into which prompts come that `arrive` queues; the tokens that it gave."""
        batch = self._scheduler.schedule()
        plan = batch.plan
        decoding = [
            Decoding(
                sequence=span.sequence,
                simulated=self._running[span.sequence.request.request_id],
                budget=span.draft_budget,
            )
            for span in batch.spans[: len(plan.budgets)]
        ]
        drafted = self._drafting.draft(plan, decoding)
        made = self._let_draft(drafted)
        if drafted.guesses:
            arrive()
            batch = self._scheduler.join(batch)
        results = Verification(
            tuple(self._result(span, drafted, place) for place, span in enumerate(batch.spans))
        )
        committed = sum(span.length for span in batch.spans)
        guesses = drafted.guesses.values()
        rows = committed + sum(guess.drafted for guess in guesses)
        tokens = sum(len(result.new_ids) for result in results.spans if result)
        contexts = [span.start + span.length for span in batch.spans]
        prompt_rows = committed - len(decoding)
        shape = StepShape(rows, len(batch.spans), sum(contexts) / len(contexts), prompt_rows)
        if isinstance(self._machine.target, MixtureCost):
            shape = self._machine.target.with_experts(shape)
        times, verifying_s = self._pass_time(made, shape, tokens)
        drafting_s = sum(time.seconds for time in times)
        outputs = self._scheduler.commit(batch, results, self.clock)
        stats = StepStats(
            num_sequences=self._scheduler.num_running,
            num_tokens=rows,
            num_drafts=len(drafted.guesses),
            num_draft_tokens=sum(guess.drafted for guess in guesses),
            num_accepted_tokens=sum(guess.accepted for guess in guesses),
            num_accepted_tokens_per_pos=(),
            num_output_tokens=sum(len(output.new_token_ids) for output in outputs),
            num_waiting=self._scheduler.num_waiting,
            drafting_s=drafting_s,
            verifying_s=verifying_s,
            total_s=drafting_s + verifying_s,
            num_sampled=sum(span.samples for span in batch.spans),
            drafters=times,
            experts_read=shape.experts,
        )
        by_request = {
            decoding[place].sequence.request.request_id: guess
            for place, guess in drafted.guesses.items()
        }
        self._drafting.learn(by_request)
        outcomes = [DraftOutcome(request_id, *guess) for request_id, guess in by_request.items()]
        self._deciding.observe(plan, outcomes, stats)
        self._note(stats, len(decoding), 0.0 if plan.forecast is None else plan.forecast.seconds)
        for output in outputs:
            self._end(output)
        server = self._machine.server
        self.clock += server.step_s + server.token_s * stats.num_output_tokens
        return stats.num_output_tokens

    def _let_draft(self, drafted: DraftedStep) -> _Drafted:
        """Let the time of drafting go by."""
        drafts = bool(drafted.guesses)
        is_cold, self._had_drafts = drafts and not self._had_drafts, drafts
        slower = self._machine.cold_drafting if is_cold else 1.0
        times = tuple(time._replace(seconds=slower * time.seconds) for time in drafted.times)
        self.clock += sum(time.seconds for time in times)
        return _Drafted(times, is_cold)

    def _pass_time(
        self, made: _Drafted, shape: StepShape, tokens: int
    ) -> tuple[tuple[DraftingTime, ...], float]:
        """Let the rest of a step go by; what is measured of the drafters, and of the rest."""
        slower = self._machine.cold_target if made.is_cold else 1.0
        verifying_s = slower * self._machine.target_s(shape, tokens)
        self.clock += verifying_s
        # What is measured is noisy, the clock is not: noise is equal for all arms in the long run,
        # and without it short runs can be compared.
        factor = self._noise.factor(sum(time.seconds for time in made.times) + verifying_s)
        times = tuple(time._replace(seconds=factor * time.seconds) for time in made.times)
        return times, factor * verifying_s

    def _result(self, span: Any, drafted: DraftedStep, place: int) -> SpanVerification | None:
        if not span.samples:
            return None
        simulated = self._running[span.sequence.request.request_id]
        guess = drafted.guesses.get(place)
        drafts, accepted = (0, 0) if guess is None else guess[1:]
        done = span.sequence.num_output
        return SpanVerification(
            new_ids=simulated.tokens(done, accepted + 1),
            num_accepted=accepted,
            num_drafted=drafts,
            sources=(),
        )

    def _note(self, stats: StepStats, decoding: int, predicted: float) -> None:
        self._steps.append(
            StepRecord(
                self.clock - self._began,
                stats.total_s,
                decoding,
                stats.num_draft_tokens,
                stats.num_accepted_tokens,
                stats.num_output_tokens,
                predicted,
            )
        )

    def _end(self, output: Output) -> None:
        request_id = output.request_id
        if output.finish_reason is None:
            return
        assert output.metrics is not None
        ended = self.clock - self._began
        arrival = ended - output.metrics.finished_s
        simulated = self._running.pop(request_id)
        self._served.append(
            ServedRequest(
                simulated.index,
                simulated.kind.name,
                arrival,
                arrival + output.metrics.first_token_s,
                ended,
                simulated.length,
            )
        )
        self._deciding.release(request_id)
        self._drafting.release(request_id)


def simulate(
    machine: SimulatedMachine,
    arm: SimulatedArm,
    traffic: Traffic,
    limits: ServingLimits | None = None,
    *,
    seed: int = 0,
) -> SimulatedRun:
    """Serve a traffic on a machine with somebody who decides."""
    return SimulatedServing(machine, arm, limits or ServingLimits(), seed=seed).run(traffic)
