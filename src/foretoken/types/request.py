"""One prompt and how to continue it, as the engine takes it: ids only, everything resolved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from foretoken.types.params import SamplingParams


@dataclass(frozen=True, slots=True)
class BadWords:
    """Token sequences that may not appear, found by the tokens before their last one.

    A row asks once for each length of a beginning, however many words there are.
    """

    lengths: tuple[int, ...]
    """How long the beginnings are, ascending; 0 for words of one token."""
    last_ids: Mapping[tuple[int, ...], tuple[int, ...]]
    """Beginning -> last tokens of the words that begin so."""

    @classmethod
    def of(cls, words: Sequence[tuple[int, ...]]) -> Self:
        """Sort `words`, each of one token or more, by their beginnings."""
        found: dict[tuple[int, ...], list[int]] = {}
        for *beginning, last in words:
            found.setdefault(tuple(beginning), []).append(last)
        lengths = sorted({len(beginning) for beginning in found})
        return cls(tuple(lengths), {beginning: tuple(ids) for beginning, ids in found.items()})

    @property
    def longest(self) -> int:
        """The longest beginning; 0 without words."""
        return self.lengths[-1] if self.lengths else 0

    def banned_after(self, output: Sequence[int], end: int) -> list[int]:
        """Ids that may not follow the first `end` tokens of `output`."""
        banned: list[int] = []
        for length in self.lengths:
            if length > end:
                break
            banned.extend(self.last_ids.get(tuple(output[end - length : end]), ()))
        return banned


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
    bad_words: BadWords = field(init=False, compare=False, repr=False)
    """bad_words_ids in the form that rows ask."""
    cache_salt: str | None = None
    """Requests share prefix-cached pages, and drafts of past outputs, only within one salt."""
    prediction_ids: tuple[int, ...] = ()
    """Token ids of params.prediction."""
    resumed_ids: tuple[int, ...] = ()
    """Output that another engine wrote: it counts as output in every way, and is not given out."""
    resumed_text: str = ""
    """The text that became final with `resumed_ids`, which is not given out either."""
    grammar: Any = field(default=None, compare=False, repr=False)
    """What params.structured_outputs compiled to, as `foretoken.runtime.grammar` reads it."""

    @property
    def brings_drafts(self) -> bool:
        """Whether it has a prediction or a grammar, from which drafts cost nothing to make."""
        return bool(self.prediction_ids) or self.params.structured is not None

    def __post_init__(self) -> None:
        """Sort the bad words once, not at every row."""
        object.__setattr__(self, "bad_words", BadWords.of(self.bad_words_ids))
