"""From settings to an engine: finds the models, decides every "auto", builds the parts.

The only place that knows all the constructors.
"""

import logging
from pathlib import Path

import torch

from foretoken.checkpoint import find_model
from foretoken.config import EngineConfig, SpeculativeConfig, resolve
from foretoken.control.budget import FixedBudget
from foretoken.engine import Engine, EngineParts
from foretoken.hardware import Hardware
from foretoken.kv.pool import PagePool
from foretoken.models import LoadOptions
from foretoken.ops.reject import INVALID, LOSSY
from foretoken.proposers.base import Proposer
from foretoken.proposers.draft_model import DraftModelProposer, LastLogits
from foretoken.proposers.registry import create_proposer
from foretoken.proposers.shared_vocabulary import SharedVocabularyRunner
from foretoken.proposers.string_draft import StringDraftProposer
from foretoken.proposers.vocabularies import Bridge, Side, Way, bridge
from foretoken.runtime.rules import RuleSettings
from foretoken.runtime.runner import Runner
from foretoken.runtime.sampler import DraftSampler, Sampler
from foretoken.runtime.schedule_config import SchedulerConfig
from foretoken.runtime.scheduler import Scheduler
from foretoken.runtime.verifier import Verifier
from foretoken.shape import ModelShape
from foretoken.text_streams import TextStreams
from foretoken.tokenizer import Tokenizer

logger = logging.getLogger("foretoken")

_DEFAULT_DRAFTS = 5


def build_engine(config: EngineConfig, proposer: Proposer | None = None) -> Engine:
    """Load everything that `config` names and put it together.

    Args:
        config: what the user set.
        proposer: drafts instead of what `config.speculative_config` names; it is asked for
            num_speculative_tokens drafts, 5 if there is no speculative_config.

    Raises:
        ConfigError: settings that contradict each other or the model.
        ModelError: a model is missing, not supported, or broken on disk.
    """
    return _Assembly(config).engine(proposer)


class _Assembly:
    """What the parts are built from."""

    def __init__(self, config: EngineConfig) -> None:
        self.folder = find_model(config.model, revision=config.revision)
        self.shape = ModelShape.from_config(self.folder)
        self.speculative = config.speculative_config
        self.draft_folder = _draft_folder(self.speculative)
        self.tokenizer = _tokenizer(config, self.folder)
        self.draft_shape: ModelShape | None = None
        self.bridge = Bridge(Way.SAME)
        if self.draft_folder is not None:
            assert self.speculative is not None, "it names the draft"
            self.draft_shape = ModelShape.from_config(self.draft_folder)
            self.bridge = bridge(
                self.speculative,
                Side(self.shape.vocab_size, self.tokenizer),
                Side(self.draft_shape.vocab_size, _own_tokenizer(self.draft_folder)),
            )
        self.config = resolve(
            config,
            Hardware.detect(),
            self.shape,
            draft_shape=self.draft_shape,
            gpu_free_memory=_gpu_free_memory(),
        )
        logger.info(self.config.describe())
        self.pool = PagePool(self.config.num_pages, self.config.page_size)

    def engine(self, proposer: Proposer | None) -> Engine:
        config, shape = self.config, self.shape
        rule = self.speculative.rejection_sample_method if self.speculative else "auto"
        verifier = Verifier(shape.vocab_size, config.device, rule, _rule_settings(self.speculative))
        texts = TextStreams(self.tokenizer)
        if proposer is None:
            proposer = create_proposer(self.speculative, lambda: self._draft_model(verifier))
            drafts = self.speculative.num_speculative_tokens if self.speculative else 0
        else:
            given = self.speculative
            drafts = given.num_speculative_tokens if given else _DEFAULT_DRAFTS
        scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=config.max_model_len,
                enable_prefix_caching=config.user.enable_prefix_caching,
            ),
            self.pool,
            draft_budget=FixedBudget(drafts).budget,
            find_stop_string=texts.find_stop_string,
        )
        return Engine(
            EngineParts(
                config=config,
                tokenizer=self.tokenizer,
                scheduler=scheduler,
                proposer=proposer,
                runner=self._runner(self.folder, config.batch_invariant),
                verifier=verifier,
                texts=texts,
                vocab_size=shape.vocab_size,
                eos_token_ids=_eos_ids(shape, self.tokenizer),
            )
        )

    def _runner(self, folder: Path, batch_invariant: bool) -> Runner:
        options = LoadOptions(
            dtype=getattr(torch, self.config.dtype),
            device=torch.device(self.config.device),
            batch_invariant=batch_invariant,
            page_size=self.config.page_size,
            max_model_len=self.config.max_model_len,
        )
        return Runner.load(folder, options, num_pages=self.config.num_pages)

    def _draft_model(self, verifier: Verifier) -> Proposer:
        """The draft needs no invariance: what it proposes is checked either way."""
        assert self.speculative is not None, "asked for by a speculative_config"
        assert self.draft_folder is not None, "found in the constructor"
        assert self.draft_shape is not None, "read in the constructor"
        runner: LastLogits = self._runner(self.draft_folder, batch_invariant=False)
        sampler, pool = verifier.sampler, self.pool
        if self.bridge.shared is not None:
            size = self.shape.vocab_size
            runner = SharedVocabularyRunner(runner, self.bridge.shared, size, self.config.device)
        if self.bridge.way is Way.STRINGS:
            sampler = Sampler(self.draft_shape.vocab_size, self.config.device)
            pool = PagePool(self.config.num_pages, self.config.page_size)
        limit = self.draft_shape.max_position_embeddings
        proposer = DraftModelProposer(
            runner,
            DraftSampler(sampler, verifier.rule, self.speculative.draft_sample_method),
            pool.generation,
            max_model_len=min(limit, self.speculative.max_model_len or limit),
            max_num_batched_tokens=self.config.max_num_batched_tokens,
        )
        if self.bridge.encoders is None:
            return proposer
        return StringDraftProposer(proposer, pool, *self.bridge.encoders)


def _rule_settings(speculative: SpeculativeConfig | None) -> RuleSettings:
    """What the rules need; says so where the output will not be the model's own."""
    if speculative is None:
        return RuleSettings()
    rule = speculative.rejection_sample_method
    if rule in LOSSY:
        logger.warning("rejection_sample_method %r is LOSSY: it changes what the model says", rule)
    if rule in INVALID:
        logger.warning("rejection_sample_method %r: all output is INVALID, for timing only", rule)
    return RuleSettings(
        posterior_threshold=speculative.posterior_threshold,
        posterior_alpha=speculative.posterior_alpha,
        synthetic_rates=speculative.synthetic_rates,
    )


def _draft_folder(speculative: SpeculativeConfig | None) -> Path | None:
    if speculative is None or speculative.method != "draft_model":
        return None
    assert speculative.model is not None, "checked by SpeculativeConfig"
    return find_model(speculative.model, revision=speculative.revision)


def _tokenizer(config: EngineConfig, folder: Path) -> Tokenizer | None:
    """The named tokenizer; the model's own if it has one, else none: ids in, ids out."""
    if config.tokenizer is not None:
        return Tokenizer(find_model(config.tokenizer, revision=config.revision))
    return _own_tokenizer(folder)


def _own_tokenizer(folder: Path) -> Tokenizer | None:
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    return Tokenizer(folder) if any((folder / name).is_file() for name in names) else None


def _eos_ids(shape: ModelShape, tokenizer: Tokenizer | None) -> frozenset[int]:
    own = set(shape.eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        own.add(tokenizer.eos_token_id)
    return frozenset(token for token in own if token < shape.vocab_size)


def _gpu_free_memory() -> int | None:
    return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else None
