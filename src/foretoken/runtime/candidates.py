"""Candidates for the children of a node of a draft tree.

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
class OpenNode:
    """A node of a draft tree that may get children."""

    row: Rows
    """The single row of logits after this node."""
    count: int
    """Most children it may get."""
    number: int
    """Which node of its tree it is; nodes drawn for one verification have noise of their own."""
    fixed: bool = False
    """Whether children that would be drawn are the most probable tokens instead, with their
    probabilities told."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Children of one node, the first choice first; fewer than asked for if no more are allowed."""

    ids: tuple[int, ...]
    probs_CV: Tensor | None
    """float32, what each was drawn from given those before it; None: they are fixed."""
    logs: tuple[float, ...] | None = None
    """Logarithm of the probability of each, given the target's noise where that is known; None
    where the node is not fixed."""


@torch.inference_mode()
def choose_candidates(
    drafts: DraftSampler, logits_NV: Tensor, nodes: Seq[OpenNode], *, with_probs: bool
) -> list[Candidates]:
    """Candidates for the children of every node.

    Args:
        drafts: says how drafts are chosen.
        logits_NV: raw float32 logits of the draft after each node.
        nodes: the nodes, in order.
        with_probs: whether to give distributions even where candidates are fixed (one-hot then).
    """
    scores_NV = torch.empty_like(logits_NV)
    drawn: dict[int, Tensor] = {}
    # A request's rule decides what its candidates are for. Each way is done for all nodes at once.
    by_way: dict[str, list[int]] = {"best": [], "coupled": [], "drawn": [], "fixed": []}
    for i, node in enumerate(nodes):
        by_way[_way(drafts, node)].append(i)
    sampler = drafts.sampler
    if by_way["best"]:
        some = by_way["best"]
        scores_NV[some] = sampler.edited(logits_NV[some], [nodes[i].row for i in some])
    if by_way["fixed"]:
        some = by_way["fixed"]
        scores_NV[some] = sampler.process(logits_NV[some], [nodes[i].row for i in some])
    for way in ("coupled", "drawn"):
        some = by_way[way]
        if some:
            rows = [nodes[i].row for i in some]
            processed_NV = sampler.process(logits_NV[some], rows)
            keys_N2 = _keys(sampler, [nodes[i] for i in some], fresh=way == "drawn")
            scores_NV[some] = perturbed(processed_NV, keys_N2, sampler.noise)
            if way == "drawn":
                drawn.update(zip(some, processed_NV.softmax(dim=-1), strict=True))
    # All ways end alike: the best of some score are kept. Where the score has noise in it, this is
    # drawing without replacement.
    width = min(max(node.count for node in nodes), scores_NV.shape[1])
    best = scores_NV.topk(width, dim=-1)
    values, ids = best.values.tolist(), best.indices.tolist()
    wholes: list[float] = []
    if any(node.fixed for node in nodes):
        wholes = scores_NV.logsumexp(dim=-1).tolist()
    found = []
    for i, node in enumerate(nodes):
        kept = [t for t, v in zip(ids[i], values[i], strict=True) if v > NEVER][: node.count]
        probs_CV = None
        if i in drawn:
            probs_CV = _without_replacement(drawn[i], kept)
        elif with_probs:
            one_hot = torch.tensor(kept, device=logits_NV.device)
            probs_CV = torch.nn.functional.one_hot(one_hot, logits_NV.shape[1]).float()
        logs = None
        if nodes[i].fixed:
            logs = tuple(value - wholes[i] for value in values[i][: len(kept)])
        found.append(Candidates(tuple(kept), probs_CV, logs))
    return found


def _way(drafts: DraftSampler, node: OpenNode) -> str:
    params = node.row.sequence.request.params
    if params.greedy or drafts.prefers_best:
        return "best"
    if not drafts.draws(params, fixed=node.fixed):
        return "coupled"
    return "fixed" if node.fixed else "drawn"


def _keys(sampler: Sampler, nodes: Seq[OpenNode], *, fresh: bool) -> Tensor:
    """The target's own noise keys, or those of each node at this verification."""
    stream = Stream.DRAFT if fresh else Stream.TARGET
    keys = sampler.keys([node.row for node in nodes], stream)
    if fresh:
        numbered = zip(keys, nodes, strict=True)
        keys = [row_key(key, node.number, stream) for key, node in numbered]
    return pack_keys(keys, sampler.device)


def _without_replacement(probs_V: Tensor, ids: Seq[int]) -> Tensor:
    """What each of the ids was drawn from, given those before it, [C, V]."""
    probs_CV = probs_V.repeat(len(ids), 1)
    for place, token in enumerate(ids):
        probs_CV[place + 1 :, token] = 0
    return probs_CV / probs_CV.sum(dim=-1, keepdim=True)
