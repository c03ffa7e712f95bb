"""Training of P-EAGLE heads: an EAGLE-3 network that guesses all its tokens in one pass over masks.

Depth 0 is EAGLE-3's own. A deeper slot stands at its anchor's position plus the depth, holds the
mask token and the learned `mask_hidden` (anchored: the newest token and features plus a mask of its
depth), and sees the anchor's true slots and its own chain before it. In training each depth goes
on with fewer anchors (`Drops`). A run may begin with a trained EAGLE-3 head.

Source: P-EAGLE (arXiv 2602.01469); the file is that of the `speculators` library.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.config.method_registry import ANCHORED
from foretoken.errors import ConfigError
from foretoken.proposers.heads.eagle3.layers import Eagle3Layer
from foretoken.proposers.heads.eagle3.network import Eagle3
from foretoken.training.heads.eagle3 import default_points, eagle3_net, speculators_config
from foretoken.training.heads.guesses import (
    DepthAttention,
    Drops,
    Guess,
    Guesser,
    ahead,
    rotary_of,
)
from foretoken.training.heads.kind import (
    OWN,
    FreshHead,
    HeadKind,
    Layout,
    read_start,
    require_mask,
    usual_vocabulary,
    usual_width,
    with_both_ways,
)
from foretoken.training.heads.target import Captured, TargetParts
from foretoken.training.settings import Settings


class PEagleGuesser(Guesser):
    """One pass a depth over the slots that it keeps; the same numbers as one pass over all."""

    def __init__(self, net: Eagle3, mask_token_id: int, keep_share: float) -> None:
        """Train `net`, whose embedding must be in place; anchored ones use no mask token."""
        assert net.shape.parallel, "only a parallel head has a mask"
        self.net, self._mask, self._keep_share = net, mask_token_id, keep_share
        self._rotary = rotary_of(net.shape.layer, net.fc.weight.device)
        whole = net.shape.draft_vocab_size == net.shape.layer.vocab_size
        self._ids = None if whole else net.target_ids

    @torch.no_grad()
    def begin(self, captured: Captured) -> None:
        """Give the masks the size of features: far smaller ones would drown among them."""
        features = captured.features_BTF.float()
        mask, spread_F = self.net.mask_hidden, features.std(dim=(0, 1))
        typical_F = 0.0 if self.net.shape.anchored else features.mean(dim=(0, 1))
        mask.copy_(typical_F + spread_F * torch.randn(mask.shape).to(mask.device))

    def guesses(self, captured: Captured, depth: int) -> Iterator[Guess]:
        """All slots at depth 0; further on those that are kept (all of them in evaluation)."""
        net, tokens_BT = self.net, captured.tokens_BT
        rows, length = tokens_BT.shape
        slots_T = torch.arange(length, device=tokens_BT.device)
        drops = Drops.of(tokens_BT, self._keep_share if net.training else 1.0)
        attends = [DepthAttention() for _ in net.layers]
        hidden = true_BTD = net.mix(captured.features_BTF)
        given = newest_BT = ahead(tokens_BT, 1)
        kept_N = slots_T
        for step in range(depth):
            if step > 0:
                chosen_M = drops.chosen(kept_N, length, step)
                for attend in attends:
                    attend.keep(chosen_M)
                kept_N = kept_N[chosen_M]
                mask_D = net.masks(step)[-1]
                if net.shape.anchored:
                    given, hidden = newest_BT[:, kept_N], true_BTD[:, kept_N] + mask_D
                else:
                    given = tokens_BT.new_full((rows, len(kept_N)), self._mask)
                    hidden = mask_D.expand(rows, len(kept_N), -1)
            output = net(given, hidden, self._rotary.at(kept_N + step), attends)
            normed = output if net.shape.norm_output else net.norm(output)
            yield Guess(
                states_BTD=normed,
                weight_VD=net.lm_head.weight,
                ids_V=self._ids,
                slots_N=kept_N if step > 0 else None,
            )


@torch.no_grad()
def begin_with_eagle3(
    net: nn.Module, points: tuple[int, ...], folder: Path, target: TargetParts
) -> None:
    """Give `net` the weights of an EAGLE-3 head; its further layers begin as the identity.

    Raises:
        ConfigError: the head is another kind, reads other points of the target, or its sizes
            differ in more than the number of layers.
        ModelError: its folder is broken.
    """
    start = read_start(net, points, folder, target)
    assert isinstance(net, Eagle3) and isinstance(start, Eagle3), (type(net), type(start))
    missing = net.load_state_dict(start.state_dict(), strict=False)
    assert not missing.unexpected_keys, missing.unexpected_keys
    for layer in list(net.layers)[len(start.layers) :]:
        assert isinstance(layer, Eagle3Layer), type(layer)
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()


def _fresh(target: TargetParts, settings: Settings, frequent_ids: Tensor) -> FreshHead:
    head = settings.of_head
    net = eagle3_net(target, head, frequent_ids, parallel=True)
    guesser = PEagleGuesser(net, head.mask_token_id, head.keep_share)
    return FreshHead(net, guesser, default_points(target))


def _layout(state: Mapping[str, Any], verifier: str, form: str | None) -> Layout:
    shape = state["shape"]
    config = speculators_config(shape, verifier)
    if shape["anchored"] and form not in (None, OWN):
        raise ConfigError("--format", form, "own: anchored P-EAGLE is a variant of Foretoken")
    if shape["anchored"]:
        config["speculators_config"]["algorithm"] = ANCHORED
        config |= {"architectures": ["PEagleAnchored"], "speculators_model_type": ANCHORED}
    else:
        config["speculators_config"]["algorithm"] = "peagle"
        config |= {
            "architectures": ["PEagleSpeculator"],
            "speculators_model_type": "peagle",
            "mask_token_id": state["head"]["mask_token_id"],
        }
    return Layout(with_both_ways(state["model"], shape["layer"]["vocab_size"]), config)


def _usual(target: TargetParts) -> dict[str, Any]:
    return {
        "depth": 5,
        "num_layers": 2,
        "inner_size": usual_width(target),
        "draft_vocab_size": usual_vocabulary(target),
        "mask_token_id": target.vocab_size - 1,
    }


KIND = HeadKind(
    fresh=_fresh,
    layout=_layout,
    points=default_points,
    require_fit=require_mask,
    begin=begin_with_eagle3,
    may_embed=True,
    usual=_usual,
)
