"""Raw logits to processed logits: edits, penalties, temperature and filters, row by row.

The one code path for targets and drafts. It knows tensors and per-row numbers, not requests.
Order: forbidden and banned ids, bias, penalties, temperature, then min_p, top_k and top_p, which
together are one threshold per row. Invariant: what happens to a row depends on that row alone.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

NEVER = float("-inf")
_WIDTHS = (64, 1024)
"""How many best ids to look at before sorting a whole row."""
_SORT_AT_ONCE = 1 << 22
"""Elements sorted together, to bound memory."""
COLDEST = 1e-30
"""Below this, a logit divided by the temperature could overflow; it is greedy long before."""
HOTTEST = 1e30
"""Above this, a temperature could overflow float32; every id is as likely as any long before."""


class Penalties(NamedTuple):
    """Strengths of the penalties of one request; the defaults do nothing."""

    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0


def penalise(logits_RU: Tensor, counts_RU: Tensor, prompt_U: Tensor, by: Penalties) -> Tensor:
    """Logits after repetition, frequency and presence penalty, a new tensor.

    Args:
        logits_RU: float32 logits of U ids.
        counts_RU: float32, how often each id occurs in the output before the row's token.
        prompt_U: bool, whether the id occurs in the prompt.
        by: the strengths.
    """
    present_RU = counts_RU > 0
    if by.repetition != 1.0:
        repeated_RU = torch.where(
            logits_RU > 0, logits_RU / by.repetition, logits_RU * by.repetition
        )
        logits_RU = torch.where(present_RU | prompt_U, repeated_RU, logits_RU)
    return logits_RU - by.frequency * counts_RU - by.presence * present_RU


def bounded(temperature: float) -> float:
    """A temperature above 0 as it is divided by."""
    return min(max(temperature, COLDEST), HOTTEST)


def scale(logits_RV: Tensor, temperatures_R: Sequence[float]) -> Tensor:
    """Logits over temperature, a new tensor; temperatures are > 0."""
    first = temperatures_R[0]
    if all(t == first for t in temperatures_R):
        return logits_RV / bounded(first)
    clipped = [bounded(t) for t in temperatures_R]
    return logits_RV / torch.tensor(clipped, device=logits_RV.device).unsqueeze(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """The filters of F rows, as columns [F, 1]; made by `of`."""

    vocab_size: int
    min_p_F1: Tensor | None
    """float32 log(min_p), -inf for none; None if no row has one."""
    top_k_F1: Tensor | None
    """int64, the vocabulary size for none; None if no row has one."""
    top_p_F1: Tensor | None
    """float32, 2 for none; None if no row has one."""

    @classmethod
    def of(cls, rows: Sequence[tuple[float, int, float]], vocab: int, device: torch.device) -> Self:
        """Columns from (min_p, top_k, top_p) per row, in the sense of SamplingParams."""
        min_p = [math.log(m) if m > 0 else NEVER for m, _, _ in rows]
        top_k = [min(k, vocab) if k > 0 else vocab for _, k, _ in rows]
        top_p = [p if p < 1 else 2.0 for _, _, p in rows]

        def column(values: Sequence[float], off: float, dtype: torch.dtype) -> Tensor | None:
            if all(v == off for v in values):
                return None
            return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)

        return cls(
            vocab_size=vocab,
            min_p_F1=column(min_p, NEVER, torch.float32),
            top_k_F1=column(top_k, vocab, torch.int64),
            top_p_F1=column(top_p, 2.0, torch.float32),
        )

    def take(self, rows_G: Tensor) -> "Filters":
        """The filters of some of the rows."""

        def pick(column_F1: Tensor | None) -> Tensor | None:
            return None if column_F1 is None else column_F1[rows_G]

        return Filters(
            vocab_size=self.vocab_size,
            min_p_F1=pick(self.min_p_F1),
            top_k_F1=pick(self.top_k_F1),
            top_p_F1=pick(self.top_p_F1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortlist:
    """Everything that filters leave of G rows: their C best ids, some of them cut off."""

    rows_G: Tensor | None
    """int64 indices of the rows; None means all rows, in order."""
    values_GC: Tensor
    """float32 logits, best first, -inf where the filters cut."""
    ids_GC: Tensor
    """int64."""
    floor_G1: Tensor
    """float32 logit of the worst id that is kept; ids equal to it are kept too."""

    def take(self, rows_H: Tensor) -> "Shortlist":
        """Some of its rows."""
        return Shortlist(
            rows_G=rows_H if self.rows_G is None else self.rows_G[rows_H],
            values_GC=self.values_GC[rows_H],
            ids_GC=self.ids_GC[rows_H],
            floor_G1=self.floor_G1[rows_H],
        )


def narrow(logits_FV: Tensor, filters: Filters) -> Iterator[Shortlist]:
    """Apply min_p, top_k and top_p to scaled logits.

    Rows come back in one or more shortlists: a row is done with the first width at which an id
    that is not kept is in sight, so that nothing (equal logits included) is missed. Cutting is
    by value, hence independent of the order of ties. top_k keeps all ids that tie with the k-th;
    top_p keeps the smallest set of best ids that reaches top_p of what min_p and top_k left,
    and all that tie with its last.
    """
    vocab = logits_FV.shape[1]
    probs_FV = None if filters.top_p_F1 is None else logits_FV.softmax(dim=-1)
    rows_F: Tensor | None = None
    for width in _WIDTHS:
        if width >= vocab:
            break
        found = _look(logits_FV, probs_FV, filters, width)
        open_G = found.values_GC[:, -1] > NEVER
        if rows_F is not None:
            found = replace(found, rows_G=rows_F)
        if not bool(open_G.any()):
            yield found
            return
        closed_H = (~open_G).nonzero().squeeze(1)
        if closed_H.numel():
            yield found.take(closed_H)
        left_H = open_G.nonzero().squeeze(1)
        rows_F = left_H if rows_F is None else rows_F[left_H]
        logits_FV, filters = logits_FV[left_H], filters.take(left_H)
        probs_FV = None if probs_FV is None else probs_FV[left_H]
    step = max(1, _SORT_AT_ONCE // vocab)
    for rows_G in torch.split(torch.arange(logits_FV.shape[0], device=logits_FV.device), step):
        probs_GV = None if probs_FV is None else probs_FV[rows_G]
        found = _look(logits_FV[rows_G], probs_GV, filters.take(rows_G), vocab)
        yield replace(found, rows_G=rows_G if rows_F is None else rows_F[rows_G])


def keep_filtered(logits_FV: Tensor, filters: Filters) -> Tensor:
    """Scaled logits with -inf wherever min_p, top_k or top_p cut; a new tensor."""
    floor_F1 = torch.empty_like(logits_FV[:, :1])
    for part in narrow(logits_FV, filters):
        if part.rows_G is None:
            floor_F1 = part.floor_G1
        else:
            floor_F1[part.rows_G] = part.floor_G1
    return logits_FV.masked_fill(logits_FV < floor_F1, NEVER)


def _look(logits_GV: Tensor, probs_GV: Tensor | None, how: Filters, width: int) -> Shortlist:
    """The `width` best ids of each row; a row is complete if the last of them is cut off."""
    if width < logits_GV.shape[1]:
        values_GC, ids_GC = logits_GV.topk(width, dim=-1)
    else:
        values_GC, ids_GC = logits_GV.sort(dim=-1, descending=True)
    floor_G1 = _floor(values_GC, probs_GV, ids_GC, how)
    values_GC = values_GC.masked_fill(values_GC < floor_G1, NEVER)
    return Shortlist(rows_G=None, values_GC=values_GC, ids_GC=ids_GC, floor_G1=floor_G1)


def _floor(values_GC: Tensor, probs_GV: Tensor | None, ids_GC: Tensor, how: Filters) -> Tensor:
    """Worst logit that the filters keep, float32 [G, 1].

    Where it cannot be told from the ids in sight, it is no better than the last of them.
    """
    floor_G1 = values_GC.new_full((values_GC.shape[0], 1), NEVER)
    if how.min_p_F1 is not None:
        floor_G1 = values_GC[:, :1] + how.min_p_F1
    if how.top_k_F1 is not None:
        kth_G1 = values_GC.gather(1, how.top_k_F1.clamp(max=values_GC.shape[1]) - 1)
        kth_G1 = kth_G1.masked_fill(how.top_k_F1 == how.vocab_size, NEVER)
        floor_G1 = torch.maximum(floor_G1, kth_G1)
    if probs_GV is None or how.top_p_F1 is None:
        return floor_G1
    kept_GC = values_GC >= floor_G1
    probs_GC = probs_GV.gather(1, ids_GC) * kept_GC
    upto_GC = probs_GC.cumsum(dim=-1)
    unfiltered_G1 = floor_G1 == NEVER
    whole_G1 = upto_GC[:, -1:].masked_fill(unfiltered_G1, 1.0)
    needed_GC = kept_GC & (upto_GC - probs_GC < how.top_p_F1 * whole_G1)
    count_G1 = needed_GC.sum(dim=-1, keepdim=True).clamp(min=1)
    cut_G1 = torch.maximum(floor_G1, values_GC.gather(1, count_G1 - 1))
    if values_GC.shape[1] == how.vocab_size:
        return cut_G1
    whole_in_sight_G1 = unfiltered_G1 | (values_GC[:, -1:] < floor_G1)
    return torch.where(whole_in_sight_G1, cut_G1, floor_G1)
