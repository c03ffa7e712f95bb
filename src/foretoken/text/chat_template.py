"""A model's chat template: where it is found, and conversations rendered with it.

Renders with jinja2 to the same text as transformers (tests/golden/test_chat_template.py), whose
import takes seconds. Everything is read when it is made; the folder may go afterwards. Templates
come with models and are not trusted: the environment is jinja2's sandbox. Knows no token ids.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from foretoken.errors import PromptError

if TYPE_CHECKING:
    from jinja2.sandbox import SandboxedEnvironment

_SPECIALS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
_OWN = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables that a request has fields for."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients send an answer's reasoning; templates read the first or the second."""


@final
class ChatTemplate:
    """The templates of one model, and the special tokens they may name."""

    def __init__(self, sources: Mapping[str, str], specials: Mapping[str, str]) -> None:
        """Templates by name, of which `default` is used, and `tool_use` where there are tools."""
        self._environment = _environment()
        self._specials = dict(specials)
        self._sources = dict(sources)
        self._templates: dict[str, Any] = {}

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

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        """The text of a conversation.

        Args:
            messages: of plain JSON values; keys whose value is None count as left out.
            add_generation_prompt: whether the answer is to begin at the end of the text.
            tools: as OpenAI writes them; what becomes of them is the template's affair.
            variables: more for the template, such as `enable_thinking`.

        Raises:
            PromptError: the template rejects the conversation, or is broken itself.
        """
        import jinja2

        for name in variables:
            if name in _OWN:
                allowed = "names that are no fields of the request"
                raise PromptError("chat_template_kwargs", name, allowed)
        if not messages:
            raise PromptError("messages", messages, "at least one message")
        try:
            chat = [_message(message) for message in messages]
            given = {**self._specials, **variables, "messages": chat, "documents": None}
            given |= {"tools": tools, "add_generation_prompt": add_generation_prompt}
            text: str = self._template(tools).render(_plain(given))
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError,
                RecursionError, TypeError, ValueError) as error:  # fmt: skip
            raise PromptError("messages", messages, f"what the template takes: {error}") from error
        return text

    def _template(self, tools: object) -> Any:
        name = "tool_use" if tools is not None and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise ValueError(f"there is no {name} among {', '.join(self._sources)}")
        if name not in self._templates:
            self._templates[name] = self._environment.from_string(self._sources[name])
        return self._templates[name]

    def unknown_tokens(self, config: Mapping[str, Any]) -> set[str]:
        """Tokens that a template names and the folder's files do not: their values are defaults of
        transformers' classes."""
        from jinja2 import TemplateSyntaxError, meta

        named: set[str] = set()
        for source in self._sources.values():
            try:
                named |= meta.find_undeclared_variables(self._environment.parse(source))
            except TemplateSyntaxError:
                continue
        known = {*self._specials, *(name for name in config if name in _SPECIALS)}
        return {name for name in named if name.endswith("_token")} - known


def _sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name; files of their own go before tokenizer_config.json."""
    found = {}
    own = folder / "chat_template.jinja"
    if own.is_file():
        found["default"] = own.read_text("utf-8")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = file.read_text("utf-8")
    given = config.get("chat_template")
    if found or given is None:
        return found
    if isinstance(given, str):
        return {"default": given}
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


def _message(message: object) -> dict[str, Any]:
    """A message without what is None, its reasoning under the names that templates read."""
    if not isinstance(message, Mapping):
        raise TypeError(f"a message is a dictionary, not {type(message).__name__}")
    fields = {name: value for name, value in message.items() if value is not None}
    reasoning = next((fields[name] for name in _REASONING if name in fields), None)
    if reasoning is not None:
        fields = {"thinking": reasoning, **fields, "reasoning_content": reasoning}
    return fields


def _plain(value: Any) -> Any:
    """A copy of plain JSON values: what else a template were given, it could call."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    raise TypeError(f"plain values, not {type(value).__name__}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; jinja2's own filter writes it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> "SandboxedEnvironment":
    """jinja2 as chat templates expect it."""
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    @final
    class GenerationBlock(Extension):
        """`{% generation %}`: marks the answers for training, and prints what is in it."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node:
            """The tag and its content."""
            line = next(parser.stream).lineno
            content = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            block = nodes.CallBlock(self.call_method("_print"), [], [], content)
            return block.set_lineno(line)

        def _print(self, caller: Any) -> Any:
            return caller()

    @final
    class Variables(Namespace):
        """`namespace()`, without names that begin with an underscore."""

        def __setitem__(self, name: str, value: object) -> None:
            """Set a variable."""
            if name.startswith("_"):
                raise SecurityError(f"a template may not set {name!r}")
            super().__setitem__(name, value)

    def namespace(*args: Any, **kwargs: Any) -> Variables:
        made = Variables()
        for name, value in dict(*args, **kwargs).items():
            made[name] = value
        return made

    def fail(message: str) -> None:
        raise TemplateError(message)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = fail
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    made.globals["namespace"] = namespace
    return made
