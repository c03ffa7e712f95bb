"""Which slots of a head are fed in one pass, with which tokens. Knows sequences, not networks."""

from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.models.tensors import SpanLayout
from foretoken.runtime.batch import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFeed:
    """Slots of several spans to be fed in one pass."""

    layouts: list[SpanLayout]
    tokens: list[int]

    @classmethod
    def of(cls, spans: Sequence[Span], starts: Sequence[int], ends: Sequence[int]) -> "HeadFeed":
        """Slots [start, end) of each span, each with the token after it."""
        layouts, tokens = [], []
        for span, start, end in zip(spans, starts, ends, strict=True):
            sequence = span.sequence
            layouts.append(
                SpanLayout(start=start, num_tokens=end - start, page_table=sequence.page_table)
            )
            tokens.extend(sequence.token_ids[start + 1 : end + 1])
        return cls(layouts=layouts, tokens=tokens)

    @classmethod
    def missing(cls, spans: Sequence[Span], starts: Sequence[int]) -> "HeadFeed":
        """Slots from `starts` on whose features are known."""
        return cls.of(spans, starts, [span.sequence.num_tokens - 1 for span in spans])

    @property
    def last_rows(self) -> list[int]:
        """The row of each span's last slot."""
        rows, end = [], 0
        for layout in self.layouts:
            end += layout.num_tokens
            rows.append(end - 1)
        return rows

    def masked(self, extra: Sequence[int], token: int | None) -> "HeadFeed":
        """With so many mask slots after each span: with `token`; None: with its newest token."""
        layouts, tokens, at = [], [], 0
        for layout, count in zip(self.layouts, extra, strict=True):
            given = self.tokens[at : at + layout.num_tokens]
            at += layout.num_tokens
            whole = layout.num_tokens + count
            layouts.append(
                SpanLayout(start=layout.start, num_tokens=whole, page_table=layout.page_table)
            )
            tokens.extend([*given, *[given[-1] if token is None else token] * count])
        return HeadFeed(layouts=layouts, tokens=tokens)
