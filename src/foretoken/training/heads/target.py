"""What a head learns from its target: sizes and matrices at first, then rows of hidden states.

Knows neither where the target runs nor the head. Invariants: `head_VD` times the hidden state after
the last norm gives the target's logits; hidden states are those that serving keeps in its feature
store, in the same order (see `foretoken.kv.features`).
"""

from dataclasses import dataclass

from torch import Tensor

from foretoken.proposers.heads.parts import HeadShape


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetParts:
    """One target; names of sizes as in `LlamaShape`."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    embedding_VD: Tensor
    head_VD: Tensor
    norm_D: Tensor | None = None
    """Weights of the last norm, to begin with; None: begin with ones."""

    def layer_shape(self, inner_size: int, layers: int = 1) -> HeadShape:
        """Decoder layers of the target's widths."""
        return HeadShape(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=inner_size,
            num_hidden_layers=layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_positions,
            rms_norm_eps=self.norm_eps,
            rope_theta=self.rope_theta,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """One batch of rows with the target's hidden states; B rows of T tokens."""

    tokens_BT: Tensor
    """int64."""
    features_BTF: Tensor
    """Hidden states at the points a head wants, side by side."""
    final_BTD: Tensor
    """After the target's last norm: position t's row gives the distribution of token t + 1."""
    part: int = 0
    """The number of this part of a run: what is drawn at random for it follows from that."""
