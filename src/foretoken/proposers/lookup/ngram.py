"""Prompt lookup: draft what followed the last n tokens when they stood in the text before.

The longest n-gram in [prompt_lookup_min, prompt_lookup_max] wins, then its most recent earlier
place. Each sequence has one hash table per n from n-gram to the position after it, extended by
the committed tokens of each step: no scan of the text, and drafts are one-hot.

Source: prompt lookup decoding (Saxena 2023), as in vLLM's `ngram` and transformers'
`prompt_lookup_num_tokens`.
"""

from foretoken.config import DrafterConfig
from foretoken.models.tensors import Draft
from foretoken.proposers.base import Context, Proposer
from foretoken.proposers.method import DrafterSpec, Target


def load_spec(config: DrafterConfig, target: Target) -> DrafterSpec:
    """The drafter of these settings; it needs nothing of the engine."""
    return DrafterSpec(
        build=lambda _: NgramProposer(
            prompt_lookup_min=config.own.prompt_lookup_min,
            prompt_lookup_max=config.own.prompt_lookup_max,
        )
    )


class _Index:
    """Where each n-gram of one sequence was last followed by a token."""

    __slots__ = ("lengths", "num_indexed", "places")

    def __init__(self, lengths: range) -> None:
        self.lengths = lengths
        self.places: dict[tuple[int, ...], int] = {}
        self.num_indexed = 0

    def extend(self, token_ids: list[int]) -> None:
        """Index every n-gram that is followed by a token of `token_ids`."""
        places = self.places
        # Each table holds the latest place only, so that the most recent one wins without a search.
        for end in range(max(self.num_indexed, 1), len(token_ids)):
            for length in self.lengths:
                if length > end:
                    break
                places[tuple(token_ids[end - length : end])] = end
        self.num_indexed = len(token_ids)

    def lookup(self, token_ids: list[int]) -> int | None:
        """Position after the most recent earlier place of the longest known last n-gram."""
        for length in reversed(self.lengths):
            if length < len(token_ids):
                place = self.places.get(tuple(token_ids[-length:]))
                if place is not None:
                    return place
        return None


class NgramProposer(Proposer):
    """Prompt lookup over prompt and output of the same request."""

    name = "ngram"
    looks_up = True

    def __init__(self, *, prompt_lookup_min: int, prompt_lookup_max: int) -> None:
        self._lengths = range(prompt_lookup_min, prompt_lookup_max + 1)
        self._indices: dict[str, _Index] = {}

    def propose(self, context: Context) -> Draft:
        ids: list[tuple[int, ...]] = [()] * len(context.spans)
        for i in context.wanted:
            span = context.spans[i]
            request_id = span.sequence.request.request_id
            index = self._indices.get(request_id)
            if index is None:
                index = self._indices[request_id] = _Index(self._lengths)
            index.extend(span.sequence.token_ids)
            ids[i] = _continuation(index, span.sequence.token_ids, span.draft_budget)
        return Draft(ids=tuple(ids), drafter=self.name)

    def release(self, request_id: str) -> None:
        self._indices.pop(request_id, None)


def _continuation(index: _Index, token_ids: list[int], count: int) -> tuple[int, ...]:
    """What followed at the place found; a text that repeats goes on repeating past its end."""
    place = index.lookup(token_ids)
    if place is None:
        return ()
    found = token_ids[place : place + count]
    period = len(token_ids) - place
    while len(found) < count:
        found.append(found[len(found) - period])
    return tuple(found)
