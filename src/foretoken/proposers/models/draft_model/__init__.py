"""Drafting with a smaller language model: chains, trees, and text where the tokenizers differ."""

from functools import partial

from foretoken.config import DrafterConfig
from foretoken.kv.pool import PagePool
from foretoken.proposers.base import Proposer
from foretoken.proposers.method import BuildContext, DrafterSpec, Target
from foretoken.proposers.models.draft_model.steps import ModelNetwork
from foretoken.proposers.models.draft_model.strings import StringDraftProposer
from foretoken.proposers.models.language import DraftLanguageModel, ModelOnDisk
from foretoken.proposers.vocab.shared import SharedVocabularyRunner
from foretoken.proposers.vocab.translation import Translation, Vocabulary, translation
from foretoken.runtime.sampler import Sampler
from foretoken.text.tokenizer import Tokenizer


def load_spec(config: DrafterConfig, target: Target) -> DrafterSpec:
    """The draft model of `config`, and how its vocabulary relates to the target's.

    Raises:
        ConfigError: the vocabularies differ and no way to translate was set.
        ModelError: the model is missing or not supported.
    """
    disk = ModelOnDisk.find(config)
    wanted = Vocabulary(target.shape.vocab_size, target.tokenizer)
    own = Vocabulary(disk.shape.vocab_size, Tokenizer.of_folder(disk.folder))
    words = translation(config, wanted, own)
    return DrafterSpec(build=partial(_build, disk, words), model=disk.memory)


def _build(disk: ModelOnDisk, words: Translation, context: BuildContext) -> Proposer:
    loaded = disk.load(context)
    if words.encoders is not None:
        # The draft goes on with text in its own tokens: its positions are not the target's, so it
        # has pages of its own, and a sampler over its own ids.
        pool = PagePool(context.pool.num_pages, context.pool.page_size)
        sampler = Sampler(disk.shape.vocab_size, context.device)
        inner = disk.drafter(ModelNetwork(loaded), loaded, context, pool=pool, sampler=sampler)
        return StringDraftProposer(inner, pool, *words.encoders)
    runner: DraftLanguageModel = loaded
    if words.shared is not None:
        runner = SharedVocabularyRunner(runner, words.shared, context.vocab_size, context.device)
    return disk.drafter(ModelNetwork(runner), loaded, context)
