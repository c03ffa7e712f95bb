"""POST /v1/completions: OpenAI's text completions with vLLM's extras."""

from collections.abc import Iterator, Sequence
from typing import Any, final

from starlette.requests import Request
from starlette.types import ASGIApp

from foretoken.errors import named_as
from foretoken.server.requests.answer_json import (
    Row,
    TokenTexts,
    asked_for,
    completion_logprobs,
)
from foretoken.server.requests.answering import ChoiceWriter, Shape, respond
from foretoken.server.requests.generation import Event, Generation
from foretoken.server.requests.prompt_ids import (
    PromptIds,
    check_model,
    check_texts,
    completion_prompts,
    with_text,
)
from foretoken.server.requests.sampling import completion_params
from foretoken.server.schemas import CompletionBody
from foretoken.server.state import state_of
from foretoken.server.transport.reading import read_body

_SHAPE = Shape("cmpl", "text_completion", "text_completion")


async def completions(request: Request) -> ASGIApp:
    """Continue one or more prompts."""
    state = state_of(request)
    body = await read_body(request, CompletionBody, state.config.limits.max_body_bytes)
    check_model(state, body.model)
    check_texts(state, body)

    def writer(generation: Generation) -> ChoiceWriter:
        return _TextWriter(generation, body)

    with named_as(body.typed_names):
        params = completion_params(body, state.config.limits)
        prompts = await completion_prompts(state, body)
        if body.echo:
            prompts = [await with_text(state, prompt) for prompt in prompts]
        return await respond(request, body, prompts, params, _SHAPE, writer)


@final
class _TextWriter(ChoiceWriter):
    """Choices with text."""

    def __init__(self, generation: Generation, body: CompletionBody) -> None:
        self._generation = generation
        self._body = body
        self._text_of = TokenTexts(generation.state.tokenizer)
        self._offsets = [self._start(i) for i in range(generation.order.num_choices)]
        self._started = set(generation.order.begun)

    def read(self, event: Event) -> None:
        """Nothing is made of it before the end."""

    def whole(self, index: int, events: Sequence[Event]) -> dict[str, Any]:
        """A choice with its text."""
        return self._choice(index, events, first=True)

    def chunks(self, event: Event) -> list[dict[str, Any]]:
        """A choice with the text of one token; the first carries what the prompt had."""
        first = event.choice not in self._started
        self._started.add(event.choice)
        return [self._choice(event.choice, [event], first=first)]

    def _prompt(self, choice: int) -> PromptIds:
        return self._generation.order.prompts[choice // self._generation.order.params.n]

    def _start(self, choice: int) -> int:
        """Where the text of a choice's first token starts: after its echo, or after the tokens that
        another server has sent, those of an echo among them."""
        request = self._generation.requests.get(choice)
        if self._body.logprobs is None or request is None or not request.resumed_ids:
            return len(self._echo(choice))
        sent = request.resumed_ids
        if self._body.echo:
            sent = request.prompt_token_ids + sent
        return sum(len(self._text_of(token)) for token in sent)

    def _echo(self, choice: int) -> str:
        """The prompt's text, if it is to be repeated."""
        if not self._body.echo:
            return ""
        return self._prompt(choice).text or ""

    def _choice(self, index: int, events: Sequence[Event], *, first: bool) -> dict[str, Any]:
        last = events[-1]
        text = "".join(event.text for event in events)
        choice: dict[str, Any] = {
            "index": index,
            "text": self._echo(index) + text if first else text,
            "logprobs": self._logprobs(index, events, first),
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
        }
        prompt_ids = self._prompt(index).ids if first else None
        return {**choice, **asked_for(self._body, events, prompt_ids, self._text_of)}

    def _logprobs(self, index: int, events: Sequence[Event], first: bool) -> dict[str, Any] | None:
        count = self._body.logprobs
        if count is None:
            return None
        rows: list[Row] = [(e.token_id, e.logprobs) for e in events if e.token_id is not None]
        offset = self._offsets[index]
        if first and self._body.echo:
            own = events[0].prompt_logprobs or ()
            rows = [*zip(self._prompt(index).ids, own, strict=True), *rows]
            offset = 0
        return completion_logprobs(rows, self._text_of, self._starts(index, rows, offset), count)

    def _starts(self, index: int, rows: Sequence[Row], offset: int) -> Iterator[int]:
        """Where the text of each row's token starts; then, where a later one's would."""
        for token_id, _ in rows:
            yield offset
            offset += len(self._text_of(token_id))
        self._offsets[index] = offset
