"""The engine: takes requests, runs steps, gives back outputs. One step is a sentence.

Owns nothing but the order of things: what runs is the scheduler's decision, how it runs the
runner's, what is accepted the verifier's, what is drafted the proposer's. Not thread-safe.
"""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from foretoken.config import ResolvedConfig
from foretoken.control.budget import PREDICTED_DRAFTS
from foretoken.control.live import LivePolicy
from foretoken.control.measured import MeasuredLimit
from foretoken.errors import ParameterError, PromptError
from foretoken.metrics import EngineMetrics
from foretoken.proposers.base import Context, Proposer
from foretoken.proposers.drafters import Drafters
from foretoken.runtime.batch import Batch
from foretoken.runtime.grammar import Grammars
from foretoken.runtime.runner import Runner
from foretoken.runtime.scheduler import Scheduler
from foretoken.runtime.verifier import Verification, Verifier
from foretoken.text_streams import TextStreams
from foretoken.tokenizer import Tokenizer
from foretoken.types import FinishReason, Output, Request, SamplingParams, Speculation, StepStats


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What an engine is made of; `foretoken.assembly` builds them."""

    config: ResolvedConfig
    tokenizer: Tokenizer | None
    scheduler: Scheduler
    proposer: Proposer
    drafters: Mapping[str, int] = field(default_factory=dict)
    """Names that a request may ask for, and the most drafts of each."""
    observers: tuple[Callable[[Batch, Verification, StepStats], None], ...] = ()
    """Told about every step."""
    runner: Runner
    verifier: Verifier
    texts: TextStreams
    vocab_size: int
    eos_token_ids: frozenset[int]
    grammars: Grammars
    live: LivePolicy
    measured: MeasuredLimit | None = None


class Engine:
    """Lossless speculative decoding of many requests at once."""

    def __init__(self, parts: EngineParts) -> None:
        """Take over `parts`."""
        config = parts.config
        self.parts = parts
        self.metrics = EngineMetrics(config.user.model, log_stats=not config.user.disable_log_stats)
        self.cancelled: tuple[str, ...] = ()
        """Requests of the last step, if it failed before anything of it was committed."""
        self.metrics.watch("foretoken:drafter_bytes", lambda: parts.proposer.num_bytes)
        self._seeds = random.Random(config.user.seed)

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do."""
        return self.parts.scheduler.has_unfinished

    def set_speculation(self, policy: Speculation) -> None:
        """Narrow speculation for all requests, from the next step on; `Speculation()` undoes it.

        Raises:
            ParameterError: an unknown drafter, or more drafts than the engine was set up for.
        """
        self._check_policy(policy, self.parts.drafters)
        assert isinstance(self.parts.proposer, Drafters), type(self.parts.proposer)
        self.parts.proposer.use_only(policy.drafter)
        self.parts.live.speculation = policy

    def make_requests(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[Request]:
        """Check one prompt and its parameters; n > 1 gives n requests, ids `request_id-i`.

        Raises:
            PromptError: the prompt is empty, too long, or has token ids out of range.
            ParameterError: a parameter names token ids that the model does not have, or needs
                text and there is no tokenizer.
            CapacityError: the prompt can never fit the KV cache.
        """
        self._check_prompt(prompt_token_ids)
        self._check_ids(params)
        prediction_ids = self._prediction(params)
        self._check_speculation(params, bool(prediction_ids))
        room = self.parts.config.max_model_len - len(prompt_token_ids)
        stop_ids = frozenset(params.stop_token_ids or ())
        eos_ids = self.parts.eos_token_ids
        request = Request(
            request_id=request_id,
            prompt_token_ids=tuple(prompt_token_ids),
            params=params,
            seed=self._seed(params),
            max_tokens=min(room, params.max_tokens or room),
            arrival=time.monotonic(),
            priority=priority,
            stop_ids=stop_ids if params.ignore_eos else stop_ids | eos_ids,
            min_tokens_ids=stop_ids | eos_ids if params.min_tokens else frozenset(),
            bad_words_ids=self._bad_words(params),
            cache_salt=cache_salt,
            prediction_ids=prediction_ids,
        )
        self.parts.scheduler.check_capacity(request)
        self.parts.grammars.check(request)
        if params.n == 1:
            return [request]
        return [
            replace(request, request_id=f"{request_id}-{i}", sample_index=i)
            for i in range(params.n)
        ]

    def add_request(self, request: Request) -> None:
        """Queue a request of `make_requests`; it ends exactly once in the outputs of `step`."""
        self.parts.scheduler.add(request)
        self.parts.texts.open(request)
        self.metrics.record_prompt(len(request.prompt_token_ids))

    def abort(self, request_id: str) -> Output | None:
        """End a request now; None if it is not there or has already ended."""
        return self._interrupted(self.parts.scheduler.abort(request_id))

    def fail(self, request_id: str, error: str) -> Output | None:
        """End a request with an error; None if it is not there or has already ended."""
        return self._interrupted(self.parts.scheduler.fail(request_id, error))

    def _interrupted(self, output: Output | None) -> Output | None:
        if output is None:
            return None
        output = self.parts.texts.advance(output)
        self._release(output.request_id)
        return output

    def step(self) -> list[Output]:
        """Run one step; new tokens and ends of the requests it touched.

        If it raises with `cancelled` not empty, nothing was committed: the engine can go on once
        those requests have been ended.
        """
        parts, began = self.parts, time.perf_counter()
        self.cancelled = ()
        planned = parts.scheduler.schedule()
        if not planned.spans:
            return []
        try:
            batch = planned.with_draft(parts.proposer.propose(Context(planned.spans)))
            drafted = time.perf_counter()
            verification = parts.verifier.verify(batch, parts.runner.run(batch))
            parts.runner.settle(batch, verification.paths)
        except BaseException:
            parts.scheduler.cancel(planned)
            self.cancelled = tuple(span.sequence.request.request_id for span in planned.spans)
            raise
        verified = time.perf_counter()
        committed = parts.scheduler.commit(batch, verification, time.monotonic())
        committed += self._fail_grammars(committed)
        outputs = [parts.texts.advance(output) for output in committed]
        for output in outputs:
            if output.finish_reason is not None:
                self._release(output.request_id)
        times = (drafted - began, verified - drafted, time.perf_counter() - began)
        stats = self._stats(batch, verification, outputs, times)
        self.metrics.record(stats)
        for observe in parts.observers:
            observe(batch, verification, stats)
        return outputs

    def _fail_grammars(self, committed: list[Output]) -> list[Output]:
        """Ends of requests whose grammar failed in this step; their tokens are taken back."""
        failures = self.parts.grammars.take_failures()
        ends = []
        for request_id, reason in failures.items():
            end = self.parts.scheduler.fail(request_id, reason)
            at = [i for i, output in enumerate(committed) if output.request_id == request_id]
            if end is not None:
                ends.append(end)
            for i in at:
                committed[i] = (
                    Output(request_id=request_id)
                    if end is not None
                    else replace(committed[i], finish_reason=FinishReason.ERROR, error=reason)
                )
        return ends

    def _release(self, request_id: str) -> None:
        self.parts.proposer.release(request_id)
        self.parts.verifier.release(request_id)
        self.metrics.record_finished()

    def _stats(
        self,
        batch: Batch,
        verification: Verification,
        outputs: list[Output],
        times: tuple[float, float, float],
    ) -> StepStats:
        checked = [v for v in verification.spans if v is not None and v.num_drafted]
        per_pos = [0] * max((span.draft_depth for span in batch.spans), default=0)
        for v in checked:
            for position in range(v.num_accepted):
                per_pos[position] += 1
        return StepStats(
            num_sequences=self.parts.scheduler.num_running,
            num_tokens=batch.num_tokens,
            num_drafts=len(checked),
            num_draft_tokens=sum(v.num_drafted for v in checked),
            num_accepted_tokens=sum(v.num_accepted for v in checked),
            num_accepted_tokens_per_pos=tuple(per_pos),
            num_output_tokens=sum(len(o.new_token_ids) for o in outputs),
            num_waiting=self.parts.scheduler.num_waiting,
            drafting_s=times[0],
            verifying_s=times[1],
            total_s=times[2],
            num_sampled=sum(span.samples for span in batch.spans),
        )

    def _seed(self, params: SamplingParams) -> int:
        """The user's seed, folded to 64 bits, or a key of the engine's own."""
        if params.seed is not None:
            return params.seed & (2**64 - 1)
        return self._seeds.getrandbits(64)

    def _check_prompt(self, prompt_token_ids: list[int]) -> None:
        if not prompt_token_ids:
            raise PromptError("prompt", prompt_token_ids, "at least one token")
        limit = self.parts.config.max_model_len
        if len(prompt_token_ids) >= limit:
            given = f"{len(prompt_token_ids)} tokens"
            raise PromptError("prompt", given, f"at most {limit - 1} (max_model_len {limit})")
        low, high = min(prompt_token_ids), max(prompt_token_ids)
        if low < 0 or high >= self.parts.vocab_size:
            wrong = low if low < 0 else high
            raise PromptError("prompt_token_ids", wrong, f"0 to {self.parts.vocab_size - 1}")

    def _check_ids(self, params: SamplingParams) -> None:
        named = {
            "allowed_token_ids": params.allowed_token_ids or (),
            "logit_bias": params.logit_bias or (),
            "stop_token_ids": params.stop_token_ids or (),
        }
        for name, ids in named.items():
            worst = max(ids, default=0)
            if worst >= self.parts.vocab_size:
                raise ParameterError(name, worst, f"0 to {self.parts.vocab_size - 1}")
        if self.parts.tokenizer is None and (params.stop or params.bad_words):
            given = params.stop or params.bad_words
            raise ParameterError("stop or bad_words", given, "nothing: there is no tokenizer")

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        if self.parts.tokenizer is None or not params.bad_words:
            return ()
        return self.parts.tokenizer.bad_words_ids(params.bad_words)

    def _prediction(self, params: SamplingParams) -> tuple[int, ...]:
        given = params.prediction
        if given is None:
            return ()
        if isinstance(given, str):
            if self.parts.tokenizer is None:
                raise ParameterError("prediction", given, "token ids: there is no tokenizer")
            return tuple(self.parts.tokenizer.encode(given, add_special_tokens=False))
        worst = max(given, default=0)
        if worst >= self.parts.vocab_size:
            raise ParameterError("prediction", worst, f"0 to {self.parts.vocab_size - 1}")
        return tuple(given)

    def _check_speculation(self, params: SamplingParams, predicted: bool) -> None:
        own = params.own_policy
        if own is not None:
            limits = dict(self.parts.drafters)
            if predicted:
                limits["prediction"] = PREDICTED_DRAFTS
            self._check_policy(own, limits)

    def _check_policy(self, policy: Speculation, limits: Mapping[str, int]) -> None:
        if policy.drafter is not None and policy.drafter not in limits:
            allowed = ", ".join(limits) or "nothing: the engine has no drafter"
            raise ParameterError("speculation.drafter", policy.drafter, allowed)
        count, most = policy.num_speculative_tokens, max(limits.values(), default=0)
        if count is not None and count > most:
            raise ParameterError("speculation.num_speculative_tokens", count, f"0 to {most}")
