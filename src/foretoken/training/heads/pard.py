"""Training of PARD drafts: a draft model that guesses all its tokens in one pass over mask tokens.

After every position stand mask tokens, each at its own depth, with conditional drops. A row's depth
0 is the token at t + 1, so that all chains begin at the same place.

Source: PARD (arXiv 2504.18583).
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from foretoken.training.heads.draft import draft_net, require_draft_fits
from foretoken.training.heads.guesses import DepthAttention, Drops, Guess, Guesser, ahead
from foretoken.training.heads.kind import FreshHead, HeadKind, require_mask
from foretoken.training.heads.target import Captured, TargetParts
from foretoken.training.llama import Llama
from foretoken.training.settings import Settings

BY_DEPTH = "foretoken_by_depth"
"""What transformers calls the attention of masks, each at its own depth."""


class ParallelGuesser(Guesser):
    """One pass a depth over the slots that it keeps; the same numbers as one pass over all."""

    def __init__(self, net: Llama, mask_token_id: int, keep_share: float = 1.0) -> None:
        """Train `net` with `mask_token_id` in place of unknown tokens."""
        net.set_attn_implementation(BY_DEPTH)
        self.net, self._mask, self._keep_share = net, mask_token_id, keep_share

    def guesses(self, captured: Captured, depth: int) -> Iterator[Guess]:
        """The true tokens at depth 0; further on masks at the slots that are kept."""
        net = self.net
        tokens_BT = ahead(captured.tokens_BT, 1)
        rows, length = tokens_BT.shape
        drops = Drops.of(captured.tokens_BT, self._keep_share if net.training else 1.0)
        attends = [DepthAttention() for _ in net.layers]
        kept_N, given = torch.arange(length, device=tokens_BT.device), tokens_BT
        for step in range(depth):
            if step > 0:
                chosen_M = drops.chosen(kept_N, length, step)
                for attend in attends:
                    attend.keep(chosen_M)
                kept_N = kept_N[chosen_M]
                given = tokens_BT.new_full((rows, len(kept_N)), self._mask)
            hidden = self._pass(given, kept_N + step, attends)
            yield Guess(
                states_BTD=net.norm(hidden),
                weight_VD=net.embed_tokens.weight,
                slots_N=kept_N if step > 0 else None,
            )

    def _pass(self, given_BN: Tensor, places_N: Tensor, attends: list[DepthAttention]) -> Tensor:
        """The residual stream of one depth, [B, N, D]."""
        net = self.net
        hidden: Tensor = net.embed_tokens(given_BN)
        rotations = net.rotary_emb(hidden, places_N[None])
        for layer in net.layers:
            hidden = layer(hidden, position_embeddings=rotations, attends=attends)
        return hidden


def _attend_by_depth(
    layer: nn.Module, q_BHTh: Tensor, k_BKTh: Tensor, v_BKTh: Tensor, *_: object, **given: Any
) -> tuple[Tensor, None]:
    """A layer's `DepthAttention`, as transformers calls an attention function."""
    attend = given["attends"][layer.layer_idx]
    return attend(*(part.transpose(1, 2) for part in (q_BHTh, k_BKTh, v_BKTh))), None


AttentionInterface.register(BY_DEPTH, _attend_by_depth)


def _fresh(target: TargetParts, settings: Settings, _: Tensor) -> FreshHead:
    head = settings.of_head
    net = draft_net(target, settings)
    return FreshHead(net, ParallelGuesser(net, head.mask_token_id, head.keep_share))


def _require_fit(target: TargetParts, settings: Settings) -> None:
    require_draft_fits(target, settings)
    require_mask(target, settings)


def _llama_keys(head: Mapping[str, Any]) -> dict[str, Any]:
    return {"pard_token": head["mask_token_id"], "spd_type": "pard"}


KIND = HeadKind(fresh=_fresh, require_fit=_require_fit, llama_keys=_llama_keys, begin=None)
