"""DSpark: DFlash's blocks with a sequential part of low rank and a judgement of each draft.

Row k of a block gives base logits z_k and an output y_k. What is drafted there is drawn from
z_k + W2 e, where e = W1[x] is a short embedding of the token x before it: so a draft knows the one
before, at the price of one narrow matrix. With `gated`, e is first multiplied with
sigmoid(G (y_k, e) + g). A second small map says how probable it is that the draft is accepted,
sigmoid(w (y_k, e) + w_0), before it is drawn.

Source: DSpark (arXiv 2607.05147) and the checkpoints of DeepSpec, SpecForge and `speculators`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self, final

import torch
from torch import Tensor, nn

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.proposers.heads.base import TargetFacts, find_head
from foretoken.proposers.heads.dflash.formats import describe
from foretoken.proposers.heads.dflash.network import BlockFollow, BlockHead
from foretoken.proposers.heads.dflash.runner import serve_blocks
from foretoken.proposers.heads.dflash.shape import BlockShape
from foretoken.proposers.heads.folder import HeadFolder
from foretoken.shape.fields import refuse_unless

_KINDS = ("vanilla", "gated")


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkovShape:
    """What DSpark adds to a block head."""

    rank: int
    """Numbers of a token's short embedding; 0: no draft depends on the one before."""
    gated: bool = False
    judges: bool = False
    """Whether it says how probable it is that a draft is accepted."""
    judges_by_token: bool = False
    """Whether the token before the draft counts for that."""


class MarkovHead(nn.Module):
    """What the token before a draft adds to its logits."""

    def __init__(self, shape: BlockShape, markov: MarkovShape) -> None:
        super().__init__()
        rank = markov.rank
        self.markov_w1 = nn.Embedding(shape.layer.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, shape.draft_vocab_size, bias=False)
        width = shape.layer.hidden_size + rank
        self.gate_proj = nn.Linear(width, rank) if markov.gated else None

    def forward(self, outputs: Tensor, previous: Tensor) -> Tensor:
        """Outputs [..., D] and tokens [...] of the target -> float32 [..., Vd]."""
        short = self.markov_w1(previous)
        if self.gate_proj is not None:
            short = short * self.gate_proj(torch.cat((outputs, short), dim=-1)).sigmoid()
        added: Tensor = self.markov_w2(short)
        return added.float()


class ConfidenceHead(nn.Module):
    """How probable it is that a draft is accepted."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def logit(self, x: Tensor) -> Tensor:
        """[..., width] -> float32 [...], before the sigmoid."""
        found: Tensor = self.proj(x)[..., 0]
        return found.float()

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> float32 [...]."""
        return self.logit(x).sigmoid()


@final
class DSpark(BlockHead):
    """A block head whose drafts follow one another."""

    method: ClassVar[str] = "dspark"

    def __init__(self, shape: BlockShape, markov: MarkovShape) -> None:
        super().__init__(shape)
        self.markov = markov
        self.markov_head = MarkovHead(shape, markov) if markov.rank else None
        width = shape.layer.hidden_size + (markov.rank if markov.judges_by_token else 0)
        self.confidence_head = ConfidenceHead(width) if markov.judges else None

    @classmethod
    def read(cls, folder: HeadFolder, target: TargetFacts) -> Self:
        found = describe(folder, target, first_row=0)
        refuse_unless(found.fields, {"projector_type": ("dspark", "dspark")})
        markov = _read_markov(found.fields, found.tensors, found.shape.layer.hidden_size)
        with torch.device("meta"):
            net = cls(found.shape, markov)
        found.fill(net)
        return net

    @property
    def tops(self) -> tuple[nn.Module, ...]:
        own = super().tops
        return own if self.markov_head is None else (*own, self.markov_head.markov_w2)

    @property
    def is_whole(self) -> bool:
        """No: the token before a row says enough. (benchmarks/LOG.md, "A part of a block")"""
        return False

    @property
    def follow(self) -> BlockFollow | None:
        """The Markov part and the judgement; kernels know no gates."""
        if super().follow is None or self.markov.gated:
            return None
        head, judge, shorts_VR = self.markov_head, self.confidence_head, None
        if head is not None:
            shorts_VR = head.markov_w1.weight.detach().contiguous()
        weights = None
        if judge is not None:
            row, bias = judge.proj.weight.detach()[0], judge.proj.bias.detach()
            blind = self.markov.rank and not self.markov.judges_by_token
            zeros = row.new_zeros(self.markov.rank if blind else 0)
            weights = torch.cat((row, zeros, bias)).float()
        linear = None if head is None else head.markov_w2
        return BlockFollow(shorts_VR=shorts_VR, linear=linear, judge=weights)

    def after(self, logits_NV: Tensor, outputs_ND: Tensor, previous_N: Tensor) -> Tensor:
        if self.markov_head is None:
            return logits_NV
        added: Tensor = self.markov_head(outputs_ND, previous_N)
        return logits_NV + added

    def sure(self, outputs_ND: Tensor, previous_N: Tensor) -> Tensor | None:
        """The chance that what each row predicts is accepted, if it was trained to judge."""
        if self.confidence_head is None:
            return None
        x = outputs_ND
        if self.markov.judges_by_token:
            assert self.markov_head is not None, "checked when it was read"
            x = torch.cat((x, self.markov_head.markov_w1(previous_N)), dim=-1)
        found: Tensor = self.confidence_head(x)
        return found


def _read_markov(
    fields: Mapping[str, Any], tensors: Mapping[str, Tensor], hidden_size: int
) -> MarkovShape:
    """What a folder's head adds: kinds from config.json, sizes from the tensors."""
    rank = fields.get("markov_rank") or 0
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        raise CheckpointError("config.json markov_rank", rank, "a rank, or 0")
    kind = fields.get("markov_head_type") or "vanilla"
    if rank and kind not in _KINDS:
        raise UnsupportedModelError("markov_head_type", kind, ", ".join(_KINDS))
    judge = tensors.get("confidence_head.proj.weight")
    by_token = judge is not None and judge.shape[-1] == hidden_size + rank and rank > 0
    return MarkovShape(
        rank=rank,
        gated=rank > 0 and kind == "gated",
        judges=judge is not None,
        judges_by_token=by_token,
    )


load_spec = partial(find_head, DSpark, serve_blocks)
