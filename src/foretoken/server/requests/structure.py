"""What a body says the output must look like, and which of its fields says so.

A schema reaches the engine as `structured_outputs`, wherever the client wrote it; errors name the
client's field.
"""

import re
from typing import Any

from foretoken.errors import ParameterError, RequestError
from foretoken.server.schemas import ChatBody, GenerationBody, NamedTool

_OWN = "structured_outputs"
_PARAMETERS = "tools[{}].function.parameters"
_AT_LINE = re.compile(r"at (\d+)\(\d+\): (.*?)(?:\n +\d+ \| .*)?\s*", re.DOTALL)
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
    if isinstance(body, ChatBody) and body.tools and body.tool_choice == "required":
        return "tools"
    if isinstance(body, ChatBody) and body.tools and isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        names = [tool.function.name for tool in body.tools]
        return _PARAMETERS.format(names.index(name)) if name in names else "tools"
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
    at_line = _AT_LINE.search(error.allowed)
    if not isinstance(body, ChatBody) or not body.tools or at_line is None:
        return ParameterError(field, error.given, error.allowed)
    # The first lines of the grammar of calls are the parameters of the tools.
    line, reason = int(at_line[1]), at_line[2]
    allowed = error.allowed[: at_line.start()] + reason
    if line > len(body.tools):
        return ParameterError(field, error.given, allowed)
    parameters = body.tools[line - 1].function.parameters
    return ParameterError(_PARAMETERS.format(line - 1), parameters, allowed)
