"""PARD: a language model that drafts all tokens in one pass over mask tokens.

The pass feeds every committed token the model has not seen and then one mask token per further
draft; the logits at the newest token and at the masks give the drafts. The masks' keys and values
are overwritten by the next pass. The KV lies under the target's page tables.

Source: An et al. 2025 (arXiv 2504.18583); checkpoints name the mask as `pard_token`.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from foretoken.config import DrafterConfig
from foretoken.errors import CheckpointError, ConfigError
from foretoken.models.tensors import Draft, SpanLayout
from foretoken.proposers.base import Context, Proposer
from foretoken.proposers.chain import ChainSteps, draft_chain
from foretoken.proposers.confidence import Confidence
from foretoken.proposers.method import BuildContext, FoundDrafter, Target
from foretoken.proposers.models.language import ModelOnDisk
from foretoken.proposers.progress import DraftProgress, Stretches
from foretoken.proposers.vocab.compare import Vocabulary, translation
from foretoken.runtime.batch import Span
from foretoken.runtime.draft_sampler import DraftSampler
from foretoken.runtime.runner import Runner
from foretoken.shape.fields import read_json
from foretoken.text.tokenizer import Tokenizer


def find(config: DrafterConfig, target: Target) -> FoundDrafter:
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
    return FoundDrafter(build=partial(_build, disk, _mask_token(disk)), model=disk.memory)


def _build(disk: ModelOnDisk, mask_token_id: int, context: BuildContext) -> Proposer:
    config, verifier, runner = disk.config, context.verifier, disk.load(context)
    return ParallelProposer(
        runner,
        DraftSampler(verifier.sampler, verifier.rule, config.draft_sample_method),
        DraftProgress(
            context.pool.generation,
            runner.page_size,
            disk.limits(context.max_num_batched_tokens),
        ),
        mask_token_id=mask_token_id,
        confidence=Confidence.of(config),
    )


def _mask_token(disk: ModelOnDisk) -> int:
    """The token that the model was trained to see in place of what it guesses."""
    token = read_json(disk.folder / "config.json").get("pard_token")
    if not isinstance(token, int) or not 0 <= token < disk.shape.vocab_size:
        allowed = f"a pard_token below {disk.shape.vocab_size}: a draft trained as PARD"
        raise CheckpointError("config.json pard_token", token, allowed)
    return token


class ParallelProposer(Proposer):
    """Drafts with a masked language model that shares the target's vocabulary and page tables."""

    name = "parallel"

    def __init__(
        self,
        runner: Runner,
        sampler: DraftSampler,
        progress: DraftProgress,
        *,
        mask_token_id: int,
        confidence: Confidence | None = None,
    ) -> None:
        """Draft with `runner`.

        Args:
            runner: the draft model over its own KV store.
            sampler: turns logits into tokens and, under rejection, distributions.
            progress: the book of the draft's keys and values, and how far they may reach.
            mask_token_id: fed where a token is to be guessed.
            confidence: when to stop before the budget; default: never.
        """
        self._runner = runner
        self._sampler = sampler
        self._progress = progress
        self._mask = mask_token_id
        self._confidence = confidence
        self.gain = None if confidence is None else confidence.gain

    @torch.inference_mode()
    def propose(self, context: Context) -> Draft:
        """Drafts of the spans that want one."""
        wanted = [i for i in context.wanted if self._progress.fits(context.spans[i])]
        if not wanted:
            return Draft.empty(len(context.spans))
        spans = [context.spans[i] for i in wanted]
        steps = _MaskSteps(self._pass(spans), [span.draft_budget for span in spans])
        drafted = draft_chain(steps, self._sampler, spans, self._confidence)
        for span in spans:
            self._progress.record(span.sequence, span.sequence.num_tokens)
        return drafted.spread(wanted, len(context.spans), self.name)

    def release(self, request_id: str) -> None:
        """Forget how far a request's draft KV reached."""
        self._progress.release(request_id)
        self._sampler.release(request_id)

    def _pass(self, spans: list[Span]) -> Tensor:
        """Logits of all drafts, span after span, [sum of budgets, V]."""

        def feed(index: int, start: int, end: int) -> None:
            self._feed([spans[index]], Stretches([start], [end]), masks=[0])

        fed = self._progress.caught_up(spans, feed)
        return self._feed(spans, fed, masks=[span.draft_budget - 1 for span in spans])

    def _feed(self, spans: Sequence[Span], fed: Stretches, masks: Sequence[int]) -> Tensor:
        """Feed a stretch of each span and its masks; logits from its last token on."""
        layouts, ids, rows, at = [], [], list[int](), 0
        for span, start, end, extra in zip(spans, fed.starts, fed.ends, masks, strict=True):
            sequence = span.sequence
            count = end - start + extra
            layouts.append(
                SpanLayout(start=start, num_tokens=count, page_table=sequence.page_table)
            )
            ids.append([*sequence.token_ids[start:end], *[self._mask] * extra])
            at += count
            rows.extend(range(at - extra - 1, at))
        return self._runner.forward(layouts, ids, rows).logits_RV


class _MaskSteps(ChainSteps):
    """Reads rows of logits that are all there."""

    def __init__(self, logits_KV: Tensor, budgets: list[int]) -> None:
        self._logits_KV = logits_KV
        self._starts = [sum(budgets[:i]) for i in range(len(budgets))]

    def first(self) -> Tensor:
        return self._logits_KV[self._starts]

    def after(self, active: list[int], drafted: list[list[int]]) -> Tensor:
        rows = [self._starts[i] + len(tokens) for i, tokens in zip(active, drafted, strict=True)]
        return self._logits_KV[rows]
