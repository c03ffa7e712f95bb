"""POST /v1/completions: OpenAI's text completions with vLLM's extras."""

from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from foretoken.server.answers import (
    Tally,
    TokenTexts,
    completion_logprobs,
    prompt_logprobs,
    token_entry,
)
from foretoken.server.events import EventStream, to_json, unless_gone
from foretoken.server.generation import Event, Generation, Order, accept
from foretoken.server.prompts import PromptIds, check_model, completion_prompts
from foretoken.server.reading import read_body
from foretoken.server.sampling import completion_params
from foretoken.server.schemas import CompletionBody, StreamOptions
from foretoken.server.state import request_id_of, salt_of, state_of


async def completions(request: Request) -> ASGIApp:
    """Continue one or more prompts."""
    state = state_of(request)
    body = await read_body(request, CompletionBody, state.config.limits.max_body_bytes)
    check_model(state, body.model)
    params = completion_params(body, state.config.limits)
    prompts = await completion_prompts(state, body)
    order = Order(
        request_id=request_id_of(request),
        prompts=prompts,
        params=params,
        priority=body.priority,
        cache_salt=salt_of(request, body.cache_salt),
    )
    generation = await accept(state, "cmpl", order)
    answer = _Answer(generation, body)
    if body.stream:
        timeout = state.config.limits.timeout_s
        return EventStream(answer.chunks(), generation.close, order.request_id, timeout)
    try:
        whole = await unless_gone(request, answer.whole())
    finally:
        generation.close()
    return Response(to_json(whole), media_type="application/json")


class _Answer:
    """One answer, whole or in chunks."""

    def __init__(self, generation: Generation, body: CompletionBody) -> None:
        self._generation = generation
        self._body = body
        self._text_of = TokenTexts(generation.state.tokenizer)
        self._tally = Tally(generation)
        self._offsets = [len(self._echo(i)) for i in range(generation.num_choices)]

    async def whole(self) -> dict[str, Any]:
        """The answer once everything is there."""
        events: list[list[Event]] = [[] for _ in range(self._generation.num_choices)]
        async for batch in self._generation.batches():
            for event in batch:
                self._tally.add(event)
                events[event.choice].append(event)
        choices = [self._choice(i, own, first=True) for i, own in enumerate(events)]
        answer = self._envelope(choices)
        answer["usage"] = self._tally.usage()
        metrics = self._tally.metrics()
        return answer if metrics is None else {**answer, "metrics": metrics}

    async def chunks(self) -> AsyncGenerator[list[dict[str, Any]], None]:
        """The answer token by token, the tokens of one step together."""
        started: set[int] = set()
        options = self._body.stream_options or StreamOptions()
        async for batch in self._generation.batches():
            sent = []
            for event in batch:
                self._tally.add(event)
                first = event.choice not in started
                started.add(event.choice)
                chunk = self._envelope([self._choice(event.choice, [event], first=first)])
                if options.continuous_usage_stats:
                    chunk["usage"] = self._tally.usage()
                sent.append(chunk)
            yield sent
        last = self._envelope([])
        metrics = self._tally.metrics()
        if metrics is not None:
            last["metrics"] = metrics
        if options.include_usage:
            last["usage"] = self._tally.usage()
        if options.include_usage or metrics is not None:
            yield [last]

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._generation.answer_id,
            "object": "text_completion",
            "created": self._generation.created,
            "model": self._generation.state.model_names[0],
            "choices": choices,
        }

    def _prompt(self, choice: int) -> PromptIds:
        return self._generation.order.prompts[choice // self._generation.order.params.n]

    def _echo(self, choice: int) -> str:
        """The prompt's text, if it is to be repeated."""
        if not self._body.echo:
            return ""
        prompt = self._prompt(choice)
        tokenizer = self._generation.state.tokenizer
        if prompt.text is None and tokenizer is not None:
            return tokenizer.decode(prompt.ids)
        return prompt.text or ""

    def _choice(self, index: int, events: list[Event], *, first: bool) -> dict[str, Any]:
        """A choice made of all its events, or of one; the first carries what the prompt had."""
        last = events[-1]
        text = "".join(event.text for event in events)
        choice: dict[str, Any] = {
            "index": index,
            "text": self._echo(index) + text if first else text,
            "logprobs": self._logprobs(index, events, first),
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
        }
        tokens = [event for event in events if event.token_id is not None]
        if self._body.return_token_ids:
            choice["token_ids"] = [event.token_id for event in tokens]
            if first:
                choice["prompt_token_ids"] = self._prompt(index).ids
        if self._body.token_sources:
            choice["tokens"] = [token_entry(event) for event in events]
        if first and self._body.prompt_logprobs is not None:
            rows = events[0].prompt_logprobs or ()
            choice["prompt_logprobs"] = prompt_logprobs(rows, self._text_of)
        return choice

    def _logprobs(self, index: int, events: list[Event], first: bool) -> dict[str, Any] | None:
        count = self._body.logprobs
        if count is None:
            return None
        rows: list[Any] = [(e.token_id, e.logprobs) for e in events if e.token_id is not None]
        offset = self._offsets[index]
        if first and self._body.echo:
            own = events[0].prompt_logprobs or ()
            rows = [*zip(self._prompt(index).ids, own, strict=True), *rows]
            offset = 0
        found = completion_logprobs(rows, self._text_of, offset, count)
        if found["tokens"]:
            self._offsets[index] = found["text_offset"][-1] + len(found["tokens"][-1])
        return found
