"""Training of MLP speculators: stages from the target's last state, each given the true token.

Source: Wertheimer et al. 2024 (arXiv 2404.19124); the file is that of IBM's accelerator repository.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from foretoken.proposers.heads.mlp import MLPShape, MLPSpeculator
from foretoken.training.heads.guesses import Guess, Guesser, ahead
from foretoken.training.heads.kind import FreshHead, HeadKind, Layout
from foretoken.training.heads.target import Captured, TargetParts
from foretoken.training.settings import Settings


class MLPGuesser(Guesser):
    """Stages from the final hidden state, each given the true token."""

    def __init__(self, net: MLPSpeculator) -> None:
        self.net = net

    def guesses(self, captured: Captured, depth: int) -> Iterator[Guess]:
        """One stage a depth."""
        state = self.net.start(captured.final_BTD)
        for stage in range(depth):
            state = self.net.advance(stage, state, ahead(captured.tokens_BT, stage + 1))
            own = 0 if self.net.shape.tie_weights else stage
            head = self.net.head[own]
            assert isinstance(head, nn.Linear), type(head)
            yield Guess(states_BTD=state, weight_VD=head.weight)


def _fresh(target: TargetParts, settings: Settings, _: Tensor) -> FreshHead:
    head = settings.of_head
    shape = MLPShape(
        vocab_size=target.vocab_size,
        emb_dim=target.hidden_size,
        inner_dim=head.inner_size,
        n_predict=head.depth,
        tie_weights=True,
        scale_input=True,
    )
    net = MLPSpeculator(shape)
    return FreshHead(net, MLPGuesser(net))


def _layout(state: Mapping[str, Any], _: str, __: str | None) -> Layout:
    shape = state["shape"]
    named = {"speculator." + name: tensor for name, tensor in state["model"].items()}
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "n_candidates": 1,
        "top_k_tokens_per_head": [1] * shape["n_predict"],
        **shape,
    }
    return Layout(named, config)


def _usual(target: TargetParts) -> dict[str, Any]:
    return {"depth": 4, "inner_size": max(16, target.hidden_size // 2)}


KIND = HeadKind(fresh=_fresh, layout=_layout, usual=_usual)
