"""The MLP speculator: a small recurrent net from one hidden state to n tokens.

All of the method is here: the network, the reader of its published files, its chains and trees,
and its call of the compiled kernels.

s_i = GELU(LN_i(P_i s_{i-1} + (w_e / w_s) Emb_i[token_i])), logits_i = Head_i s_i, with s_{-1} the
target's last hidden state after its final norm, token_0 the newest token, w_s = 0.5^(0.5 / n) and
w_e = sqrt((1 - w_s^2) D / 2). Stateless: it needs one hidden state and no KV.

Source: Wertheimer et al. 2024 (arXiv 2404.19124) and IBM's accelerator checkpoints.
"""

import ctypes
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.errors import CheckpointError
from foretoken.kernels.linear import TYPES
from foretoken.kernels.structures import FtMlp, FtMlpStage
from foretoken.ops.linear import KernelLinear
from foretoken.proposers.heads.base import TargetFacts, check_fits, find_head
from foretoken.proposers.heads.folder import HeadFolder, fill
from foretoken.proposers.heads.linears import kernel_of
from foretoken.proposers.heads.stateless_head import (
    StatelessCall,
    StatelessHead,
    draft_function,
    serve_stateless,
)
from foretoken.proposers.steps import DraftSteps, StateSteps
from foretoken.proposers.tree import SpanTree, newest_tokens
from foretoken.runtime.batch import Span
from foretoken.shape.fields import size


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPShape:
    """Field names as in the published config.json."""

    vocab_size: int
    emb_dim: int
    """Hidden size of the target."""
    inner_dim: int
    n_predict: int
    tie_weights: bool = False
    """One embedding, head and norm for all stages, one projection for all but the first."""
    scale_input: bool = False
    """Whether the target's state is normalised and divided by sqrt(2) first."""


class ScaledNorm(nn.Module):
    """x / sqrt(mean(x^2) + 1e-6), then scale and shift."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return torch.addcmul(self.bias, normalised(x), self.weight)


def normalised(x: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + 1e-6) over the last dimension."""
    return F.rms_norm(x, (x.shape[-1],), None, 1e-6)


@final
class MLPSpeculator(StatelessHead):
    """Stages share one module where weights are tied, as their state dict does."""

    method: ClassVar[str] = "mlp"

    def __init__(self, shape: MLPShape) -> None:
        """Random weights of the published initialisation."""
        super().__init__()
        self.shape = shape
        inner, count = shape.inner_dim, shape.n_predict
        own = 1 if shape.tie_weights else count
        projections = min(count, 2) if shape.tie_weights else count
        self.emb = nn.ModuleList(nn.Embedding(shape.vocab_size, inner) for _ in range(own))
        self.proj = nn.ModuleList(
            nn.Linear(shape.emb_dim if i == 0 else inner, inner, bias=False)
            for i in range(projections)
        )
        self.head = nn.ModuleList(
            nn.Linear(inner, shape.vocab_size, bias=False) for _ in range(own)
        )
        self.ln = nn.ModuleList(ScaledNorm(inner) for _ in range(own))
        for parameters in (self.emb, self.proj, self.head):
            for parameter in parameters.parameters():
                nn.init.normal_(parameter, 0.0, inner**-0.5)
        state_weight = 0.5 ** (0.5 / count)
        token_weight = ((1 - state_weight**2) * inner / 2) ** 0.5
        self.token_scale = token_weight / state_weight

    def start(self, hidden: Tensor) -> Tensor:
        """The first state, from the target's hidden state after its final norm [..., E]."""
        return normalised(hidden) * 0.5**0.5 if self.shape.scale_input else hidden

    def advance(self, stage: int, state: Tensor, tokens: Tensor) -> Tensor:
        """The state after the token that stands before what `stage` predicts, [..., D]."""
        own = 0 if self.shape.tie_weights else stage
        projected = self.proj[min(stage, len(self.proj) - 1)](state)
        mixed = torch.add(projected, self.emb[own](tokens), alpha=self.token_scale)
        return F.gelu(self.ln[own](mixed))

    def logits(self, stage: int, state: Tensor) -> Tensor:
        """[..., V]."""
        own = 0 if self.shape.tie_weights else stage
        logits: Tensor = self.head[own](state)
        return logits

    @property
    def max_drafts(self) -> int:
        return self.shape.n_predict

    @property
    def tops(self) -> tuple[nn.Module, ...]:
        return (self.head,)

    @classmethod
    def read(cls, folder: HeadFolder, target: TargetFacts) -> Self:
        """The network of an accelerator's folder, with IBM's names or without their prefix."""
        config = folder.config
        width = size(config, "emb_dim")
        shape = MLPShape(
            vocab_size=size(config, "vocab_size"),
            emb_dim=width,
            inner_dim=config.get("inner_dim") or width,
            n_predict=size(config, "n_predict"),
            tie_weights=bool(config.get("tie_weights", False)),
            scale_input=bool(config.get("scale_input", False)),
        )
        check_fits("hidden_size", width, target.hidden_size)
        check_fits("vocab_size", shape.vocab_size, target.vocab_size)
        with torch.device("meta"):
            net = cls(shape)
        doubles = _tied_doubles(folder, net.state_dict()) if shape.tie_weights else ()
        fill(
            net,
            folder.tensors,
            rename=lambda name: name.removeprefix("speculator."),
            ignored=doubles,
        )
        return net

    def steps(self, hidden_BD: Tensor, spans: Sequence[Span]) -> DraftSteps:
        return _MLPSteps(self, hidden_BD, spans)

    def compiled(self, features_SD: Tensor) -> StatelessCall | None:
        dtype = self.ln[0].get_parameter("weight").dtype
        tied, stages = self.shape.tie_weights, (FtMlpStage * self.shape.n_predict)()
        part: KernelLinear | None = None
        for i, stage in enumerate(stages):
            own = 0 if tied else i
            project = kernel_of(self.proj[min(i, len(self.proj) - 1)], dtype, dtype)
            head = kernel_of(self.head[own], dtype, torch.float32)
            if project is None or head is None:
                return None
            stage.project, stage.head, part = project.address, head.address, head
            stage.embedding = self.emb[own].get_parameter("weight").data_ptr()
            stage.weight = self.ln[own].get_parameter("weight").data_ptr()
            stage.bias = self.ln[own].get_parameter("bias").data_ptr()
        assert part is not None, "it drafts something"
        struct = FtMlp(
            stages=ctypes.addressof(stages),
            hidden=self.shape.emb_dim,
            inner=self.shape.inner_dim,
            vocabulary=self.shape.vocab_size,
            token_scale=self.token_scale,
            type=TYPES[dtype],
            norms_input=self.shape.scale_input,
        )
        return StatelessCall(
            draft_function(part, "ft_mlp_draft"),
            struct,
            features_SD,
            widest=max(self.shape.emb_dim, self.shape.inner_dim),
            kept=(self, stages),
        )


def _tied_doubles(folder: HeadFolder, wanted: Mapping[str, Any]) -> list[str]:
    """Copies of tied tensors under the names of later stages; they must be equal."""
    doubles = []
    for name, tensor in folder.tensors.items():
        plain = name.removeprefix("speculator.")
        match = re.fullmatch(r"(emb|proj|head|ln)\.(\d+)\.(weight|bias)", plain)
        if plain in wanted or match is None:
            continue
        part, _, field = match.groups()
        source = f"{part}.{1 if part == 'proj' else 0}.{field}"
        first = folder.tensors.get(name.replace(plain, source))
        if first is None or not torch.equal(first, tensor):
            raise CheckpointError("tie_weights", name, f"a copy of {source}")
        doubles.append(name)
    return doubles


@final
class _MLPSteps(StateSteps):
    """A stage a token, or a level of a tree."""

    def __init__(self, net: MLPSpeculator, hidden_BD: Tensor, spans: Sequence[Span]) -> None:
        super().__init__(spans)
        self._net, self._hidden_BD, self._stage = net, hidden_BD, -1

    def begin(self) -> Tensor:
        newest = [sequence.token_ids[-1] for sequence in self.sequences]
        return self._next(self._net.start(self._hidden_BD), newest)

    def advance(self, states_BD: Tensor, active: list[int], drafted: list[list[int]]) -> Tensor:
        return self._next(states_BD, [tokens[-1] for tokens in drafted])

    def grow(self, states_FD: Tensor, trees: Sequence[SpanTree]) -> Tensor:
        return self._next(states_FD, newest_tokens(trees))

    def logits(self, states_BD: Tensor) -> Tensor:
        return self._net.logits(self._stage, states_BD).float()

    def _next(self, states_BD: Tensor, tokens: Sequence[int]) -> Tensor:
        self._stage += 1
        tokens_B = torch.tensor(tokens, device=states_BD.device)
        return self._net.advance(self._stage, states_BD, tokens_B)


load_spec = partial(find_head, MLPSpeculator, serve_stateless)
