"""POST /tokenize and /detokenize, as in vLLM. Long lists are written in slices, beside streams."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from foretoken.errors import PromptError, named_as
from foretoken.server.requests.answer_json import TokenTexts
from foretoken.server.requests.prompt_ids import chat_prompt, check_model, encode, tokenizer_of
from foretoken.server.schemas import DetokenizeBody, TokenizeBody
from foretoken.server.state import state_of
from foretoken.server.transport.events import LateList, json_response, unless_gone
from foretoken.server.transport.reading import read_body
from foretoken.server.transport.slices import JsonAnswer, in_slices, pieces

_MOST_CHARACTERS = 1 << 18
"""Of a text for /tokenize; longer ones can be cut by whoever counts."""


async def tokenize(request: Request) -> JsonAnswer:
    """Token ids of a text or of a conversation."""
    state = state_of(request)
    body = await read_body(request, TokenizeBody, state.config.limits.max_body_bytes)
    check_model(state, body.model)
    if (body.prompt is None) == (body.messages is None):
        given = "neither" if body.prompt is None else "prompt and messages"
        raise PromptError("prompt", given, "either prompt or messages")
    if body.messages is not None:
        with named_as({"prompt": "messages"}):
            work = chat_prompt(
                state,
                body.messages,
                add_generation_prompt=body.add_generation_prompt,
                variables=body.chat_template_kwargs,
            )
            prompt = await unless_gone(request, work)
        ids = prompt.ids
    else:
        text = body.prompt or ""
        if len(text) > _MOST_CHARACTERS:
            given = f"{len(text)} characters"
            raise PromptError("prompt", given, f"at most {_MOST_CHARACTERS} at once")
        ids = await encode(state, text, body.add_special_tokens)
    texts = TokenTexts(state.tokenizer)
    answer = {
        "count": len(ids),
        "max_model_len": state.max_model_len,
        "tokens": LateList(ids),
        "token_strs": LateList(map(texts, ids)) if body.return_token_strs else None,
    }
    return JsonAnswer(await in_slices(pieces(answer), state.writing))


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    state = state_of(request)
    body = await read_body(request, DetokenizeBody, state.config.limits.max_body_bytes)
    check_model(state, body.model)
    highest = state.engine.engine.parts.intake.vocab_size - 1
    wrong = [i for i in body.tokens if not 0 <= i <= highest]
    if wrong:
        raise PromptError("tokens", wrong[0], f"0 to {highest}")
    skip = body.skip_special_tokens
    text = await asyncio.to_thread(
        tokenizer_of(state).decode, body.tokens, skip_special_tokens=skip
    )
    return json_response({"prompt": text})
