"""Training of Medusa heads: each guesses one token further, over the target's own output head.

Source: Cai et al. 2024 (arXiv 2401.10774). The blocks have the names of the Medusa repository;
heads of low rank that share the target's output head are a variant under our own names.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from foretoken.proposers.heads.medusa import Medusa, MedusaShape
from foretoken.training.heads.guesses import Guess, Guesser
from foretoken.training.heads.kind import FreshHead, HeadKind, Layout
from foretoken.training.heads.target import Captured, TargetParts
from foretoken.training.settings import Settings


class MedusaGuesser(Guesser):
    """Independent heads on the final hidden state, over the target's own output head."""

    def __init__(self, net: Medusa, target_head_VD: Tensor) -> None:
        """Train `net`, whose shape must share the target's head."""
        assert net.shape.share_head, "a head of its own is not trained here"
        self.net, self._head = net, target_head_VD.detach()

    def guesses(self, captured: Captured, depth: int) -> Iterator[Guess]:
        """One head a depth."""
        states = self.net.states(captured.final_BTD, depth)
        for k in range(depth):
            yield Guess(states_BTD=states[..., k, :], weight_VD=self._head)


def _fresh(target: TargetParts, settings: Settings, _: Tensor) -> FreshHead:
    head = settings.of_head
    shape = MedusaShape(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        medusa_num_heads=head.depth,
        medusa_num_layers=head.num_layers,
        rank=head.inner_size,
        share_head=True,
    )
    net = Medusa(shape)
    return FreshHead(net, MedusaGuesser(net, target.head_VD))


def _layout(state: Mapping[str, Any], verifier: str, _: str | None) -> Layout:
    shape = state["shape"]
    config = {
        "base_model_name_or_path": verifier,
        "medusa_num_heads": shape["medusa_num_heads"],
        "medusa_num_layers": shape["medusa_num_layers"],
        "medusa_share_head": shape["share_head"],
        "hidden_size": shape["hidden_size"],
        "vocab_size": shape["vocab_size"],
    }
    return Layout(state["model"], config)


def _usual(target: TargetParts) -> dict[str, Any]:
    return {"depth": 4, "inner_size": max(16, target.hidden_size // 2), "num_layers": 2}


KIND = HeadKind(fresh=_fresh, layout=_layout, usual=_usual)
