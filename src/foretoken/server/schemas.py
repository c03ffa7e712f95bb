"""The bodies of requests: OpenAI's fields and vLLM's extras, each with its type.

Ranges are checked by SamplingParams and by the limits. A field that is not here is an error, not
ignored; fields that change nothing here are accepted only at the values at which they do not. A
null is as good as no field, in every object that is described here, whatever its name.
"""

from abc import ABC
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

MOST_WORDS = 1024
"""Bad words of a request; each is looked for at every row of every step."""
MOST_STOPS = 64
"""Stop strings of a request; each is looked for after every token."""

LogitBias = dict[str, float]
Ids = Annotated[list[int], Field(fail_fast=True)]
"""Token ids. Lists that clients fill end at their first mistake: a million take seconds to say."""


def _kind_of_prompt(given: Any) -> str | None:
    """Which form a prompt has, found at a glance: trying each on a long list takes seconds."""
    if isinstance(given, str):
        return "text"
    kinds: tuple[Any, ...] = tuple(set(map(type, given))) if isinstance(given, list) else (None,)
    if kinds == (list,):
        return "lists" if all(set(map(type, one)) <= {int} for one in given) else None
    return {(): "texts", (str,): "texts", (int,): "ids"}.get(kinds)


Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Tag("texts")]
    | Annotated[list[int], Tag("ids")]
    | Annotated[list[list[int]], Tag("lists")],
    Discriminator(
        _kind_of_prompt,
        custom_error_type="prompt",
        custom_error_message="a text, texts, token ids, or lists of token ids",
    ),
]
_WITHOUT_EFFECT = (
    "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "verbosity",
    "reasoning_effort", "service_tier", "store", "metadata",
)  # fmt: skip
"""Fields that new clients send, and that are named in the log."""


class Body(BaseModel, ABC):
    """An object of a request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """Clients send null for what they leave open: it is as if they had not named it. Values
        that are no object of ours, such as schemas, keep theirs."""
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}


class StreamOptions(Body):
    """What a stream carries beside the choices."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class SchemaFormat(Body):
    """A JSON schema as OpenAI's response_format carries it."""

    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """What the text must be: anything, a JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """Beside json_object, as instructor and llama.cpp have it: the object's schema."""


class TextPart(Body):
    """A stretch of text."""

    type: Literal["text"]
    text: str


class Prediction(Body):
    """OpenAI's predicted output: text that the answer will probably contain."""

    type: Literal["content"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class WrittenOutput(Body):
    """A choice as far as another server has written it."""

    output_ids: Ids = Field(default_factory=list)
    ended: bool = False


class GenerationBody(Body, ABC):
    """What completions and chat completions have in common."""

    model: str | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: LogitBias | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    bad_words: Annotated[list[str], Field(max_length=MOST_WORDS)] | None = None
    allowed_token_ids: Ids | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    prediction: Prediction | None = None
    speculation: dict[str, Any] | None = None
    """enabled, drafter, num_speculative_tokens, guard: how this request is drafted for."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    verbosity: str | None = None
    reasoning_effort: str | None = None
    """Given to the chat template, which may know it; without effect elsewhere."""
    service_tier: str | None = None
    """`flex`: the request has time, and drafts of others may cost it more."""
    store: bool | None = None
    metadata: dict[str, str] | None = None
    priority: int = 0
    cache_salt: str | None = None
    """Requests share cached prefixes only within one salt."""
    resume: Annotated[list[WrittenOutput], Field(fail_fast=True)] | None = None
    """For whoever has the server's internal key: each choice as far as another server has written
    it. The stream has what comes after."""
    return_token_ids: bool = False
    """Add `token_ids` to every choice."""
    token_sources: bool = False
    """Add to every choice `tokens`, text, id and source of each, and at its end `times`: seconds
    from the request's arrival until it ran, until its first token and until its end."""

    @property
    def most_tokens(self) -> int | None:
        """The length of an output that was asked for."""
        return self.max_tokens

    @property
    def without_effect(self) -> tuple[str, ...]:
        """Fields that were given and change nothing here."""
        return tuple(name for name in _WITHOUT_EFFECT if getattr(self, name) is not None)


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Prompt
    logprobs: int | None = None
    echo: bool = False
    add_special_tokens: bool = True
    best_of: Literal[1] | None = None
    suffix: None = None

    @property
    def typed_names(self) -> dict[str, str]:
        """Names that what is typed here goes by further on, and what it is called here."""
        return {"prompt_token_ids": "prompt"}


class Message(Body):
    """One message of a conversation; templates may use further fields, such as tool_calls."""

    model_config = ConfigDict(extra="allow", strict=False)

    role: str
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None


class FunctionDefinition(Body):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """OpenAI's wrapper around a function."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """The one function that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    echo: Literal[False] = False
    tools: list[Tool] | None = Field(default=None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    """More variables for the chat template, such as `enable_thinking`."""
    modalities: list[Literal["text"]] | None = None

    @property
    def typed_names(self) -> dict[str, str]:
        """Names that what is typed here goes by further on, and what it is called here."""
        names = dict.fromkeys(("prompt", "prompt_token_ids"), "messages")
        names["logprobs"] = "top_logprobs"
        if self.max_tokens is None:
            names["max_tokens"] = "max_completion_tokens"
        return names

    @property
    def most_tokens(self) -> int | None:
        """The length of an output that was asked for, under either name."""
        given = self.max_completion_tokens
        return self.max_tokens if given is None else given

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the chat template is given beside messages and tools."""
        given = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**given, **(self.chat_template_kwargs or {})}


class TokenizeBody(Body):
    """POST /tokenize: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Ids
    skip_special_tokens: bool = False


class SpeculationBody(Body):
    """PUT /admin/speculation: what the engine may still do of what it was configured for."""

    enabled: bool = True
    drafter: str | None = None
    num_speculative_tokens: int | None = None
    guard: float | None = None


class CorpusBody(Body):
    """PUT /admin/corpora/NAME: a text, and whose requests may be drafted for from it."""

    text: str = Field(min_length=1)
    cache_salt: str | None = None
    api_key: str | None = None
