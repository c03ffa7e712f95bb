"""Decoder: embedding, layers, last norm, head, in our own layers. Model files build it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from foretoken.kv.features import FINAL, FeatureStore
from foretoken.kv.store import KVStore
from foretoken.layers.attention import StepState
from foretoken.layers.decoder_layer import Layer, LayerKind
from foretoken.layers.embedding import Embedding
from foretoken.layers.layer_inputs import LayerInputs
from foretoken.layers.norm import RMSNorm
from foretoken.models.base import Model
from foretoken.models.compiled_layers import CompiledLayers
from foretoken.models.gpu.captured import CapturedSteps
from foretoken.models.rollout import MOST_ROWS, CompiledRollout
from foretoken.models.stages import Stages
from foretoken.models.tensors import (
    ModelInput,
    ModelOutput,
    RolledOut,
    RolloutPlan,
    SpanLayout,
    StepDraws,
)
from foretoken.ops.linear import Linear
from foretoken.ops.mixture_kernel import ExpertCounter
from foretoken.shape import ModelShape


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder(Model):
    """A causal language model in our own layers."""

    shape: ModelShape
    embedding: Embedding
    embedding_scale: Tensor | None
    """One number in the model's type; None: 1."""
    kinds: tuple[LayerKind, ...]
    layers: tuple[Layer, ...]
    norm: RMSNorm
    top: Linear | None
    """Makes a step's logits; None: rank 0 alone does."""
    head: Linear | None
    """The same, or where ranks share `top` all of it; None: nobody asked for that."""
    compiled: CompiledLayers | None
    """Runs all layers in one call into C, with the same bits; None: some part has no kernel."""
    rollout: CompiledRollout | None
    """Drafts several tokens in one call into C; None: some part has no kernel."""
    layer_inputs: LayerInputs | None = None
    """Makes what layers get beside the stream; None: nothing."""
    captured: CapturedSteps | None = None
    """Runs whole steps and chains of drafts by a GPU's kernels; None: some part has none."""
    experts_read: ExpertCounter | None = None
    """What layers with experts read; None: there are none."""
    stages: Stages | None = None
    """Runs the layers where others have some of them; None: all are here."""

    def hidden(
        self, inputs: ModelInput, store: KVStore, features: FeatureStore | None = None
    ) -> Tensor:
        """Run a step: hidden states after the last norm, [T, D]."""
        # A copy of its own: the layers below change it in place.
        x_TD = self.embedding(inputs.tokens_T)
        if self.embedding_scale is not None:
            x_TD *= self.embedding_scale
        x_TD = self.norm(self._streamed(x_TD, inputs, store, features))
        if features is not None:
            features.write(FINAL, inputs.slots_T, x_TD)
        return x_TD

    def _streamed(
        self, x_TD: Tensor, inputs: ModelInput, store: KVStore, features: FeatureStore | None
    ) -> Tensor:
        """The residual stream after the last layer, wherever the layers are."""

        def run(x_TD: Tensor, layers: range) -> Tensor:
            # For a small model hundreds of calls from Python take longer than the arithmetic. The
            # bits are those of the layers one by one.
            given_TLP = None
            if self.layer_inputs is not None:
                assert layers.start == 0, "made of what the first layer is given"
                given_TLP = self.layer_inputs(inputs.tokens_T, x_TD)
            if self.compiled is None:
                return self._run_layers(x_TD, layers, inputs, store, features, given_TLP)
            self.compiled.run(x_TD, inputs, store, features, given_TLP, layers)
            return x_TD

        def keep(x_TD: Tensor, layer: int) -> None:
            if features is not None:
                features.write(layer, inputs.slots_T, x_TD)

        if self.stages is None:
            return run(x_TD, range(len(self.layers)))
        return self.stages(x_TD, run, keep)

    def _run_layers(
        self,
        x_TD: Tensor,
        layers: range,
        inputs: ModelInput,
        store: KVStore,
        features: FeatureStore | None,
        given_TLP: Tensor | None,
    ) -> Tensor:
        """The residual stream after these layers, part by part."""
        # Rotations and attention are planned once for all layers of a kind.
        spans = [layout.window for layout in inputs.spans]
        steps = [
            StepState(
                rotation=kind.rotary.at(inputs.positions_T),
                slots_T=inputs.slots_T,
                attend=kind.attention.plan(spans),
            )
            for kind in self.kinds
        ]
        for index in layers:
            # Point k is what layer k is given, which is what heads are trained on.
            if features is not None:
                features.write(index, inputs.slots_T, x_TD)
            layer = self.layers[index]
            keys_SKh = store.layers[self.shape.kv_layer(index)]
            own_TP = None if given_TLP is None else given_TLP[:, index]
            x_TD = layer(x_TD, keys_SKh, steps[layer.kind], own_TP)
        return x_TD

    def take_experts_read(self) -> float:
        """As its layers counted them."""
        return 0.0 if self.experts_read is None else self.experts_read.take()

    @property
    def runs_steps(self) -> bool:
        """Where a GPU's kernels have all parts."""
        return self.captured is not None

    def step(
        self,
        layouts: Sequence[SpanLayout],
        token_ids: Sequence[Sequence[int]],
        rows: Sequence[int],
        store: KVStore,
        features: FeatureStore | None = None,
        draws: StepDraws | None = None,
    ) -> ModelOutput | None:
        """A whole step on a GPU; None: layer by layer."""
        if self.captured is None:
            return None
        return self.captured.run(layouts, token_ids, rows, store, features, draws)

    def roll_out(
        self,
        layouts: Sequence[SpanLayout],
        token_ids: Sequence[Sequence[int]],
        plan: RolloutPlan,
        store: KVStore,
    ) -> RolledOut | None:
        """Draft several tokens after each sequence in one call into C, or by a GPU's kernels; None:
        token by token."""
        if self.captured is not None:
            return self.captured(layouts, token_ids, plan, store)
        # The kernel does not know soft caps. They keep the order of logits, so the best token is
        # the same without them; what is drawn is not.
        capped = self.shape.logit_softcap is not None
        if self.rollout is None or (capped and not plan.best):
            return None
        if sum(layout.num_tokens for layout in layouts) > MOST_ROWS:
            return None
        return self.rollout(layouts, token_ids, plan, store)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """float32 logits [R, V]."""
        if self.top is None:
            return hidden_RD.new_empty((hidden_RD.shape[0], 0), dtype=torch.float32)
        return self._capped(self.top(hidden_RD))

    @property
    def makes_draft_logits(self) -> bool:
        """Where this process has all of the output head."""
        return self.head is not None

    def draft_logits(self, hidden_RD: Tensor) -> Tensor:
        """The same by this process alone."""
        assert self.head is not None, "LoadOptions.keeps_head was not set"
        return self._capped(self.head(hidden_RD))

    def _capped(self, raw_RV: Tensor) -> Tensor:
        logits_RV = raw_RV.float()
        if self.shape.logit_scale != 1.0:
            logits_RV = logits_RV * self.shape.logit_scale
        cap = self.shape.logit_softcap
        return logits_RV if cap is None else logits_RV.div_(cap).tanh_().mul_(cap)
