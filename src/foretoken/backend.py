"""What computes on a device: the one object that is asked for layers and kernels.

`backend_for` chooses once per device, and is the only place that asks which device there is or
whether the C kernels are. Models, proposers and runners take what a backend gives: linear layers,
attention, row operations, drawing, rejecting. What is made of parts that all have C kernels can be
bound to C as a whole (`models.compiled`, `models.rollout`), which asks the parts. Owns no layer. A
new device is a class here and a line in `backend_for`.
"""

import importlib
import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final, final

import torch
from torch import Tensor

from foretoken.control.adaptive.allocation import Search, allocate
from foretoken.kernels.allocating import AllocationKernel
from foretoken.kernels.build import library_path
from foretoken.kernels.gpu_kernels import GpuKernels
from foretoken.kernels.library import Library, find_library, wants_twins
from foretoken.kernels.linear import TYPES, Packed, pack_block_rows, pack_float
from foretoken.kernels.threads import StepThreads
from foretoken.kernels.triton.found import has_triton, say_which
from foretoken.ops.attention import Attention, Geometry, torch_attention
from foretoken.ops.attention.gpu import GpuAttention
from foretoken.ops.attention.native import NativeAttention
from foretoken.ops.drawing import DrawKernel
from foretoken.ops.gpu.drawing import GpuDraw
from foretoken.ops.gpu.probe import why_bits_differ
from foretoken.ops.gpu.rejection import GpuReject
from foretoken.ops.gpu.twin_kernels import TwinKernels
from foretoken.ops.linear import (
    InvariantLinear,
    KernelLinear,
    Linear,
    PackedLinear,
    PlainLinear,
    RowProbe,
    can_pack,
)
from foretoken.ops.linear.gpu import WholeLinear, pack_for_gpu
from foretoken.ops.native_rejection import RejectKernel
from foretoken.ops.noise import CACHED_NOISE
from foretoken.ops.row_operations import RowKernels
from foretoken.quant import BlockWeights, IntWeights, Scheme, Weights, round_weights, scheme_of
from foretoken.quant.arrange import for_kernels
from foretoken.quant.pieces import pack_integers, pack_rounded
from foretoken.quant.triton_layer import TRITON_TYPES, TritonLinear

logger = logging.getLogger("foretoken")

_GPU_NOISE: Final = 1 << 25
_CARD_IN_USE: Final = torch.device("cuda")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """What a linear layer has to be; a backend decides how."""

    weights: Weights
    """[N, K]: floats in `dtype`, or integers."""
    dtype: torch.dtype
    """Type of the rows that it will be given."""
    bias_N: Tensor | None = None
    """Added to every row, in the type of the rows."""
    adds_residual: bool = False
    """Whether it will be given residuals."""
    is_gate: bool = False
    """Whether its outputs are the gates of an MLP, then what they gate."""
    is_head: bool = False
    """Whether it makes logits: results are float32 where that costs nothing, and weights are never
    rounded below 8 bits."""
    is_wide: bool = False
    """Whether it is float32 beside others that are not."""
    keeps_sums: bool = False
    """Whether results are float32 where that costs nothing, as those of a head: they are added to
    others before they are rounded."""
    quantization: str | None = None
    """A name of `config.quantization`: how floats are rounded; None: they stay."""
    packed: Packed | None = None
    """The weights as `CpuKernels` packed them in an earlier load; `weights` has their shape then,
    and no contents."""
    x_bits: int = 16
    """Of the fixed point that rows are rounded to before integer weights, where kernels do so."""
    of_outputs: int = 0
    """Outputs of the matrix that these are some of, which decides how sums are made; 0: all."""
    probe: RowProbe | None = None
    """Measures which numbers of rows give the same bits, where that has to be measured. None: no
    promise about bits is needed."""

    @property
    def out_dtype(self) -> torch.dtype | None:
        """Type of the results; None: that of the rows."""
        return torch.float32 if self.is_head or self.keeps_sums else None

    @property
    def scheme(self) -> Scheme | None:
        """How its floats are rounded; None: they stay."""
        if self.quantization is None:
            return None
        scheme = scheme_of(self.quantization)
        return scheme.for_head() if self.is_head else scheme.fitted(self.weights.shape[1])

    def settled(self) -> "LinearSpec":
        """This layer with integers only in groups that kernels have, and others as floats."""
        if isinstance(self.weights, Tensor):
            return self
        fitting = for_kernels(self.weights)
        return replace(self, weights=fitting or self.weights.dequantized(self.dtype))


class Backend(ABC):
    """What computes on one device. Where a kernel is None, PyTorch's operations do the same."""

    library: Library | None = None
    """The C kernels, where layers' weights are packed for them."""
    keeps_bits: bool = False
    """Whether rows keep their bits in all of its layers, by the order of sums."""
    holds_integers: bool
    """Whether integer weights stay integers; else they are multiplied out when they are loaded."""
    why_not_int8: str | None
    """Why rounding a draft model's weights need not be tried; None: it may save time."""
    noise_at_once: int
    """Random numbers that are best made in one pass."""
    gpu: GpuKernels | None = None
    """A GPU's kernels, of which whole steps are recorded (`models.gpu.captured`)."""
    draw: DrawKernel | GpuDraw | None
    """Chooses tokens from rows of logits."""
    reject: RejectKernel | GpuReject | None
    """Accepts and rejects drafts."""

    @abstractmethod
    def linear(self, spec: LinearSpec) -> Linear:
        """The fastest layer of this kind; given a probe, a row's bits do not depend on others."""

    @abstractmethod
    def attention(self, geometry: Geometry, *, batch_invariant: bool) -> Attention:
        """The fastest attention; under `batch_invariant` the fastest that keeps a row's bits."""

    def rows(self, x: Tensor) -> RowKernels | None:
        """Norms, rotary positions and gates for rows like `x`."""
        return None

    def step_threads(self, dtype: torch.dtype, threads: int) -> StepThreads:
        """Which work during a step of a model of this type, so many `threads`."""
        return StepThreads(None, threads)


@final
class PlainTorch(Backend):
    """PyTorch's operations, on any device: the reference, and what others fall back on."""

    holds_integers = False
    draw = None
    reject = None

    def __init__(self, device: torch.device) -> None:
        """Serve `device`."""
        self._on_cpu = device.type == "cpu"
        self.noise_at_once = CACHED_NOISE if self._on_cpu else _GPU_NOISE
        self.why_not_int8: str | None = "draft steps are timed on a CPU only"
        if self._on_cpu:
            self.why_not_int8 = (
                "without kernels of ours integers are multiplied out, which saves no time"
            )

    def linear(self, spec: LinearSpec) -> Linear:
        """Floats, by oneDNN where it packs them; integers are multiplied out."""
        spec = spec.settled()
        weights, scheme = spec.weights, spec.scheme
        if isinstance(weights, Tensor) and scheme is not None:
            weights = round_weights(weights, scheme)
        if not isinstance(weights, Tensor):
            if not self._on_cpu:
                say_which()
            weights = weights.dequantized(spec.dtype)
        packs = self._on_cpu and can_pack(weights)
        bias_N = spec.bias_N
        linear = PackedLinear(weights, bias_N) if packs else PlainLinear(weights, bias_N)
        if spec.probe is None:
            return linear
        rows = spec.probe.row_class(
            linear,
            weights,
            adds_residual=spec.adds_residual,
            bias_N=bias_N,
        )
        return InvariantLinear(linear, rows)

    def attention(self, geometry: Geometry, *, batch_invariant: bool) -> Attention:
        """By PyTorch's scaled_dot_product_attention, tiled so as to keep bits where it must."""
        return torch_attention(geometry, batch_invariant=batch_invariant)


@final
class CpuKernels(Backend):
    """The C kernels, for the types that they take; whose rows keep their bits by construction."""

    holds_integers = True
    why_not_int8 = None
    noise_at_once = CACHED_NOISE

    def __init__(self, library: Library, device: torch.device) -> None:
        """Bind the functions of `library`."""
        self.library: Library | None = library
        self._library, self._plain = library, PlainTorch(device)
        self._rows = RowKernels(library)
        self.draw, self.reject = DrawKernel(library), RejectKernel(library)

    def linear(self, spec: LinearSpec) -> Linear:
        """Weights packed for the kernels, floats and integers alike."""
        if spec.dtype not in TYPES:
            return self._plain.linear(spec)
        library, spec = self._library, spec.settled()
        weights, scheme = spec.weights, spec.scheme
        library.use_threads(torch.get_num_threads())
        if spec.packed is not None:
            packed = spec.packed
        elif isinstance(weights, BlockWeights):
            packed = pack_block_rows(library, weights.rows())
        elif isinstance(weights, IntWeights):
            packed = pack_integers(library, weights)
        elif scheme is not None:
            packed = pack_rounded(library, weights, scheme)
        else:
            packed = pack_float(library, weights)
        packed = replace(packed, x_bits=spec.x_bits)
        return KernelLinear(
            library,
            packed,
            dtype=spec.dtype,
            out_dtype=spec.out_dtype,
            bias_N=spec.bias_N,
        )

    def attention(self, geometry: Geometry, *, batch_invariant: bool) -> Attention:
        """The C kernel, which reads pages where they lie."""
        if geometry.dtype not in TYPES:
            return self._plain.attention(geometry, batch_invariant=batch_invariant)
        return NativeAttention(geometry, self._library)

    def rows(self, x: Tensor) -> RowKernels | None:
        """The kernels, if they take tensors like `x`."""
        return self._rows if x.dtype in TYPES and x.stride(-1) == 1 else None

    def step_threads(self, dtype: torch.dtype, threads: int) -> StepThreads:
        """The kernels' own pool has them, where the kernels do the heavy work."""
        library = self._library if dtype in TYPES else None
        return StepThreads(library, threads)


@final
class TritonIntegers(Backend):
    """A GPU: integer weights by Triton's kernels, everything else by PyTorch."""

    holds_integers = True
    draw = None
    reject = None
    noise_at_once = _GPU_NOISE

    def __init__(self, device: torch.device) -> None:
        """Serve `device`."""
        self._plain = PlainTorch(device)
        self.why_not_int8 = self._plain.why_not_int8

    def linear(self, spec: LinearSpec) -> Linear:
        """Integers as they are; floats as PyTorch has them."""
        spec = spec.settled()
        weights, scheme = spec.weights, spec.scheme
        if isinstance(weights, BlockWeights):
            weights = weights.dequantized(spec.dtype)
        if isinstance(weights, Tensor) and scheme is not None:
            weights = round_weights(weights, scheme)
        if isinstance(weights, Tensor) or spec.dtype not in TRITON_TYPES:
            return self._plain.linear(replace(spec, weights=weights))
        say_which()
        fitting = for_kernels(weights)
        assert isinstance(fitting, IntWeights), "rounding makes groups that kernels have"
        return TritonLinear(fitting, dtype=spec.dtype, out_dtype=spec.out_dtype, bias_N=spec.bias_N)

    def attention(self, geometry: Geometry, *, batch_invariant: bool) -> Attention:
        """PyTorch's."""
        return self._plain.attention(geometry, batch_invariant=batch_invariant)


@final
class GpuSteps(Backend):
    """A GPU: kernels of which whole steps are recorded. Rows keep their bits by the order of sums;
    a probe at load asks the device whether they do (`ops.gpu.probe`)."""

    keeps_bits = True
    holds_integers = True
    noise_at_once = _GPU_NOISE

    def __init__(self, kernels: GpuKernels, device: torch.device) -> None:
        """Serve `device` by `kernels`."""
        self.gpu: GpuKernels | None = kernels
        self._kernels, self._plain = kernels, PlainTorch(device)
        self.why_not_int8 = self._plain.why_not_int8
        self.draw, self.reject = GpuDraw(kernels), GpuReject(kernels)

    def linear(self, spec: LinearSpec) -> Linear:
        """Weights as the kernels read them, floats and integers alike."""
        if spec.dtype not in self._kernels.types and not spec.is_wide:
            return self._plain.linear(spec)
        spec = spec.settled()
        weights, scheme = spec.weights, spec.scheme
        if isinstance(weights, Tensor) and scheme is not None:
            weights = round_weights(weights, scheme)
        in_one = spec.is_head or spec.is_gate or spec.keeps_sums
        if isinstance(weights, Tensor):
            packed = pack_for_gpu(self._kernels, weights, in_one=in_one, of_outputs=spec.of_outputs)
        else:
            fitting = for_kernels(weights)
            assert fitting is not None, "rounding makes groups that kernels have"
            found = fitting.integers() if isinstance(fitting, BlockWeights) else fitting
            packed = pack_for_gpu(
                self._kernels,
                found.values_NK,
                (found.scale_NG, found.zero_NG),
                bits=found.bits,
                in_one=in_one,
                of_outputs=spec.of_outputs,
            )
        return WholeLinear(self._kernels, packed, out_dtype=spec.out_dtype, bias_N=spec.bias_N)

    def attention(self, geometry: Geometry, *, batch_invariant: bool) -> Attention:
        """The kernel, which reads pages where they lie."""
        if geometry.dtype not in self._kernels.types:
            return self._plain.attention(geometry, batch_invariant=batch_invariant)
        return GpuAttention(geometry, self._kernels)


def backend_for(device: torch.device) -> Backend:
    """The backend of this device; `cuda` is the card that is in use, which is probed once whatever
    it is called."""
    if device == _CARD_IN_USE and has_triton():
        device = torch.device("cuda", torch.cuda.current_device())
    return make_backend(device)


@cache
def make_backend(device: torch.device) -> Backend:
    """The backend of a device with its index."""
    if device.type == "cpu" and wants_twins():
        torch.set_num_threads(1)  # Thousands of small operations, each in the order of one thread.
        return GpuSteps(TwinKernels(), device)
    if device.type == "cpu":
        library = find_library()
        return PlainTorch(device) if library is None else CpuKernels(library, device)
    if device.type == "cuda" and has_triton():
        return _gpu_steps(device) or TritonIntegers(device)
    return PlainTorch(device)


def _gpu_steps(device: torch.device) -> GpuSteps | None:
    """Recorded steps; None: the device gives rows other bits beside other rows, or the kernels do
    not run on it, which is said."""
    try:
        # It imports triton, which an installation for CPUs has not.
        found: Any = importlib.import_module("foretoken.kernels.triton.launches")
        kernels: GpuKernels = found.TritonKernels(torch.cuda.get_device_capability(device))
        why = why_bits_differ(kernels, device)
    except Exception as error:  # noqa: BLE001 - a compiler's, a driver's: PyTorch's operations run
        why = f"{type(error).__name__}: {error}"
    if why is None:
        logger.info("GPU: whole steps are recorded; a probe found that rows keep their bits")
        return GpuSteps(kernels, device)
    words = "GPU: steps are run by PyTorch's operations, slowly, and batch_invariant auto is off"
    logger.warning("%s: the probe of the kernels failed (%s)", words, why)
    return None


def packing_devices() -> list[str]:
    """Where kernels keep integer weights; on `cpu` they pack floats too."""
    return [name for name in ("cpu", "cuda") if backend_for(torch.device(name)).holds_integers]


def plan_search() -> Search:
    """What finds the best plan of a step, for one thread.

    It runs on the host whatever the device is; nothing is compiled for it alone.
    """
    library = find_library() if library_path().is_file() else None
    return allocate if library is None else AllocationKernel(library)
