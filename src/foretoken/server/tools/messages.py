"""The message of one choice while its text arrives: content and tool calls, OpenAI's shape."""

import uuid
from typing import Any, final

from foretoken.server.tools.calls import Piece
from foretoken.server.tools.parsers import ToolParser


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
