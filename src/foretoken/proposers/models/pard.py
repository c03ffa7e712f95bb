"""PARD: a language model that drafts all tokens in one pass over mask tokens.

The pass feeds every committed token the model has not seen and then one mask token per further
draft; the logits at the newest token and at the masks give the drafts. The masks' keys and values
are overwritten by the next pass. The KV lies under the target's page tables.

Source: An et al. 2025 (arXiv 2504.18583); checkpoints name the mask as `pard_token`.
"""

from collections.abc import Sequence as Seq
from functools import partial
from typing import final

from torch import Tensor

from foretoken.config import DrafterConfig
from foretoken.errors import CheckpointError, ConfigError
from foretoken.models.tensors import SpanLayout
from foretoken.proposers.base import Proposer
from foretoken.proposers.confidence import Confidence
from foretoken.proposers.kv_progress import DraftProgress, Stretches
from foretoken.proposers.kv_proposer import DraftNetwork, KVProposer, KVSteps
from foretoken.proposers.method import BuildContext, DrafterSpec, Target
from foretoken.proposers.models.language import ModelOnDisk
from foretoken.proposers.tree import TreeSteps
from foretoken.proposers.vocab.translation import Vocabulary, translation
from foretoken.runtime.batch import Span
from foretoken.runtime.draft_sampler import DraftSampler
from foretoken.runtime.runner import Runner
from foretoken.runtime.sequence import Sequence
from foretoken.shape.fields import read_json
from foretoken.text.tokenizer import Tokenizer


def load_spec(config: DrafterConfig, target: Target) -> DrafterSpec:
    """The model of `config`.

    Raises:
        ConfigError: it has another vocabulary than the target.
        ModelError: it is missing, not supported, or was not trained as PARD.
    """
    disk = ModelOnDisk.find(config)
    wanted = Vocabulary(target.shape.vocab_size, target.tokenizer)
    own = Vocabulary(disk.shape.vocab_size, Tokenizer.of_folder(disk.folder))
    words = translation(config, wanted, own)
    if words.shared is not None:
        allowed = f"a {config.method} draft of the target's {wanted.vocab_size} ids"
        raise ConfigError("speculative_config.model", f"{disk.shape.vocab_size} ids", allowed)
    return DrafterSpec(build=partial(_build, disk, _mask_token(disk)), model=disk.memory)


def _build(disk: ModelOnDisk, mask_token_id: int, context: BuildContext) -> Proposer:
    config, verifier, runner = disk.config, context.verifier, disk.load(context)
    limits = disk.limits(context.max_num_batched_tokens)
    pages = context.draft_pages(config.label, runner)
    progress = DraftProgress(context.pool.generation, runner.page_size, limits, pages=pages)
    return KVProposer(
        config.method,
        MaskNetwork(runner, mask_token_id),
        DraftSampler(verifier.sampler, verifier.rule, config.draft_sample_method),
        progress,
        confidence=Confidence.of(config),
    )


def _mask_token(disk: ModelOnDisk) -> int:
    """The token that the model was trained to see in place of what it guesses."""
    token = read_json(disk.folder / "config.json").get("pard_token")
    if not isinstance(token, int) or not 0 <= token < disk.shape.vocab_size:
        allowed = f"a pard_token below {disk.shape.vocab_size}: a draft trained as PARD"
        raise CheckpointError("config.json pard_token", token, allowed)
    return token


@final
class MaskNetwork(DraftNetwork):
    """A model that was trained to see masks in place of what it guesses."""

    drafts_blocks = True

    def __init__(self, runner: Runner, mask_token_id: int) -> None:
        """Draft with `runner`, over its own KV store."""
        self._runner, self._mask = runner, mask_token_id

    def steps(self, spans: list[Span], fed: Stretches) -> KVSteps:
        """One pass with a mask for each draft but the first."""
        return MaskSteps(self, spans, fed)

    def feed(self, sequences: Seq[Sequence], fed: Stretches) -> None:
        """No masks; the logits are thrown away."""
        self.run(sequences, fed, [0] * len(sequences))

    def run(self, sequences: Seq[Sequence], fed: Stretches, masks: Seq[int]) -> Tensor:
        """Feed a stretch of each sequence and its masks; logits from its last token on."""
        layouts, ids, rows, at = [], [], list[int](), 0
        each = zip(sequences, fed.starts, fed.ends, masks, strict=True)
        for sequence, start, end, extra in each:
            count = end - start + extra
            layouts.append(
                SpanLayout(start=start, num_tokens=count, page_table=sequence.page_table)
            )
            ids.append([*sequence.token_ids[start:end], *[self._mask] * extra])
            at += count
            rows.extend(range(at - extra - 1, at))
        return self._runner.forward(layouts, ids, rows).logits_RV


@final
class MaskSteps(KVSteps):
    """Reads rows of logits that one pass gave."""

    def __init__(self, network: MaskNetwork, spans: list[Span], fed: Stretches) -> None:
        """Nothing is run yet; `fed` is what the network has not seen of the spans."""
        self._network, self._fed, self._spans = network, fed, spans
        budgets = [span.draft_budget for span in spans]
        self._starts = [sum(budgets[:i]) for i in range(len(budgets))]
        self._logits_KV: Tensor

    def trees(self) -> TreeSteps:
        """It drafts none: the table of methods says so, and settings that ask are refused."""
        raise AssertionError("trees are refused by the settings")

    def first(self) -> Tensor:
        """Run the pass; logits after the newest tokens."""
        masks = [span.draft_budget - 1 for span in self._spans]
        sequences = [span.sequence for span in self._spans]
        self._logits_KV = self._network.run(sequences, self._fed, masks)
        return self._logits_KV[self._starts]

    def after(self, active: list[int], drafted: list[list[int]]) -> Tensor:
        """Logits at the next mask, whatever was drafted before."""
        rows = [self._starts[i] + len(tokens) for i, tokens in zip(active, drafted, strict=True)]
        return self._logits_KV[rows]
