"""One token from one row of processed logits: greedy, by keyed noise, or by a shared shortlist.

Knows rows and keys, not requests. The keyed draw is argmax over ids of l - log(E) with E the
exponential noise of (row key, id) (Gumbel-max): a pure function of row and key, the same whether
it is computed over the whole vocabulary or over the ids that a filter left. Ties go to the
lowest id.
"""

import torch
from torch import Tensor

from foretoken.ops.logits import NEVER, Filters, narrow
from foretoken.ops.noise import KeyedNoise
from foretoken.types import Logprob


def greedy(logits_RV: Tensor) -> Tensor:
    """Best id of each row, int64 [R]; the lowest among equals."""
    return logits_RV.argmax(dim=-1)


def draw(logits_RV: Tensor, keys_R2: Tensor, noise: KeyedNoise) -> Tensor:
    """One id per row with probability softmax(row), int64 [R]; -inf is never drawn.

    Args:
        logits_RV: float32, temperature and filters applied.
        keys_R2: int32 row keys of `pack_keys`.
        noise: kept buffers for this vocabulary and device.
    """
    step = noise.rows_at_once
    if logits_RV.shape[0] <= step:
        return _draw(logits_RV, keys_R2, noise)
    pieces = zip(torch.split(logits_RV, step), torch.split(keys_R2, step), strict=True)
    return torch.cat([_draw(rows_RV, keys, noise) for rows_RV, keys in pieces])


def _draw(logits_RV: Tensor, keys_R2: Tensor, noise: KeyedNoise) -> Tensor:
    score_RV = noise.exponential(keys_R2).log_()
    return torch.sub(logits_RV, score_RV, out=score_RV).argmax(dim=-1)


def perturbed(logits_RV: Tensor, keys_R2: Tensor, noise: KeyedNoise) -> Tensor:
    """Logits plus Gumbel noise, float32 [R, V]: the best id is what `draw` draws, and the best k
    in order are k draws without replacement (Kool et al. 2019, arXiv 1903.06059)."""
    step, result_RV = noise.rows_at_once, torch.empty_like(logits_RV)
    for at in range(0, logits_RV.shape[0], step):
        part = slice(at, at + step)
        exponential = noise.exponential(keys_R2[part]).log_()
        torch.sub(logits_RV[part], exponential, out=result_RV[part])
    return result_RV


def draw_filtered(
    logits_RV: Tensor, filters: Filters, keys_R2: Tensor, noise: KeyedNoise
) -> Tensor:
    """What `draw` gives after `keep_filtered`, but noise is computed for the surviving ids only.

    A row without any id above -inf gives 0, as `draw` does.
    """
    ids_R = torch.empty(logits_RV.shape[0], dtype=torch.int64, device=logits_RV.device)
    for part in narrow(logits_RV, filters):
        keys = keys_R2 if part.rows_G is None else keys_R2[part.rows_G]
        score_GC = part.values_GC - noise.exponential_at(keys, part.ids_GC).log_()
        best_G1 = score_GC.amax(dim=-1, keepdim=True)
        lost = score_GC < best_G1
        ids_G1 = part.ids_GC.masked_fill(lost, noise.vocab_size).amin(dim=-1, keepdim=True)
        ids_G = ids_G1.masked_fill(best_G1 == NEVER, 0).squeeze(1)
        if part.rows_G is None:
            return ids_G
        ids_R[part.rows_G] = ids_G
    return ids_R


def top_logprobs(
    logits_RV: Tensor, chosen_R: list[int], counts_R: list[int]
) -> list[dict[int, Logprob]]:
    """Log-probabilities of the chosen id and of the best `counts_R` ids of each row.

    Args:
        logits_RV: raw float32 logits, before any processing.
        chosen_R: the id that was chosen (or that stands in the prompt) after each row.
        counts_R: how many best ids to report per row; 0 reports the chosen id alone.

    Returns:
        Per row a map in vLLM's form: the chosen id first, then the best ids in order, ranks from
        1. The chosen id's rank counts the strictly better ids.
    """
    device = logits_RV.device
    chosen_R1 = torch.tensor(chosen_R, dtype=torch.int64, device=device).unsqueeze(1)
    logprobs_RV = logits_RV.log_softmax(dim=-1)
    own = logprobs_RV.gather(1, chosen_R1).squeeze(1).tolist()
    better_RV = logits_RV > logits_RV.gather(1, chosen_R1)
    ranks = (better_RV.sum(dim=-1) + 1).tolist()
    width = min(max(counts_R, default=0), logits_RV.shape[1])
    values_RN, ids_RN = logprobs_RV.topk(width, dim=-1)
    result = []
    rows = zip(chosen_R, own, ranks, counts_R, values_RN.tolist(), ids_RN.tolist(), strict=True)
    for token, logprob, rank, count, values, ids in rows:
        best = sorted(zip(values, ids, strict=True), key=lambda pair: (-pair[0], pair[1]))
        entry = {token: Logprob(logprob, rank)}
        for place, (value, other) in enumerate(best[:count], 1):
            if other != token:
                entry[other] = Logprob(value, place)
        result.append(entry)
    return result
