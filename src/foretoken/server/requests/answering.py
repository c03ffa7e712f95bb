"""From an accepted generation to its HTTP answer, whole or as a stream: what both endpoints share.

Owns the envelope, usage, metrics and the closing chunk. What a choice looks like is the writer's
business. Invariant: a generation that was accepted here is closed, whatever becomes of the answer.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from starlette.requests import Request
from starlette.types import ASGIApp

from foretoken.errors import ParameterError, RequestError
from foretoken.server.problems import Problem
from foretoken.server.replica_protocol.progress import StreamProgress, mark
from foretoken.server.requests.answer_json import Tally
from foretoken.server.requests.generation import Event, Generation, GenerationRequest, accept
from foretoken.server.requests.prompt_ids import PromptIds
from foretoken.server.requests.sampling import about_body, structure_field
from foretoken.server.schemas import CompletionBody, GenerationBody, StreamOptions
from foretoken.server.state import priority_of, request_id_of, salt_from, state_of
from foretoken.server.transport.events import EventStream, LateList, as_event, unless_gone
from foretoken.server.transport.slices import JsonAnswer, gathered, in_slices, pieces
from foretoken.types import Resume, SamplingParams

MOST_LOGPROBS = 1 << 18
"""Log-probabilities of one answer. They are held until it is sent, and the more objects there are,
the longer Python's collector stops every thread: with as many as these for some 70 ms."""
MOST_REPEATED = 1 << 22
"""Tokens of prompts that an answer repeats."""


@dataclass(frozen=True, slots=True)
class _Size:
    """Log-probabilities of an answer: of each output those of its prompt and of its new tokens."""

    outputs: int
    prompt_tokens: int
    """Over all outputs."""
    per_prompt_token: int
    per_new_token: int

    @property
    def of_prompts(self) -> int:
        return self.prompt_tokens * self.per_prompt_token

    @property
    def most_new(self) -> int:
        """New tokens of each output that there is room for."""
        return (MOST_LOGPROBS - self.of_prompts) // (self.outputs * self.per_new_token)

    def refused(self, field: str, new_tokens: int) -> ParameterError:
        """Outputs of so many new tokens are too many: the reckoning."""
        of_outputs = self.outputs * new_tokens * self.per_new_token
        reckoned = (
            f"{self.of_prompts + of_outputs:,} log-probabilities ({self.outputs} outputs with "
            f"{self.prompt_tokens:,} prompt tokens in all x {self.per_prompt_token}, and "
            f"{self.outputs} outputs x {new_tokens:,} new tokens x {self.per_new_token})"
        )
        allowed = f"{MOST_LOGPROBS:,} in one answer; of a stream only those of its prompts count"
        return ParameterError(field, reckoned, f"at most {allowed}")


def within_bounds(
    body: GenerationBody, prompts: Sequence[PromptIds], params: SamplingParams, max_model_len: int
) -> SamplingParams:
    """`params`, with the `max_tokens` that there is room for if the body has none.

    A short body can ask for an answer of gigabytes. Text that is generated costs a step of the
    model a token and is not bounded here; what is said of each token, and repeated of the prompt in
    each output, is.

    Raises:
        ParameterError: the answer would have more log-probabilities, or repeat more of its prompts,
            than one answer may.
    """
    echo = isinstance(body, CompletionBody) and body.echo
    lengths = [len(prompt.ids) for prompt in prompts]
    repeated = params.n * sum(lengths)
    if (echo or body.return_token_ids) and repeated > MOST_REPEATED:
        given = f"{params.n} outputs of prompts of {sum(lengths):,} tokens in all: {repeated:,}"
        field = "echo" if echo else "return_token_ids"
        raise ParameterError(field, given, f"at most {MOST_REPEATED:,} tokens of prompts repeated")
    own = 0 if params.logprobs is None else params.logprobs + 1
    of_prompt = 0 if body.prompt_logprobs is None else body.prompt_logprobs + 1
    size = _Size(
        outputs=params.n * len(prompts),
        prompt_tokens=repeated,
        per_prompt_token=of_prompt + (own if echo else 0),
        # What a stream has sent, it does not hold.
        per_new_token=0 if body.stream else own + body.token_sources,
    )
    if size.of_prompts > MOST_LOGPROBS:
        field = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        raise size.refused(field, 0)
    if not size.per_new_token:
        return params
    room = max_model_len - min(lengths)
    new_tokens = min(room, params.max_tokens or room)
    if new_tokens <= size.most_new:
        return params
    if body.most_tokens is not None or not size.most_new:
        raise size.refused("token_sources" if not own else "logprobs", new_tokens)
    return replace(params, max_tokens=size.most_new)


def resume_of(
    request: Request, body: GenerationBody, num_choices: int
) -> tuple[Resume, ...] | None:
    """What the body's `resume` has of each choice; None without one.

    A client that could say what the model wrote could put words into its mouth, count tokens that
    were never generated, and pass by whoever waits: only what brings the server's internal key may.

    Raises:
        Problem: 400, the server was started without an internal key; 403, it was not given.
        ParameterError: the answer is no stream, or there are more or fewer choices.
    """
    if body.resume is None:
        return None
    given = f"{len(body.resume)} outputs"
    if state_of(request).config.internal_key is None:
        allowed = "nothing: the server was started without --internal-key"
        raise ParameterError("resume", given, allowed)
    if not request.scope["foretoken.internal"]:
        needed = "nothing without the internal key, in the header x-foretoken-internal-key"
        raise Problem(403, f"resume: got {given!r}; allowed: {needed}", "resume")
    if not body.stream:
        raise ParameterError("resume", given, "nothing without stream: true")
    if len(body.resume) != num_choices:
        allowed = f"one entry per choice: {num_choices}, n of each prompt"
        raise ParameterError("resume", given, allowed)
    return Resume.list_of([one.model_dump() for one in body.resume])


@dataclass(frozen=True, slots=True)
class Shape:
    """How the answers of an endpoint are called."""

    id_prefix: str
    whole: str
    """`object` of an answer in one piece."""
    chunk: str
    """`object` of a chunk of a stream."""


class ChoiceWriter(ABC):
    """Makes the choices of one answer out of events; asked for the whole or for chunks."""

    @abstractmethod
    def read(self, event: Event) -> None:
        """An event that will be part of a whole, as it comes: what of it is made one by one."""

    @abstractmethod
    def whole(self, index: int, events: Sequence[Event]) -> dict[str, Any]:
        """A choice of all its events, each of which was read."""

    @abstractmethod
    def chunks(self, event: Event) -> list[dict[str, Any]]:
        """What one event adds, each entry in a chunk of its own."""


async def respond(
    request: Request,
    body: GenerationBody,
    prompts: list[PromptIds],
    params: SamplingParams,
    shape: Shape,
    writer: Callable[[Generation], ChoiceWriter],
) -> ASGIApp:
    """Have `prompts` continued and answer as `body` wants it. Raises Problem: the request was not
    admitted, or failed before anything was sent; RequestError: a prompt or a parameter is wrong."""
    state = state_of(request)
    params = within_bounds(body, prompts, params, state.max_model_len)
    order = GenerationRequest(
        request_id=request_id_of(request),
        prompts=prompts,
        params=params,
        priority=priority_of(request, body.priority),
        cache_salt=salt_from(request.scope["foretoken.tenant"], body.cache_salt),
        resume=resume_of(request, body, len(prompts) * params.n),
        origin=request.scope["foretoken.origin"],
        traceparent=request.headers.get("traceparent"),
        without_effect=body.without_effect,
        structure_field=structure_field(body),
    )
    try:
        generation = await accept(state, shape.id_prefix, order)
    except RequestError as error:
        raise about_body(error, body) from None
    answer = _Answer(generation, shape, writer(generation), body.stream_options or StreamOptions())
    if body.stream:
        timeout = state.config.limits.client_timeout_s
        return EventStream(answer.events(), generation.close, order.request_id, timeout)
    try:
        whole = await unless_gone(request, answer.whole())
    finally:
        generation.close()
    return JsonAnswer(whole)


@final
class _Answer:
    """One answer, whole or in chunks."""

    def __init__(
        self, generation: Generation, shape: Shape, writer: ChoiceWriter, options: StreamOptions
    ) -> None:
        self._generation = generation
        self._shape = shape
        self._writer = writer
        self._options = options
        self._tally = Tally(generation)

    async def whole(self) -> list[bytes]:
        """The answer once everything is there, as pieces of JSON."""
        events: list[list[Event]] = [[] for _ in range(self._generation.order.num_choices)]
        async for batch in self._generation.batches():
            for event in batch:
                self._tally.add(event)
                self._writer.read(event)
                events[event.choice].append(event)
        choices = LateList(self._writer.whole(i, own) for i, own in enumerate(events))
        answer = self._envelope(self._shape.whole, choices)
        answer["usage"] = self._tally.usage()
        metrics = self._tally.metrics()
        if metrics is not None:
            answer["metrics"] = metrics
        return await in_slices(pieces(answer), self._generation.state.writing)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer token by token, the tokens of one step together, and behind the last of them
        what closes the stream. For the front of several replicas with marks: what closes it comes
        before the last one, so that a stream is either complete or goes on elsewhere."""
        num_open = len(self._generation.requests)
        async for batch in self._generation.batches():
            num_open -= sum(event.finish_reason is not None for event in batch)
            made = self._written(batch, last=not num_open)
            sent = gathered(await in_slices(made, self._generation.state.writing))
            marked = mark(_gained(batch)) if self._generation.order.origin is not None else b""
            held = b""
            for part in sent:
                if held:
                    yield held
                held = part
            yield held + marked

    def _written(self, batch: Sequence[Event], *, last: bool) -> Iterator[bytes]:
        """What the events of a step add to a stream, and what closes it."""
        for event in batch:
            large = event.prompt_logprobs is not None
            self._tally.add(event)
            for choice in self._writer.chunks(event):
                chunk = self._envelope(self._shape.chunk, [choice])
                if self._options.continuous_usage_stats:
                    chunk["usage"] = self._tally.usage()
                if not large:
                    yield as_event(chunk)
                    continue
                yield b"data: "
                yield from pieces({**chunk, "choices": LateList([choice])})
                yield b"\n\n"
        if last:
            yield from map(as_event, self._last())

    def _last(self) -> list[dict[str, Any]]:
        """The chunk without choices that closes a stream, if there is anything to put in it."""
        metrics = self._tally.metrics()
        if metrics is None and not self._options.include_usage:
            return []
        chunk = self._envelope(self._shape.chunk, [])
        if metrics is not None:
            chunk["metrics"] = metrics
        if self._options.include_usage:
            chunk["usage"] = self._tally.usage()
        return [chunk]

    def _envelope(self, kind: str, choices: list[dict[str, Any]] | LateList) -> dict[str, Any]:
        return {
            "id": self._generation.answer_id,
            "object": kind,
            "created": self._generation.created,
            "model": self._generation.state.model_names[0],
            "choices": choices,
        }


def _gained(batch: Sequence[Event]) -> Iterator[StreamProgress]:
    """Each choice with its tokens of a step, in their order."""
    for choice in dict.fromkeys(event.choice for event in batch):
        own = [event for event in batch if event.choice == choice]
        ids = tuple(event.token_id for event in own if event.token_id is not None)
        yield StreamProgress(choice, ids, own[-1].finish_reason)
