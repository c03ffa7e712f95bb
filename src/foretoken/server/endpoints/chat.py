"""POST /v1/chat/completions: OpenAI's chat with vLLM's extras."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

from starlette.requests import Request
from starlette.types import ASGIApp

from foretoken.errors import named_as
from foretoken.server.requests.answer_json import (
    TokenTexts,
    asked_for,
    chat_logprobs,
    server_times,
    token_entry,
)
from foretoken.server.requests.answering import ChoiceWriter, Shape, respond
from foretoken.server.requests.generation import Event, Generation
from foretoken.server.requests.prompt_ids import chat_prompt, check_model, check_texts
from foretoken.server.requests.sampling import chat_params
from foretoken.server.schemas import ChatBody
from foretoken.server.state import state_of
from foretoken.server.tools import ChoiceMessage, ToolPlan, plan_tools
from foretoken.server.transport.events import LateList, unless_gone
from foretoken.server.transport.reading import read_body
from foretoken.types import FinishReason

_SHAPE = Shape("chatcmpl", "chat.completion", "chat.completion.chunk")


async def chat_completions(request: Request) -> ASGIApp:
    """Answer a conversation."""
    state = state_of(request)
    body = await read_body(request, ChatBody, state.config.limits.max_body_bytes)
    check_model(state, body.model)
    check_texts(state, body)
    plan = plan_tools(body, state.config.tool_parser, state.tokenizer)

    def writer(generation: Generation) -> ChoiceWriter:
        return _ChatWriter(generation, body, plan)

    with named_as(body.typed_names):
        params = chat_params(body, state.config.limits, plan.structure)
        if plan.shows_special:
            params = replace(params, skip_special_tokens=False)
        work = chat_prompt(
            state,
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            tools=plan.tools,
            variables=body.template_variables,
        )
        prompt = await unless_gone(request, work)
        return await respond(request, body, [prompt], params, _SHAPE, writer)


@final
class _ChatWriter(ChoiceWriter):
    """Choices with a message, or with deltas of one."""

    def __init__(self, generation: Generation, body: ChatBody, plan: ToolPlan) -> None:
        self._prompt_ids = generation.order.prompts[0].ids
        self._body = body
        self._text_of = TokenTexts(generation.state.tokenizer)
        self._named = plan.named
        order = generation.order
        self._messages = [ChoiceMessage(plan.parser()) for _ in range(order.num_choices)]
        for choice, request in generation.requests.items():
            self._messages[choice].read(request.resumed_text, ends=False)
        self._started = set(order.begun)

    def read(self, event: Event) -> None:
        """More of a choice's message."""
        self._messages[event.choice].read(event.text, ends=event.finish_reason is not None)

    def whole(self, index: int, events: Sequence[Event]) -> dict[str, Any]:
        """A choice with its message."""
        last = events[-1]
        message = self._messages[index]
        choice: dict[str, Any] = {
            "index": index,
            "message": message.whole(),
            "logprobs": self._logprobs(events),
            "finish_reason": self._finish_reason(last),
            "stop_reason": last.stop_reason,
        }
        return {**choice, **asked_for(self._body, events, self._prompt_ids, self._text_of)}

    def _finish_reason(self, event: Event) -> str | None:
        called = self._messages[event.choice].num_calls > 0
        if event.finish_reason is FinishReason.STOP and called and not self._named:
            return "tool_calls"
        return event.finish_reason

    def chunks(self, event: Event) -> list[dict[str, Any]]:
        """The role before a choice's first token, then the deltas of the token."""
        if event.choice in self._started:
            return self._deltas(event)
        self._started.add(event.choice)
        opening = self._delta(event.choice, {"role": "assistant", "content": ""})
        return [opening, *self._deltas(event)]

    def _deltas(self, event: Event) -> list[dict[str, Any]]:
        """The deltas of one token: what its text turned out to be, and the end. The last of them
        has its id: who has read that has read all of the token."""
        message = self._messages[event.choice]
        ends = event.finish_reason is not None
        found = [self._delta(event.choice, delta) for delta in message.read(event.text, ends=ends)]
        body = self._body
        ids_alone = body.return_token_ids and not ends
        if not found and (body.logprobs or body.token_sources or ids_alone):
            found = [self._delta(event.choice, {"content": ""})]
        if found:
            found[0]["logprobs"] = self._logprobs([event])
            if self._body.token_sources:
                found[0]["tokens"] = [token_entry(event)]
        if ends:
            end = self._delta(event.choice, {})
            end["finish_reason"] = self._finish_reason(event)
            end["stop_reason"] = event.stop_reason
            if self._body.token_sources and event.metrics is not None:
                end["times"] = server_times(event.metrics)
            found.append(end)
        if found and body.return_token_ids and event.token_id is not None:
            found[-1]["token_ids"] = [event.token_id]
        return found

    def _delta(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, events: Sequence[Event]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        count = self._body.top_logprobs or 0
        rows = [e for e in events if e.token_id is not None and e.logprobs is not None]
        return {"content": LateList(chat_logprobs(e, self._text_of, count) for e in rows)}
