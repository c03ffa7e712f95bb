"""The rules that weigh distributions, on the compiled kernel where there is one.

Owns the way from checks to the kernel and back. What the kernel leaves open, and everything where
there is none, is decided by the rule's own operations on tensors, the kernel's twin.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TypeVar

import torch
from torch import Tensor

from foretoken.ops.drawing import UNDECIDED
from foretoken.ops.native_rejection import RejectionInput, RejectionResult
from foretoken.runtime.rows import Rows
from foretoken.runtime.rules.base import Branch, C, Check, TreeCheck
from foretoken.runtime.sampler import Sampler

R = TypeVar("R")


def weigh(
    sampler: Sampler, logits_PV: Tensor, checks: Seq[C], probs_KV: Tensor | None, *, block: bool
) -> list[Branch | None]:
    """What stays of each check and what follows it; None where that is left open.

    Args:
        sampler: edits logits, and knows the requests' keys and filters.
        logits_PV: raw float32 logits of the checks' own rows, check after check.
        checks: chains, or trees.
        probs_KV: distributions of all drafts of the step, or None: they are one-hot.
        block: block verification, of trees traversal; else draft by draft.
    """
    kernel = sampler.backend.reject
    if kernel is None:
        return [None] * len(checks)
    spans: list[RejectionInput] = []
    row = 0
    for check in checks:
        spans.append(_span(sampler, check, row))
        row += check.num_rows
    edited_PV = sampler.edited(logits_PV, [rows for check in checks for rows in _rows(check)])
    results = kernel.decide(edited_PV, spans, probs_KV, block=block)
    return [_branch(*pair) for pair in zip(spans, results, strict=True)]


def complete(
    found: Seq[R | None],
    logits_PV: Tensor,
    checks: Seq[C],
    decide: Callable[[Tensor, list[C]], list[R]],
) -> list[R]:
    """`found` with what is None in it decided by `decide`, from those checks and their own rows."""
    left = [i for i, one in enumerate(found) if one is None]
    if not left:
        return [one for one in found if one is not None]
    if len(left) == len(checks):
        return decide(logits_PV, list(checks))
    rows: list[int] = []
    start = 0
    for one, check in zip(found, checks, strict=True):
        if one is None:
            rows.extend(range(start, start + check.num_rows))
        start += check.num_rows
    part_PV = logits_PV[torch.tensor(rows, device=logits_PV.device)]
    decided = iter(decide(part_PV, [checks[i] for i in left]))
    return [next(decided) if one is None else one for one in found]


def _span(sampler: Sampler, check: Check | TreeCheck, row: int) -> RejectionInput:
    """A check whose own rows begin at `row`."""
    profile = sampler.profile(check.rows.sequence.request)
    return RejectionInput(
        key=profile.key,
        how=profile.drawing,
        position=check.rows.position,
        row=row,
        drafted_row=check.drafted_row,
        ids=check.ids if isinstance(check, TreeCheck) else check.drafts,
        parents=check.tree.parents if isinstance(check, TreeCheck) else None,
    )


def _branch(span: RejectionInput, found: RejectionResult) -> Branch | None:
    if found.last == UNDECIDED:
        return None
    return Branch(found.path, (*(span.ids[node] for node in found.path), found.last))


def _rows(check: Check | TreeCheck) -> Seq[Rows]:
    return check.runs if isinstance(check, TreeCheck) else (check.rows,)
