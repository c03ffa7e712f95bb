"""What callers of `LLM` may give, read and checked: prompts, parameters, priorities, conversations.

Knows no engine and no tokenizer. Invariant: whatever is given, the error names the field.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from foretoken.errors import ParameterError, PromptError
from foretoken.types.params import SamplingParams
from foretoken.types.resume import Resume
from foretoken.types.scalars import plain

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]

_PROMPTS = "a text, token ids, a dictionary with prompt or prompt_token_ids, or a list of those"
_CONVERSATION = "a list of messages, each a dictionary, or a list of such lists"


class GivenPrompt(NamedTuple):
    """One prompt and what was given beside it."""

    content: str | Sequence[int]
    """Text or token ids."""
    cache_salt: str | None = None
    resume: tuple[Resume, ...] | None = None
    """Its outputs as far as another engine has written them."""


def list_prompts(prompts: Any) -> list[Prompt]:
    """One prompt or several as a list. Raises PromptError: it is neither."""
    prompts = plain(prompts)
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes | bytearray) or not hasattr(prompts, "__iter__"):
        raise PromptError("prompts", prompts, _PROMPTS)
    listed = list(prompts)
    return [listed] if listed and isinstance(plain(listed[0]), int) else listed


def read_prompt(prompt: Any) -> GivenPrompt:
    """The text or the token ids of a prompt, and what a dictionary has beside them. Raises
    PromptError: it is no prompt; ParameterError: its `resume` is wrong."""
    salt, resume = None, None
    field = "prompt"
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt", "resume"}
        if unknown or not {"prompt", "prompt_token_ids"} & set(prompt):
            allowed = "prompt or prompt_token_ids, cache_salt, resume"
            raise PromptError("prompt", [*map(str, prompt)], allowed)
        salt = prompt.get("cache_salt")
        if salt is not None and not isinstance(salt, str):
            raise PromptError("cache_salt", salt, "a text")
        resume = Resume.list_of(prompt.get("resume"))
        if prompt.get("prompt_token_ids") is not None:
            field, prompt = "prompt_token_ids", prompt["prompt_token_ids"]
            if isinstance(prompt, str):
                raise PromptError(field, prompt, "a list of integers")
        else:
            prompt = prompt.get("prompt")
    prompt = plain(prompt)
    listed = isinstance(prompt, str) or hasattr(prompt, "__iter__")
    if not listed or isinstance(prompt, bytes | bytearray | Mapping):
        allowed = "a text or a list of token ids" if field == "prompt" else "a list of integers"
        raise PromptError(field, prompt, allowed)
    return GivenPrompt(prompt, salt, resume)


def text_of(prompt: Prompt) -> str | None:
    """The prompt, if it was given as text."""
    given = prompt.get("prompt", ()) if isinstance(prompt, Mapping) else prompt
    return given if isinstance(given, str) else None


def list_params(given: Any, num_prompts: int) -> list[SamplingParams]:
    """Parameters of each prompt, from one for all or one each. Raises PromptError: there are more
    or fewer than prompts; ParameterError: some are no SamplingParams."""
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * num_prompts
    params = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    for one in params:
        if not isinstance(one, SamplingParams):
            raise ParameterError("sampling_params", one, "SamplingParams, or a list of them")
    if len(params) != num_prompts:
        allowed = f"one, or one per prompt ({num_prompts})"
        raise PromptError("sampling_params", f"{len(params)} of them", allowed)
    return params


def list_priorities(given: Any, num_prompts: int) -> list[int]:
    """A priority of each prompt. Raises PromptError: there are more or fewer than prompts, or some
    are no integers."""
    if given is None:
        return [0] * num_prompts
    many = hasattr(given, "__iter__") and getattr(given, "ndim", 1) != 0
    ranks = [*map(plain, given)] if many else [plain(given)]
    for rank in ranks:
        if not isinstance(rank, int) or isinstance(rank, bool):
            raise PromptError("priority", rank, "an integer for each prompt")
    if len(ranks) != num_prompts:
        raise PromptError("priority", len(ranks), f"one number per prompt ({num_prompts})")
    return ranks


def list_conversations(messages: Any) -> list[Messages]:
    """One conversation or several as a list. Raises PromptError: it is neither."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise PromptError("messages", messages, _CONVERSATION)
    many = bool(messages) and not isinstance(messages[0], Mapping)
    conversations = list(messages) if many else [messages]
    for one in conversations:
        wrong = not isinstance(one, Sequence) or isinstance(one, str | bytes)
        if wrong or not all(isinstance(message, Mapping) for message in one):
            raise PromptError("messages", one, _CONVERSATION)
    return conversations
