"""A model's chat template: where it is found, and conversations rendered with it.

Renders with jinja2 to the same text as transformers (tests/golden/test_chat_template.py), whose
import takes seconds. Everything is read when it is made; the folder may go afterwards. Templates
come with models and are not trusted: none is read by jinja2 in this process. Knows no token ids.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from foretoken.errors import PromptError
from foretoken.text.renderers import Renderers, always, order_of

_SPECIALS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
_OWN = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables that a request has fields for."""
_TOKEN = re.compile(r"\b\w+_token\b")


@final
class ChatTemplate:
    """The templates of one model, and the special tokens they may name."""

    def __init__(self, sources: Mapping[str, str], specials: Mapping[str, str]) -> None:
        """Templates by name, of which `default` is used, and `tool_use` where there are tools."""
        self.renderers = Renderers()
        self._specials = dict(specials)
        self._sources = dict(sources)

    @classmethod
    def of_folder(cls, folder: Path, config: Mapping[str, Any]) -> "ChatTemplate | None":
        """The template of a model's folder, whose tokenizer_config.json is `config`, if any."""
        sources = _sources(folder, config)
        return cls(sources, _specials(folder, config)) if sources else None

    @classmethod
    def of_transformers(cls, tokenizer: Any) -> "ChatTemplate | None":
        """The template of a tokenizer of transformers; None if it has none."""
        given = tokenizer.chat_template
        if given is None:
            return None
        sources = given if isinstance(given, Mapping) else {"default": given}
        return cls(sources, tokenizer.special_tokens_map)

    def with_specials_of(self, tokenizer: Any) -> "ChatTemplate":
        """The same templates with the special tokens of a tokenizer of transformers."""
        return ChatTemplate(self._sources, tokenizer.special_tokens_map)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        wanted: Callable[[], bool] = always,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: of plain JSON values; keys whose value is None count as left out, and
                arguments of tool calls may be the JSON of an object.
            add_generation_prompt: whether the answer is to begin at the end of the text.
            tools: as OpenAI writes them; what becomes of them is the template's affair.
            variables: more for the template, such as `enable_thinking`.
            wanted: asked now and then; when it says no, the text is not made to the end.

        Raises:
            PromptError: the template rejects the conversation, is broken itself, or takes more time
                or memory than a text may.
            ForetokenError: there is no process to render in, or the text is not wanted any more.
        """
        for name in variables:
            if name in _OWN:
                allowed = "names that are no fields of the request"
                raise PromptError("chat_template_kwargs", name, allowed)
        if not messages:
            raise PromptError("messages", messages, "at least one message")
        given = {**self._specials, **variables, "messages": messages, "documents": None}
        given |= {"tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            _check_messages(messages)
            order = order_of(self._source(tools), _plain(given))
            return self.renderers.ask(order, wanted)
        except (RecursionError, TypeError, ValueError) as error:
            raise PromptError("messages", f"{len(messages)} messages", str(error)) from error

    def _source(self, tools: object) -> str:
        name = "tool_use" if tools is not None and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise ValueError(f"there is no {name} among {', '.join(self._sources)}")
        return self._sources[name]

    def unknown_tokens(self, config: Mapping[str, Any]) -> set[str]:
        """Tokens that a template names and the folder's files do not: their values are defaults of
        transformers' classes."""
        known = {*self._specials, *(name for name in config if name in _SPECIALS)}
        named: set[str] = set()
        for source in self._sources.values():
            if set(_TOKEN.findall(source)) <= known:
                continue  # what most templates are: no process has to read them for this
            try:
                named |= set(self.renderers.ask(order_of(source, None)).split("\n"))
            except ValueError:
                continue
        return {name for name in named if name.endswith("_token")} - known


def _sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name; files of their own go before tokenizer_config.json, also where they are
    a processor's, which reads pictures beside text."""
    found = {}
    own = folder / "chat_template.jinja"
    if own.is_file():
        found["default"] = own.read_text("utf-8")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = file.read_text("utf-8")
    processors = folder / "chat_template.json"
    if "default" not in found and processors.is_file():
        found |= _named(json.loads(processors.read_text("utf-8")).get("chat_template"))
    given = config.get("chat_template")
    return found or _named(given)


def _named(given: Any) -> dict[str, str]:
    """One template, or several with their names."""
    if given is None or isinstance(given, str):
        return {} if given is None else {"default": given}
    return {str(one["name"]): str(one["template"]) for one in given}


def _specials(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens as the folder's files give them."""
    given = {name: config.get(name) for name in _SPECIALS}
    older = folder / "special_tokens_map.json"
    if "added_tokens_decoder" not in config and older.is_file():
        stored = json.loads(older.read_text("utf-8"))
        given |= {name: stored[name] for name in _SPECIALS if name in stored}
    texts = {
        name: token.get("content") if isinstance(token, Mapping) else token
        for name, token in given.items()
    }
    return {name: str(text) for name, text in texts.items() if text is not None}


def _check_messages(messages: Sequence[object]) -> None:
    for message in messages:
        if not isinstance(message, Mapping):
            raise TypeError(f"dictionaries, not {type(message).__name__}")


def _plain(value: Any) -> Any:
    """A copy of plain JSON values: what else a template were given, it could call."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    raise TypeError(f"plain values, not {type(value).__name__}")
