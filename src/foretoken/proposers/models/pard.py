"""PARD: a language model that drafts all tokens in one pass over mask tokens.

The pass feeds every committed token the model has not seen and then one mask token per further
draft; the logits at the newest token and at the masks give the drafts. The masks' keys and values
are overwritten by the next pass. The KV lies under the target's page tables.

Source: An et al. 2025 (arXiv 2504.18583); checkpoints name the mask as `pard_token`.
"""

from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from typing import final

from torch import Tensor

from foretoken.config import DrafterConfig
from foretoken.errors import CheckpointError, ConfigError
from foretoken.proposers.base import Proposer
from foretoken.proposers.kv_progress import Stretches
from foretoken.proposers.kv_proposer import DraftNetwork
from foretoken.proposers.method import BuildContext, DrafterSpec, Target
from foretoken.proposers.models.language import ModelOnDisk
from foretoken.proposers.steps import DepthSteps, DraftSteps
from foretoken.proposers.vocab.translation import Vocabulary, translation
from foretoken.runtime.batch import Span
from foretoken.runtime.runner import Runner
from foretoken.runtime.sequence import Sequence
from foretoken.shape.fields import read_json
from foretoken.text.tokenizer import Tokenizer


def load_spec(config: DrafterConfig, target: Target) -> DrafterSpec:
    """The model of `config`. Raises ConfigError: it has another vocabulary than the target;
    ModelError: it is missing, not supported, or was not trained as PARD."""
    disk = ModelOnDisk.find(config)
    wanted = Vocabulary(target.shape.vocab_size, target.tokenizer)
    own = Vocabulary(disk.shape.vocab_size, Tokenizer.of_folder(disk.folder))
    words = translation(config, wanted, own)
    if words.shared is not None:
        allowed = f"a {config.method} draft of the target's {wanted.vocab_size} ids"
        raise ConfigError("speculative_config.model", f"{disk.shape.vocab_size} ids", allowed)
    return DrafterSpec(build=partial(_build, disk, _mask_token(disk)), model=disk.memory)


def _build(disk: ModelOnDisk, mask_token_id: int, context: BuildContext) -> Proposer:
    loaded = disk.load(context)
    return disk.drafter(MaskNetwork(loaded, mask_token_id), loaded, context)


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
        self._runner, self._mask = runner, mask_token_id

    def steps(self, spans: list[Span], fed: Stretches, depths: list[int]) -> DraftSteps:
        return MaskSteps(self, spans, fed, depths)

    def feed(self, sequences: Seq[Sequence], fed: Stretches) -> None:
        self.run(sequences, fed, [0] * len(sequences))

    def run(self, sequences: Seq[Sequence], fed: Stretches, masks: Seq[int]) -> Tensor:
        """Feed a stretch of each sequence and its masks; logits from its last token on."""
        layouts, rows, at = [], list[int](), 0
        for layout, extra in zip(fed.layouts(sequences), masks, strict=True):
            layouts.append(replace(layout, num_tokens=layout.num_tokens + extra))
            at += layout.num_tokens + extra
            rows.extend(range(at - extra - 1, at))
        tokens = zip(fed.tokens(sequences), masks, strict=True)
        ids = [[*one, *[self._mask] * extra] for one, extra in tokens]
        return self._runner.forward(layouts, ids, rows).logits_RV


@final
class MaskSteps(DepthSteps):
    """One pass with a mask for each draft but the first."""

    def __init__(
        self, network: MaskNetwork, spans: list[Span], fed: Stretches, depths: list[int]
    ) -> None:
        """Nothing is run yet; `fed` is what the network has not seen of the spans."""
        super().__init__(spans, depths)
        self._network, self._fed = network, fed

    def run(self) -> Tensor:
        return self._network.run(self.sequences, self._fed, [depth - 1 for depth in self.depths])
