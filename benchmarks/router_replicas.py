"""Replicas of `router_simulated.py`: the engine's scheduler and pages, steps that take what a model
of step time says, and users who hold conversations. Knows no router."""

from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple, final

from benchmarks.simulate.machine import SimulatedMachine
from benchmarks.simulate.serving import SpanResult, SpanResults
from foretoken.control.cost import StepShape
from foretoken.kv.pool import PagePool
from foretoken.router.view import ReplicaView
from foretoken.runtime.scheduling.scheduler import Scheduler, SchedulerConfig
from foretoken.types import Request, SamplingParams
from foretoken.types.fingerprint import Fingerprint

PAGE = 32
MOST_SEQUENCES, MOST_TOKENS, MOST_CONTEXT = 64, 2048, 1 << 16
VOCABULARY = 1 << 15
FINGERPRINT = Fingerprint("simulated", "simulated", "simulated")
GREEDY = SamplingParams(temperature=0.0)


class Turn(NamedTuple):
    """One request of a conversation."""

    tenant: str
    prompt: tuple[int, ...]
    """All of the conversation so far, and the tenant's instructions before it."""
    answer: tuple[int, ...]
    think_s: float
    """From its answer to the next turn."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """How long conversations are, in tokens unless said otherwise. Every mean but that of the
    instructions is of a geometric or exponential law."""

    tenants: int = 16
    instructions: tuple[int, int] = (200, 1600)
    """Shortest and longest; a tenant's are the same in all its conversations."""
    first: int = 300
    later: int = 80
    answer: int = 150
    turns: float = 5.0
    think_s: float = 5.0


class User:
    """One conversation after the other: the same for the same seed and number, whatever happens."""

    def __init__(self, talk: Talk, number: int, seed: int) -> None:
        self._talk, self._random = talk, Random(f"user {seed} {number}")
        # A tenth of the tenants have about a third of the users, as far as there are ten.
        place = int(talk.tenants * self._random.random() ** 2)
        self.tenant, tenant = f"tenant {place}", Random(f"tenant {seed} {place}")
        self._instructions = self._text(tenant.randint(*talk.instructions), tenant)
        self._said: tuple[int, ...] = ()
        self.first_s = self._random.uniform(0.0, 2.0 * talk.think_s)

    def turn(self) -> Turn:
        talk, random = self._talk, self._random
        if not self._said or random.random() < 1.0 / talk.turns:
            self._said = self._instructions + self._text(self._length(talk.first), random)
        else:
            self._said += self._text(self._length(talk.later), random)
        prompt, answer = self._said, self._text(self._length(talk.answer), random)
        self._said += answer
        return Turn(self.tenant, prompt, answer, random.expovariate(1.0 / talk.think_s))

    def _length(self, mean: int) -> int:
        return min(1 + int(self._random.expovariate(1.0 / mean)), 4 * mean)

    def _text(self, length: int, random: Random) -> tuple[int, ...]:
        return tuple(random.choices(range(VOCABULARY), k=length))


class Answered(NamedTuple):
    """Tokens of one request after a step."""

    request_id: str
    tokens: int
    ended: bool


class SimulatedReplica:
    """One engine without a model."""

    def __init__(self, replica_id: str, machine: SimulatedMachine, pages: int) -> None:
        self.replica_id, self._machine, self._now = replica_id, machine, 0.0
        limits = SchedulerConfig(
            max_num_seqs=MOST_SEQUENCES,
            max_num_batched_tokens=MOST_TOKENS,
            max_model_len=MOST_CONTEXT,
        )
        self._scheduler = Scheduler(limits, PagePool(pages, PAGE), clock=lambda: self._now)
        self._turns: dict[str, Turn] = {}
        self._batch: Any = None
        self._ends = 0.0
        one, many = (machine.target_s(StepShape(rows), 1) for rows in (1, MOST_TOKENS))
        self._step_s, self.prefill_token_s = one, (many - one) / (MOST_TOKENS - 1)

    @property
    def busy(self) -> bool:
        return self._batch is not None

    @property
    def prompt_tokens(self) -> tuple[int, int]:
        """Of all requests so far: those found in the cache, and all."""
        prefix = self._scheduler.prefix
        assert prefix is not None
        return prefix.num_hit_tokens, prefix.num_queried_tokens

    def add(self, request_id: str, turn: Turn, now: float) -> None:
        self._now = now
        self._turns[request_id] = turn
        self._scheduler.add(
            Request(
                request_id=request_id,
                prompt_token_ids=turn.prompt,
                params=GREEDY,
                seed=0,
                max_tokens=len(turn.answer),
                arrival=now,
                cache_salt=turn.tenant,
            )
        )

    def begin(self, now: float) -> float | None:
        """Begin a step; when it ends, None where there is nothing to do."""
        self._now = now
        if not self._scheduler.has_unfinished:
            return None
        self._batch = batch = self._scheduler.schedule()
        assert batch.spans, "somebody waits, and nobody runs"
        rows = sum(span.length for span in batch.spans)
        contexts = sum(span.start + span.length for span in batch.spans)
        # A step samples one token of each span but of prompts that are not read to their end.
        tokens = sum(span.samples for span in batch.spans)
        decoding = sum(span.sequence.is_decoding for span in batch.spans)
        shape = StepShape(
            rows, len(batch.spans), contexts / len(batch.spans), prompt_rows=rows - decoding
        )
        seconds = self._machine.target_s(shape, tokens)
        # What a step takes beside the prompts in it: the usual delay of whoever comes now.
        self._step_s = max(seconds - (rows - decoding) * self.prefill_token_s, 0.0)
        self._ends = now + seconds
        return self._ends

    def end(self, now: float) -> list[Answered]:
        """End the step."""
        self._now, batch = now, self._batch
        self._batch = None
        results = SpanResults([self._result(span) for span in batch.spans])
        answered = []
        for output in self._scheduler.commit(batch, results, now):
            ended = output.finish_reason is not None
            answered.append(Answered(output.request_id, len(output.new_token_ids), ended))
            if ended:
                del self._turns[output.request_id]
        return answered

    def _result(self, span: Any) -> SpanResult | None:
        if not span.samples:
            return None
        answer = self._turns[span.sequence.request.request_id].answer
        done = span.sequence.num_output
        return SpanResult(answer[done : done + 1])

    def view(self, now: float) -> ReplicaView:
        """As it reports itself: its queue is the rest of the step, a step, and the prompt tokens
        that are not computed; of prompts that wait it expects its usual share of hits."""
        scheduler = self._scheduler
        hit, asked = self.prompt_tokens
        miss_share = 1.0 - hit / max(asked, 1)
        left = 0.0
        for sequence in scheduler.sequences.values():
            if sequence.page_table:
                left += 0 if sequence.is_decoding else sequence.num_tokens - sequence.num_computed
            else:
                left += miss_share * sequence.num_tokens
        step_s = max(self._ends - now, 0.0) + self._step_s if self.busy else 0.0
        return ReplicaView(
            replica_id=self.replica_id,
            fingerprint=FINGERPRINT,
            queued=scheduler.num_waiting,
            running=scheduler.num_running,
            kv_use=scheduler.kv_usage,
            queue_s=step_s + left * self.prefill_token_s,
            prefill_token_s=self.prefill_token_s,
        )
