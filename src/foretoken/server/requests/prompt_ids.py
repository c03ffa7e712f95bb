"""From what a body asks to be continued to token ids.

Texts that cannot fit are refused before they are encoded, which may take seconds; long ones are
encoded off the loop, many short ones between its rounds.
"""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.errors import ContextError, PromptError
from foretoken.server.problems import Problem
from foretoken.server.schemas import CompletionBody, GenerationBody, Message, Tool
from foretoken.server.state import ServerState
from foretoken.text.conversation import conversation_of
from foretoken.text.tokenizer import Tokenizer

_ENCODED_AT_ONCE = 2000
"""Characters that are encoded on the loop, in well under a millisecond."""


@dataclass(frozen=True, slots=True)
class PromptIds:
    """A prompt as ids, and as text if it was given as text or is to be repeated."""

    ids: list[int]
    text: str | None = None


def check_model(state: ServerState, name: str | None) -> None:
    """Raise a Problem (404) unless `name` is None or served here."""
    if name is not None and name not in state.model_names:
        allowed = ", ".join(state.model_names)
        raise Problem(
            404, f"model: got {name[:200]!r}; allowed: {allowed}", "model", code="model_not_found"
        )


def tokenizer_of(state: ServerState) -> Tokenizer:
    """The tokenizer. Raises PromptError: the model has none."""
    if state.tokenizer is None:
        raise PromptError("prompt", "text", "token ids: the model has no tokenizer")
    return state.tokenizer


async def completion_prompts(state: ServerState, body: CompletionBody) -> list[PromptIds]:
    """The prompts of a completion, in order. Raises PromptError: none, too many, or text without a
    tokenizer."""
    given: Any = body.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    most = state.config.limits.max_prompts
    if not 1 <= len(given) <= most:
        raise PromptError("prompt", f"{len(given)} prompts", f"1 to {most}")
    prompts, on_loop = list[PromptIds](), 0
    for one in given:
        on_loop += len(one)
        if on_loop > _ENCODED_AT_ONCE:
            on_loop = 0
            await asyncio.sleep(0)
        prompt = PromptIds(one)
        if isinstance(one, str):
            check_fits(state, "prompt", one, _most_tokens(state))
            prompt = PromptIds(await encode(state, one, body.add_special_tokens), one)
        prompts.append(_within(state, prompt))
    return prompts


async def with_text(state: ServerState, prompt: PromptIds) -> PromptIds:
    """The prompt with its text, decoded if it was given as ids; without a tokenizer, as it is."""
    if prompt.text is not None or state.tokenizer is None:
        return prompt
    text = await asyncio.to_thread(state.tokenizer.decode, prompt.ids)
    return PromptIds(prompt.ids, text)


async def encode(state: ServerState, text: str, special: bool = True) -> list[int]:
    """Token ids of a text."""
    tokenizer = tokenizer_of(state)
    if len(text) <= _ENCODED_AT_ONCE:
        return tokenizer.encode(text, add_special_tokens=special)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=special)


def check_fits(state: ServerState, field: str, text: str, most: int) -> None:
    """Raise a ContextError for a text of more characters than `most` tokens can cover."""
    longest = None if state.tokenizer is None else state.tokenizer.max_token_length
    if longest is not None and len(text) > longest * most:
        given = f"{len(text)} characters, which are more than {most} tokens"
        allowed = f"at most {most} tokens, one of at most {longest} characters"
        raise ContextError(field, given, allowed)


def check_texts(state: ServerState, body: GenerationBody) -> None:
    """Raise a ContextError for texts beside the prompt that cannot be in any output."""
    for word in body.bad_words or ():
        check_fits(state, "bad_words", word, state.max_model_len)
    if body.prediction is not None:
        check_fits(state, "prediction", body.prediction.text, state.max_model_len)


async def chat_prompt(
    state: ServerState,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Tool] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> PromptIds:
    """A conversation through the model's chat template. Cancelled, it is not rendered to the end.
    Raises PromptError: there is no template, it rejects the messages, or they cannot fit."""
    tokenizer = tokenizer_of(state)
    gone = threading.Event()

    def run() -> str:
        return tokenizer.chat_text(
            conversation_of([message.model_dump(exclude_none=True) for message in messages]),
            add_generation_prompt=add_generation_prompt,
            tools=None
            if tools is None
            else [tool.model_dump(exclude_unset=True) for tool in tools],
            variables=variables,
            wanted=lambda: not gone.is_set(),
        )

    try:
        text = await asyncio.get_running_loop().run_in_executor(state.rendering, run)
    finally:
        gone.set()
    check_fits(state, "messages", text, _most_tokens(state))
    return _within(state, PromptIds(await encode(state, text, special=False)))


def _most_tokens(state: ServerState) -> int:
    """Tokens of the longest prompt that is taken."""
    most = state.config.limits.max_prompt_tokens
    return min(state.max_model_len - 1, most or state.max_model_len)


def _within(state: ServerState, prompt: PromptIds) -> PromptIds:
    most = state.config.limits.max_prompt_tokens
    if most is not None and len(prompt.ids) > most:
        raise ContextError("prompt", f"{len(prompt.ids)} tokens", f"at most {most} on this server")
    return prompt
