"""What a tool choice means for one request: which grammar it forces and which parser reads it."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from foretoken.errors import ParameterError
from foretoken.server.schemas import ChatBody, FunctionDefinition, NamedTool, Tool
from foretoken.server.tools.parsers import PARSERS, ArgumentsParser, PlainParser, ToolParser

_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_COMPACT = {"x-guidance": {"whitespace_flexible": False}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPlan:
    """How calls are asked for and read."""

    tools: list[Tool] | None
    """What the template is given."""
    structure: dict[str, Any] | None
    """What the output must look like; None: as the model likes."""
    parser: Callable[[], ToolParser]
    """Makes one parser per choice."""
    named: bool = False
    """Whether the one call is given; its end is then a `stop`, as in OpenAI's API."""


def plan_tools(body: ChatBody, parser: str) -> ToolPlan:
    """The plan for a body, with the server's `parser`.

    Raises:
        ParameterError: a choice without tools, an unknown name, or two tools of one name.
    """
    tools, choice = body.tools or None, body.tool_choice
    if tools is None:
        if choice not in (None, "none", "auto"):
            given = choice.model_dump() if isinstance(choice, NamedTool) else choice
            raise ParameterError("tool_choice", given, "none or auto, without tools")
        return ToolPlan(tools=None, structure=None, parser=PlainParser)
    by_name = {tool.function.name: tool.function for tool in tools}
    if len(by_name) < len(tools):
        names = [tool.function.name for tool in tools]
        raise ParameterError("tools", names, "functions with different names")
    if choice == "none":
        return ToolPlan(tools=None, structure=None, parser=PlainParser)
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in by_name:
            allowed = ", ".join(by_name)
            raise ParameterError("tool_choice.function.name", name, allowed)
        schema = by_name[name].parameters or _ANY_OBJECT
        structure = {"json": schema, "disable_any_whitespace": True}
        return ToolPlan(
            tools=tools, structure=structure, parser=lambda: ArgumentsParser(name), named=True
        )
    forced = None
    if choice == "required":
        forced = {
            "grammar": calls_grammar(list(by_name.values()), parser, body.parallel_tool_calls)
        }
    return ToolPlan(tools=tools, structure=forced, parser=PARSERS[parser])


def calls_grammar(functions: list[FunctionDefinition], parser: str, several: bool) -> str:
    """A Lark grammar of one or more calls, written as the parser reads them."""
    arguments = "arguments" if parser == "hermes" else "parameters"
    schemas = [_call_schema(function, arguments) for function in functions]
    body = json.dumps({"anyOf": schemas, **_COMPACT})
    if parser == "hermes":
        call = '"<tool_call>\\n" body "\\n</tool_call>"'
        more = f'("\\n" {call})*' if several else ""
    else:
        call, more = "body", '("; " body)*' if several else ""
    return f"start: {call} {more}\nbody: %json {body}\n"


def _call_schema(function: FunctionDefinition, arguments: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": function.name},
            arguments: function.parameters or _ANY_OBJECT,
        },
        "required": ["name", arguments],
        "additionalProperties": False,
    }
