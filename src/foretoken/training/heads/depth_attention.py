"""Attention as drafting sees it, for all slots of a row at once.

Depth 0 are the true slots, causal as usual. A query of slot i at depth s stands at position i + s
and sees the true slots up to i and, of each earlier depth and its own, only the slot i: its own
draft. This is EAGLE-3's training-time test and the conditional rollout of PARD and P-EAGLE, whose
later depths may go on with fewer slots.

Source: Li et al. 2025 (arXiv 2503.01840), section on training-time test.
"""

import torch
from torch import Tensor


class DepthAttention:
    """One layer's keys and values of all depths so far; call it once per depth, in order."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._slots_N: Tensor | None = None

    def keep(self, chosen_M: Tensor) -> None:
        """Go on with these of the slots of the depth before, ascending, int64."""
        assert self._keys, "depth 0 has all slots"
        known = self._slots_N
        self._slots_N = chosen_M if known is None else known[chosen_M]
        self._keys[1:] = [key[:, :, chosen_M] for key in self._keys[1:]]
        self._values[1:] = [value[:, :, chosen_M] for value in self._values[1:]]

    def __call__(self, q_BTHh: Tensor, k_BTKh: Tensor, v_BTKh: Tensor) -> Tensor:
        """Mix of the values that each slot of the next depth sees, [B, T, H * h]."""
        group = q_BTHh.shape[2] // k_BTKh.shape[2]
        self._keys.append(k_BTKh.repeat_interleave(group, dim=2).transpose(1, 2))
        self._values.append(v_BTKh.repeat_interleave(group, dim=2).transpose(1, 2))
        q_BHTh = q_BTHh.transpose(1, 2) * q_BTHh.shape[-1] ** -0.5
        length = self._keys[0].shape[2]
        scores = q_BHTh @ self._keys[0].transpose(2, 3)
        slots_T = torch.arange(length, device=scores.device)
        own_N = slots_T if self._slots_N is None else self._slots_N
        unseen = slots_T > own_N[:, None]
        parts = [scores.float().masked_fill(unseen, float("-inf"))]
        for key in self._keys[1:]:
            parts.append((q_BHTh * key).sum(dim=-1, keepdim=True).float())
        weights = torch.softmax(torch.cat(parts, dim=-1), dim=-1).to(v_BTKh.dtype)
        mixed = weights[..., :length] @ self._values[0]
        for depth, value in enumerate(self._values[1:]):
            mixed = mixed + weights[..., length + depth : length + depth + 1] * value
        return mixed.transpose(1, 2).flatten(2)
