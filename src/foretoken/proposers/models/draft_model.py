"""A smaller language model drafts, token by token or level by level, on the target's page tables.

It feeds every committed token it has not seen in one pass (the newest one, after full acceptance
two, after a pause all that were missed, after a prefix hit only pages it never filled), then one
token per further draft. Of a tree, each pass feeds all nodes so far that have children, each on its
own branch, and takes the logits of the newest level: as many passes as for a chain of the tree's
depth.

Source: Leviathan et al. 2023 and Chen et al. 2023.
"""

from collections.abc import Sequence as Seq
from functools import partial
from typing import final

from torch import Tensor

from foretoken.config import DrafterConfig
from foretoken.kv.pool import PagePool
from foretoken.models.tensors import RolledOut, RolloutPlan, SpanLayout
from foretoken.proposers.base import Proposer
from foretoken.proposers.kv_progress import Stretches
from foretoken.proposers.kv_proposer import DraftNetwork
from foretoken.proposers.method import BuildContext, DrafterSpec, Target
from foretoken.proposers.models.language import DraftLanguageModel, ModelOnDisk
from foretoken.proposers.models.strings import StringDraftProposer
from foretoken.proposers.steps import DraftSteps
from foretoken.proposers.tree import SpanTree
from foretoken.proposers.vocab.shared import SharedVocabularyRunner
from foretoken.proposers.vocab.translation import Translation, Vocabulary, translation
from foretoken.runtime.batch import Span
from foretoken.runtime.sampler import Sampler
from foretoken.runtime.sequence import Sequence
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


@final
class ModelNetwork(DraftNetwork):
    """A draft model over its own KV store: chains or trees, a token a pass."""

    def __init__(self, runner: DraftLanguageModel) -> None:
        self.runner = runner

    def steps(self, spans: list[Span], fed: Stretches, depths: list[int]) -> DraftSteps:
        return ModelSteps(self.runner, spans, fed)

    def feed(self, sequences: Seq[Sequence], fed: Stretches) -> None:
        self.runner.forward_last(fed.layouts(sequences), fed.tokens(sequences))


@final
class ModelSteps(DraftSteps):
    """One pass over what the draft has not seen, then one token of each sequence a pass."""

    rolls_out = True
    keeps_drafts = True

    def __init__(self, runner: DraftLanguageModel, spans: list[Span], fed: Stretches) -> None:
        """Nothing is run yet; `fed` is what the model has not seen of the spans."""
        self.runner, self._fed = runner, fed
        self.sequences = [span.sequence for span in spans]

    def first(self) -> Tensor:
        return self.runner.forward_last(*self._unseen())

    def after(self, active: list[int], drafted: list[list[int]]) -> Tensor:
        return self.runner.forward_last(*self._newest(active, drafted))

    def roll_out(
        self, active: list[int], drafted: list[list[int]], plan: RolloutPlan
    ) -> RolledOut | None:
        # The first call also feeds what the draft has not seen: mostly one or two tokens.
        places = self._newest(active, drafted) if drafted[0] else self._unseen()
        return self.runner.roll_out(*places, plan)

    def after_nodes(self, trees: Seq[SpanTree]) -> Tensor:
        # Inner nodes are fed again and again.
        layouts, ids = [], []
        rows: list[int] = []
        at = 0
        for tree in trees:
            growth, inner = tree.growth, tree.growth.inner
            sequence = self.sequences[tree.index]
            place = {node: i for i, node in enumerate(inner)}
            layouts.append(
                SpanLayout(
                    start=sequence.num_tokens,
                    num_tokens=len(inner),
                    page_table=sequence.page_table,
                    paths=tuple(tuple(place[n] for n in growth.path(node)) for node in inner),
                )
            )
            ids.append([growth.tokens[node] for node in inner])
            rows.extend(at + place[node] for node in growth.frontier)
            at += len(inner)
        return self.runner.logits_at(layouts, ids, rows)

    def _unseen(self) -> tuple[list[SpanLayout], list[list[int]]]:
        return self._fed.layouts(self.sequences), self._fed.tokens(self.sequences)

    def _newest(
        self, active: list[int], drafted: list[list[int]]
    ) -> tuple[list[SpanLayout], list[list[int]]]:
        """Where the newest drafted token of each span stands, and what it is."""
        sequences = [self.sequences[i] for i in active]
        layouts = [
            SpanLayout(
                start=sequence.num_tokens + len(tokens) - 1,
                num_tokens=1,
                page_table=sequence.page_table,
            )
            for sequence, tokens in zip(sequences, drafted, strict=True)
        ]
        return layouts, [tokens[-1:] for tokens in drafted]
