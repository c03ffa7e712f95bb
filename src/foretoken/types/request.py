"""One prompt and how to continue it, as the engine takes it: ids only, everything resolved."""

from dataclasses import dataclass, field
from typing import Any

from foretoken.types.params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and how to continue it; n > 1 is n requests that differ in `sample_index`."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    """64-bit key of all randomness of this request: the user's seed, or one drawn at arrival."""
    max_tokens: int
    """params.max_tokens, or what the context leaves."""
    arrival: float = 0.0
    """time.monotonic() at arrival."""
    priority: int = 0
    """Lower runs first; equal priorities run in order of arrival."""
    sample_index: int = 0
    stop_ids: frozenset[int] = frozenset()
    """Token ids that end the output: stop_token_ids, and EOS unless ignore_eos."""
    min_tokens_ids: frozenset[int] = frozenset()
    """Token ids masked until min_tokens outputs: EOS and stop_token_ids."""
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences of params.bad_words."""
    cache_salt: str | None = None
    """Requests share prefix-cached pages, and drafts of past outputs, only within one salt."""
    prediction_ids: tuple[int, ...] = ()
    """Token ids of params.prediction."""
    grammar: Any = field(default=None, compare=False, repr=False)
    """What params.structured_outputs compiled to, as `foretoken.runtime.grammar` reads it."""
