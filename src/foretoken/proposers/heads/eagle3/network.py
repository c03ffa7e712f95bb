"""EAGLE-3: a decoder layer over features of several target layers, with a vocabulary of its own.

Slot i joins the embedding of token i + 1 with g_i = fc(features of three layers at i), or with its
own previous output where the target's features are not known yet. The layer's output, before the
last norm, is recycled; after it, `lm_head` gives logits over the reduced vocabulary. `d2t` holds
offsets: draft id j stands for target id j + d2t[j]. P-EAGLE (arXiv 2602.01469) is the same network
with `mask_hidden` for slots whose features do not exist.

Source: Li et al. 2025 (arXiv 2503.01840), the published EAGLE-3 checkpoints, and the variants of
the `speculators` format.
"""

from collections.abc import Iterable, Sequence
from typing import ClassVar, Self, cast, final

import torch
from torch import Tensor, nn

from foretoken.kv.features import FINAL
from foretoken.layers.rope import Rotation
from foretoken.proposers.heads.base import TargetFacts, check_ids
from foretoken.proposers.heads.chain_head import ChainHead
from foretoken.proposers.heads.eagle3.formats import describe
from foretoken.proposers.heads.eagle3.layers import Eagle3Layer, Eagle3Shape
from foretoken.proposers.heads.folder import HeadFolder
from foretoken.proposers.heads.parts import Attend, HeadShape


@final
class Eagle3(ChainHead):
    """The network; parameters have the names of the `speculators` format."""

    method: ClassVar[str] = "eagle3"

    def __init__(
        self,
        shape: Eagle3Shape,
        points: tuple[int, ...] = (FINAL,),
        mask_token_id: int | None = None,
    ) -> None:
        """Random weights; the reduced vocabulary starts as the first ids.

        Args:
            shape: sizes and variants.
            points: where it reads the target's hidden states.
            mask_token_id: P-EAGLE: the token of mask slots; None: it has none, or repeats the
                newest (anchored).
        """
        super().__init__()
        self.shape, self.mask_token_id = shape, mask_token_id
        self.points = points
        size, eps = shape.layer.hidden_size, shape.layer.rms_norm_eps
        wide, count = shape.target_hidden_size, shape.num_features
        self.input_norm = nn.RMSNorm(count * wide, eps) if shape.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(nn.RMSNorm(wide, eps) for _ in range(count)) if shape.fc_norm else None
        )
        self.fc = nn.Linear(count * wide, size, bias=False)
        self.layers = nn.ModuleList(
            Eagle3Layer(shape, first=i == 0) for i in range(shape.layer.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, shape.draft_vocab_size, bias=False)
        self.d2t: Tensor
        self.register_buffer("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.int64))
        if shape.parallel:
            self.mask_hidden = nn.Parameter(torch.zeros(1, shape.mask_depths, count * wide))
        if shape.own_embedding:
            self.embed_tokens = nn.Embedding(shape.layer.vocab_size, size)

    @classmethod
    def read(cls, folder: HeadFolder, target: TargetFacts) -> Self:
        found = describe(folder, target)
        with torch.device("meta"):
            net = cls(found.shape, found.points, found.mask_token_id)
        found.fill(net)
        check_ids(net.target_ids, target)
        return net

    @property
    def parallel(self) -> bool:
        return self.shape.parallel

    @property
    def layer_shape(self) -> HeadShape:
        return self.shape.layer

    @property
    def decoder_layers(self) -> tuple[Eagle3Layer, ...]:
        return tuple(cast("Iterable[Eagle3Layer]", self.layers))

    @property
    def tops(self) -> tuple[nn.Module, ...]:
        return (self.lm_head,)

    def drop_matrices(self) -> None:
        """Free all linear maps: from now on something else runs them. Norms, tables, masks and ids
        stay."""
        del self.layers, self.fc, self.lm_head

    @property
    def target_ids(self) -> Tensor:
        ids: Tensor = self.d2t + torch.arange(self.d2t.shape[0], device=self.d2t.device)
        return ids

    def mix(self, features: Tensor) -> Tensor:
        """Features of the target's layers, side by side [..., F] -> [..., D]."""
        mixed: Tensor = self.fc(self.normed_features(features))
        return mixed

    @property
    def norms_features(self) -> bool:
        """Whether `normed_features` does anything."""
        return self.input_norm is not None or self.fc_norm is not None

    def mask_features(self, count: int) -> Tensor:
        """What stands for the features of the first `count` mask slots, [count, F]."""
        last = self.shape.mask_depths - 1
        return self.mask_hidden[0, [min(i, last) for i in range(count)]]

    def masks(self, count: int) -> Tensor:
        """What stands for the mixed features of the first `count` mask slots, [count, D]."""
        return self.mix(self.mask_features(count))

    def normed_features(self, features: Tensor) -> Tensor:
        """Features as `fc` wants them, [..., F]."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            features = torch.cat(normed, dim=-1)
        return features

    def forward(
        self, tokens: Tensor, hidden: Tensor, rotation: Rotation, attends: Sequence[Attend]
    ) -> Tensor:
        embedded = self.table(tokens)
        x = hidden
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(x, embedded, rotation, attend)
        return self.norm(x) if self.shape.norm_output else x

    def logits(self, outputs: Tensor) -> Tensor:
        """Logits over the reduced vocabulary, [..., Vd], from what `forward` returned."""
        normed = outputs if self.shape.norm_output else self.norm(outputs)
        logits: Tensor = self.lm_head(normed)
        return logits
