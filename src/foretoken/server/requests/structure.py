"""What a body says the output must look like, and which of its fields says so.

A schema reaches the engine as `structured_outputs`, wherever the client wrote it; errors name the
client's field.
"""

import re
from typing import Any

from foretoken.errors import ParameterError, RequestError
from foretoken.server.schemas import ChatBody, GenerationBody, NamedTool

_OWN, _TOOLS = "structured_outputs", "tools"
_PARAMETERS = "tools[{}].function.parameters"
_AT_LINE = re.compile(r"at (\d+)\(\d+\): (.*?)(?:\n +\d+ \| .*)?$", re.DOTALL)
"""Where in a Lark grammar llguidance found an error, what it is, and the lines around it."""


def structure_of(body: GenerationBody) -> dict[str, Any] | None:
    """What response_format or structured_outputs ask for, as SamplingParams takes it.

    Raises:
        ParameterError: both do, or response_format is incomplete.
    """
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
