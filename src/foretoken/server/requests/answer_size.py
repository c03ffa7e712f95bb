"""How large an answer may become: what of it grows with outputs times tokens, reckoned before
anything runs.

A short body can ask for an answer of gigabytes. Text that is generated costs a step of the model a
token and is not bounded here; what is said of each token, and repeated of the prompt in each
output, is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from foretoken.errors import ParameterError
from foretoken.server.requests.prompt_ids import PromptIds
from foretoken.server.schemas import CompletionBody, GenerationBody
from foretoken.types import SamplingParams

MOST_LOGPROBS = 1 << 18
"""Log-probabilities of one answer. They are held until it is sent, and the more objects there are,
the longer Python's collector stops every thread: with as many as these for some 70 ms."""
MOST_REPEATED = 1 << 22
"""Tokens of prompts that an answer repeats."""


@dataclass(frozen=True, slots=True)
class _Size:
    """Log-probabilities of an answer: of each output those of its prompt and of its new tokens."""

    outputs: int
    prompt_tokens: int
    """Over all outputs."""
    per_prompt_token: int
    per_new_token: int

    @property
    def of_prompts(self) -> int:
        return self.prompt_tokens * self.per_prompt_token

    @property
    def most_new(self) -> int:
        """New tokens of each output that there is room for."""
        return (MOST_LOGPROBS - self.of_prompts) // (self.outputs * self.per_new_token)

    def refused(self, field: str, new_tokens: int) -> ParameterError:
        """Outputs of so many new tokens are too many: the reckoning."""
        of_outputs = self.outputs * new_tokens * self.per_new_token
        reckoned = (
            f"{self.of_prompts + of_outputs:,} log-probabilities ({self.outputs} outputs with "
            f"{self.prompt_tokens:,} prompt tokens in all x {self.per_prompt_token}, and "
            f"{self.outputs} outputs x {new_tokens:,} new tokens x {self.per_new_token})"
        )
        allowed = f"{MOST_LOGPROBS:,} in one answer; of a stream only those of its prompts count"
        return ParameterError(field, reckoned, f"at most {allowed}")


def within_bounds(
    body: GenerationBody, prompts: Sequence[PromptIds], params: SamplingParams, max_model_len: int
) -> SamplingParams:
    """`params`, with the `max_tokens` that there is room for if the body has none.

    Raises:
        ParameterError: the answer would have more log-probabilities, or repeat more of its prompts,
            than one answer may.
    """
    echo = isinstance(body, CompletionBody) and body.echo
    lengths = [len(prompt.ids) for prompt in prompts]
    repeated = params.n * sum(lengths)
    if (echo or body.return_token_ids) and repeated > MOST_REPEATED:
        given = f"{params.n} outputs of prompts of {sum(lengths):,} tokens in all: {repeated:,}"
        field = "echo" if echo else "return_token_ids"
        raise ParameterError(field, given, f"at most {MOST_REPEATED:,} tokens of prompts repeated")
    own = 0 if params.logprobs is None else params.logprobs + 1
    size = _Size(
        outputs=params.n * len(prompts),
        prompt_tokens=repeated,
        per_prompt_token=_per_prompt_token(body, own if echo else 0),
        # What a stream has sent, it does not hold.
        per_new_token=0 if body.stream else own + body.token_sources,
    )
    if size.of_prompts > MOST_LOGPROBS:
        field = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        raise size.refused(field, 0)
    if not size.per_new_token:
        return params
    room = max_model_len - min(lengths)
    new_tokens = min(room, params.max_tokens or room)
    if new_tokens <= size.most_new:
        return params
    if body.most_tokens is not None or not size.most_new:
        raise size.refused("token_sources" if not own else "logprobs", new_tokens)
    return replace(params, max_tokens=size.most_new)


def _per_prompt_token(body: GenerationBody, echoed: int) -> int:
    asked = 0 if body.prompt_logprobs is None else body.prompt_logprobs + 1
    return asked + echoed
