"""Tools of a chat: what a choice of them means for one request, and calls found in arriving text.

One parser per way in which templates write calls. Invariant: what a parser gives out depends on the
text alone, not on how it was cut: it never passes on as content what may still become a call. One
call, `{"name": ..., "arguments": {...}}`, is read character by character; arguments are passed on
as they were written. Knows no HTTP.
"""

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from foretoken.errors import ParameterError
from foretoken.server.schemas import ChatBody, FunctionDefinition, NamedTool, Tool
from foretoken.text.tokenizer import Tokenizer

_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What a stretch of text turned out to be: content, a call's name, or part of its arguments."""

    content: str = ""
    call: int | None = None
    """Number of the call that `name` or `arguments` belong to."""
    name: str | None = None
    arguments: str = ""


@final
class CallReader:
    """One JSON object, from its opening brace to its closing one."""

    def __init__(self, number: int) -> None:
        self.text = ""
        """All of it so far."""
        self.done = False
        self.name: str | None = None
        self._number = number
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._string_start = 0
        self._key: str | None = None
        self._value_start = 0
        self._expects_value = False
        self._held = ""

    def feed(self, char: str) -> list[Piece]:
        assert not self.done, "the object is closed"
        at = len(self.text)
        self.text += char
        in_arguments = self._expects_value and self._key in _ARGUMENTS and self._depth >= 1
        pieces: list[Piece] = []
        ended = self._track(char, at)
        if ended:
            pieces += self._end_of_value(at)
        elif in_arguments and (self._value_start or not char.isspace()):
            pieces += self._argument(char)
        if self._expects_value and not self._value_start and not char.isspace() and char != ":":
            self._value_start = at or 1
        return pieces

    def _track(self, char: str, at: int) -> bool:
        """Follow strings and nesting; whether a top-level value ends before this character."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                if self._depth == 1 and not self._expects_value:
                    self._key = _loads(self.text[self._string_start :])
            return False
        if char == '"':
            self._in_string, self._string_start = True, at
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.done = self._depth == 0
            return self.done and self._expects_value
        elif char == ":" and self._depth == 1 and not self._expects_value:
            self._expects_value, self._value_start = True, 0
        elif char == "," and self._depth == 1:
            return self._expects_value
        return False

    def _end_of_value(self, at: int) -> list[Piece]:
        """The value of a key is complete: the name may set free the arguments before it."""
        value = self.text[self._value_start : at]
        key, self._key, self._expects_value = self._key, None, False
        if key == "name":
            name = _loads(value)
            if isinstance(name, str) and name and self.name is None:
                self.name = name
                pieces = [Piece(call=self._number, name=name)]
                if self._held:
                    pieces.append(Piece(call=self._number, arguments=self._held))
                return pieces
        return []

    def _argument(self, char: str) -> list[Piece]:
        if self.name is None:
            self._held += char
            return []
        return [Piece(call=self._number, arguments=char)]


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def merged(pieces: list[Piece]) -> list[Piece]:
    """Neighbouring pieces of the same kind joined."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if last is None or piece.name is not None or last.call != piece.call:
            found.append(piece)
        elif piece.call is None:
            found[-1] = Piece(content=last.content + piece.content)
        else:
            joined = last.arguments + piece.arguments
            found[-1] = Piece(call=last.call, name=last.name, arguments=joined)
    return found


class ToolParser(ABC):
    """Reads the text of one choice."""

    marks: ClassVar[tuple[str, ...]] = ()
    """Texts by which it knows a call; a model may have a token for each."""

    @abstractmethod
    def feed(self, text: str) -> list[Piece]:
        """Add text; what is certain by now."""

    def finish(self) -> list[Piece]:
        """No more text: what was held back."""
        return []


@final
class PlainParser(ToolParser):
    """No calls: everything is content."""

    def feed(self, text: str) -> list[Piece]:
        return [Piece(content=text)] if text else []


@final
class ArgumentsParser(ToolParser):
    """A named tool choice: the whole text is the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def feed(self, text: str) -> list[Piece]:
        """The name first, then arguments."""
        if not text:
            return []
        name, self._name = self._name, None
        return [Piece(call=0, name=name, arguments=text)]


@final
class HermesParser(ToolParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number, text between."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    marks = (OPEN, CLOSE)

    def __init__(self) -> None:
        self._held = ""
        self._num_calls = 0
        self._reader: CallReader | None = None
        self._after_call = False

    def feed(self, text: str) -> list[Piece]:
        return merged([piece for char in text for piece in self._char(char)])

    def finish(self) -> list[Piece]:
        held = self._held
        if self._reader is not None and self._reader.name is None:
            held = self.OPEN + held + self._reader.text
        elif self._reader is not None or self._after_call:
            held = ""
        self._held = ""
        return [Piece(content=held)] if held else []

    def _char(self, char: str) -> list[Piece]:
        reader = self._reader
        if reader is None:
            return self._outside(char)
        if not reader.text and char.isspace():
            self._held += char
            return []
        if not reader.text and char != "{":
            self._reader, held, self._held = None, self.OPEN + self._held + char, ""
            return [Piece(content=held)]
        if reader.done:
            return self._until_closed(char)
        return reader.feed(char)

    def _until_closed(self, char: str) -> list[Piece]:
        """After the object: skip what closes the call."""
        assert self._reader is not None, "called inside"
        self._held += char
        if not self._held.endswith(self.CLOSE):
            return []
        reader, self._reader, self._held = self._reader, None, ""
        if reader.name is None:
            return [Piece(content=f"{self.OPEN}{reader.text}{self.CLOSE}")]
        self._num_calls += 1
        self._after_call = True
        return []

    def _outside(self, char: str) -> list[Piece]:
        self._held += char
        if self._held.endswith(self.OPEN):
            content, self._held = self._held.removesuffix(self.OPEN), ""
            self._reader = CallReader(self._num_calls)
            return self._content(content)
        keep = _overlap(self._held, self.OPEN)
        content = self._held[: len(self._held) - keep]
        if self._after_call and content.isspace():
            return []
        self._held = self._held[len(content) :]
        return self._content(content)

    def _content(self, content: str) -> list[Piece]:
        """Content; blank text between calls is none."""
        if not content or (self._after_call and content.isspace()):
            return []
        self._after_call = False
        return [Piece(content=content)]


@final
class LlamaJsonParser(ToolParser):
    """The whole text is `{"name": ..., "parameters": {...}}`, several separated by `;`."""

    TAG = "<|python_tag|>"

    def __init__(self) -> None:
        self._held = ""
        self._num_calls = 0
        self._reader: CallReader | None = None
        self._is_content = False

    def feed(self, text: str) -> list[Piece]:
        return merged([piece for char in text for piece in self._char(char)])

    def finish(self) -> list[Piece]:
        held = self._held
        if self._reader is not None and self._reader.name is None:
            held += self._reader.text
        elif self._num_calls or self._reader is not None:
            held = ""
        return [Piece(content=held)] if held else []

    def _char(self, char: str) -> list[Piece]:
        if self._is_content:
            return [Piece(content=char)]
        if self._reader is not None:
            return self._inside(char)
        if char == "{":
            self._reader = CallReader(self._num_calls)
            return self._reader.feed(char)
        self._held += char
        start = self._held.strip()
        if not start or self.TAG.startswith(start) or start == self.TAG:
            return []
        if self._num_calls and char == ";":
            self._held = ""
            return []
        return self._give_up()

    def _inside(self, char: str) -> list[Piece]:
        reader = self._reader
        assert reader is not None, "called inside"
        pieces = reader.feed(char)
        if not reader.done:
            return pieces
        self._reader = None
        if reader.name is None:
            self._held += reader.text
            return pieces + self._give_up()
        self._num_calls += 1
        self._held = ""
        return pieces

    def _give_up(self) -> list[Piece]:
        """It is no call; whatever comes is content."""
        self._is_content, held, self._held = True, self._held, ""
        return [Piece(content=held)]


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a beginning of `marker`."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if marker.startswith(text[-n:])), 0)


PARSERS: dict[str, type[ToolParser]] = {"hermes": HermesParser, "llama3_json": LlamaJsonParser}


@final
class ChoiceMessage:
    """Grows by the text of tokens; gives deltas on the way and the whole at the end."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser
        self._content: list[str] = []
        self.calls: list[dict[str, Any]] = []

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
            "content": content if content or not self.calls else None,
            "refusal": None,
        }
        if self.calls:
            message["tool_calls"] = self.calls
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
            self.calls.append({**call, "function": dict(function)})
        else:
            self.calls[piece.call]["function"]["arguments"] += piece.arguments
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
    """The plan for a body, with the server's `parser` and the model's `tokenizer`. Raises
    ParameterError: a choice without tools, an unknown name, or two tools of one name."""
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
