"""From a body to SamplingParams: OpenAI's names and defaults, and the server's limits.

A schema reaches the engine as `structured_outputs`, wherever the client wrote it; errors name the
client's field.
"""

import re
from typing import Any

from foretoken.errors import ParameterError, RequestError
from foretoken.server.schemas import ChatBody, CompletionBody, GenerationBody, NamedTool
from foretoken.server.settings import Limits
from foretoken.types import SamplingParams

_OWN, _TOOLS = "structured_outputs", "tools"
_PARAMETERS = "tools[{}].function.parameters"
_AT_LINE = re.compile(r"at (\d+)\(\d+\): (.*?)(?:\n +\d+ \| .*)?$", re.DOTALL)
"""Where in a Lark grammar llguidance found an error, what it is, and the lines around it."""


def structure_of(body: GenerationBody) -> dict[str, Any] | None:
    """What response_format or structured_outputs ask for, as SamplingParams takes it. Raises
    ParameterError: both do, or response_format is incomplete."""
    form = body.response_format
    if form is not None and form.schema_ is not None and form.type != "json_object":
        raise ParameterError("response_format.schema", "a schema", "json_object beside it")
    if form is None or form.type == "text":
        return body.structured_outputs
    if body.structured_outputs is not None:
        raise ParameterError("response_format", form.type, f"nothing beside {_OWN}")
    if form.type == "json_object" and form.schema_ is not None:
        return {"json": form.schema_, "disable_any_whitespace": True}
    if form.type == "json_object":
        return {"json_object": True, "disable_any_whitespace": True}
    if form.json_schema is None:
        raise ParameterError("response_format.json_schema", None, "a schema, for json_schema")
    return {"json": form.json_schema.schema_, "disable_any_whitespace": True}


def structure_field(body: GenerationBody) -> str:
    """The field that says what the output must look like."""
    if isinstance(body, ChatBody) and body.tools:
        choice = body.tool_choice
        if choice == "required":
            return _TOOLS
        if isinstance(choice, NamedTool):
            names = [tool.function.name for tool in body.tools]
            return _PARAMETERS.format(names.index(choice.function.name))
    form = body.response_format
    if form is None or form.type == "text":
        return _OWN
    if form.json_schema is not None:
        return "response_format.json_schema.schema"
    return "response_format" if form.schema_ is None else "response_format.schema"


def about_body(error: RequestError, body: GenerationBody) -> RequestError:
    """The same error, about the field of `body` that the client wrote."""
    field = structure_field(body)
    if field == _OWN or error.field.split(".")[0] != _OWN:
        return error
    found = _AT_LINE.search(error.allowed) if field == _TOOLS else None
    if found is None:
        return ParameterError(field, error.given, error.allowed)
    assert isinstance(body, ChatBody) and body.tools, "it has tools"
    # The first lines of the grammar of calls are the parameters of the tools, in order.
    index, allowed = int(found[1]) - 1, error.allowed[: found.start()] + found[2]
    if index >= len(body.tools):
        return ParameterError(field, error.given, allowed)
    parameters = body.tools[index].function.parameters
    return ParameterError(_PARAMETERS.format(index), parameters, allowed)


_SAME = (
    "n", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "logit_bias", "seed", "stop", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "bad_words", "allowed_token_ids",
    "skip_special_tokens", "spaces_between_special_tokens", "prompt_logprobs",
)  # fmt: skip
_TIER_GUARDS = {"flex": 0.1}
"""`speculation.guard` of service tiers that have time."""


def completion_params(body: CompletionBody, limits: Limits) -> SamplingParams:
    """Parameters of a completion; max_tokens is 16 unless given, as in OpenAI's API. Raises
    ParameterError: a value out of its range or over a limit."""
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    of_prompt, logprobs = body.prompt_logprobs, body.logprobs
    if body.echo and of_prompt is None:
        of_prompt = logprobs
    given = {"logprobs": logprobs, "prompt_logprobs": of_prompt}
    return _params(body, limits, max_tokens=max_tokens, **given)


def chat_params(
    body: ChatBody, limits: Limits, structure: dict[str, Any] | None = None
) -> SamplingParams:
    """Parameters of a chat completion; without max_tokens, all that the context leaves.

    Args:
        body: what was asked for.
        limits: of the server.
        structure: what a tool choice forces the output to be.

    Raises:
        ParameterError: a value out of its range or over a limit, or top_logprobs alone.
    """
    if body.top_logprobs is not None and not body.logprobs:
        raise ParameterError("top_logprobs", body.top_logprobs, "nothing without logprobs: true")
    max_tokens = body.most_tokens
    if body.max_tokens is not None and body.max_tokens != max_tokens:
        raise ParameterError("max_tokens", body.max_tokens, "the same as max_completion_tokens")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    others: dict[str, Any] = {} if structure is None else {"structured_outputs": structure}
    if others and structure_of(body) is not None:
        allowed = "none or auto, beside response_format and structured_outputs"
        choice = body.tool_choice
        shown = choice.model_dump() if isinstance(choice, NamedTool) else choice
        raise ParameterError("tool_choice", shown, allowed)
    return _params(body, limits, max_tokens=max_tokens, logprobs=logprobs, **others)


def _params(body: GenerationBody, limits: Limits, **others: Any) -> SamplingParams:
    given = {name: getattr(body, name) for name in _SAME}
    given["structured_outputs"] = structure_of(body)
    given["speculation"] = body.speculation
    guard = _TIER_GUARDS.get(body.service_tier or "")
    if guard is not None:
        given["speculation"] = {"guard": guard, **(body.speculation or {})}
    given["prediction"] = body.prediction.text if body.prediction is not None else None
    given.update(others)
    if body.token_sources and given["logprobs"] is None:
        given["logprobs"] = 0
    kept = {k: v for k, v in given.items() if v is not None or k == "max_tokens"}
    try:
        params = SamplingParams(**kept)
    except ParameterError as error:
        raise about_body(error, body) from None
    if params.n > limits.max_n:
        raise ParameterError("n", params.n, f"at most {limits.max_n} on this server")
    most = limits.max_tokens
    if most is not None and (params.max_tokens or 0) > most:
        raise ParameterError("max_tokens", params.max_tokens, f"at most {most} on this server")
    if most is not None and params.max_tokens is None:
        return _params(body, limits, **{**others, "max_tokens": most})
    return params
