"""A decoder-only model: embedding, blocks, last norm, output head.

Invariants: a forward writes the keys and values of exactly the tokens it is given; logits are
float32. Knows neither sequences nor scheduling.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.layers.block import Block, StepView
from foretoken.models.tensors import ModelInput
from foretoken.ops.attention import Geometry, Plan
from foretoken.ops.linear import Linear
from foretoken.ops.norm import rms_norm
from foretoken.ops.rope import RotaryTable
from foretoken.shape import ModelShape

_HEAD_ELEMENTS = 1 << 26
"""Most logits computed at once before they become float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParts:
    """What a model is made of."""

    embedding_VD: Tensor
    blocks: tuple[Block, ...]
    norm_D: Tensor
    head: Linear
    rotary: RotaryTable


class Model:
    """A loaded model; holds no state of any request."""

    def __init__(
        self, shape: ModelShape, parts: ModelParts, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Take over `parts`."""
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self._parts = parts

    def geometry(self, page_size: int) -> Geometry:
        """What attention over this model's keys and values needs to know."""
        return Geometry(
            num_heads=self.shape.num_attention_heads,
            num_kv_heads=self.shape.num_key_value_heads,
            head_dim=self.shape.head_dim,
            page_size=page_size,
            dtype=self.dtype,
            device=self.device,
        )

    def __call__(self, inputs: ModelInput, layers_kv: list[Tensor], plan: Plan) -> Tensor:
        """Hidden states after the last norm of the rows asked for: [R, D].

        Args:
            inputs: the step's tokens.
            layers_kv: the KV store's tensors, one per layer; written at `inputs.slots_T`.
            plan: the step's attention.
        """
        parts = self._parts
        step = StepView(
            rotation=parts.rotary.at(inputs.positions_T),
            slots_T=inputs.slots_T,
            first_slot=inputs.first_slot,
            plan=plan,
        )
        x_TD = parts.embedding_VD[inputs.tokens_T]
        for block, layer_kv in zip(parts.blocks, layers_kv, strict=True):
            x_TD = block(x_TD, layer_kv, step)
        if inputs.rows_R is not None:
            x_TD = x_TD[inputs.rows_R]
        return rms_norm(x_TD, parts.norm_D, self.shape.rms_norm_eps)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """float32 logits [R, V] of final hidden states."""
        rows = max(1, _HEAD_ELEMENTS // self.shape.vocab_size)
        if hidden_RD.shape[0] <= rows:
            return self._parts.head(hidden_RD).float()
        return torch.cat([self._parts.head(part).float() for part in hidden_RD.split(rows)])
