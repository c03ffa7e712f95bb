"""Paged attention for modules of transformers, through its attention interface.

transformers finds a function by its registered name; the function finds its model's
`PagedAttention` on the calling module. At load that notes how each layer calls (heads, window, soft
cap, scale) and refuses what causal attention over pages is not; in a step it writes keys and values
and attends.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from foretoken.errors import UnsupportedModelError
from foretoken.kv.store import KVStore, write
from foretoken.ops.attention import SpanWindow
from foretoken.ops.attention.base import Attend, Attention
from foretoken.ops.quantize_kv import quantize_kv

NAME = "foretoken"
_HARMLESS = ("position_ids", "cache_position")
"""Tensors that attention functions are given and that do not change causal attention."""


class LayerCall(NamedTuple):
    """How a layer calls attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    softcap: float | None
    scale: float


@dataclass(frozen=True, slots=True)
class _Step:
    attends: tuple[Attend, ...]
    slots_T: Tensor | slice
    store: KVStore


class PagedAttention:
    """What the attention modules of one model share. Not thread-safe, as the model is not."""

    def __init__(self, model_type: str) -> None:
        """Nothing is noted yet, and no step runs."""
        self._model_type = model_type
        self.calls: dict[int, LayerCall] = {}
        """By layer, as noted."""
        self._kinds: tuple[Attention, ...] = ()
        self._kind_of: dict[int, int] = {}
        self._step: _Step | None = None

    def attach(self, model: nn.Module) -> None:
        """Let every module of the model find this."""
        for module in model.modules():
            module.foretoken_attention = self  # type: ignore[assignment]

    def serve(self, kinds: Mapping[LayerCall, Attention]) -> None:
        """From now on compute, with one attention per way of calling."""
        order = list(kinds)
        self._kinds = tuple(kinds.values())
        self._kind_of = {layer: order.index(call) for layer, call in self.calls.items()}

    def begin(self, spans: list[SpanWindow], slots_T: Tensor | slice, store: KVStore) -> None:
        """Plan a step."""
        attends = tuple(attention.plan(spans) for attention in self._kinds)
        self._step = _Step(attends, slots_T, store)

    def end(self) -> None:
        """Forget the step."""
        self._step = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [1, H, T, h], k and v [1, K, T, h] -> [1, T, H, h]."""
        step = self._step
        assert step is not None, "attention outside of a step"
        heads, tokens, size = q.shape[1:]
        key_heads = k.shape[1]
        kv_TKh, layer_SKh = torch.cat([k[0], v[0]]).transpose(0, 1), step.store.layers[layer]
        write(layer_SKh, step.slots_T, quantize_kv(kv_TKh, layer_SKh.dtype))
        q_KGTh = q[0].unflatten(0, (key_heads, heads // key_heads))
        q_THh = q_KGTh.permute(2, 1, 0, 3).reshape(tokens, heads, size).contiguous()
        out_TD = step.attends[self._kind_of[layer]](q_THh, layer_SKh)
        out_TGKh = out_TD.view(tokens, heads // key_heads, key_heads, size)
        return out_TGKh.transpose(1, 2).reshape(1, tokens, heads, size)

    @property
    def noting(self) -> bool:
        """Whether calls are noted instead of computed."""
        return not self._kinds

    def note(self, layer: int, call: LayerCall, others: Mapping[str, Any]) -> None:
        """Note a layer's call.

        Raises:
            UnsupportedModelError: it asks for more than a window, a soft cap and a scale.
        """
        tensors = [name for name, value in others.items() if isinstance(value, Tensor)]
        unknown = sorted(set(tensors) - set(_HARMLESS))
        if unknown:
            self._refuse(f"attention with {', '.join(unknown)}")
        if layer in self.calls:
            self._refuse(f"attention that is called twice in layer {layer}")
        self.calls[layer] = call

    def _refuse(self, what: str) -> None:
        allowed = "causal attention with at most a window and a soft cap"
        raise UnsupportedModelError("model_type", f"{self._model_type} ({what})", allowed)

    def check(self, module: nn.Module, mask: Tensor | None, k: Tensor, v: Tensor) -> None:
        """The call is causal attention of a layer with keys and values of one size.

        Raises:
            UnsupportedModelError: it is not.
        """
        if mask is not None:
            self._refuse("a mask of its own")
        if not getattr(module, "is_causal", True):
            self._refuse("attention that is not causal")
        if k.shape != v.shape:
            self._refuse(f"keys of {k.shape[-1]} and values of {v.shape[-1]} numbers")
        if not isinstance(getattr(module, "layer_idx", None), int):
            self._refuse("attention without a layer")


def register() -> None:
    """Make the name known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface; see `PagedAttention.attend` for the shapes."""
    paged: PagedAttention = module.foretoken_attention  # type: ignore[assignment]
    layer: int = module.layer_idx  # type: ignore[assignment]
    if not paged.noting:
        return paged.attend(layer, query, key, value), None
    mask = args[0] if args else kwargs.pop("attention_mask", None)
    paged.check(module, mask, key, value)
    scale = kwargs.pop("scaling", None)
    call = LayerCall(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[3],
        window=kwargs.pop("sliding_window", None),
        softcap=kwargs.pop("softcap", None),
        scale=query.shape[3] ** -0.5 if scale is None else float(scale),
    )
    paged.note(layer, call, kwargs)
    return query.transpose(1, 2), None
