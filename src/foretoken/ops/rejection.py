"""Which drafts are kept, draft by draft: matching, the rejection rule for chains, or typicality.

Matching keeps the drafts that are the target's own tokens. Rejection (Leviathan et al. 2211.17192,
Chen et al. 2302.01318) keeps a draft x drawn from q with probability min(1, p(x) / q(x)) and, in
place of the first that fails, draws from max(p - q, 0) normalised: every token then has
distribution p. Typical acceptance (Cai et al. 2401.10774) is lossy. Knows probabilities and
tokens, not requests. Invariant: a draft id of -1 is never kept and counts as q = 0 everywhere.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.ops.logits import NEVER


def agreeing(drafts: Sequence[int], targets: Sequence[int]) -> int:
    """How many leading drafts are the target's own tokens."""
    for count, (draft, target) in enumerate(zip(drafts, targets, strict=False)):
        if draft != target:
            return count
    return min(len(drafts), len(targets))


def acceptable(
    probs_KV: Tensor, drafted_KV: Tensor | None, ids_K: Sequence[int], uniforms_K: Sequence[float]
) -> list[bool]:
    """Whether each draft passes its test, whatever came before it.

    Args:
        probs_KV: float32 target distributions.
        drafted_KV: float32 distributions that the drafts were drawn from; None: one-hot.
        ids_K: draft ids; -1 never passes.
        uniforms_K: float64 in (0, 1), independent of how the drafts were drawn.
    """
    device = probs_KV.device
    given_K = torch.tensor(ids_K, dtype=torch.int64, device=device)
    ids_K1 = given_K.clamp(min=0).unsqueeze(1)
    bar_K = torch.tensor(uniforms_K, dtype=torch.float64, device=device)
    if drafted_KV is not None:
        bar_K = bar_K * drafted_KV.gather(1, ids_K1).squeeze(1)
    passed_K = (bar_K < probs_KV.gather(1, ids_K1).squeeze(1)) & (given_K >= 0)
    passed: list[bool] = passed_K.tolist()
    return passed


def leading(passed: Sequence[bool]) -> int:
    """How many drafts are kept: those before the first that failed."""
    return passed.index(False) if False in passed else len(passed)


def typical(
    probs_KV: Tensor, ids_K: Sequence[int], *, threshold: float, alpha: float
) -> list[bool]:
    """Whether each draft is probable enough: p(x) > min(threshold, alpha exp(-entropy)). LOSSY.

    Args:
        probs_KV: float32 target distributions.
        ids_K: draft ids; -1 never passes.
        threshold: the bar where the target is sure (epsilon of Cai et al. 2401.10774).
        alpha: scale of the bar where it is not (delta).
    """
    given_K = torch.tensor(ids_K, dtype=torch.int64, device=probs_KV.device)
    entropy_K = -(probs_KV * (probs_KV + 1e-5).log()).sum(dim=-1)
    bar_K = (alpha * (-entropy_K).exp()).clamp(max=threshold)
    own_K = probs_KV.gather(1, given_K.clamp(min=0).unsqueeze(1)).squeeze(1)
    passed: list[bool] = ((own_K > bar_K) & (given_K >= 0)).tolist()
    return passed


def residual(
    logits_SV: Tensor,
    probs_SV: Tensor,
    drafted_SV: Tensor | None,
    ids_S: Sequence[int],
    *,
    weights_S: Sequence[float] | None = None,
) -> Tensor:
    """Logits of the token in place of a rejected draft, float32 [S, V].

    Args:
        logits_SV: processed target logits.
        probs_SV: their softmax.
        drafted_SV: distributions that the rejected drafts were drawn from; None: one-hot.
        ids_S: the rejected drafts; for -1 the row is left as it is.
        weights_S: in [0, 1], of the drafts before them (block verification); None: all 1.

    Returns:
        log max(w p - q, 0); the row's own logits where that is empty.
    """
    given_S1 = torch.tensor(ids_S, dtype=torch.int64, device=logits_SV.device).unsqueeze(1)
    known_S1 = given_S1 >= 0
    if drafted_SV is None:
        left_SV = logits_SV.scatter(1, given_S1.clamp(min=0), NEVER)
    else:
        if weights_S is not None:
            weights = torch.tensor(weights_S, dtype=torch.float32, device=logits_SV.device)
            probs_SV = probs_SV * weights.unsqueeze(1)
        left_SV = (probs_SV - drafted_SV).clamp_(min=0).log_()
    some_S1 = (left_SV > NEVER).any(dim=-1, keepdim=True)
    return torch.where(known_S1 & some_S1, left_SV, logits_SV)
