"""A mixture of experts in one call into C (native/experts.h); its twin is `layers/mixture.py`.

Owns what the structure points to; the matrices belong to their layers, which it keeps alive.
"""

import ctypes
from collections.abc import Sequence
from typing import Final, NamedTuple, final

import torch
from torch import Tensor

from foretoken.kernels.linear import BFLOAT16, FLOAT32, PANEL, TYPES, Packed
from foretoken.kernels.structures import FtExperts, FtExpertsRows
from foretoken.ops.activation import ACTIVATIONS, COMPILED, SWISH_ALPHA, Activation
from foretoken.ops.linear import KernelLinear, Linear
from foretoken.shape.mixtures.experts import Experts

_SCORES: Final = {"none": 0, "softmax": 1, "sigmoid": 2}
_WEIGHTS: Final = {"kept": 0, "normalized": 1, "softmax": 2, "sigmoid": 3}
_ACTIVATIONS: Final = {
    **{name: COMPILED[activate] for name, activate in ACTIVATIONS.items()},
    "clamped": 3,
    "relu2": 4,
}
MOST_EXPERTS: Final = 1024
MOST_USED: Final = 32
"""What native/experts.h has room for."""
_TO_GATED, _FROM_GATED = 1, 2
"""Its halves of a call."""


@final
class ExpertCounter:
    """How many experts the rows of a step read, over all layers of a model that have some."""

    __slots__ = ("layers", "total")

    def __init__(self) -> None:
        """Nothing read; `layers` is to be counted by whoever makes them."""
        self.layers, self.total = 0, ctypes.c_int64()

    @property
    def address(self) -> int:
        """Of the number, to which C adds; valid while this object lives."""
        return ctypes.addressof(self.total)

    def take(self) -> float:
        """Experts of a layer since this was asked last, on average; then it is 0 again."""
        total, self.total.value = self.total.value, 0
        return total / self.layers if self.layers else 0.0


class MixtureParts(NamedTuple):
    """What a mixture consists of."""

    router: Linear
    """[T, D] -> [T, E]."""
    choice_bias_E: Tensor | None
    """float32, added to scores for the choice alone."""
    scale_E: Tensor | None
    """float32, what the weight of each expert is multiplied by at last."""
    pairs: Sequence[tuple[Linear, Linear]]
    """Gate-up and down of each expert; the second has float32 results."""
    shared: tuple[Linear, Linear, Activation] | None
    """The same of what all rows go through, and what stands between them."""
    shared_gate: Linear | None
    """[T, D] -> [T, 1]."""


@final
class MixtureKernel:
    """x [T, D] -> [T, D], plus a residual."""

    def __init__(self, experts: Experts, parts: MixtureParts) -> None:
        """Bind parts that have kernels; `experts`: how rows are given them."""
        router, shared_gate, shared = _kernel(parts.router), parts.shared_gate, parts.shared
        pairs = [(_kernel(up), _kernel(down)) for up, down in parts.pairs]
        gate_up, down = pairs[0]
        rows_ED = _rows_of(router.packed)
        if shared_gate is not None:
            rows_ED = torch.cat([rows_ED, _rows_of(_kernel(shared_gate).packed)])
        panels, addresses = _in_panels(rows_ED), ctypes.c_void_p * experts.count
        bias_E = router.bias_N if experts.routing.bias else None
        terms = [
            None if one is None else one.float().contiguous()
            for one in (bias_E, parts.choice_bias_E, parts.scale_E)
        ]
        gate_ups = addresses(*(one.address for one, _ in pairs))
        downs = addresses(*(one.address for _, one in pairs))
        self._kept = (panels, *terms, gate_ups, downs, *pairs, shared)
        self._struct = _numbers(experts, gate_up)
        self._outputs = down.columns
        self._struct.router = panels.data_ptr()
        self._struct.router_bias, self._struct.choice_bias, self._struct.weight_scale = (
            None if one is None else one.data_ptr() for one in terms
        )
        self._struct.gate_up, self._struct.down = map(ctypes.addressof, (gate_ups, downs))
        self._struct.shared_gated = shared_gate is not None
        if shared is not None:
            up, back = map(_kernel, shared[:2])
            self._struct.shared_gate_up, self._struct.shared_down = up.address, back.address
            self._struct.shared_inner = up.columns // 2
            self._struct.shared_activation = COMPILED[shared[2]]
        call = (ctypes.c_void_p, ctypes.POINTER(FtExpertsRows))
        self._run = router.library.function("ft_experts_run", call)

    @property
    def address(self) -> int:
        """Address of its ft_experts; valid while this object lives."""
        return ctypes.addressof(self._struct)

    def __call__(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        *,
        by_TD: Tensor | None = None,
        counter: ExpertCounter | None = None,
    ) -> Tensor:
        """mixture(x), plus the residual if there is one.

        Args:
            x_TD: rows in the type of the layers.
            residual_TD: like them.
            by_TD: what the router reads; None: the rows.
            counter: is told how many were read.
        """
        y_TD = torch.empty_like(x_TD)
        self._call(
            x_TD.shape[0], x=x_TD, by=by_TD, y=y_TD, residual=residual_TD, counter=counter,
        )  # fmt: skip
        return y_TD

    def gate(
        self, x_TD: Tensor, by_TD: Tensor | None, counter: ExpertCounter | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The first half, where this kernel has some of all outputs.

        Returns:
            What the second half is to be told, int64 [T, K + 1]; what experts multiply next,
            [T * K, F], rows by expert; and what all rows do, [T, S].
        """
        rows, one = x_TD.shape[0], self._struct
        routes = torch.empty((rows, one.chosen + 1), dtype=torch.int64)
        gated = torch.empty((rows * one.chosen, one.inner), dtype=x_TD.dtype)
        shared = torch.empty((rows, one.shared_inner), dtype=x_TD.dtype)
        self._call(
            rows, x=x_TD, by=by_TD, routes=routes, gated=gated, shared=shared, counter=counter,
            half=_TO_GATED,
        )  # fmt: skip
        return routes, gated, shared

    def finish(
        self, routes: Tensor, gated: Tensor, shared: Tensor, residual_TN: Tensor | None
    ) -> Tensor:
        """The second half, [T, N], of what was gated by all that share the experts, and of this
        kernel's outputs of the residual."""
        y_TN = torch.empty((len(routes), self._outputs), dtype=gated.dtype)
        self._call(
            len(routes), y=y_TN, residual=residual_TN, routes=routes, gated=gated, shared=shared,
            half=_FROM_GATED,
        )  # fmt: skip
        return y_TN

    def _call(
        self,
        rows: int,
        *,
        half: int = 0,
        counter: ExpertCounter | None = None,
        **tensors: Tensor | None,
    ) -> None:
        dense = {name: one.contiguous() for name, one in tensors.items() if one is not None}
        call = FtExpertsRows(
            rows=rows,
            half=half,
            distinct=None if counter is None else counter.address,
            **{name: one.data_ptr() for name, one in dense.items()},
        )
        self._run(self.address, ctypes.byref(call))


def _numbers(experts: Experts, gate_up: KernelLinear) -> FtExperts:
    """What the structure says of any layer of the model."""
    routing = experts.routing
    return FtExperts(
        hidden=gate_up.packed.inputs,
        inner=gate_up.columns // (2 if experts.is_gated else 1),
        experts=experts.count,
        chosen=experts.used,
        score=_SCORES[routing.score],
        weights=_WEIGHTS[routing.weights],
        groups=routing.groups if routing.groups > 1 else 0,
        open_groups=routing.groups_used,
        activation=_ACTIVATIONS[experts.activation],
        type=TYPES[gate_up.dtype],
        rounds_router=not routing.wide and gate_up.dtype == torch.bfloat16,
        floor=routing.floor,
        added=routing.eps,
        scale=routing.scale,
        softcap=routing.softcap or 0.0,
        limit=experts.limit,
        alpha=SWISH_ALPHA,
    )


def find_kernel(experts: Experts, parts: MixtureParts) -> MixtureKernel | None:
    """The mixture as one call; None: some part of it has no kernel."""
    shared, gates = parts.shared, filter(None, (parts.router, parts.shared_gate))
    floats = all(isinstance(one, KernelLinear) and one.fixed_bits == 0 for one in gates)
    both = [*parts.pairs] if shared is None else [*parts.pairs, shared[:2]]
    known = all(
        isinstance(up, KernelLinear)
        and isinstance(down, KernelLinear)
        and len(down.parts) == 1
        and down.out_dtype == torch.float32
        for up, down in both
    )
    own = shared is None or shared[2] in COMPILED
    fits = own and experts.count <= MOST_EXPERTS and experts.used <= MOST_USED
    return MixtureKernel(experts, parts) if floats and known and fits else None


def _kernel(linear: Linear) -> KernelLinear:
    assert isinstance(linear, KernelLinear), type(linear).__name__
    return linear


def _rows_of(packed: Packed) -> Tensor:
    """Packed floats as rows, float32 [outputs, inputs]."""
    assert packed.weight_type in (FLOAT32, BFLOAT16), packed.weight_type
    if packed.weight_type == FLOAT32:
        panels_PKL = packed.weight.view(torch.float32)
    else:
        pairs = packed.weight.view(torch.bfloat16).unflatten(-1, (PANEL, 2)).float()
        panels_PKL = pairs.transpose(2, 3).flatten(1, 2)
    rows: Tensor = panels_PKL.transpose(1, 2).flatten(0, 1)
    return rows[: packed.outputs, : packed.inputs]


def _in_panels(rows_ED: Tensor) -> Tensor:
    """[panels, inputs, 16], with zeros for what is missing of the last."""
    missing = -rows_ED.shape[0] % PANEL
    padded = torch.nn.functional.pad(rows_ED, (0, 0, 0, missing))
    panels: Tensor = padded.unflatten(0, (-1, PANEL)).transpose(1, 2)
    return panels.contiguous()
