"""Training of EAGLE heads (1 and 2): each depth continues from the head's own guess at the feature.

Source: Li et al. 2024 (arXiv 2401.15077) and their repository's files. The divergence at several
depths takes the place of the paper's regression on features.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.layers.embedding import Embedding
from foretoken.layers.rope import RotaryTable
from foretoken.proposers.heads.eagle import Eagle
from foretoken.proposers.heads.eagle3.network import Eagle3
from foretoken.training.heads.guesses import DepthAttention, Guess, Guesser, ahead, rotary_of
from foretoken.training.heads.kind import FreshHead, HeadKind, Layout, usual_width
from foretoken.training.heads.target import Captured, TargetParts
from foretoken.training.settings import Settings


class EagleGuesser(Guesser):
    """One pass over all slots a depth; the target's own output head turns guesses into logits."""

    def __init__(self, net: Eagle, target_head_VD: Tensor) -> None:
        """Train `net`, whose embedding must be in place."""
        self.net, self._head = net, target_head_VD.detach()
        self._rotary = rotary_of(net.shape, net.fc.weight.device)

    def guesses(self, captured: Captured, depth: int) -> Iterator[Guess]:
        """Guess at the feature of the next slot, again and again."""
        for hidden in recur(self.net, self._rotary, captured, depth):
            yield Guess(states_BTD=hidden, weight_VD=self._head)


def recur(
    net: Eagle | Eagle3, rotary: RotaryTable, captured: Captured, depth: int
) -> Iterator[Tensor]:
    """Outputs [B, T, D] of `depth` passes, the first from true features, each from the last's."""
    attends = [DepthAttention() for _ in net.layers]
    hidden = net.mix(captured.features_BTF)
    slots = torch.arange(hidden.shape[1], device=hidden.device)
    for step in range(depth):
        tokens = ahead(captured.tokens_BT, step + 1)
        hidden = net(tokens, hidden, rotary.at(slots + step), attends)
        yield hidden


def _fresh(target: TargetParts, settings: Settings, _: Tensor) -> FreshHead:
    net = Eagle(target.layer_shape(settings.of_head.inner_size), fc_bias=False)
    net.use_embedding(Embedding(target.embedding_VD))
    net.to(target.embedding_VD.device)
    return FreshHead(net, EagleGuesser(net, target.head_VD))


def _layout(state: Mapping[str, Any], _: str, form: str | None) -> Layout:
    layer = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    bias = "fc.bias" in state["model"]
    if bias and form == "vllm":
        allowed = "eagle or own: vLLM has no place for the bias of this head"
        raise ConfigError("--format", form, allowed)
    return Layout(state["model"], {**layer, **state["shape"], "bias": bias})


def _usual(target: TargetParts) -> dict[str, Any]:
    return {"depth": 4, "inner_size": usual_width(target)}


KIND = HeadKind(fresh=_fresh, layout=_layout, usual=_usual)
