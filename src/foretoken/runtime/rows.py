"""Rows of logits and what their requests ask for, worked out once per request.

A row is a place where a token is chosen: a sequence, the drafts taken as given before it, and
hence a position. Knows nothing of models or of verification. Invariant: the token of a row is
number `sequence.num_tokens + num_drafts_before` of its sequence.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from foretoken.ops.drawing import BEST, Drawing, pack_rows
from foretoken.ops.logits import Penalties
from foretoken.ops.noise import Stream, request_key, row_key
from foretoken.runtime.sequence import Sequence
from foretoken.types import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Consecutive rows of one sequence, after drafts[:first], drafts[:first + 1], ..., drafts."""

    sequence: Sequence
    drafts: tuple[int, ...] = ()
    first: int = 0

    @property
    def num_rows(self) -> int:
        """How many rows of logits these are."""
        return len(self.drafts) - self.first + 1

    @property
    def position(self) -> int:
        """Index in the sequence of the token that the first row chooses."""
        return self.sequence.num_tokens + self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What one request needs at each row, in the form the step wants it."""

    request: Request
    key: int
    """`request_key` of its noise."""
    greedy: bool
    temperature: float
    filters: tuple[float, int, float] | None
    """min_p, top_k, top_p; None if none of them does anything."""
    forbidden_V: Tensor | None
    """bool, ids outside allowed_token_ids."""
    bias: tuple[Tensor, Tensor] | None
    """int64 ids and float32 values of logit_bias."""
    penalties: Penalties | None
    """None if none of them does anything."""
    edits: bool
    """Whether anything but temperature and filters touches its logits."""
    drawing: Drawing
    """How tokens of the request are chosen from edited logits."""

    @classmethod
    def of(cls, request: Request, vocab_size: int, device: torch.device) -> "Profile":
        """Read a request; token ids outside the vocabulary are left out."""
        params = request.params
        filters = (params.min_p, params.top_k, params.top_p)
        penalties = Penalties(
            params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        )
        some_filter = params.min_p > 0 or 0 < params.top_k < vocab_size or params.top_p < 1
        kept = filters if some_filter else None
        penalised = penalties != Penalties()
        forbidden_V = _forbidden(request, vocab_size, device)
        bias = _bias(request, vocab_size, device)
        others = request.min_tokens_ids and params.min_tokens
        return cls(
            request=request,
            key=request_key(request.seed, request.sample_index),
            greedy=params.greedy,
            temperature=params.temperature,
            filters=kept,
            drawing=BEST if params.greedy else Drawing.of(params.temperature, kept),
            forbidden_V=forbidden_V,
            bias=bias,
            penalties=penalties if penalised else None,
            edits=bool(others or request.bad_words_ids or penalised)
            or params.structured is not None
            or forbidden_V is not None
            or bias is not None,
        )

    def keys(self, rows: Rows, stream: Stream) -> list[int]:
        """Noise keys of the rows; drafts get fresh noise whenever they are drafted again."""
        anchor = rows.sequence.num_tokens if stream is Stream.DRAFT else 0
        start = rows.position
        return [row_key(self.key, start + i, stream, anchor) for i in range(rows.num_rows)]


class Kind(IntEnum):
    """How rows are chosen; those of one kind are chosen together."""

    GREEDY = 0
    OPEN = 1
    FILTERED = 2


@dataclass(frozen=True, slots=True)
class RowGroup:
    """One Rows with its request's profile and where its logits start."""

    rows: Rows
    profile: Profile
    start: int

    @property
    def kind(self) -> Kind:
        """By the request's parameters."""
        if self.profile.greedy:
            return Kind.GREEDY
        return Kind.OPEN if self.profile.filters is None else Kind.FILTERED

    @property
    def end(self) -> int:
        """Where the logits of this group end."""
        return self.start + self.rows.num_rows

    def packed(self, stream: Stream) -> bytes:
        """The rows of this group, packed for a `DrawKernel`."""
        if self.profile.greedy:
            return pack_rows((0,) * self.rows.num_rows, BEST)
        return pack_rows(self.profile.keys(self.rows, stream), self.profile.drawing)

    def single(self, row: int, start: int) -> "RowGroup":
        """A group of one of these rows, by index over all; the logits of it start at `start`."""
        first = self.rows.first + row - self.start
        one = Rows(sequence=self.rows.sequence, drafts=self.rows.drafts[:first], first=first)
        return RowGroup(one, self.profile, start)


def _forbidden(request: Request, vocab_size: int, device: torch.device) -> Tensor | None:
    allowed = request.params.allowed_token_ids
    if allowed is None:
        return None
    forbidden_V = torch.ones(vocab_size, dtype=torch.bool)
    forbidden_V[[i for i in allowed if i < vocab_size]] = False
    return forbidden_V.to(device)


def _bias(request: Request, vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
    bias = {i: b for i, b in (request.params.logit_bias or {}).items() if i < vocab_size}
    if not bias:
        return None
    ids = torch.tensor(list(bias), dtype=torch.int64, device=device)
    return ids, torch.tensor(list(bias.values()), dtype=torch.float32, device=device)


def banned_cells(rows: Rows) -> list[tuple[int, int]]:
    """(row, id) pairs that min_tokens and bad_words forbid, row 0 being the first of `rows`."""
    request = rows.sequence.request
    cells: list[tuple[int, int]] = []
    before = rows.sequence.num_output + rows.first
    for row in range(min(rows.num_rows, request.params.min_tokens - before)):
        cells.extend((row, token) for token in request.min_tokens_ids)
    if not request.bad_words_ids:
        return cells
    sequence, words = rows.sequence, request.bad_words
    start = max(sequence.num_prompt, sequence.num_tokens - words.longest)
    tail = [*sequence.token_ids[start:], *rows.drafts]
    first = sequence.num_tokens - start + rows.first
    for row in range(rows.num_rows):
        cells.extend((row, token) for token in words.banned_after(tail, first + row))
    return cells
