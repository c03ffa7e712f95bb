"""One accepted HTTP request on its way through the engine: admission, events, its end.

An event is one token of one choice, so that what is made of it cannot depend on how many tokens a
step had. Knows no JSON. Invariant: whatever ends the reading of events (the end, an error, a
timeout, a client that left), nothing of the request stays in the engine.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, replace

from foretoken.engine.engine import Engine
from foretoken.engine.thread import OutputStream
from foretoken.server.problems import Problem, draining
from foretoken.server.replica_protocol.origin import RequestOrigin
from foretoken.server.requests.prompt_ids import PromptIds
from foretoken.server.state import ServerState
from foretoken.types import (
    FinishReason,
    Logprob,
    Output,
    Request,
    RequestMetrics,
    Resume,
    SamplingParams,
    TokenSource,
)

logger = logging.getLogger("foretoken")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A token of a choice, or the end of a choice, or both."""

    choice: int
    text: str
    token_id: int | None
    source: TokenSource | None = None
    drafter: str | None = None
    """Who proposed it, if it was an accepted draft."""
    position: int = 0
    """Its number among the tokens of its step."""
    logprobs: dict[int, Logprob] | None = None
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    metrics: RequestMetrics | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What a request asks for, checked and encoded."""

    request_id: str
    """As logs and errors name it."""
    prompts: list[PromptIds]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    resume: tuple[Resume, ...] | None = None
    """Every choice as far as another server has written it."""
    origin: RequestOrigin | None = None
    """What the front of several replicas says of it."""
    traceparent: str | None = None
    """The caller's trace, in W3C's words."""
    without_effect: tuple[str, ...] = ()
    """Fields of the body that change nothing; the log names them."""
    structure_field: str = "structured_outputs"
    """The field of the body that says what the output must look like."""

    @property
    def num_choices(self) -> int:
        """Choices of the answer, those that ended elsewhere included."""
        return len(self.prompts) * self.params.n

    @property
    def begun(self) -> frozenset[int]:
        """Choices whose first tokens another server has sent."""
        return frozenset(i for i, one in enumerate(self.resume or ()) if one.output_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What was accepted: choices in order, prompt after prompt."""

    answer_id: str
    order: GenerationRequest
    requests: Mapping[int, Request]
    """By choice; a choice that ended elsewhere has none."""
    stream: OutputStream
    state: ServerState
    deadline: float
    created: int

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(prompt.ids) for prompt in self.order.prompts)

    async def batches(self) -> AsyncIterator[list[Event]]:
        """Events of the engine's steps until all choices have ended. Raises Problem: 500 the engine
        failed, 504 it took too long, 503 the server is going away."""
        choices = {request.request_id: choice for choice, request in self.requests.items()}
        try:
            async for outputs in self.stream.batches(self.deadline):
                events: list[Event] = []
                for output in outputs:
                    self._check(output)
                    events.extend(events_of(output, choices[output.request_id]))
                yield events
        except TimeoutError:
            limit = self.state.config.limits.timeout_s
            raise Problem(504, f"the request took longer than {limit:g} s") from None
        if self.stream.overflowed:
            raise Problem(504, "the client read too slowly; the request was ended")

    def close(self) -> None:
        self.state.engine.close(self.stream)

    def _check(self, output: Output) -> None:
        if output.refused is not None:
            structured = output.refused == "structured_outputs"
            field = self.order.structure_field if structured else output.refused
            raise Problem(400, output.error or "", field)
        if output.finish_reason is FinishReason.ERROR:
            logger.error("request %s failed: %s", self.order.request_id, output.error)
            raise Problem(500, "the engine failed; the request id finds the cause in the log")
        if output.finish_reason is FinishReason.ABORT:
            raise draining()


def events_of(output: Output, choice: int) -> Iterator[Event]:
    """The tokens of an output one by one, the last with the end if there is one."""
    count = len(output.new_token_ids)
    pieces = output.text_pieces or ("",) * max(count, 1)
    for i in range(max(count, 1)):
        last = i + 1 >= count
        yield Event(
            choice=choice,
            text=pieces[i],
            token_id=output.new_token_ids[i] if count else None,
            source=output.sources[i] if count else None,
            drafter=output.drafters[i] if i < len(output.drafters) else None,
            position=i,
            logprobs=output.logprobs[i] if count and output.logprobs is not None else None,
            prompt_logprobs=output.prompt_logprobs if i == 0 else None,
            finish_reason=output.finish_reason if last else None,
            stop_reason=output.stop_reason if last else None,
            metrics=output.metrics if last else None,
        )


async def accept(state: ServerState, kind: str, order: GenerationRequest) -> Generation:
    """Send prompts to the engine; whoever asks must `close` what is returned.

    Args:
        state: the server.
        kind: what the answer's id starts with.
        order: what to generate.

    Raises:
        Problem: 503 while draining, 429 when too many wait.
        RequestError: a prompt or a parameter is wrong; nothing was started.
    """
    if state.auditor is not None:
        state.auditor.give_way()
    _check_admission(state, order.num_choices)
    engine = state.engine.engine
    origin = order.origin
    answer_id = f"{kind}-{uuid.uuid4().hex if origin is None else origin.answer}"
    if not engine.parts.grammars.knows(order.params):
        # one after the other, and not in the threads that encode prompts: it can take seconds
        compiling, params = state.compiling, order.params
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(compiling, engine.parts.grammars.compiled, params)
    at_once = order.params.prediction is None and not order.params.bad_words and not order.begun
    if at_once:
        by_choice = _make_requests(engine, answer_id, order)
    else:
        by_choice = await asyncio.to_thread(_make_requests, engine, answer_id, order)
    requests = list(by_choice.values())
    deadline = asyncio.get_running_loop().time() + state.config.limits.timeout_s
    if state.auditor is not None:  # an audit may have begun while the request was made
        state.auditor.give_way()
    stream = state.engine.open(requests)
    for told in (state.metrics, state.pace, state.auditor):
        if told is not None:
            told.opened(requests)
    if state.spans is not None:
        state.spans.opened(requests, order.request_id, order.traceparent)
    facts: dict[str, object] = {
        "request_id": order.request_id,
        "id": answer_id,
        "prompt_tokens": sum(len(prompt.ids) for prompt in order.prompts),
        "choices": len(requests),
    }
    if order.begun:
        facts["resumed_tokens"] = sum(len(request.resumed_ids) for request in requests)
    if order.without_effect:
        facts["without_effect"] = ",".join(order.without_effect)
    logger.info("accepted", extra={"facts": facts})
    return Generation(
        answer_id=answer_id,
        order=order,
        requests=by_choice,
        stream=stream,
        state=state,
        deadline=deadline,
        created=int(time.time()) if origin is None else origin.created,
    )


def _make_requests(engine: Engine, answer_id: str, order: GenerationRequest) -> dict[int, Request]:
    """Requests of all prompts by choice, their grammar compiled before; texts beside them, and
    what they resume, are encoded and decoded."""
    requests: dict[int, Request] = {}
    count = order.params.n
    keys = None if order.origin is None else order.origin.keys()
    for number, prompt in enumerate(order.prompts):
        first = number * count
        made = engine.make_requests(
            f"{answer_id}-{number}" if len(order.prompts) > 1 else answer_id,
            prompt.ids,
            order.params,
            priority=order.priority,
            cache_salt=order.cache_salt,
            resume=None if order.resume is None else order.resume[first : first + count],
        )
        if keys is not None and order.params.seed is None:
            key = keys.getrandbits(64)
            made = [replace(request, seed=key) for request in made]
        requests |= {first + request.sample_index: request for request in made}
    return requests


def _check_admission(state: ServerState, num_choices: int) -> None:
    limits = state.config.limits
    if num_choices > limits.max_n:
        raise Problem(400, f"n: got {num_choices} outputs in all; allowed: {limits.max_n}", "n")
    if state.draining():
        raise draining()
    if not state.engine.alive:
        raise Problem(503, "the engine has stopped")
    running = state.engine.engine.parts.config.max_num_seqs
    if state.engine.num_open + num_choices > running + limits.max_queue:
        message = f"{state.engine.num_open} requests are running or waiting already"
        raise Problem(429, message, headers={"retry-after": "1"})
