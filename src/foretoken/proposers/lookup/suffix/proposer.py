"""Suffix look-up: draft what followed the newest tokens before, in this text or in past outputs.

Each request has an index of its own prompt and output; the outputs of all requests go into one
bounded cache that requests share within a `cache_salt`. Longer matches and more frequent
continuations give longer drafts, which are one-hot and follow from committed text alone. The
shared cache is fed while outputs grow, so requests that run side by side help each other.

Source: suffix decoding (Oliaro et al. 2024, arXiv 2411.04975); keys as in vLLM's `suffix`.
"""

import logging
from dataclasses import dataclass

from foretoken.errors import ParameterError
from foretoken.models.tensors import Draft
from foretoken.proposers.base import Context, Proposer
from foretoken.proposers.lookup.suffix.path import (
    NO_PATH,
    Path,
    PathLimits,
    RecentTokens,
    best_path,
)
from foretoken.proposers.lookup.suffix.texts import CachedText, LocalText, SuffixCache
from foretoken.runtime.sequence import Sequence

logger = logging.getLogger("foretoken")


@dataclass(slots=True)
class _RequestTexts:
    """One request: its text, its part of the cache, and how much of it they hold."""

    sequence: Sequence
    local: LocalText
    shared: CachedText | None
    num_shared: int = 0
    """Output tokens that the cache has."""


class SuffixProposer(Proposer):
    """Drafts by frequency from what has been written before."""

    name = "suffix"
    looks_up = True

    def __init__(
        self,
        *,
        max_tree_depth: int,
        max_cached_requests: int,
        max_spec_factor: float,
        min_token_prob: float,
    ) -> None:
        """Draft as vLLM's suffix_decoding_* keys say.

        Args:
            max_tree_depth: longest context compared, and longest draft.
            max_cached_requests: finished outputs to keep; 0: no shared cache.
            max_spec_factor: drafts per matching token.
            min_token_prob: stop where the draft's frequency falls below it.
        """
        self._depth = max_tree_depth
        self._limits = PathLimits(per_match=max_spec_factor, least_probability=min_token_prob)
        self._cache = SuffixCache(max_cached_requests) if max_cached_requests else None
        self._texts: dict[str, _RequestTexts] = {}
        self._corpora: dict[str, CachedText] = {}
        if self._cache is not None:
            most = self._cache.most_bytes / 2**20
            logger.info(
                "suffix: up to %d past outputs shared, %.0f MiB at most", max_cached_requests, most
            )

    @property
    def corpora(self) -> dict[str, int]:
        """Tokens of the texts that were added, by name."""
        return {name: len(text.tokens) for name, text in self._corpora.items()}

    def add_corpus(self, name: str, salt: str | None, tokens: list[int]) -> CachedText:
        """Draft also from `tokens`, for requests of `salt`; an old text of that name is replaced.

        Returns:
            The text, for `extend_corpus`: its name may be another's by then.

        Raises:
            ParameterError: there is no shared cache to put it into.
        """
        if self._cache is None:
            allowed = "suffix_decoding_max_cached_requests above 0"
            raise ParameterError("suffix_decoding_max_cached_requests", 0, allowed)
        self.remove_corpus(name)
        text = self._corpora[name] = self._cache.open(salt)
        self._cache.pin(text, tokens)
        return text

    def extend_corpus(self, text: CachedText, tokens: list[int]) -> bool:
        """Append to a text that was added; False if it was replaced or removed since."""
        assert self._cache is not None, "a text was added"
        if text not in self._cache:
            return False
        self._cache.pin(text, tokens)
        return True

    def remove_corpus(self, name: str) -> bool:
        """Forget a text; False if there is none of that name."""
        text = self._corpora.pop(name, None)
        if text is not None and self._cache is not None:
            self._cache.unpin(text)
        return text is not None

    def propose(self, context: Context) -> Draft:
        paths = [NO_PATH] * len(context.spans)
        for i in context.wanted:
            span = context.spans[i]
            paths[i] = self._draft(span.sequence, min(span.draft_budget, self._depth))
        return Draft(
            ids=tuple(tuple(path.tokens) for path in paths),
            drafter=self.name,
            promises=tuple(path.score for path in paths),
        )

    def release(self, request_id: str) -> None:
        """Drop a request's own index; its output stays in the shared cache for its time."""
        texts = self._texts.pop(request_id, None)
        if texts is not None and texts.shared is not None and self._cache is not None:
            self._share(texts)
            self._cache.finish(texts.shared)

    @property
    def num_bytes(self) -> int:
        own = sum(texts.local.num_bytes for texts in self._texts.values())
        return own + (self._cache.num_bytes if self._cache is not None else 0)

    @property
    def most_bytes(self) -> int:
        """What the shared cache can grow to."""
        return self._cache.most_bytes if self._cache is not None else 0

    def _draft(self, sequence: Sequence, budget: int) -> Path:
        texts = self._texts_of(sequence)
        window = RecentTokens(sequence.token_ids[-self._depth :])
        path = best_path(texts.local.places(window), budget, self._limits)
        if self._cache is not None and texts.shared is not None and path.score < budget:
            places = self._cache.places(window, texts.shared)
            shared = best_path(places, budget, self._limits)
            if shared.score > path.score:
                return shared
        return path

    def _texts_of(self, sequence: Sequence) -> _RequestTexts:
        """The texts of a request, brought up to the newest committed token."""
        request = sequence.request
        texts = self._texts.get(request.request_id)
        if texts is None:
            shared = None if self._cache is None else self._cache.open(request.cache_salt)
            texts = self._texts[request.request_id] = _RequestTexts(sequence, LocalText(), shared)
        texts.local.extend(sequence.token_ids[len(texts.local.tokens) :])
        self._share(texts)
        return texts

    def _share(self, texts: _RequestTexts) -> None:
        sequence = texts.sequence
        if self._cache is not None and texts.shared is not None:
            first = sequence.num_prompt + texts.num_shared
            self._cache.extend(texts.shared, sequence.token_ids[first:])
            texts.num_shared = sequence.num_output
