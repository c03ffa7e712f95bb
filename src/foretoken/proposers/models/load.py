"""From a config's draft models to drafters: where they are, how their words map to the target's.

Knows every way a draft model can be put to work; not how an engine is put together. Two steps:
`find_draft_models` reads what is on disk, since the size of the KV cache depends on it, and
`build_draft_model` loads the weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from foretoken.checkpoint import find_model
from foretoken.config import SpeculativeConfig
from foretoken.config.methods import find_method
from foretoken.config.quantization import AUTO
from foretoken.errors import CheckpointError
from foretoken.kv.pool import PagePool
from foretoken.proposers.base import Proposer
from foretoken.proposers.confidence import Confidence
from foretoken.proposers.models.draft_model import DraftModelProposer, LastLogits
from foretoken.proposers.models.draft_tree import TreeDraftProposer
from foretoken.proposers.models.parallel import ParallelProposer
from foretoken.proposers.models.quantization import load_cheaper
from foretoken.proposers.models.string_draft import StringDraftProposer
from foretoken.proposers.progress import DraftLimits, DraftProgress
from foretoken.proposers.tree_shapes import tree_shape
from foretoken.proposers.vocab.compare import Bridge, Side, Way, bridge
from foretoken.proposers.vocab.shared import SharedVocabularyRunner
from foretoken.runtime.draft_sampler import DraftSampler
from foretoken.runtime.runner import Runner
from foretoken.runtime.sampler import Sampler
from foretoken.runtime.verifier import Verifier
from foretoken.shape import ModelShape
from foretoken.shape.fields import read_json
from foretoken.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModel:
    """A draft model as found on disk."""

    config: SpeculativeConfig
    folder: Path
    shape: ModelShape
    bridge: Bridge


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the engine gives its draft models."""

    load: Callable[[Path, str | None, str], Runner]
    """A model, quantized so, over a KV store of its own, kept so, with as many pages as the
    target's."""
    verifier: Verifier
    pool: PagePool
    """The target's pages, which the drafts share."""
    vocab_size: int
    """Of the target."""
    device: str
    max_num_batched_tokens: int


def find_draft_models(speculative: SpeculativeConfig | None, target: Side) -> dict[str, DraftModel]:
    """The draft models of all drafters, by name.

    Raises:
        ConfigError: the vocabularies differ and no way to bridge them was set.
        ModelError: a model is missing or not supported.
    """
    found = {}
    for one in () if speculative is None else speculative.each:
        if find_method(one.method).drafts_with != "model":
            continue
        assert one.model is not None, "checked by SpeculativeConfig"
        folder = find_model(one.model, revision=one.revision)
        shape = ModelShape.from_config(folder)
        side = Side(shape.vocab_size, Tokenizer.of_folder(folder))
        found[one.label] = DraftModel(
            config=one, folder=folder, shape=shape, bridge=bridge(one, target, side)
        )
    return found


def _mask_token(draft: DraftModel) -> int:
    """The token that a parallel draft was trained to see in place of what it guesses."""
    config = read_json(draft.folder / "config.json")
    token = config.get("pard_token")
    if not isinstance(token, int) or not 0 <= token < draft.shape.vocab_size:
        allowed = f"a pard_token below {draft.shape.vocab_size}: a draft trained as PARD"
        raise CheckpointError("config.json pard_token", token, allowed)
    return token


def _load(draft: DraftModel, around: Surroundings) -> Runner:
    kept = draft.config.kv_cache_dtype
    if draft.config.quantization == AUTO:
        return load_cheaper(lambda folder, bits: around.load(folder, bits, kept), draft.folder)
    return around.load(draft.folder, draft.config.quantization, kept)


def build_draft_model(draft: DraftModel, around: Surroundings) -> Proposer:
    """Load a draft model. It needs no invariance: what it proposes is checked either way."""
    config, limit = draft.config, draft.shape.max_position_embeddings
    runner: LastLogits = _load(draft, around)
    sampler, pool = around.verifier.sampler, around.pool
    if draft.bridge.shared is not None:
        runner = SharedVocabularyRunner(
            runner, draft.bridge.shared, around.vocab_size, around.device
        )
    if draft.bridge.way is Way.STRINGS:
        sampler = Sampler(draft.shape.vocab_size, around.device)
        pool = PagePool(pool.num_pages, pool.page_size)
    limits = DraftLimits(
        max_model_len=min(limit, config.max_model_len or limit),
        max_num_batched_tokens=around.max_num_batched_tokens,
        padded_to=config.padded_to,
    )
    drafts = DraftSampler(sampler, around.verifier.rule, config.draft_sample_method)
    confidence = Confidence.of(config)
    if config.method == "parallel":
        assert isinstance(runner, Runner), "another vocabulary is refused by SpeculativeConfig"
        return ParallelProposer(
            runner,
            drafts,
            DraftProgress(pool.generation, runner.page_size),
            mask_token_id=_mask_token(draft),
            limits=limits,
            confidence=confidence,
        )
    proposer = DraftModelProposer(
        runner,
        drafts,
        pool.generation,
        limits=limits,
        confidence=confidence,
    )
    shape = tree_shape(config)
    if shape is not None:
        return TreeDraftProposer(proposer, runner, drafts, shape)
    if draft.bridge.encoders is None:
        return proposer
    return StringDraftProposer(proposer, pool, *draft.bridge.encoders)
