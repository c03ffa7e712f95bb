"""Several candidates for one place: the children of a node of a draft tree.

Where matching will check them, they are the best under the target's own noise, so that the token
which the target draws is probably among them; where the rule weighs distributions, they are drawn
without replacement. Both are the best of the same sum, log-probability plus noise (Gumbel top-k:
Vieira 2014; Kool et al. 2019, arXiv 1903.06059). Knows no trees, only rows and numbers.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.ops.logits import NEVER
from foretoken.ops.noise import Stream, pack_keys, row_key
from foretoken.ops.sampling import perturbed
from foretoken.runtime.draft_sampler import DraftSampler
from foretoken.runtime.rows import Rows
from foretoken.runtime.sampler import Sampler


@dataclass(frozen=True, slots=True)
class Fork:
    """One place and how many candidates it may have."""

    row: Rows
    """A single row."""
    count: int
    number: int
    """Which node of its tree it is; places drawn for one verification have noise of their own."""
    fixed: bool = False
    """Whether candidates that would be drawn are the most probable instead, and whether they are
    to say how probable they are."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens of one place, the first choice first; fewer than asked for if no more are allowed."""

    ids: tuple[int, ...]
    probs_CV: Tensor | None
    """float32, what each was drawn from given those before it; None: they are fixed."""
    logs: tuple[float, ...] | None = None
    """Of fixed forks: logarithm of the probability of each; given the target's noise where that is
    known."""


@torch.inference_mode()
def choose_candidates(
    drafts: DraftSampler, logits_FV: Tensor, forks: Seq[Fork], *, with_probs: bool
) -> list[Candidates]:
    """Candidates of every place.

    Args:
        drafts: says how drafts are chosen.
        logits_FV: raw float32 logits of the draft at each place.
        forks: the places.
        with_probs: whether to give distributions even where candidates are fixed (one-hot then).
    """
    scores_FV = torch.empty_like(logits_FV)
    drawn: dict[int, Tensor] = {}
    by_way: dict[str, list[int]] = {"best": [], "coupled": [], "drawn": [], "fixed": []}
    for i, fork in enumerate(forks):
        by_way[_way(drafts, fork)].append(i)
    sampler = drafts.sampler
    if by_way["best"]:
        some = by_way["best"]
        scores_FV[some] = sampler.edited(logits_FV[some], [forks[i].row for i in some])
    if by_way["fixed"]:
        some = by_way["fixed"]
        scores_FV[some] = sampler.process(logits_FV[some], [forks[i].row for i in some])
    for way in ("coupled", "drawn"):
        some = by_way[way]
        if some:
            rows = [forks[i].row for i in some]
            processed_NV = sampler.process(logits_FV[some], rows)
            keys_N2 = _keys(sampler, [forks[i] for i in some], fresh=way == "drawn")
            scores_FV[some] = perturbed(processed_NV, keys_N2, sampler.noise)
            if way == "drawn":
                drawn.update(zip(some, processed_NV.softmax(dim=-1), strict=True))
    width = min(max(fork.count for fork in forks), scores_FV.shape[1])
    best = scores_FV.topk(width, dim=-1)
    values, ids = best.values.tolist(), best.indices.tolist()
    wholes: list[float] = []
    if any(fork.fixed for fork in forks):
        wholes = scores_FV.logsumexp(dim=-1).tolist()
    found = []
    for i, fork in enumerate(forks):
        kept = [t for t, v in zip(ids[i], values[i], strict=True) if v > NEVER][: fork.count]
        probs_CV = None
        if i in drawn:
            probs_CV = _without_replacement(drawn[i], kept)
        elif with_probs:
            one_hot = torch.tensor(kept, device=logits_FV.device)
            probs_CV = torch.nn.functional.one_hot(one_hot, logits_FV.shape[1]).float()
        logs = None
        if forks[i].fixed:
            logs = tuple(value - wholes[i] for value in values[i][: len(kept)])
        found.append(Candidates(tuple(kept), probs_CV, logs))
    return found


def _way(drafts: DraftSampler, fork: Fork) -> str:
    params = fork.row.sequence.request.params
    if params.greedy or drafts.prefers_best:
        return "best"
    if not drafts.draws(params, fixed=fork.fixed):
        return "coupled"
    return "fixed" if fork.fixed else "drawn"


def _keys(sampler: Sampler, forks: Seq[Fork], *, fresh: bool) -> Tensor:
    """The target's own noise keys, or those of each node at this verification."""
    stream = Stream.DRAFT if fresh else Stream.TARGET
    keys = sampler.keys([fork.row for fork in forks], stream)
    if fresh:
        numbered = zip(keys, forks, strict=True)
        keys = [row_key(key, fork.number, stream) for key, fork in numbered]
    return pack_keys(keys, sampler.device)


def _without_replacement(probs_V: Tensor, ids: Seq[int]) -> Tensor:
    """What each of the ids was drawn from, given those before it, [C, V]."""
    probs_CV = probs_V.repeat(len(ids), 1)
    for place, token in enumerate(ids):
        probs_CV[place + 1 :, token] = 0
    return probs_CV / probs_CV.sum(dim=-1, keepdim=True)
