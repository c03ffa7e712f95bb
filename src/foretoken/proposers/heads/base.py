"""What every head is: a drafting network that answers for itself.

A head is an `nn.Module` whose parameters have the names of its published checkpoint format. The
same object serves and trains. Everyone asks it what it reads, keeps and can do; nobody asks for its
class. A method is such a network, a function that puts it to work (`serve_stateless`,
`serve_chains`, `serve_blocks` or one of its own), and one line that joins the two:

    load_spec = partial(find_head, Network, serve)
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from foretoken.checkpoint import find_model
from foretoken.config import DrafterConfig
from foretoken.config.memory import HeadMemory
from foretoken.errors import CheckpointError, ConfigError
from foretoken.kv.features import FINAL, FeatureGaps, FeatureView
from foretoken.proposers.base import Proposer
from foretoken.proposers.drafting import DraftSampling
from foretoken.proposers.heads.folder import HeadFolder, method_of, read_head
from foretoken.proposers.heads.linears import HeadLinears, keep_stored
from foretoken.proposers.method import BuildContext, DrafterSpec, Target
from foretoken.shape.gguf import about_gguf
from foretoken.shape.memory_formula import KVPerToken, WeightCounts


class TargetFacts(Protocol):
    """What a head must fit; `ModelShape` has it."""

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""

    @property
    def vocab_size(self) -> int:
        """Tokens that the target knows."""

    @property
    def num_hidden_layers(self) -> int:
        """Layers whose inputs can be read."""

    @property
    def max_position_embeddings(self) -> int:
        """Positions that the target reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadServingContext:
    """Where a head is put to work: its settings, and what the engine gives it."""

    config: DrafterConfig
    engine: BuildContext
    view: FeatureView
    """The target's hidden states at the head's points."""
    drafting: DraftSampling
    """How its tokens are chosen."""
    linears: HeadLinears
    """Makes the linear maps that serve."""
    gaps: FeatureGaps | None = None
    """Tokens without hidden states, because they were computed while the head rested."""


class DraftHead(nn.Module, ABC):
    """A drafting network and what others must know of it."""

    method: ClassVar[str]
    """The word the user types."""
    points: tuple[int, ...] = (FINAL,)
    """Where it reads the target's hidden states (see `foretoken.kv.features`), in its own order."""

    @classmethod
    @abstractmethod
    def read(cls, folder: HeadFolder, target: TargetFacts) -> Self:
        """The network in a published folder of its kind, in the type of its file.

        Raises:
            CheckpointError: tensors are missing, unused or misshapen.
            ConfigError: the head belongs to another target.
            NotYetError: a variant that is known and not run.
        """

    @property
    def parallel(self) -> bool:
        """Whether it drafts all tokens in one pass over mask slots."""
        return False

    @property
    def tops(self) -> tuple[nn.Module, ...]:
        """The parts of it that make logits; none: the target's own head does."""
        return ()

    @property
    def borrowed_top(self) -> tuple[int, int] | None:
        """Outputs and inputs of the target's head, if a rounded head needs a rounded copy of it."""
        return None

    def borrows_head(self, *, rounded: bool) -> bool:
        """Whether, rounded or not, it makes logits with the target's head itself."""
        return False

    def kept(self, kv_cache_dtype: str) -> KVPerToken | None:
        """The keys and values that it keeps of a token, if any."""
        return None

    def memory(self, quantization: str | None, kv_cache_dtype: str) -> HeadMemory:
        """What it will keep; tables that it shares with the target are not among its weights."""
        return HeadMemory(
            counts=self._counts(rounded=quantization is not None),
            quantization=quantization,
            kept=self.kept(kv_cache_dtype),
            borrows_head=self.borrows_head(rounded=quantization is not None),
        )

    def _counts(self, *, rounded: bool) -> WeightCounts:
        tops = {id(one) for top in self.tops for one in top.modules()}
        found = Counter[str]()
        for module in self.modules():
            numbers = sum(one.numel() for one in module.parameters(recurse=False))
            if not isinstance(module, nn.Linear):
                found["table" if isinstance(module, nn.Embedding) else "rest"] += numbers
                continue
            top, matrix = id(module) in tops, module.weight.numel()
            found["head" if top else "matrices"] += matrix
            found["head_outputs" if top else "outputs"] += module.out_features
            found["rest"] += numbers - matrix
        if self.borrowed_top is not None and rounded:
            outputs, inputs = self.borrowed_top
            found["head"] += outputs * inputs
            found["head_outputs"] += outputs
        return WeightCounts(**{name: found[name] for name in WeightCounts._fields})

    def leave_file(self) -> None:
        """Copy out of the file what is kept as it is; linear maps are packed from there later."""
        for module in self.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.clone())
            if not isinstance(module, nn.Linear):
                for parameter in module.parameters(recurse=False):
                    parameter.data = parameter.data.clone()


Serve = Callable[[Any, HeadServingContext], Proposer]
"""(a head in the target's type and on its device, where it is put to work) -> its drafter. Raises
ConfigError if the settings ask for what the head cannot do."""


@torch.no_grad()
def find_head(
    kind: type[DraftHead], serve: Serve, config: DrafterConfig, target: Target
) -> DrafterSpec:
    """The head that `config` names; the `load_spec` of each method's module calls this.

    Args:
        kind: its network.
        serve: puts it to work.
        config: the settings.
        target: what it must fit.

    Raises:
        ConfigError: a head of another kind or target, or without a mask to draft in parallel with.
        ModelError: its folder is missing, broken or of no kind that is run.
    """
    assert config.model is not None, "checked by DrafterConfig"
    path = find_model(config.model, revision=config.revision)
    folder = read_head(path)
    method = method_of(folder)
    if method != kind.method:
        where = "speculative_config.method"
        raise ConfigError(where, config.method, f"{method}, which {config.model} is")
    with about_gguf(path):
        if path.suffix == ".gguf" and "vocab_size" in folder.config:
            check_fits("vocabulary", folder.config["vocab_size"], target.shape.vocab_size)
        head = kind.read(folder, target.shape)
        keep_stored(head, folder.stored)
    if config.parallel_drafting and not head.parallel:
        allowed = f"False: {config.model} has no mask to draft in parallel with"
        raise ConfigError("speculative_config.parallel_drafting", True, allowed)
    return DrafterSpec(
        build=partial(_build, head, serve, config),
        head=head.memory(config.quantization, config.kv_cache_dtype),
        points=head.points,
    )


def _build(head: DraftHead, serve: Serve, config: DrafterConfig, engine: BuildContext) -> Proposer:
    """The drafter over a head, in the target's type and on its device."""
    features = engine.target.features
    assert features is not None, "kept since the engine was put together"
    like = engine.target.model.embedding
    head = head.to(like.device, like.dtype).eval().requires_grad_(False)
    head.leave_file()
    site = HeadServingContext(
        config=config,
        engine=engine,
        view=FeatureView(features, head.points),
        drafting=DraftSampling.of(config, engine.verifier),
        linears=HeadLinears(config.quantization, config.precision.x_bits),
        gaps=engine.target.gaps.get(config.label),
    )
    return serve(head, site)


def check_fits(name: str, given: int, wanted: int) -> None:
    """The head's size must be the target's."""
    if given != wanted:
        allowed = f"a head of this target, whose {name} is {wanted}"
        raise ConfigError("speculative_config.model", f"{name} {given}", allowed)


def check_ids(ids: Tensor, target: TargetFacts) -> None:
    """Raise CheckpointError unless these are ascending ids of the target."""
    ascending = bool((ids[1:] > ids[:-1]).all())
    if not ascending or int(ids[0]) < 0 or int(ids[-1]) >= target.vocab_size:
        allowed = f"offsets that give ascending ids below {target.vocab_size}"
        raise CheckpointError("d2t", f"ids {int(ids.min())} to {int(ids.max())}", allowed)
