"""The sizes and variants of block heads (DFlash, DSpark), and what one pass of them runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from foretoken.models.tensors import SpanLayout
from foretoken.proposers.heads.parts import HeadShape
from foretoken.shape import RopeShape


class BlockPass(NamedTuple):
    """What one pass runs: context that is new, and blocks, laid end to end."""

    context: Sequence[SpanLayout]
    """Places whose keys and values are not there yet, in order of their blocks if there are any."""
    blocks: Sequence[SpanLayout] = ()
    """Where each block lies; all places before it are there by the end of the pass."""
    token_ids: Sequence[int] = ()
    """The newest token and masks of each."""

    @property
    def num_fed(self) -> int:
        """Places of the context."""
        return sum(layout.num_tokens for layout in self.context)


@dataclass(frozen=True, slots=True)
class BlockView:
    """What the rows of a block see in a layer."""

    window: int | None = None
    """Only keys at a distance below this; None: all."""
    causal: bool = False
    """Whether a row sees no later row of its block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """Sizes and variants of a block head."""

    layer: HeadShape
    """Sizes of the decoder layers; vocab_size is the target's."""
    rope: RopeShape
    views: tuple[BlockView, ...]
    """One a layer."""
    block_size: int
    """Rows of a block as it was trained: the newest token and the masks behind it."""
    first_row: int
    """The row that predicts the first draft: 1, row 0 predicts nothing; or 0, each row predicts the
    token after its own."""
    mask_token_id: int
    target_hidden_size: int
    target_layers: int
    points: tuple[int, ...]
    """Target layers whose inputs are joined, in this order."""
    draft_vocab_size: int
    own_embedding: bool = False
    own_head: bool = False
    """Whether it brings its own output head; else the target's makes its logits."""
    attention_bias: bool = False
    embedding_scale: float = 1.0
    """What rows of the embedding table are multiplied with."""
    output_multiplier: float = 1.0
    """What is multiplied with the outputs before they become logits."""
    logit_softcap: float | None = None
    """Of its own head: logits become c * tanh(logits / c)."""

    @property
    def max_drafts(self) -> int:
        """Drafts of a whole block."""
        return self.block_size - self.first_row
