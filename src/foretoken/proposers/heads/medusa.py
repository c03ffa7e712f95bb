"""Medusa: independent heads on one hidden state, head k guessing the token k + 2 places on.

z = h, then per layer z = z + SiLU(W z + b), then logits = U z. With `share_head`, which the
packaged head uses to stay small, U is the target's own head times a square matrix of each Medusa
head: SiLU hardly goes below zero, so blocks alone cannot take the next token out of h. Stateless:
it needs one hidden state and no KV. All of the method is here: the network, the reader of its
published files, its chains and trees, and its call of the compiled kernels.

Source: Cai et al. 2024 (arXiv 2401.10774) and the FasterDecoding checkpoints.
"""

import ctypes
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.errors import CheckpointError, ConfigError
from foretoken.kernels.linear import TYPES
from foretoken.kernels.structures import FtMedusa, FtMedusaBlock
from foretoken.ops.linear import KernelLinear
from foretoken.proposers.heads.base import HeadServingContext, TargetFacts, check_fits, find_head
from foretoken.proposers.heads.folder import HeadFolder, fill
from foretoken.proposers.heads.linears import kernel_of
from foretoken.proposers.heads.stateless_head import (
    StatelessCall,
    StatelessHead,
    draft_function,
    serve_stateless,
)
from foretoken.proposers.steps import DepthSteps, DraftSteps
from foretoken.runtime.batch import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaShape:
    """Sizes; field names as in the published config.json where it has them."""

    hidden_size: int
    vocab_size: int
    medusa_num_heads: int
    medusa_num_layers: int = 1
    rank: int | None = None
    """Inner width of W = W_out W_in; None: one full matrix, as published."""
    share_head: bool = False
    """Whether U is the target's own head times a matrix of each head's."""


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b); W may be of low rank."""

    def __init__(self, shape: MedusaShape) -> None:
        """W and b start at zero, so that the block starts as the identity."""
        super().__init__()
        size, rank = shape.hidden_size, shape.rank
        self.down = None if rank is None else nn.Linear(size, rank, bias=False)
        self.linear = nn.Linear(rank or size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        inner = x if self.down is None else self.down(x)
        return x + F.silu(self.linear(inner))

    def compiled(self, dtype: torch.dtype) -> FtMedusaBlock | None:
        """The block in C's memory, from `dtype` to `dtype`, or None if some part has no kernel."""
        down, linear = (kernel_of(one, dtype, dtype) for one in (self.down, self.linear))
        if linear is None or (down is None and self.down is not None):
            return None
        return FtMedusaBlock(down=None if down is None else down.address, linear=linear.address)


@final
class Medusa(StatelessHead):
    """All heads; parameters are `blocks.K.L.linear.weight`, and `lm_heads.K.weight` or, where the
    target's head is shared, `mixers.K.weight`."""

    method: ClassVar[str] = "medusa"
    shared_logits: Callable[[Tensor], Tensor] | None = None
    """float32 logits [R, V] of states [R, D], by the target's head or a rounded copy of it; set
    where the network serves."""
    _shared_linear: KernelLinear | None = None
    """The kernel that does all of `shared_logits`; None: there is none."""

    def __init__(self, shape: MedusaShape) -> None:
        """Identity blocks and matrices; heads are to be copied from the target's."""
        super().__init__()
        self.shape = shape
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(shape) for _ in range(shape.medusa_num_layers)))
            for _ in range(shape.medusa_num_heads)
        )
        size, heads = shape.hidden_size, range(shape.medusa_num_heads)
        own, shared = (heads[:0], heads) if shape.share_head else (heads, heads[:0])
        self.lm_heads = nn.ModuleList(nn.Linear(size, shape.vocab_size, bias=False) for _ in own)
        self.mixers = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in shared)
        for mixer in self.mixers:
            nn.init.eye_(mixer.get_parameter("weight"))

    def states(self, hidden: Tensor, count: int) -> Tensor:
        """What the first `count` heads make of the target's final hidden state, [..., count, D]."""
        states = [block(hidden) for block in list(self.blocks)[:count]]
        if self.shape.share_head:
            states = [mix(z) for mix, z in zip(list(self.mixers)[:count], states, strict=True)]
        return torch.stack(states, dim=-2)

    def logits(self, states: Tensor) -> Tensor:
        """[..., count, D] -> [..., count, V]; only where the heads are its own."""
        assert not self.shape.share_head, "the target's head is to be used"
        count = states.shape[-2]
        return torch.stack(
            [head(states[..., k, :]) for k, head in enumerate(list(self.lm_heads)[:count])], dim=-2
        )

    @property
    def residual_blocks(self) -> tuple[ResidualBlock, ...]:
        heads = cast("Iterable[Iterable[ResidualBlock]]", self.blocks)
        return tuple(block for head in heads for block in head)

    @property
    def max_drafts(self) -> int:
        return self.shape.medusa_num_heads

    @property
    def tops(self) -> tuple[nn.Module, ...]:
        return (self.lm_heads,)

    @property
    def borrowed_top(self) -> tuple[int, int] | None:
        shape = self.shape
        return (shape.vocab_size, shape.hidden_size) if shape.share_head else None

    def borrows_head(self, *, rounded: bool) -> bool:
        """Where it is shared and stays as it is."""
        return self.shape.share_head and not rounded

    @classmethod
    def read(cls, folder: HeadFolder, target: TargetFacts) -> Self:
        """The network of a folder with the authors' names, vLLM's or ours."""
        renamed = {_our_name(name): tensor for name, tensor in folder.tensors.items()}
        places = [name.split(".") for name in renamed if name.startswith("blocks.")]
        if "blocks.0.0.linear.bias" not in renamed:
            raise CheckpointError("missing tensors", "0.0.linear.bias", "Medusa heads")
        own = renamed.get("lm_heads.0.weight")
        down = renamed.get("blocks.0.0.down.weight")
        hidden = renamed["blocks.0.0.linear.bias"].shape[0]
        shape = MedusaShape(
            hidden_size=hidden,
            vocab_size=target.vocab_size if own is None else own.shape[0],
            medusa_num_heads=1 + max(int(place[1]) for place in places),
            medusa_num_layers=1 + max(int(place[2]) for place in places if place[1] == "0"),
            rank=None if down is None else down.shape[0],
            share_head=own is None,
        )
        if own is None and not folder.config.get("medusa_share_head", False):
            allowed = "or medusa_share_head: true"
            raise CheckpointError("missing tensors", "lm_heads.0.weight", allowed)
        check_fits("hidden_size", hidden, target.hidden_size)
        check_fits("vocab_size", shape.vocab_size, target.vocab_size)
        with torch.device("meta"):
            net = cls(shape)
        fill(net, folder.tensors, rename=_our_name)
        return net

    def prepare(self, site: HeadServingContext) -> None:
        """Put the linear maps on kernels, and find what makes logits where the head is shared.
        Raises ConfigError: the target's head cannot be copied in other bits."""
        super().prepare(site)
        if not self.shape.share_head:
            return
        model, make = site.engine.target.model, site.linears
        linear = model.head
        self.shared_logits = model.draft_logits
        if make.quantization is not None:
            if not model.shape.tie_word_embeddings or model.shape.logit_softcap is not None:
                allowed = "None: this head uses the target's, which is not to be had in other bits"
                raise ConfigError("speculative_config.quantization", make.quantization, allowed)
            copy = linear = make(model.embedding.floats(), top=True)
            self.shared_logits = lambda states_RD: copy(states_RD).float()
        # A soft cap bends logits after the linear map: then the kernel alone does not do all of it.
        if isinstance(linear, KernelLinear) and model.shape.logit_softcap is None:
            self._shared_linear = linear

    def steps(self, hidden_BD: Tensor, spans: Sequence[Span]) -> DraftSteps:
        return _MedusaSteps(self, hidden_BD, spans)

    def compiled(self, features_SD: Tensor) -> StatelessCall | None:
        shape, dtype = self.shape, features_SD.dtype
        if (shape.rank or 0) > shape.hidden_size:
            return None
        layers = [block.compiled(dtype) for block in self.residual_blocks]
        bound = [layer for layer in layers if layer is not None]
        if len(bound) < len(layers):
            return None
        blocks = (FtMedusaBlock * len(bound))(*bound)
        if shape.share_head:
            shared = self._shared_linear
            tops = [shared if shared is not None and shared.dtype == dtype else None]
        else:
            tops = [kernel_of(head, dtype, torch.float32) for head in self.lm_heads]
        mixers = [kernel_of(mixer, dtype, dtype) for mixer in self.mixers]
        pointers = _pointers(mixers), _pointers(tops)
        if None in pointers or tops[0] is None or tops[0].out_dtype != torch.float32:
            return None
        struct = FtMedusa(
            blocks=ctypes.addressof(blocks),
            mixers=ctypes.addressof(pointers[0]) if mixers else None,
            tops=ctypes.addressof(pointers[1]),
            hidden=shape.hidden_size,
            vocabulary=tops[0].columns,
            layers=shape.medusa_num_layers,
            type=TYPES[dtype],
        )
        return StatelessCall(
            draft_function(tops[0], "ft_medusa_draft"),
            struct,
            features_SD,
            widest=shape.hidden_size,
            kept=(self, self._shared_linear, blocks, pointers),
            one_pass=True,
        )


def _our_name(name: str) -> str:
    """`K.L.linear.weight` and `K.L.weight` of the published files, or vLLM's names, as ours."""
    name = re.sub(r"^(blocks\.\d+)\.layers\.(\d+)\.(weight|bias)$", r"\1.\2.linear.\3", name)
    match = re.fullmatch(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias)", name)
    if match is None:
        return name
    head, layer, linear, field = match.groups()
    return f"blocks.{head}.{layer}.linear.{field}" if linear else f"lm_heads.{head}.{field}"


@final
class _MedusaSteps(DepthSteps):
    """As many heads as the longest budget, or all of them, in one pass."""

    def __init__(self, net: Medusa, hidden_BD: Tensor, spans: Sequence[Span]) -> None:
        count = min(max(span.draft_budget for span in spans), net.max_drafts)
        super().__init__(spans, [count] * len(spans))
        self._net, self._hidden_BD = net, hidden_BD

    def run(self) -> Tensor:
        states_BKD = self._net.states(self._hidden_BD, self.depths[0])
        if not self._net.shape.share_head:
            return self._net.logits(states_BKD).float().flatten(0, 1)
        assert self._net.shared_logits is not None, "set by `prepare`"
        return self._net.shared_logits(states_BKD.flatten(0, 1))


def _pointers(linears: Sequence[KernelLinear | None]) -> Any:
    """Their addresses in C's memory; None if one is missing."""
    addresses = [linear.address for linear in linears if linear is not None]
    return (ctypes.c_void_p * len(linears))(*addresses) if len(addresses) == len(linears) else None


load_spec = partial(find_head, Medusa, serve_stateless)
