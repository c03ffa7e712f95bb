"""A model without a network, for tests of the scheduler: KV slots hold (position, token id).

The next token is a function of what stands in the slots of a sequence's page table, so a wrong
page, a stale prefix or a bad rollback changes the output. Of a layer with a window, if there is
one, what a row sees must stand there too; it may be gone before.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from zlib import crc32

from foretoken.control.plan import DraftPlan, DraftPlanner
from foretoken.kv.free_runs import Run
from foretoken.kv.pool import PagePool
from foretoken.kv.shared_pages import SharedPages
from foretoken.models.tensors import Draft
from foretoken.runtime.batch import Batch, Span, SpanVerification, Verification
from foretoken.runtime.scheduling.scheduler import Scheduler, SchedulerConfig
from foretoken.types import FinishReason, Logprob, Output, Request, SamplingParams, TokenSource

VOCAB = 5
Drafter = Callable[[Span], tuple[int, ...]]


def next_token(token_ids: list[int]) -> int:
    return crc32(bytes(token_ids)) % VOCAB


def continuation(prompt: tuple[int, ...], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


def at_most(num_drafts: int) -> DraftPlanner:
    return lambda requests, load: DraftPlan(load=load, budgets=(num_drafts,) * len(requests))


def expected_output(request: Request, max_len: int) -> tuple[list[int], FinishReason]:
    """What a request must give, whatever happens around it."""
    count = min(request.max_tokens, max_len - len(request.prompt_token_ids))
    output: list[int] = []
    for token in continuation(request.prompt_token_ids, count):
        output.append(token)
        if token in request.stop_ids and len(output) >= request.params.min_tokens:
            return output, FinishReason.STOP
    return output, FinishReason.LENGTH


def make_request(request_id: str, prompt: tuple[int, ...], **changes: object) -> Request:
    """A request with greedy defaults; `changes` are fields of Request or of SamplingParams."""
    names = Request.__dataclass_fields__
    fields = {key: value for key, value in changes.items() if key in names}
    others = {key: value for key, value in changes.items() if key not in names}
    fields.setdefault("max_tokens", 8)
    params = SamplingParams(temperature=0, max_tokens=None, **others)  # type: ignore[arg-type]
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        params=params,
        seed=0,
        **fields,  # type: ignore[arg-type]
    )


def nothing(span: Span) -> tuple[int, ...]:
    return ()


def perfect(span: Span) -> tuple[int, ...]:
    return tuple(continuation(tuple(span.sequence.token_ids), span.draft_budget))


def noisy(random: Random) -> Drafter:
    """A drafter that is right for a while, then wrong, and of any length up to its budget."""

    def draft(span: Span) -> tuple[int, ...]:
        right = perfect(span)[: random.randint(0, span.draft_budget)]
        wrong_from = random.randint(0, len(right))
        return right[:wrong_from] + tuple((t + 1) % VOCAB for t in right[wrong_from:])

    return draft


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeWindow:
    """A layer with a window beside one without: what a page takes in each, and what there is."""

    window: int
    page_bytes: int
    rest_bytes: int
    num_bytes: int


class FakeEngine:
    def __init__(
        self,
        *,
        num_pages: int = 16,
        page_size: int = 4,
        drafter: Drafter = nothing,
        config: SchedulerConfig | None = None,
        window: FakeWindow | None = None,
        **parts: object,
    ) -> None:
        self.pool = PagePool(num_pages, page_size)
        self.clock = 0.0
        config = config or SchedulerConfig(max_model_len=64)
        self.window = window
        self.shared: SharedPages | None = None
        if window is not None:
            self.shared = SharedPages(
                self.pool, window.num_bytes, window.rest_bytes, self._forget_in(0)
            )
            step = config.max_num_batched_tokens
            self.shared.add_windows(window.window, step, window.page_bytes, self._forget_in(1))
        self.scheduler = Scheduler(
            config,
            self.pool,
            clock=lambda: self.clock,
            shared=self.shared,
            **parts,  # type: ignore[arg-type]
        )
        self.drafter = drafter
        self.layers: tuple[dict[int, tuple[int, int]], ...] = ({}, {})
        """What stands in a slot, without a window and with one."""
        self.outputs: dict[str, list[Output]] = {}

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.outputs.setdefault(request.request_id, [])

    def abort(self, request_id: str) -> None:
        output = self.scheduler.abort(request_id)
        if output is not None:
            self.outputs[request_id].append(output)

    def plan(self) -> Batch:
        self.scheduler.check_integrity()
        planned = self.scheduler.schedule()
        self.scheduler.check_integrity()
        return planned.with_draft(Draft(ids=tuple(self.drafter(s) for s in planned.spans)))

    def finish(self, batch: Batch) -> list[Output]:
        results = Verification(tuple(self._run(span) for span in batch.spans))
        if self.window is not None and self.shared is not None:
            used = self.num_bytes + self.shared.draft_bytes
            assert used <= self.window.num_bytes, f"{used} bytes are written"
        outputs = self.scheduler.commit(batch, results, self.clock)
        self.scheduler.check_integrity()
        for output in outputs:
            self.outputs[output.request_id].append(output)
        return outputs

    def step(self) -> list[Output]:
        """One whole step, one second long."""
        self.clock += 1.0
        return self.finish(self.plan())

    def run(self, max_steps: int = 1000) -> int:
        for count in range(max_steps):
            if not self.scheduler.has_unfinished:
                return count
            self.step()
        raise AssertionError(f"unfinished after {max_steps} steps")

    def tokens(self, request_id: str) -> list[int]:
        return [t for output in self.outputs[request_id] for t in output.new_token_ids]

    def _forget_in(self, layer: int) -> Callable[[Iterable[Run]], None]:
        def forget(runs: Iterable[Run]) -> None:
            size = self.pool.page_size
            for run in runs:
                for slot in range(run.start * size, (run.start + run.length) * size):
                    self.layers[layer].pop(slot, None)

        return forget

    @property
    def num_bytes(self) -> int:
        """What has been written and not given back."""
        assert self.window is not None and self.shared is not None
        size = self.pool.page_size
        rest, seen = (len({slot // size for slot in layer}) for layer in self.layers)
        return rest * self.window.rest_bytes + seen * self.window.page_bytes

    def _slot(self, span: Span, position: int) -> int:
        size = self.pool.page_size
        return span.sequence.page_table[position // size] * size + position % size

    def _read(self, span: Span, length: int) -> list[int]:
        found = [self.layers[0][self._slot(span, p)] for p in range(length)]
        assert [position for position, _ in found] == list(range(length)), found
        if self.window is not None:
            first = max(0, length - self.window.window)
            seen = [self.layers[1][self._slot(span, p)] for p in range(first, length)]
            assert seen == found[first:], (seen, found[first:])
        return [token for _, token in found]

    def _run(self, span: Span) -> SpanVerification | None:
        if not span.sequence.page_table:
            return None
        for offset, token in enumerate(span.input_ids):
            position = span.start + offset
            for layer in self.layers:
                layer[self._slot(span, position)] = (position, token)
        end = span.start + span.length
        before = self._prompt_logprobs(span)
        if not span.samples:
            if before is None:
                return None
            return SpanVerification(
                new_ids=(), num_accepted=0, num_drafted=0, sources=(), prompt_logprobs=before
            )
        wanted = [next_token(self._read(span, end + i)) for i in range(span.num_drafts + 1)]
        accepted = 0
        while accepted < span.num_drafts and span.draft_ids[accepted] == wanted[accepted]:
            accepted += 1
        new_ids = tuple(wanted[: accepted + 1])
        last = TokenSource.TARGET
        if span.num_drafts:
            last = TokenSource.BONUS if accepted == span.num_drafts else TokenSource.RECOVERED
        return SpanVerification(
            new_ids=new_ids,
            num_accepted=accepted,
            num_drafted=span.num_drafts,
            sources=(TokenSource.ACCEPTED,) * accepted + (last,),
            logprobs=tuple({token: Logprob(-1.0, 1)} for token in new_ids),
            prompt_logprobs=before,
        )

    def _prompt_logprobs(self, span: Span) -> tuple[dict[int, Logprob], ...] | None:
        if not span.wants_prompt_logprobs:
            return None
        ids = span.sequence.token_ids[span.start + 1 : span.start + 1 + span.prompt_rows]
        return tuple({token: Logprob(-1.0, 1)} for token in ids)
