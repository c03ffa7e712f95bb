"""A request's prompt as the router takes it, made without a tokenizer.

Texts that begin with the same characters begin with the same tokens, but for the last one of what
they share. So stretches of text stand for tokens: `_BYTES` bytes for each, which is about what a
token of English is. Prompts of token ids are taken as they are. The names of pages are the front's
own: replicas have others for the same text. Of a long prompt the first `MOST_NAMED` pages have
names, since it costs its sender nothing and may be refused; what is alike so far goes together.

Owns what counts as the beginning of a conversation: what templates write first comes first.
"""

from array import array
from collections.abc import Sequence
from typing import Any

from foretoken.router.prompt import RoutedPrompt
from foretoken.server.schemas import ChatBody, CompletionBody
from foretoken.server.transport.events import to_json

PAGE = 32
"""Tokens of a page, or stretches of text."""
MOST_NAMED = 2048
"""Pages of a prompt that are looked at: 64 Ki tokens, 256 KiB of text."""
_ID = (1 << 63) - 1
"""What of a token id counts; what is beyond is refused by a replica."""
_BYTES = 4


def prompt_of(body: CompletionBody | ChatBody, salt: str | None) -> RoutedPrompt:
    """The prompt of a request within its salt; of several prompts the first, as all of one request
    go to one replica."""
    return RoutedPrompt.of(_pieces(body), salt, page_size=PAGE, most_pages=MOST_NAMED)


def _pieces(body: CompletionBody | ChatBody) -> Sequence[int]:
    if isinstance(body, ChatBody):
        return _of_text(_conversation(body))
    named = MOST_NAMED * PAGE
    prompt: Any = body.prompt
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return _of_text(prompt.encode()) or [0]
    return [*(int(one) & _ID for one in prompt[:named]), *prompt[named:]] or [0]


def _conversation(body: ChatBody) -> bytes:
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    messages = [to_json(message.model_dump(exclude_none=True)) for message in body.messages]
    return b"\n".join([to_json([body.template_variables, tools]), *messages])


def _of_text(text: bytes) -> Sequence[int]:
    """One number for every few bytes, the last filled up."""
    return array("I", text + bytes(-len(text) % _BYTES))
