"""What a loaded model is, whoever runs its layers; and how it is asked to be loaded."""

from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.distributed import Group, Share
from foretoken.errors import ConfigError
from foretoken.kv.features import FeatureStore
from foretoken.kv.store import KVStore
from foretoken.layers.embedding import Embedding
from foretoken.models.tensors import (
    ModelInput,
    ModelOutput,
    RolledOut,
    RolloutPlan,
    SpanLayout,
    StepDraws,
)
from foretoken.ops.linear import Linear
from foretoken.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How to load a checkpoint."""

    dtype: torch.dtype
    """Weights and activations are converted to it."""
    device: torch.device
    batch_invariant: bool
    """Keep each row's bits independent of the other rows."""
    page_size: int
    """Slots of a page of the KV store that the model will run over."""
    quantization: str | None = None
    """A name of config.quantization; None: weights stay in `dtype`."""
    x_bits: int = 16
    """Bits of activations in fixed point, which integer weights are multiplied with: 16 or 8."""
    x_bits_asked_by: str | None = None
    """The setting that asks for them, which is an error where nothing is multiplied so; None:
    nobody does, they are taken where they can be."""
    kv_store_dtype: torch.dtype | None = None
    """Type of stored keys and values; None: `dtype`."""
    max_model_len: int | None = None
    """Positions that sequences will reach at most; None: what the model was made for."""
    maps_experts: bool = False
    """Keep experts in a mapped file of packed weights, since memory has no room for them; the file
    is written first if it is not there."""
    group: Group | None = None
    """Processes that compute the model together; None: this one does all of it."""
    keeps_head: bool = False
    """Whether rank 0 has all of the output head too, for drafters that share it."""
    by_layers: bool = False
    """Whether those processes have some consecutive layers each, instead of a share of all."""
    points: tuple[int, ...] = ()
    """Layers before which rank 0 keeps hidden states, of whoever has the layers."""

    @property
    def share(self) -> Share:
        """What this process computes of a layer."""
        return Share() if self.group is None or self.by_layers else self._part

    def layers(self, total: int) -> range:
        """Which of so many layers this process computes."""
        return self._part.of(total) if self.by_layers else range(total)

    @property
    def _part(self) -> Share:
        return Share() if self.group is None else Share(self.group.rank, self.group.size)


def check_bits(options: LoadOptions, found: Container[int]) -> None:
    """Raise if a setting asks for activations that no linear of the model is multiplied with.

    Args:
        options: how the model was loaded.
        found: bits of the fixed point that its linears round rows to.

    Raises:
        ConfigError: all matrices are floats, or integers that no kernel here takes.
    """
    if options.x_bits_asked_by is None or options.x_bits in found:
        return
    allowed = "auto: no matrix of this model is kept in integers by the compiled kernels"
    raise ConfigError(options.x_bits_asked_by, f"int{options.x_bits}", allowed)


class Model(ABC):
    """A causal language model over paged keys and values."""

    shape: ModelShape
    embedding: Embedding
    """The embedding table as stored; some families scale what they look up."""
    head: Linear | None
    """Makes logits of hidden states, before a soft cap, without other ranks; None: only `logits`
    can."""

    @abstractmethod
    def hidden(
        self, inputs: ModelInput, store: KVStore, features: FeatureStore | None = None
    ) -> Tensor:
        """Run a step: hidden states after the last norm, [T, D] in the model's type.

        Args:
            inputs: the step's tokens and where they stand.
            store: keys and values; the step's are written to it.
            features: where the hidden states that a drafter reads are kept, if any.
        """

    def take_experts_read(self) -> float:
        """Experts of a layer that steps read since this was asked last, on average over layers that
        have some; 0: they are not counted, or there are none."""
        return 0.0

    @property
    def runs_steps(self) -> bool:
        """Whether `step` runs anything."""
        return False

    def step(
        self,
        layouts: Sequence[SpanLayout],
        token_ids: Sequence[Sequence[int]],
        rows: Sequence[int],
        store: KVStore,
        features: FeatureStore | None = None,
        draws: StepDraws | None = None,
    ) -> ModelOutput | None:
        """Run a whole step at once, where a device has kernels for all of it.

        Args:
            layouts: where each span lies; its pages must cover it.
            token_ids: the tokens of each span.
            rows: which of the step's tokens need logits.
            store: keys and values; the step's are written to it.
            features: where the hidden states that a drafter reads are kept, if any.
            draws: how the token of each of `rows` is drawn; None: tokens are not drawn here.

        Returns:
            Its results, valid until the next step; None: this step is run by `hidden` and `logits`.
        """
        return None

    def roll_out(
        self,
        layouts: Sequence[SpanLayout],
        token_ids: Sequence[Sequence[int]],
        plan: RolloutPlan,
        store: KVStore,
    ) -> RolledOut | None:
        """Draft several tokens after each sequence, where that is one call into C.

        Args:
            layouts: where the tokens of each sequence stand that were not fed before, the newest
                included; the pages must cover `plan.steps` positions from that one on.
            token_ids: those tokens.
            plan: how many tokens, and how each is chosen.
            store: keys and values; those of all tokens but the last draft are written to it.

        Returns:
            The tokens, fewer than planned where one was too close to call; None: this model
            drafts token by token, or there is too much to feed.
        """
        return None

    @abstractmethod
    def logits(self, hidden_RD: Tensor) -> Tensor:
        """float32 logits [R, V] of such hidden states; all ranks of the model must call it. What
        others than rank 0 get is worth nothing."""

    @property
    def makes_draft_logits(self) -> bool:
        """Whether `draft_logits` can be called here."""
        return True

    def draft_logits(self, hidden_RD: Tensor) -> Tensor:
        """The same bits without other ranks: on rank 0, where LoadOptions.keeps_head was set."""
        return self.logits(hidden_RD)
