"""All layers of a decoder in one call into C (native/decoder.h).

What a step of a small model costs is not its arithmetic but hundreds of calls from Python. The
kernels, their order and the roundings between them are those of `layers`, so are the bits; a test
compares them. Owns the layers' pointers; the tensors belong to the layers, which it keeps alive.
"""

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, final

from torch import Tensor

from foretoken.kernels.linear import TYPES
from foretoken.kernels.structures import FtDecoder, FtLayer, FtStep, FtStepKind
from foretoken.kv.features import FeatureStore
from foretoken.kv.store import KVStore
from foretoken.layers.attention import AttentionBlock
from foretoken.layers.decoder_layer import Layer, LayerKind, Scaled
from foretoken.layers.mixture import Mixture, MixtureBeside
from foretoken.layers.mlp import GatedMLP
from foretoken.layers.norm import RMSNorm
from foretoken.layers.rope import RotaryTable
from foretoken.models.tensors import ModelInput, SpanLayout
from foretoken.ops.activation import COMPILED
from foretoken.ops.attention.native import AttentionPlan, NativeAttention
from foretoken.ops.linear import KernelLinear, Linear

_I32, _PTR = ctypes.c_int32, ctypes.c_void_p


@final
class CompiledLayers:
    """Layers bound to C. `compile_layers` makes it, where every part has its kernel."""

    def __init__(self, layers: Sequence[Layer], kinds: Sequence[LayerKind]) -> None:
        self._layers, self._kinds = tuple(layers), tuple(kinds)
        self.library = _attention(kinds[0]).library
        self._run = self.library.function("ft_decoder_run", (_PTR, _PTR, _I32, _I32))
        self._bound = (FtLayer * len(layers))(*map(_bind, layers))
        first, plain = layers[0], _plain(layers)
        geometry, norm = first.attention.geometry, next(_norms(first))
        self.kv_heads = geometry.kv_heads
        out = _usual(first).out
        assert isinstance(out, KernelLinear)
        self._decoder = FtDecoder(
            layers=ctypes.addressof(self._bound),
            hidden=out.columns,
            inner=_inner(plain[0]) if plain else 0,
            num_heads=geometry.num_heads,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            type=TYPES[geometry.dtype],
            norm_type=TYPES[norm.weight_D.dtype],
            activation=COMPILED[plain[0].activate] if plain else 0,
            eps=norm.eps,
            branch_scale=_branch_scale(first),
        )
        self._store: KVStore | None = None
        self._stores = (_PTR * len(layers))()
        mixtures = (layer.mlp for layer in layers if isinstance(layer.mlp, Mixture))
        self._counter = next((mixture.counter for mixture in mixtures), None)
        self._features: FeatureStore | None = None
        self._kept = (_PTR * len(layers))()

    def run(
        self,
        x_TD: Tensor,
        inputs: ModelInput,
        store: KVStore,
        features: FeatureStore | None = None,
        beside_TD: Tensor | None = None,
        layers: range | None = None,
    ) -> None:
        """Turn the embedded tokens into the residual stream after the last layer, in place.

        Args:
            x_TD: the tokens.
            inputs: where they stand.
            store: keys and values; those of the tokens are written to it.
            features: where the hidden states that a drafter reads are kept, if any.
            beside_TD: what layers with a `beside_norm` take beside the stream.
            layers: neighbours among them that are to be run alone; None: all.
        """
        assert x_TD.is_contiguous() and inputs.positions_T.is_contiguous(), x_TD.stride()
        plan = self.plan_rows(inputs.spans, store)
        step = plan.step
        step.x, step.positions = x_TD.data_ptr(), inputs.positions_T.data_ptr()
        assert step.rows == x_TD.shape[0], (step.rows, x_TD.shape[0])
        if beside_TD is not None:
            assert beside_TD.shape == x_TD.shape and beside_TD.is_contiguous(), beside_TD.shape
            step.beside = beside_TD.data_ptr()
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
        for made, kind, plan in zip(kinds, self._kinds, plans, strict=True):
            made.attention, made.units, made.num_units = plan.call, plan.units, plan.num_units
            made.cos, made.sin = kind.rotary.cos.data_ptr(), kind.rotary.sin.data_ptr()
            made.width = kind.rotary.cos.shape[-1]
            if kind.rotary.query_scale is not None:
                made.query_scale = kind.rotary.query_scale.data_ptr()
        step = FtStep(
            rows=sum(span.num_tokens for span in spans),
            kv=self.stores_of(store),
            kv_stride=store.layers[0].stride(0),
            kinds=ctypes.addressof(kinds),
        )
        return RowsPlan(step, plans, kinds)

    def stores_of(self, store: KVStore) -> int:
        """Address of pointers to the layers' keys and values; until another store is given."""
        # A model keeps its store, so its pointers are collected once and not in every step.
        if store is not self._store:
            assert store.kv_heads == self.kv_heads, (store.kv_heads, self.kv_heads)
            self._store = store
            self._stores[:] = [layer.data_ptr() for layer in store.layers]
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
        own = next(_norms(self._layers[0]))
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


def compile_layers(layers: Sequence[Layer], kinds: Sequence[LayerKind]) -> CompiledLayers | None:
    """The layers as one call, or None if some part of them has no kernel."""
    known = all(isinstance(kind.attention, NativeAttention) for kind in kinds)
    if not known or not all(map(_has_kernels, layers)):
        return None
    norms = [norm for layer in layers for norm in _norms(layer)]
    if len({(norm.eps, norm.weight_D.dtype) for norm in norms}) > 1:
        return None
    alike = (set(map(_branch_scale, layers)), set(map(_inner, _plain(layers))))
    if any(len(found) > 1 for found in alike):
        return None
    return CompiledLayers(layers, kinds)


def _plain(layers: Sequence[Layer]) -> list[GatedMLP]:
    return [layer.mlp for layer in layers if isinstance(layer.mlp, GatedMLP)]


def _inner(mlp: GatedMLP) -> int:
    assert isinstance(mlp.down, KernelLinear), type(mlp.down).__name__
    return mlp.down.packed.inputs


def _branch_scale(layer: Layer) -> float:
    """What both of its parts give is multiplied with."""
    after = layer.after_mlp
    return after.factor if isinstance(after, Scaled) else 1.0


def _has_kernels(layer: Layer) -> bool:
    """Whether each part of the layer is one that ft_decoder_run knows."""
    attention, mlp = layer.attention, layer.mlp
    if isinstance(mlp, MixtureBeside) or not isinstance(attention, AttentionBlock):
        return False
    dtype = attention.geometry.dtype
    if not attention.kernels_know or layer.input is not None or layer.scale is not None:
        return False
    known = mlp.kernel is not None if isinstance(mlp, Mixture) else mlp.activate in COMPILED
    return known and all(
        isinstance(linear, KernelLinear)
        and (linear.dtype, linear.out_dtype) == (dtype, dtype)
        and not linear.packed.gated
        for linear in _linears(layer)
    )


def _linears(layer: Layer) -> tuple[Linear, ...]:
    """Its matrices, but those of experts."""
    attention, mlp = _usual(layer), layer.mlp
    both = (attention.qkv, attention.out)
    return (*both, mlp.gate_up, mlp.down) if isinstance(mlp, GatedMLP) else both


def _usual(layer: Layer) -> AttentionBlock:
    assert isinstance(layer.attention, AttentionBlock), "that of other layers is not compiled"
    return layer.attention


def _norms(layer: Layer) -> Iterator[RMSNorm]:
    own = (layer.attention_norm, layer.mlp_norm, layer.after_attention, layer.after_mlp)
    yield from (norm for norm in (*own, layer.beside_norm) if isinstance(norm, RMSNorm))
    if (heads := _usual(layer).norms) is not None:
        yield from (heads.query, heads.key)


def _bind(layer: Layer) -> FtLayer:
    def address(norm: RMSNorm | Scaled | None) -> int | None:
        return norm.weight_D.data_ptr() if isinstance(norm, RMSNorm) else None

    linears = [linear.address for linear in _linears(layer) if isinstance(linear, KernelLinear)]
    attention, mlp = _usual(layer), layer.mlp
    heads = attention.norms
    kernel = mlp.kernel if isinstance(mlp, Mixture) else None
    return FtLayer(
        *linears,
        experts=None if kernel is None else kernel.address,
        sinks=None if attention.sinks_H is None else attention.sinks_H.data_ptr(),
        attention_norm=address(layer.attention_norm),
        mlp_norm=address(layer.mlp_norm),
        after_attention=address(layer.after_attention),
        after_mlp=address(layer.after_mlp),
        query_norm=None if heads is None else address(heads.query),
        key_norm=None if heads is None else address(heads.key),
        beside_norm=address(layer.beside_norm),
        from_norm=int(layer.from_norm),
        whole_norms=int(heads is not None and heads.whole),
        kind=layer.kind,
    )


def _attention(kind: LayerKind) -> NativeAttention:
    assert isinstance(kind.attention, NativeAttention), type(kind.attention).__name__
    return kind.attention
