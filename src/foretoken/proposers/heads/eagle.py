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

from foretoken.layers.embedding import Embedding
from foretoken.layers.rope import Rotation
from foretoken.proposers.heads.base import TargetFacts, check_fits, find_head
from foretoken.proposers.heads.chain_head import ChainHead, serve_chains
from foretoken.proposers.heads.folder import HeadFolder, fill
from foretoken.proposers.heads.parts import (
    Attend,
    HeadAttention,
    HeadMLP,
    HeadNorm,
    HeadShape,
    num_layers,
    read_layer_shape,
)


class EagleLayer(nn.Module):
    """A Llama layer; the first one has no input norm."""

    def __init__(self, shape: HeadShape, *, first: bool, attention_bias: bool) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = None if first else HeadNorm(size, eps)
        self.self_attn = HeadAttention(shape, size, bias=attention_bias)
        self.post_attention_layernorm = HeadNorm(size, eps)
        self.mlp = HeadMLP(shape)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """The residual stream after the layer."""
        normed = x if self.input_layernorm is None else self.input_layernorm(x)
        x = x + self.self_attn(normed, rotation, attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


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
            EagleLayer(shape, first=i == 0, attention_bias=attention_bias)
            for i in range(shape.num_hidden_layers)
        )
        self.embedding: Embedding

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

    def use_embedding(self, embedding: Embedding) -> None:
        self.embedding = embedding

    def mix(self, features: Tensor) -> Tensor:
        return features

    def forward(
        self, tokens: Tensor, hidden: Tensor, rotation: Rotation, attends: Sequence[Attend]
    ) -> Tensor:
        embedded = self.embedding(tokens)
        x: Tensor = self.fc(torch.cat((embedded, hidden), dim=-1))
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(x, rotation, attend)
        return x


load_spec = partial(find_head, Eagle, serve_chains)
