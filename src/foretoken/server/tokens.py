"""POST /tokenize and /detokenize, as in vLLM."""

from starlette.requests import Request
from starlette.responses import Response

from foretoken.errors import PromptError
from foretoken.server.answers import TokenTexts
from foretoken.server.events import to_json
from foretoken.server.prompts import chat_prompt, check_model, encode, tokenizer_of
from foretoken.server.reading import read_body
from foretoken.server.schemas import DetokenizeBody, TokenizeBody
from foretoken.server.state import state_of


async def tokenize(request: Request) -> Response:
    """Token ids of a text or of a conversation."""
    state = state_of(request)
    body = await read_body(request, TokenizeBody, state.config.limits.max_body_bytes)
    check_model(state, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise PromptError("prompt", None, "either prompt or messages")
    if body.messages is not None:
        prompt = await chat_prompt(
            state, body.messages, add_generation_prompt=body.add_generation_prompt
        )
        ids = prompt.ids
    else:
        ids = await encode(state, body.prompt or "", body.add_special_tokens)
    texts = TokenTexts(state.tokenizer)
    answer = {
        "tokens": ids,
        "count": len(ids),
        "max_model_len": state.max_model_len,
        "token_strs": [texts(i) for i in ids] if body.return_token_strs else None,
    }
    return Response(to_json(answer), media_type="application/json")


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    state = state_of(request)
    body = await read_body(request, DetokenizeBody, state.config.limits.max_body_bytes)
    check_model(state, body.model)
    highest = state.engine.engine.parts.vocab_size - 1
    wrong = [i for i in body.tokens if not 0 <= i <= highest]
    if wrong:
        raise PromptError("tokens", wrong[0], f"0 to {highest}")
    text = tokenizer_of(state).decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
    return Response(to_json({"prompt": text}), media_type="application/json")
