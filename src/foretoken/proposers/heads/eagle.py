"""EAGLE (1 and 2): one decoder layer that continues the target's last features.

Slot i joins the embedding of token i + 1 with feature i (after the target's final norm); a linear
map halves the pair and a decoder layer without input norm gives the guess at feature i + 1, which
the target's own head turns into logits. Drafting goes on from its own guesses
(`chain_head.py`).

Source: Li et al. 2024 (arXiv 2401.15077, 2406.16858) and the published EAGLE checkpoints.
"""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar, Self, final

import torch
from torch import Tensor, nn

from foretoken.layers.rope import Rotation
from foretoken.proposers.heads.base import TargetFacts, check_fits, find_head
from foretoken.proposers.heads.chain_head import ChainHead, serve_chains
from foretoken.proposers.heads.folder import HeadFolder, fill
from foretoken.proposers.heads.parts import (
    Attend,
    HeadLayer,
    HeadShape,
    num_layers,
    read_layer_shape,
)


@final
class Eagle(ChainHead):
    """The network; its embedding is the target's, never saved."""

    method: ClassVar[str] = "eagle"

    def __init__(
        self, shape: HeadShape, *, fc_bias: bool = True, attention_bias: bool = False
    ) -> None:
        """Random weights; embeddings are given by `use_embedding`."""
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=fc_bias)
        self.layers = nn.ModuleList(
            HeadLayer(shape, bias=attention_bias, normed=i > 0)
            for i in range(shape.num_hidden_layers)
        )

    @classmethod
    def read(cls, folder: HeadFolder, target: TargetFacts) -> Self:
        """The network of a folder with the authors' names."""
        names = folder.tensors
        shape = read_layer_shape(folder.config, target, num_layers(names))
        check_fits("hidden_size", shape.hidden_size, target.hidden_size)
        check_fits("vocab_size", shape.vocab_size, target.vocab_size)
        with torch.device("meta"):
            net = cls(
                shape,
                fc_bias="fc.bias" in names,
                attention_bias="layers.0.self_attn.q_proj.bias" in names,
            )
        fill(net, names, ignored=("embed_tokens.weight",))
        return net

    @property
    def layer_shape(self) -> HeadShape:
        return self.shape

    def borrows_head(self, *, rounded: bool) -> bool:
        return True

    def mix(self, features: Tensor) -> Tensor:
        return features

    def forward(
        self, tokens: Tensor, hidden: Tensor, rotation: Rotation, attends: Sequence[Attend]
    ) -> Tensor:
        embedded = self.table(tokens)
        x: Tensor = self.fc(torch.cat((embedded, hidden), dim=-1))
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(x, rotation, attend)
        return x


load_spec = partial(find_head, Eagle, serve_chains)
