"""Block verification: how many leading drafts stay when a chain is tested as a whole.

With w_0 = 1 and w_i = min(w_{i-1} p_i(x_i) / q_i(x_i), 1), a chain of n drafts keeps the largest
i with u_i <= h_i, where h_n = w_n, and for i < n, h_i = S / (S + 1 - w_i) with S the sum of
max(w_i p_{i+1} - q_{i+1}, 0); what follows draft i < n is drawn from that difference. Every token
then has distribution p, and no rule for chains keeps more drafts on average (Sun et al. 2024,
arXiv 2403.10444). Knows probabilities and tokens, not requests. The uniforms of all drafts count,
also of those behind the last one kept: they must be new at every verification.

Shape letters: K drafts of all chains, S chains, M drafts of the longest chain.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTests:
    """Chains of drafts, end to end."""

    ids_K: list[int]
    """A draft of -1 ends its chain: it and what follows is never kept."""
    uniforms_K: list[float]
    """float64 in (0, 1)."""
    lengths_S: list[int]
    """Each at least 1."""
    target_KV: Tensor
    """float32 target distribution at each draft."""
    drafted_KV: Tensor | None
    """float32 distribution each draft was drawn from; None: one-hot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """What stays of each chain."""

    kept_S: list[int]
    failed_S: list[int | None]
    """Index into K of the draft after the last one kept; None: there is none."""
    weight_S: list[float]
    """w of the last draft kept: what follows is drawn from max(w p - q, 0)."""


def keep_blocks(tests: BlockTests) -> Blocks:
    """Test every chain; waits for the device once."""
    device, counts = tests.target_KV.device, tests.lengths_S
    width = max(counts)
    place = [s * width + j for s, count in enumerate(counts) for j in range(count)]
    place_K = torch.tensor(place, dtype=torch.int64, device=device)
    given_K = torch.tensor(tests.ids_K, dtype=torch.int64, device=device)

    def padded(values_K: Tensor, empty: float) -> Tensor:
        filled = torch.full((len(counts) * width,), empty, dtype=torch.float64, device=device)
        filled[place_K] = values_K.double()
        return filled.view(len(counts), width)

    drift_SM = padded(_log_ratios(tests, given_K), 0.0).cumsum(dim=1)
    weight_SM = (drift_SM - drift_SM.cummax(dim=1).values.clamp(min=0)).exp()
    before_SM = torch.cat([torch.ones_like(weight_SM[:, :1]), weight_SM], dim=1)
    mass_SM = padded(_left_over(tests, given_K, before_SM[:, :-1].reshape(-1)[place_K]), 0.0)
    next_SM = torch.cat([mass_SM[:, 1:], torch.zeros_like(mass_SM[:, :1])], dim=1)
    chance_SM = torch.nan_to_num(next_SM / (next_SM + 1 - weight_SM), nan=1.0)
    count_S1 = torch.tensor(counts, device=device).unsqueeze(1)
    number_SM = torch.arange(1, width + 1, device=device).expand(len(counts), -1)
    chance_SM = torch.where(number_SM == count_S1, weight_SM, chance_SM)
    uniform_K = torch.tensor(tests.uniforms_K, dtype=torch.float64, device=device)
    stays_SM = (padded(uniform_K, 2.0) <= chance_SM) & (number_SM <= count_S1)
    kept_S = (number_SM * stays_SM).amax(dim=1)
    last_S = before_SM.gather(1, kept_S.unsqueeze(1)).squeeze(1)
    found = torch.stack([kept_S.double(), last_S]).tolist()
    kept = [int(count) for count in found[0]]
    return Blocks(kept_S=kept, failed_S=_failed(kept, counts), weight_S=found[1])


def _log_ratios(tests: BlockTests, given_K: Tensor) -> Tensor:
    """log(p / q) of each draft, float64; -inf for -1."""
    ids_K1 = given_K.clamp(min=0).unsqueeze(1)
    ratio_K = tests.target_KV.gather(1, ids_K1).squeeze(1).double().log()
    if tests.drafted_KV is not None:
        drawn_K = tests.drafted_KV.gather(1, ids_K1).squeeze(1).double()
        ratio_K = ratio_K - drawn_K.clamp(min=torch.finfo(torch.float32).tiny).log()
    return ratio_K.masked_fill(given_K < 0, -torch.inf)


def _left_over(tests: BlockTests, given_K: Tensor, weight_K: Tensor) -> Tensor:
    """Sum of max(w p - q, 0) at each draft, with w of the draft before it; q is 0 for -1."""
    known_K = given_K >= 0
    if tests.drafted_KV is None:
        kept_K = tests.target_KV.gather(1, given_K.clamp(min=0).unsqueeze(1)).squeeze(1)
        return weight_K * (1 - kept_K.double() * known_K)
    left_KV = weight_K.float().unsqueeze(1) * tests.target_KV
    left_KV = left_KV - tests.drafted_KV * known_K.unsqueeze(1)
    return left_KV.clamp_(min=0).sum(dim=-1)


def _failed(kept: list[int], counts: list[int]) -> list[int | None]:
    failed: list[int | None] = []
    first = 0
    for stays, count in zip(kept, counts, strict=True):
        failed.append(first + stays if stays < count else None)
        first += count
    return failed
