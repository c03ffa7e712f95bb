"""POST /v1/chat/completions: OpenAI's chat with vLLM's extras."""

from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from foretoken.server.answers import (
    Tally,
    TokenTexts,
    chat_logprobs,
    prompt_logprobs,
    token_entry,
)
from foretoken.server.events import EventStream, to_json, unless_gone
from foretoken.server.generation import Event, Generation, Order, accept
from foretoken.server.messages import ChoiceMessage
from foretoken.server.prompts import chat_prompt, check_model
from foretoken.server.reading import read_body
from foretoken.server.sampling import chat_params
from foretoken.server.schemas import ChatBody, StreamOptions
from foretoken.server.state import request_id_of, salt_of, state_of
from foretoken.server.tool_choice import ToolPlan, plan_tools
from foretoken.types import FinishReason


async def chat_completions(request: Request) -> ASGIApp:
    """Answer a conversation."""
    state = state_of(request)
    body = await read_body(request, ChatBody, state.config.limits.max_body_bytes)
    check_model(state, body.model)
    plan = plan_tools(body, state.config.tool_parser)
    params = chat_params(body, state.config.limits, plan.structure)
    prompt = await chat_prompt(
        state,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        tools=plan.tools,
    )
    order = Order(
        request_id=request_id_of(request),
        prompts=[prompt],
        params=params,
        priority=body.priority,
        cache_salt=salt_of(request, body.cache_salt),
    )
    generation = await accept(state, "chatcmpl", order)
    answer = _Answer(generation, body, plan)
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

    def __init__(self, generation: Generation, body: ChatBody, plan: ToolPlan) -> None:
        self._generation = generation
        self._body = body
        self._text_of = TokenTexts(generation.state.tokenizer)
        self._tally = Tally(generation)
        self._named = plan.named
        self._messages = [ChoiceMessage(plan.parser()) for _ in range(generation.num_choices)]

    async def whole(self) -> dict[str, Any]:
        """The answer once everything is there."""
        events: list[list[Event]] = [[] for _ in range(self._generation.num_choices)]
        async for batch in self._generation.batches():
            for event in batch:
                self._tally.add(event)
                events[event.choice].append(event)
        answer = self._envelope(
            "chat.completion", [self._choice(i, own) for i, own in enumerate(events)]
        )
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
                if event.choice not in started:
                    started.add(event.choice)
                    opening = {"role": "assistant", "content": ""}
                    sent.append(self._chunk([self._delta(event.choice, opening)]))
                sent.extend(self._chunk([delta]) for delta in self._deltas(event))
            if options.continuous_usage_stats:
                for chunk in sent:
                    chunk["usage"] = self._tally.usage()
            yield sent
        last = self._chunk([])
        metrics = self._tally.metrics()
        if metrics is not None:
            last["metrics"] = metrics
        if options.include_usage:
            last["usage"] = self._tally.usage()
        if options.include_usage or metrics is not None:
            yield [last]

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._envelope("chat.completion.chunk", choices)

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._generation.answer_id,
            "object": kind,
            "created": self._generation.created,
            "model": self._generation.state.model_names[0],
            "choices": choices,
        }

    def _choice(self, index: int, events: list[Event]) -> dict[str, Any]:
        last = events[-1]
        message = self._messages[index]
        for event in events:
            message.read(event.text, ends=event.finish_reason is not None)
        choice: dict[str, Any] = {
            "index": index,
            "message": message.whole(),
            "logprobs": self._logprobs(events),
            "finish_reason": self._finish_reason(last),
            "stop_reason": last.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = [e.token_id for e in events if e.token_id is not None]
            choice["prompt_token_ids"] = self._generation.order.prompts[0].ids
        if self._body.token_sources:
            choice["tokens"] = [token_entry(event) for event in events]
        if self._body.prompt_logprobs is not None:
            rows = events[0].prompt_logprobs or ()
            choice["prompt_logprobs"] = prompt_logprobs(rows, self._text_of)
        return choice

    def _finish_reason(self, event: Event) -> str | None:
        called = self._messages[event.choice].num_calls > 0
        if event.finish_reason is FinishReason.STOP and called and not self._named:
            return "tool_calls"
        return event.finish_reason

    def _deltas(self, event: Event) -> list[dict[str, Any]]:
        """The deltas of one token: what its text turned out to be, and the end."""
        message = self._messages[event.choice]
        ends = event.finish_reason is not None
        found = [self._delta(event.choice, delta) for delta in message.read(event.text, ends=ends)]
        if not found and (self._body.logprobs or self._body.token_sources):
            found = [self._delta(event.choice, {"content": ""})]
        if found:
            found[0]["logprobs"] = self._logprobs([event])
            if self._body.token_sources:
                found[0]["tokens"] = [token_entry(event)]
            if self._body.return_token_ids and event.token_id is not None:
                found[0]["token_ids"] = [event.token_id]
        if ends:
            end = self._delta(event.choice, {})
            end["finish_reason"] = self._finish_reason(event)
            end["stop_reason"] = event.stop_reason
            found.append(end)
        return found

    def _delta(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, events: list[Event]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        count = self._body.top_logprobs or 0
        rows = [e for e in events if e.token_id is not None and e.logprobs is not None]
        return {"content": [chat_logprobs(e, self._text_of, count) for e in rows]}
