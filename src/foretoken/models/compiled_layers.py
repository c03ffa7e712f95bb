"""All layers of a decoder in one call into C (native/decoder.h).

What a step of a small model costs is not its arithmetic but hundreds of calls from Python. The
kernels, their order and the roundings between them are those of `layers`, so are the bits; a test
compares them. Owns the layers' pointers; the tensors belong to the layers, which it keeps alive.
"""

import ctypes
from collections.abc import Sequence
from itertools import chain
from typing import Any, final

from torch import Tensor

from foretoken.kernels.linear import TYPES
from foretoken.kernels.structures import FtDecoder, FtLayer, FtStep, FtStepKind
from foretoken.kv.features import FeatureStore
from foretoken.kv.store import KVStore
from foretoken.layers.decoder_layer import Layer, LayerKind, Scaled
from foretoken.layers.mixture import Mixture, MixtureBeside
from foretoken.layers.mlp import GatedMLP
from foretoken.layers.norm import RMSNorm
from foretoken.layers.rope import RotaryTable
from foretoken.models.tensors import ModelInput, SpanLayout
from foretoken.ops.activation import COMPILED, Activation
from foretoken.ops.attention.native import AttentionPlan, NativeAttention
from foretoken.ops.linear import KernelLinear, Linear
from foretoken.ops.mixture_kernel import MixtureKernel

_I32, _PTR = ctypes.c_int32, ctypes.c_void_p


@final
class CompiledLayers:
    """Layers bound to C. `compile_layers` makes it, where every part has its kernel."""

    def __init__(
        self, layers: Sequence[Layer], kinds: Sequence[LayerKind], stores: Sequence[int]
    ) -> None:
        self._layers, self._kinds, self._of_store = tuple(layers), tuple(kinds), tuple(stores)
        self.library = _attention(kinds[0]).library
        self._run = self.library.function("ft_decoder_run", (_PTR, _PTR, _I32, _I32))
        self._bound = (FtLayer * len(layers))(*map(_bind, layers))
        first, activations = layers[0], set[Activation]().union(*map(_activations, layers))
        geometry, norm = first.attention.geometry, next(iter(_norms(first).values()))
        # Layers of some models differ; those have no ranks that share them.
        self.kv_heads = max((one.attention.geometry.kv_heads for one in layers), key=len)
        out = first.attention.out
        assert isinstance(out, KernelLinear)
        self._decoder = FtDecoder(
            layers=ctypes.addressof(self._bound),
            hidden=out.columns,
            type=TYPES[geometry.dtype],
            norm_type=TYPES[norm.weight_D.dtype],
            activation=max((COMPILED[one] for one in activations), default=0),
            eps=norm.eps,
            branch_scale=_branch_scale(first),
        )
        self._store: KVStore | None = None
        self._stores = (_PTR * len(layers))()
        self._strides = [0] * len(kinds)
        mixtures = filter(None, map(_mixture, layers))
        self._counter = next((mixture.counter for mixture in mixtures), None)
        self._features: FeatureStore | None = None
        self._kept = (_PTR * len(layers))()

    def run(
        self,
        x_TD: Tensor,
        inputs: ModelInput,
        store: KVStore,
        features: FeatureStore | None = None,
        beside: Tensor | None = None,
        layers: range | None = None,
    ) -> None:
        """Turn the embedded tokens into the residual stream after the last layer, in place.

        Args:
            x_TD: the tokens.
            inputs: where they stand.
            store: keys and values; those of the tokens are written to it.
            features: where the hidden states that a drafter reads are kept, if any.
            beside: what layers take beside the stream: with a `beside_norm` [T, D], with an `input`
                [T, L, P].
            layers: neighbours among them that are to be run alone; None: all.
        """
        assert x_TD.is_contiguous() and inputs.positions_T.is_contiguous(), x_TD.stride()
        plan = self.plan_rows(inputs.spans, store)
        step = plan.step
        step.x, step.positions = x_TD.data_ptr(), inputs.positions_T.data_ptr()
        assert step.rows == x_TD.shape[0], (step.rows, x_TD.shape[0])
        if beside is not None:
            assert len(beside) == step.rows and beside.is_contiguous(), beside.shape
            if beside.ndim == 2:
                step.beside = beside.data_ptr()
            else:
                step.inputs, step.inputs_stride = beside.data_ptr(), beside.stride(0)
        if isinstance(inputs.slots_T, Tensor):
            step.slots = inputs.slots_T.data_ptr()
        else:
            step.first_slot = inputs.slots_T.start
        if features is not None:
            assert features.slots_SF.dtype == x_TD.dtype, (features.slots_SF.dtype, x_TD.dtype)
            step.kept, step.kept_stride = self._kept_by(features), features.slot_bytes
        if self._counter is not None:
            step.distinct = self._counter.address
        layers = layers or range(self.num_layers)
        self._run(self.address, ctypes.addressof(step), layers.start, layers.stop)

    def plan_rows(self, layouts: Sequence[SpanLayout], store: KVStore) -> "RowsPlan":
        """The rows of these spans as C wants them; x, positions and slots are still to be set."""
        spans = [layout.window for layout in layouts]
        plans = [_attention(kind).layout(spans) for kind in self._kinds]
        kinds = (FtStepKind * len(plans))()
        stores = self.stores_of(store)
        each = zip(kinds, self._kinds, plans, self._strides, strict=True)
        for made, kind, plan, stride in each:
            made.attention, made.units, made.num_units = plan.call, plan.units, plan.num_units
            made.cos, made.sin = kind.rotary.cos.data_ptr(), kind.rotary.sin.data_ptr()
            made.width, made.kv_stride = kind.rotary.cos.shape[-1], stride
            if kind.rotary.query_scale is not None:
                made.query_scale = kind.rotary.query_scale.data_ptr()
        step = FtStep(
            rows=sum(span.num_tokens for span in spans),
            kv=stores,
            kinds=ctypes.addressof(kinds),
        )
        return RowsPlan(step, plans, kinds)

    def stores_of(self, store: KVStore) -> int:
        """Address of pointers to the layers' keys and values; until another store is given."""
        # A model keeps its store, so its pointers are collected once and not in every step.
        if store is not self._store:
            assert store.kv_heads == self.kv_heads, (store.kv_heads, self.kv_heads)
            self._store = store
            own = [store.layers[number] for number in self._of_store]
            self._stores[:] = [one.data_ptr() for one in own]
            for layer, kept_SKh in zip(self._layers, own, strict=True):
                self._strides[layer.kind] = kept_SKh.stride(0)
        return ctypes.addressof(self._stores)

    @property
    def address(self) -> int:
        """Address of its ft_decoder; valid while this object lives."""
        return ctypes.addressof(self._decoder)

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return len(self._layers)

    @property
    def only_kind(self) -> tuple[NativeAttention, RotaryTable] | None:
        """Attention and positions of all layers; None: they are not all of one kind, or queries
        are scaled, which rollouts do not know."""
        if len(self._kinds) != 1 or self._kinds[0].rotary.query_scale is not None:
            return None
        return _attention(self._kinds[0]), self._kinds[0].rotary

    def shares_norm(self, norm: RMSNorm) -> bool:
        """Whether a norm is computed as those of the layers are."""
        own = next(iter(_norms(self._layers[0]).values()))
        return (norm.eps, norm.weight_D.dtype) == (own.eps, own.weight_D.dtype)

    def _kept_by(self, features: FeatureStore) -> int:
        """Address of pointers to where layers' inputs are kept; until another store is given."""
        if features is not self._features:
            self._features = features
            row = features.slots_SF.data_ptr()
            size = features.slots_SF.element_size()
            self._kept[:] = [
                None if at is None else row + at.start * size
                for at in map(features.columns.get, range(self.num_layers))
            ]
        return ctypes.addressof(self._kept)


@final
class RowsPlan:
    """A step in C's memory, which lives as long as this object."""

    __slots__ = ("_kinds", "_plans", "step")

    def __init__(self, step: FtStep, plans: list[AttentionPlan], kinds: Any) -> None:
        """Keep everything that `step` points to."""
        self.step, self._plans, self._kinds = step, plans, kinds


def compile_layers(
    layers: Sequence[Layer], kinds: Sequence[LayerKind], stores: Sequence[int] | None = None
) -> CompiledLayers | None:
    """The layers as one call, or None if some part of them has no kernel; `stores`: whose keys and
    values each reads, if not its own."""
    known = all(isinstance(kind.attention, NativeAttention) for kind in kinds)
    if not known or not all(map(_has_kernels, layers)):
        return None
    norms = [norm for layer in layers for norm in _norms(layer).values()]
    if len({(norm.eps, norm.weight_D.dtype) for norm in norms}) > 1:
        return None
    alike = (set(map(_branch_scale, layers)), set(chain.from_iterable(map(_activations, layers))))
    if any(len(found) > 1 for found in alike):
        return None
    return CompiledLayers(layers, kinds, range(len(layers)) if stores is None else stores)


def _plain(layer: Layer) -> GatedMLP | None:
    mlp = layer.mlp.mlp if isinstance(layer.mlp, MixtureBeside) else layer.mlp
    return mlp if isinstance(mlp, GatedMLP) else None


def _mixture(layer: Layer) -> Mixture | None:
    mlp = layer.mlp.mixture if isinstance(layer.mlp, MixtureBeside) else layer.mlp
    return mlp if isinstance(mlp, Mixture) else None


def _branch_scale(layer: Layer) -> float:
    """What both of its parts give is multiplied with."""
    after = layer.after_mlp
    return after.factor if isinstance(after, Scaled) else 1.0


def _has_kernels(layer: Layer) -> bool:
    """Whether each part of the layer is one that ft_decoder_run knows."""
    mixture, dtype = _mixture(layer), layer.attention.geometry.dtype
    known = mixture is None or isinstance(mixture.kernel, MixtureKernel)
    return (
        known
        and COMPILED.keys() >= _activations(layer)
        and all(
            isinstance(linear, KernelLinear)
            and (linear.dtype, linear.out_dtype) == (dtype, dtype)
            and not linear.packed.gated
            for linear in _linears(layer).values()
        )
    )


def _linears(layer: Layer) -> dict[str, Linear]:
    """Its matrices by their names in C, but those of experts."""
    attention, mlp = layer.attention, _plain(layer)
    found = {"qkv": attention.qkv, "out": attention.out}
    if attention.gate is not None:
        found["gate"] = attention.gate
    if layer.input is not None:
        found |= {"input_gate": layer.input.gate, "input_back": layer.input.projection}
    return found if mlp is None else {**found, "gate_up": mlp.gate_up, "down": mlp.down}


def _activations(layer: Layer) -> set[Activation]:
    """Of its plain MLP and of what it gets beside the stream."""
    return {one.activate for one in (_plain(layer), layer.input) if one is not None}


def _norms(layer: Layer) -> dict[str, RMSNorm]:
    """Its norms by their names in C."""
    found: dict[str, RMSNorm | Scaled | None] = {
        "attention_norm": layer.attention_norm,
        "mlp_norm": layer.mlp_norm,
        "after_attention": layer.after_attention,
        "after_mlp": layer.after_mlp,
        "beside_norm": layer.beside_norm,
    }
    if layer.input is not None:
        found["input_norm"] = layer.input.norm
    if (heads := layer.attention.norms) is not None:
        found |= {"query_norm": heads.query, "key_norm": heads.key, "value_norm": heads.value}
    if isinstance(both := layer.mlp, MixtureBeside):
        found |= {
            "mlp_norm": both.mlp_norm,
            "after_plain": both.after_mlp,
            "experts_norm": both.mixture_norm,
            "after_experts": both.after_mixture,
            "router_norm": both.router_norm,
        }
    return {name: norm for name, norm in found.items() if isinstance(norm, RMSNorm)}


def _bind(layer: Layer) -> FtLayer:
    linears, norms = _linears(layer).items(), _norms(layer).items()
    attention, mixture = layer.attention, _mixture(layer)
    heads, kernel = attention.norms, None if mixture is None else mixture.kernel
    return FtLayer(
        **{name: one.address for name, one in linears if isinstance(one, KernelLinear)},
        **{name: one.weight_D.data_ptr() for name, one in norms},
        experts=kernel.address if isinstance(kernel, MixtureKernel) else None,
        sinks=None if attention.sinks_H is None else attention.sinks_H.data_ptr(),
        from_norm=layer.from_norm,
        whole_norms=heads is not None and heads.whole,
        turns_first=heads is not None and heads.after_turning,
        keeps=attention.keeps,
        kind=layer.kind,
        scale=1.0 if layer.scale is None else float(layer.scale),
    )


def _attention(kind: LayerKind) -> NativeAttention:
    assert isinstance(kind.attention, NativeAttention), type(kind.attention).__name__
    return kind.attention
