"""From a config's heads to drafters: EAGLE, EAGLE-3 and P-EAGLE, MLP speculators, Medusa.

Two steps, as for draft models: `find_heads` reads what is on disk, since the size of the KV cache
depends on it, and `build_head` puts a network to work on the target's runner.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from foretoken.checkpoint import find_model
from foretoken.config import SpeculativeConfig
from foretoken.config.methods import find_method
from foretoken.config.model_memory import HeadMemory
from foretoken.errors import ConfigError
from foretoken.kv.features import FeatureView
from foretoken.kv.pool import PagePool
from foretoken.models.decoder import Decoder
from foretoken.ops.linear import KernelLinear, Linear
from foretoken.ops.stored_kv import kept_dtype
from foretoken.proposers.base import Proposer
from foretoken.proposers.confidence import Confidence
from foretoken.proposers.heads.base import LoadedHead
from foretoken.proposers.heads.eagle import Eagle
from foretoken.proposers.heads.eagle3.network import Eagle3
from foretoken.proposers.heads.files import read_head
from foretoken.proposers.heads.formats import load_head
from foretoken.proposers.heads.linears import HeadLinears, serve_linears
from foretoken.proposers.heads.medusa import Medusa
from foretoken.proposers.heads.memory import head_memory, own_memory, tops_of
from foretoken.proposers.heads.mlp import MLPSpeculator
from foretoken.proposers.heads.paged import EagleManner, EagleProposer
from foretoken.proposers.heads.runner import HeadPages, HeadRunner
from foretoken.proposers.heads.stateless import (
    MedusaSteps,
    MLPSteps,
    StatelessManner,
    StatelessProposer,
)
from foretoken.proposers.heads.stateless_kernels import compile_medusa, compile_mlp
from foretoken.proposers.heads.trees import DepthSteps, MLPTreeSteps
from foretoken.proposers.progress import DraftLimits, DraftProgress
from foretoken.proposers.static_tree import StaticTree
from foretoken.proposers.tree import TreeShape, TreeSteps
from foretoken.proposers.tree_shapes import tree_shape
from foretoken.runtime.batch import Span
from foretoken.runtime.draft_sampler import DraftSampler
from foretoken.runtime.runner import Runner
from foretoken.runtime.verifier import Verifier
from foretoken.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundHead:
    """A head as found on disk."""

    config: SpeculativeConfig
    head: LoadedHead

    @property
    def memory(self) -> HeadMemory:
        """What it will keep."""
        return head_memory(self.head.net, self.config)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSurroundings:
    """What the engine gives its heads."""

    target: Runner
    """Already keeping the features of all heads."""
    verifier: Verifier
    pool: PagePool
    """The target's pages, which heads share."""
    max_num_batched_tokens: int


def find_heads(speculative: SpeculativeConfig | None, target: ModelShape) -> dict[str, FoundHead]:
    """The heads of all drafters, by name.

    Raises:
        ConfigError: a head is of another kind than its method, or of another target.
        ModelError: its folder is missing, broken or of no kind that is run.
    """
    found = {}
    for one in () if speculative is None else speculative.each:
        if find_method(one.method).drafts_with != "head":
            continue
        assert one.model is not None, "checked by SpeculativeConfig"
        head = load_head(read_head(find_model(one.model, revision=one.revision)), target)
        if head.kind != one.method:
            where = "speculative_config.method"
            raise ConfigError(where, one.method, f"{head.kind}, which {one.model} is")
        if one.parallel_drafting and not head.parallel:
            allowed = f"False: {one.model} has no mask to draft in parallel with"
            raise ConfigError("speculative_config.parallel_drafting", True, allowed)
        found[one.label] = FoundHead(config=one, head=head)
    return found


def feature_points(heads: Iterable[FoundHead]) -> tuple[int, ...]:
    """Every point at which some head reads hidden states, once each."""
    return tuple(dict.fromkeys(point for found in heads for point in found.head.points))


def build_head(found: FoundHead, around: HeadSurroundings) -> Proposer:
    """The drafter of one head, in the target's type and on its device."""
    target, config, net = around.target, found.config, found.head.net
    features = target.features
    assert features is not None, "kept since the engine was put together"
    like = target.model.embedding_VD
    net = net.to(like.device, like.dtype).eval().requires_grad_(False)
    own_memory(net)
    sampler = DraftSampler(
        around.verifier.sampler, around.verifier.rule, config.draft_sample_method
    )
    view = FeatureView(features, found.head.points)
    make = HeadLinears(config.quantization)
    shape = tree_shape(config)
    confidence = Confidence.of(config)
    if isinstance(net, MLPSpeculator | Medusa):
        serve_linears(net, tops_of(net), make)
        top = _target_head(net, target, make)
        return StatelessProposer(
            config.method,
            _stateless_manner(net, top, view, shape),
            features=view,
            page_size=target.page_size,
            sampler=sampler,
            confidence=confidence,
        )
    assert isinstance(net, Eagle | Eagle3), type(net)
    net.use_embedding(like)
    limit = config.max_model_len or target.model.shape.max_position_embeddings
    runner = HeadRunner(
        net,
        view,
        target_logits=target.model.logits,
        vocab_size=target.model.shape.vocab_size,
        pages=HeadPages(
            num_pages=around.pool.num_pages,
            page_size=target.page_size,
            kv_dtype=kept_dtype(config.kv_cache_dtype),
        ),
        make=make if config.quantization else None,
    )
    if isinstance(net, Eagle3) and runner.kernels is not None:
        net.drop_matrices()
    return EagleProposer(
        config.method,
        runner,
        sampler,
        DraftProgress(around.pool.generation, target.page_size),
        limits=DraftLimits(
            max_model_len=limit,
            max_num_batched_tokens=around.max_num_batched_tokens,
            padded_to=config.padded_to,
        ),
        manner=EagleManner(
            parallel=found.head.parallel,
            mask_token_id=found.head.mask_token_id,
            shape=shape,
            confidence=confidence,
        ),
    )


@dataclass(frozen=True, slots=True)
class _TargetHead:
    """What makes logits of the states of heads that have none of their own."""

    logits: Callable[[Tensor], Tensor]
    linear: KernelLinear | None
    """The kernel that does all of it; None: there is none."""


def _target_head(net: MLPSpeculator | Medusa, target: Runner, make: HeadLinears) -> _TargetHead:
    """The target's own, or a rounded copy if the network borrows it and is quantized.

    Raises:
        ConfigError: the target's head cannot be copied.
    """
    model = target.model
    linear = model.head if isinstance(model, Decoder) else None
    logits: Callable[[Tensor], Tensor] = model.logits
    borrows = isinstance(net, Medusa) and net.shape.share_head
    if borrows and make.quantization is not None:
        if not model.shape.tie_word_embeddings or model.shape.logit_softcap is not None:
            allowed = "None: this head uses the target's, which is not to be had in other bits"
            raise ConfigError("speculative_config.quantization", make.quantization, allowed)
        linear = make(model.embedding_VD, top=True)
        logits = _Copy(linear)
    if isinstance(linear, KernelLinear) and model.shape.logit_softcap is None:
        return _TargetHead(logits, linear)
    return _TargetHead(logits, None)


@dataclass(frozen=True, slots=True)
class _Copy:
    """Of the target's head."""

    linear: Linear

    def __call__(self, states_RD: Tensor) -> Tensor:
        """float32 logits [R, V]."""
        return self.linear(states_RD).float()


def _stateless_manner(
    net: MLPSpeculator | Medusa, top: _TargetHead, view: FeatureView, shape: TreeShape | None
) -> StatelessManner:
    """How such a head drafts.

    Raises:
        ConfigError: the trees are deeper than the head.
    """
    most = net.shape.n_predict if isinstance(net, MLPSpeculator) else net.shape.medusa_num_heads
    if shape is not None and shape.depth > most:
        field = "choices" if isinstance(shape, StaticTree) else "tree_depth"
        allowed = f"at most {most}: the head drafts no further"
        raise ConfigError(f"speculative_config.{field}", f"a depth of {shape.depth}", allowed)
    if isinstance(net, MLPSpeculator):
        return StatelessManner(
            chains=partial(MLPSteps, net),
            trees=partial(MLPTreeSteps, net),
            most=most,
            shape=shape,
            kernels=compile_mlp(net, view.rows_SF),
        )
    chains = partial(MedusaSteps, net, top.logits)

    def trees(hidden_BD: Tensor, spans: list[Span]) -> TreeSteps:
        return DepthSteps(chains(hidden_BD, spans).at, len(spans))

    kernels = compile_medusa(net, view.rows_SF, top.linear)
    return StatelessManner(chains=chains, trees=trees, most=most, shape=shape, kernels=kernels)
