"""What a tool choice means for one request: which grammar it forces and which parser reads it; and
the message of one choice while its text arrives, content and tool calls in OpenAI's shape.
"""

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from foretoken.errors import ParameterError
from foretoken.server.schemas import ChatBody, FunctionDefinition, NamedTool, Tool
from foretoken.server.tools.parsers import (
    PARSERS,
    ArgumentsParser,
    HermesParser,
    Piece,
    PlainParser,
    ToolParser,
)
from foretoken.text.tokenizer import Tokenizer


@final
class ChoiceMessage:
    """Grows by the text of tokens; gives deltas on the way and the whole at the end."""

    def __init__(self, parser: ToolParser) -> None:
        """Read with `parser`."""
        self._parser = parser
        self._content: list[str] = []
        self._calls: list[dict[str, Any]] = []

    @property
    def num_calls(self) -> int:
        """Calls that were begun."""
        return len(self._calls)

    def read(self, text: str, *, ends: bool) -> list[dict[str, Any]]:
        """Deltas of more text; with its end, also what was held back."""
        pieces = self._parser.feed(text)
        if ends:
            pieces += self._parser.finish()
        return [self._delta(piece) for piece in pieces]

    def whole(self) -> dict[str, Any]:
        """The message; content is null where there are only calls."""
        content = "".join(self._content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not self._calls else None,
            "refusal": None,
        }
        if self._calls:
            message["tool_calls"] = self._calls
        return message

    def _delta(self, piece: Piece) -> dict[str, Any]:
        if piece.call is None:
            self._content.append(piece.content)
            return {"content": piece.content}
        function = {"arguments": piece.arguments}
        change: dict[str, Any] = {"index": piece.call, "function": function}
        if piece.name is not None:
            function["name"] = piece.name
            change |= {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
            call = {"id": change["id"], "type": "function"}
            self._calls.append({**call, "function": dict(function)})
        else:
            self._calls[piece.call]["function"]["arguments"] += piece.arguments
        return {"tool_calls": [change]}


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
    shows_special: bool = False
    """Whether the text that the parser reads must have special tokens in it: the model writes what
    marks a call as such."""


def plan_tools(body: ChatBody, parser: str, tokenizer: Tokenizer | None) -> ToolPlan:
    """The plan for a body, with the server's `parser` and the model's `tokenizer`.

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
    found = {} if tokenizer is None else tokenizer.added_tokens
    marks = {mark: found[mark] for mark in PARSERS[parser].marks if mark in found}
    forced = None
    if choice == "required":
        spelt = {mark: f"<[{token.token_id}]>" for mark, token in marks.items()}
        functions = list(by_name.values())
        forced = {"grammar": calls_grammar(functions, parser, body.parallel_tool_calls, spelt)}
    return ToolPlan(
        tools=tools,
        structure=forced,
        parser=PARSERS[parser],
        shows_special=any(token.special for token in marks.values()),
    )


def calls_grammar(
    functions: Sequence[FunctionDefinition], parser: str, several: bool, spelt: Mapping[str, str]
) -> str:
    """A Lark grammar of one or more calls, written as the parser reads them.

    Its first lines are the functions' parameters, in order: each a schema of its own, in which
    references point.

    Args:
        functions: what may be called.
        parser: whose way of writing.
        several: whether there may be more than one call.
        spelt: how the grammar names the tokens of marks for which the model has one.
    """
    key = "arguments" if parser == "hermes" else "parameters"
    schemas = [{**(function.parameters or _ANY_OBJECT), **_COMPACT} for function in functions]
    lines = [f"arguments_{i}: %json {json.dumps(schema)}" for i, schema in enumerate(schemas)]
    heads = [f'{{"name":"{function.name}","{key}":' for function in functions]
    bodies = [f'{json.dumps(head)} arguments_{i} "}}"' for i, head in enumerate(heads)]
    lines.append(f"body: {' | '.join(bodies)}")
    if parser == "hermes":
        opening, closing = (spelt.get(mark, json.dumps(mark)) for mark in HermesParser.marks)
        call = f'{opening} "\\n" body "\\n" {closing}'
        more = f'("\\n" {call})*' if several else ""
    else:
        call, more = "body", '("; " body)*' if several else ""
    return "\n".join([*lines, f"start: {call} {more}", ""])
