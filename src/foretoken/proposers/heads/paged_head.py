"""Heads with keys and values of their own: what EAGLE, EAGLE-3, P-EAGLE, DFlash and DSpark share.

They lie in the head's own tensors under the target's page tables. A runner knows pages, positions
and features; what is drafted for whom is the business of `KVProposer`, which asks a runner as its
`DraftNetwork`. How a pass attends, what it reads beside tokens and how further drafts follow is
told by its two kinds: `ChainRunner` in `chain_head.py`, `BlockRunner` in `dflash/runner.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from foretoken.backend import backend_for
from foretoken.kv.features import FeatureView
from foretoken.kv.store import KVStore
from foretoken.layers.embedding import Embedding
from foretoken.layers.rope import RotaryTable
from foretoken.ops.attention import Geometry
from foretoken.ops.attention.base import Attention
from foretoken.ops.linear import Linear
from foretoken.ops.logits import NEVER
from foretoken.ops.quantize_kv import kv_store_dtype
from foretoken.proposers.heads.base import DraftHead, HeadServingContext
from foretoken.proposers.heads.linears import HeadLinears, serve_linears
from foretoken.proposers.heads.parts import HeadShape
from foretoken.proposers.kv_progress import DraftLimits, DraftProgress, MadeOf
from foretoken.proposers.kv_proposer import DraftNetwork, KVProposer
from foretoken.shape import RopeShape
from foretoken.shape.memory_formula import KVPerToken


class PagedHead(DraftHead, ABC):
    """A head whose layers keep keys and values of each place.

    It is given how to attend: training (rows of a batch) and serving (pages) differ only in that.
    """

    @property
    @abstractmethod
    def layer_shape(self) -> HeadShape:
        """Sizes of its decoder layers."""

    @property
    def rope(self) -> RopeShape:
        """How positions turn queries and keys."""
        layer = self.layer_shape
        return RopeShape(theta=layer.rope_theta, rotary_dim=layer.head_dim)

    @property
    def target_ids(self) -> Tensor | None:
        """The target's id of each of its logits, int64 ascending; None: they are the target's."""
        return None

    embedding: Embedding
    """The target's table; unset where `embed_tokens` is the head's own."""

    @property
    def table(self) -> Embedding:
        """The token embeddings: its own, or the target's."""
        own = getattr(self, "embed_tokens", None)
        return self.embedding if own is None else Embedding(own.weight)

    def use_embedding(self, embedding: Embedding) -> None:
        """Embed tokens with the target's table, shared and not trained, unless it has its own."""
        if not hasattr(self, "embed_tokens"):
            self.embedding = embedding

    @property
    def makes_logits(self) -> bool:
        """Whether `logits` can be asked; else the target's head makes them."""
        return bool(self.tops)

    def logits(self, outputs: Tensor) -> Tensor:
        """Its own logits [..., Vd] from what a pass gave [..., D]."""
        raise AssertionError("the target's head makes the logits")

    def drop_matrices(self) -> None:
        """Free the linear maps that a compiled twin runs from now on."""

    def kept(self, kv_cache_dtype: str) -> KVPerToken:
        shape = self.layer_shape
        heads = 2 * shape.num_hidden_layers * shape.num_key_value_heads
        return KVPerToken(heads * shape.head_dim, shape.head_dim, kv_cache_dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedContext:
    """What a runner reads and writes, and whose head it borrows."""

    features: FeatureView
    """What the target's runner keeps at the network's points."""
    target_logits: Callable[[Tensor], Tensor]
    """float32 [N, V] of [N, D], for networks without a head."""
    vocab_size: int
    """Ids of the target."""
    num_pages: int
    """As many as the target has, under the same numbers."""
    page_size: int
    target_head: Linear | None = None
    """What does all of `target_logits` alone, if anything does."""
    kv_store_dtype: torch.dtype | None = None
    """How keys and values are stored; None: in the network's type."""
    make: HeadLinears | None = None
    """How matrices become linears; None: as they are."""

    @classmethod
    def of(cls, site: HeadServingContext) -> Self:
        """From where a head is put to work."""
        engine, target = site.engine, site.engine.target.model
        return cls(
            features=site.view,
            target_logits=target.draft_logits,
            vocab_size=engine.vocab_size,
            target_head=target.head if target.shape.logit_softcap is None else None,
            num_pages=engine.pool.num_pages,
            page_size=engine.target.page_size,
            kv_store_dtype=kv_store_dtype(site.config.kv_cache_dtype),
            make=site.linears if site.config.quantization else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerParts:
    """What a runner has around its network, for a compiled twin to be bound to."""

    features: FeatureView
    store: KVStore
    rotary: RotaryTable
    geometry: Geometry
    linears: HeadLinears
    target_head: Linear | None
    vocab_size: int

    def attention(self, window: int | None = None) -> Attention:
        """Attention over the store; with a window, only that far back."""
        geometry = replace(self.geometry, window=window)
        return backend_for(geometry.device).attention(geometry, batch_invariant=False)


class PagedRunner(DraftNetwork, ABC):
    """A network with keys and values of its own, its store of them, and the features it reads."""

    net: PagedHead
    kernels: Any
    """The network on compiled kernels; None: some part has none, and PyTorch runs it."""

    def __init__(self, net: PagedHead, context: PagedContext) -> None:
        """Run `net`, in the type and on the device of the features, with its embedding in place."""
        self.net = net.eval().requires_grad_(False)
        self.features, self.page_size = context.features, context.page_size
        shape, like = net.layer_shape, self.features.slots_SF
        self.device = like.device
        self.store = KVStore(
            shape,
            num_pages=context.num_pages + self.spare_pages(context),
            page_size=context.page_size,
            dtype=context.kv_store_dtype or like.dtype,
            device=like.device,
        )
        self.max_positions = shape.max_position_embeddings
        self._target_logits, self._vocab_size = context.target_logits, context.vocab_size
        self._rotary = RotaryTable(net.rope, max_positions=self.max_positions, like=like)
        parts = RunnerParts(
            features=self.features,
            store=self.store,
            rotary=self._rotary,
            geometry=Geometry(
                num_heads=shape.num_attention_heads,
                num_kv_heads=shape.num_key_value_heads,
                head_dim=shape.head_dim,
                page_size=context.page_size,
                dtype=like.dtype,
                device=like.device,
                kv_store_dtype=context.kv_store_dtype,
            ),
            linears=context.make or HeadLinears(),
            target_head=context.target_head,
            vocab_size=context.vocab_size,
        )
        self.kernels = self._compile(parts)
        if self.kernels is None and context.make is not None:
            serve_linears(net, net.tops, context.make)
        ids_N = net.target_ids
        whole = ids_N is None or len(ids_N) == self._vocab_size
        self._target_ids = None if whole else ids_N

    def spare_pages(self, context: PagedContext) -> int:
        """Pages of the store beside the target's."""
        return 0

    @abstractmethod
    def _compile(self, parts: RunnerParts) -> Any:
        """The network on kernels, or None if some part has none."""

    def own_logits(self, outputs_ND: Tensor) -> Tensor:
        """float32 logits over the network's own ids, [N, Vd]."""
        if not self.net.makes_logits:
            return self._target_logits(outputs_ND)
        return self.net.logits(outputs_ND).float()

    def spread(self, own_NV: Tensor) -> Tensor:
        """Logits over the target's vocabulary, [N, V]; ids that it cannot draft get -inf."""
        if self._target_ids is None:
            return own_NV
        full_NV = own_NV.new_full((own_NV.shape[0], self._vocab_size), NEVER)
        return full_NV.index_copy_(1, self._target_ids, own_NV)

    def logits(self, outputs_ND: Tensor) -> Tensor:
        """float32 logits over the target's vocabulary, [N, V], of what a pass gave."""
        return self.spread(self.own_logits(outputs_ND))


def serve_paged(
    runner: PagedRunner, site: HeadServingContext, made_of: MadeOf, *, enters: bool = True
) -> KVProposer:
    """The drafter over a runner.

    Args:
        runner: of `PagedContext.of(site)`.
        site: where its head is put to work.
        made_of: what its keys and values are made of.
        enters: as in `DraftLimits`.
    """
    if runner.kernels is not None:
        runner.net.drop_matrices()
    config, engine = site.config, site.engine
    longest = config.max_model_len or engine.target.model.shape.max_position_embeddings
    limits = DraftLimits(
        max_model_len=min(longest, runner.max_positions),
        max_num_batched_tokens=engine.max_num_batched_tokens,
        enters=enters,
    )
    progress = DraftProgress(
        engine.pool.generation,
        runner.page_size,
        limits,
        made_of=made_of,
        gaps=site.gaps,
        pages=engine.draft_pages(config.label, runner.store),
    )
    return KVProposer(runner.net.method, runner, site.drafting, progress)
