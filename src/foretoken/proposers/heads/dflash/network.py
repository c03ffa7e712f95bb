"""Block heads: the network over a block of masks and the target's context, which DFlash is.

Once for each position, the features of some target layers become a context vector
c = norm(fc(features)), of which every layer makes keys and values. A draft is one pass over a
block: the newest token and mask tokens behind it, at their own positions. The rows of the block see
the context before it and each other; layers are Qwen3's. Knows no pages and no requests; training
gives the same network other functions to attend with.

Source: DFlash (arXiv 2602.06036) and its published checkpoints.
"""

from abc import ABC
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self, cast, final

import torch
from torch import Tensor, nn

from foretoken.layers.embedding import Embedding
from foretoken.layers.rope import Rotation
from foretoken.proposers.heads.base import TargetFacts
from foretoken.proposers.heads.dflash.formats import describe
from foretoken.proposers.heads.dflash.shape import BlockShape, BlockView
from foretoken.proposers.heads.folder import HeadFolder
from foretoken.proposers.heads.paged_head import PagedHead
from foretoken.proposers.heads.parts import Attend, HeadLayer, HeadShape
from foretoken.shape import RopeShape
from foretoken.shape.fields import refuse_unless


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFollow:
    """What is done to the rows of a block one after the other, as kernels take it."""

    shorts_VR: Tensor | None = None
    """A short embedding of each of the target's tokens; None: no row depends on the one before."""
    linear: nn.Module | None = None
    """Makes of that of the token before a row what is added to the row's logits."""
    judge: Tensor | None = None
    """float32 weights of an output, of a short embedding if there are some, and a bias: how sure a
    draft is, before a sigmoid. None: as its best token is probable."""


class BlockHead(PagedHead, ABC):
    """The network; parameters have the names of the published files."""

    def __init__(self, shape: BlockShape) -> None:
        """Random weights; a reduced vocabulary starts as the first ids."""
        super().__init__()
        self.shape, self.points = shape, shape.points
        size, eps = shape.layer.hidden_size, shape.layer.rms_norm_eps
        self.fc = nn.Linear(len(shape.points) * shape.target_hidden_size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.layers = nn.ModuleList(
            HeadLayer(shape.layer, bias=shape.attention_bias, norms=True) for _ in shape.views
        )
        self.norm = nn.RMSNorm(size, eps)
        self.d2t: Tensor
        if shape.own_embedding:
            self.embed_tokens = nn.Embedding(shape.layer.vocab_size, size)
        if shape.own_head:
            self.lm_head = nn.Linear(size, shape.draft_vocab_size, bias=False)
        if self.is_reduced:
            self.register_buffer("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.int64))

    @property
    def is_reduced(self) -> bool:
        """Whether its logits are of some of the target's ids only."""
        return self.shape.draft_vocab_size < self.shape.layer.vocab_size

    @property
    def tops(self) -> tuple[nn.Module, ...]:
        return (self.lm_head,) if self.shape.own_head else ()

    def borrows_head(self, *, rounded: bool) -> bool:
        return not self.shape.own_head

    @property
    def decoder_layers(self) -> tuple[HeadLayer, ...]:
        return tuple(cast("Iterable[HeadLayer]", self.layers))

    @property
    def viewed_layers(self) -> tuple[tuple[HeadLayer, BlockView], ...]:
        """Each layer and what the rows of a block see in it."""
        return tuple(zip(self.decoder_layers, self.shape.views, strict=True))

    @property
    def is_whole(self) -> bool:
        """Whether it drafts well in whole blocks only, however few drafts are wanted: where rows
        see the masks behind them, a shorter block is nothing that it was trained on."""
        return not all(view.causal for view in self.shape.views)

    @property
    def follow(self) -> BlockFollow | None:
        """What kernels do to its rows one after the other; None: they cannot."""
        return BlockFollow() if self.shape.logit_softcap is None else None

    def drop_matrices(self) -> None:
        del self.layers, self.fc

    @property
    def target_ids(self) -> Tensor | None:
        if not self.is_reduced:
            return None
        ids: Tensor = self.d2t + torch.arange(self.d2t.shape[0], device=self.d2t.device)
        return ids

    def use_embedding(self, embedding: Embedding) -> None:
        """Embed tokens with the target's table as it is stored, unless it has another one. A copy,
        which DeepSpec's files have, is given up."""
        if self.shape.own_embedding and embedding.equals(self.embed_tokens.weight):
            self.shape = replace(self.shape, own_embedding=False)
            del self.embed_tokens
        super().use_embedding(embedding)

    def use_head(self, tied: Embedding) -> None:
        """Leave logits to the target's head, of these weights, if its own is a copy of it."""
        if self.shape.own_head and tied.equals(self.lm_head.weight):
            self.shape = replace(self.shape, own_head=False)
            del self.lm_head

    @property
    def layer_shape(self) -> HeadShape:
        return self.shape.layer

    @property
    def rope(self) -> RopeShape:
        return self.shape.rope

    @property
    def makes_logits(self) -> bool:
        return self.shape.own_head

    def context(self, features: Tensor) -> Tensor:
        """The context vectors [..., D] of the target's features, side by side [..., F]."""
        mixed: Tensor = self.hidden_norm(self.fc(features))
        return mixed

    def forward(self, tokens: Tensor, rotation: Rotation, attends: Sequence[Attend]) -> Tensor:
        """One pass over blocks.

        Args:
            tokens: the newest token of each block and mask tokens, int64 [...].
            rotation: of the rows' positions.
            attends: one per layer; each is given the rows' queries, keys and values, and knows the
                context's.

        Returns:
            The rows' outputs after the last norm, [..., D].
        """
        x = self.table(tokens)
        if self.shape.embedding_scale != 1.0:
            x = x * self.shape.embedding_scale
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(x, rotation, attend)
        outputs: Tensor = self.norm(x)
        if self.shape.output_multiplier != 1.0:
            outputs = outputs * self.shape.output_multiplier
        return outputs

    def logits(self, outputs: Tensor) -> Tensor:
        """float32 logits of its own head, [..., Vd], before what follows from a token."""
        assert self.shape.own_head, "the target's head makes the logits"
        logits: Tensor = self.lm_head(outputs).float()
        cap = self.shape.logit_softcap
        return logits if cap is None else (logits / cap).tanh() * cap

    def after(self, logits_NV: Tensor, outputs_ND: Tensor, previous_N: Tensor) -> Tensor:
        """Logits of rows, once the tokens are known that come before what they predict.

        Args:
            logits_NV: float32, over its own ids.
            outputs_ND: of the rows.
            previous_N: those tokens, int64 ids of the target.
        """
        return logits_NV

    def sure(self, outputs_ND: Tensor, previous_N: Tensor) -> Tensor | None:
        """The chance that what each row predicts is accepted, float32 [N], judged before it is
        drawn; None: the head has no opinion."""
        return None


@final
class DFlash(BlockHead):
    """A block head without anything more: each row predicts the token at its own position, whatever
    the rows before it predict; row 0 is the newest token and predicts nothing."""

    method: ClassVar[str] = "dflash"

    @classmethod
    def read(cls, folder: HeadFolder, target: TargetFacts) -> Self:
        found = describe(folder, target)
        refuse_unless(found.fields, {"projector_type": ("dflash", "dflash")})
        with torch.device("meta"):
            net = cls(found.shape)
        found.fill(net)
        return net
