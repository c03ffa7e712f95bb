"""A mixture of experts in one call into C (native/experts.h); its twin is `layers/mixture.py`.

Owns what the structure points to; the matrices belong to their layers, which it keeps alive.
"""

import ctypes
from collections.abc import Sequence
from typing import Final, final

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
    "clamped": 2,
    "relu2": 3,
}
MOST_EXPERTS: Final = 1024
MOST_USED: Final = 32
"""What native/experts.h has room for."""


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


@final
class MixtureKernel:
    """x [T, D] -> [T, D], plus a residual."""

    def __init__(
        self,
        experts: Experts,
        *,
        router: KernelLinear,
        choice_bias_E: Tensor | None,
        pairs: Sequence[tuple[KernelLinear, KernelLinear]],
        shared: tuple[KernelLinear, KernelLinear, Activation] | None,
        shared_gate: KernelLinear | None,
    ) -> None:
        """Bind layers that have kernels.

        Args:
            experts: how rows are given their experts.
            router: [T, D] -> [T, E].
            choice_bias_E: float32, added to scores for the choice alone.
            pairs: gate-up and down of each expert; the second has float32 results.
            shared: the same of what all rows go through, and what stands between them.
            shared_gate: [T, D] -> [T, 1].
        """
        gate_up, down = pairs[0]
        rows_ED = _rows_of(router.packed)
        if shared_gate is not None:
            rows_ED = torch.cat([rows_ED, _rows_of(shared_gate.packed)])
        panels, addresses = _in_panels(rows_ED), ctypes.c_void_p * experts.count
        bias_E = router.bias_N if experts.routing.bias else None
        biases = [
            None if one is None else one.float().contiguous() for one in (bias_E, choice_bias_E)
        ]
        gate_ups = addresses(*(one.address for one, _ in pairs))
        downs = addresses(*(one.address for _, one in pairs))
        self._kept = (panels, *biases, gate_ups, downs, *pairs, shared)
        self._struct = _numbers(experts, gate_up, down)
        self._struct.router = panels.data_ptr()
        self._struct.router_bias, self._struct.choice_bias = (
            None if one is None else one.data_ptr() for one in biases
        )
        self._struct.gate_up, self._struct.down = map(ctypes.addressof, (gate_ups, downs))
        self._struct.shared_gated = shared_gate is not None
        if shared is not None:
            up, back, activate = shared
            self._struct.shared_gate_up, self._struct.shared_down = up.address, back.address
            self._struct.shared_inner = back.packed.inputs
            self._struct.shared_activation = COMPILED[activate]
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
        choices_TK: Tensor | None = None,
        *,
        counter: ExpertCounter | None = None,
    ) -> Tensor:
        """mixture(x), plus the residual if there is one.

        Args:
            x_TD: rows in the type of the layers.
            residual_TD: like them.
            choices_TK: int32, written: the experts of each row, by number.
            counter: is told how many were read.
        """
        x_TD = x_TD.contiguous()
        y_TD = torch.empty_like(x_TD)
        residual_TD = None if residual_TD is None else residual_TD.contiguous()
        rows = FtExpertsRows(
            x=x_TD.data_ptr(),
            y=y_TD.data_ptr(),
            residual=None if residual_TD is None else residual_TD.data_ptr(),
            rows=x_TD.shape[0],
            choices=None if choices_TK is None else choices_TK.data_ptr(),
            distinct=None if counter is None else counter.address,
        )
        self._run(self.address, ctypes.byref(rows))
        return y_TD


def _numbers(experts: Experts, gate_up: KernelLinear, down: KernelLinear) -> FtExperts:
    """What the structure says of any layer of the model."""
    routing = experts.routing
    return FtExperts(
        hidden=gate_up.packed.inputs,
        inner=down.packed.inputs,
        experts=experts.count,
        chosen=experts.used,
        score=_SCORES[routing.score],
        weights=_WEIGHTS[routing.weights],
        groups=routing.groups if routing.groups > 1 else 0,
        open_groups=routing.groups_used,
        group_best=2,
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


def find_kernel(
    experts: Experts,
    *,
    router: Linear,
    choice_bias_E: Tensor | None,
    pairs: Sequence[tuple[Linear, Linear]],
    shared: tuple[Linear, Linear, Activation] | None,
    shared_gate: Linear | None,
) -> MixtureKernel | None:
    """The mixture as one call, as `MixtureKernel` takes it; None: some part of it has no kernel."""
    gates = [router] if shared_gate is None else [router, shared_gate]
    floats = all(isinstance(one, KernelLinear) and one.fixed_bits == 0 for one in gates)
    both = [*pairs] if shared is None else [*pairs, shared[:2]]
    known = all(
        isinstance(up, KernelLinear)
        and isinstance(down, KernelLinear)
        and len(down.parts) == 1
        and down.out_dtype == torch.float32
        for up, down in both
    )
    own = not (experts.routing.normed or experts.routing.expert_scales)
    own = own and (shared is None or shared[2] in COMPILED)
    fits = own and experts.count <= MOST_EXPERTS and experts.used <= MOST_USED
    if not (floats and known and fits):
        return None
    return MixtureKernel(
        experts,
        router=_kernel(router),
        choice_bias_E=choice_bias_E,
        pairs=[(_kernel(up), _kernel(down)) for up, down in pairs],
        shared=None if shared is None else (_kernel(shared[0]), _kernel(shared[1]), shared[2]),
        shared_gate=None if shared_gate is None else _kernel(shared_gate),
    )


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
