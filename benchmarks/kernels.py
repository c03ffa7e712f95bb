"""Linear layers against the time their weights take to be read: rows 1, 6, 16 x types of weights.

    python benchmarks/kernels.py [--threads 1] [--shapes 2048x8192,...] [--weights bf16,int8]

Matrices of a 1 B model, each weight type over as many copies as do not fit a cache, so that every
call reads memory. The limit is the same bytes read by the same threads with nothing computed, in
the same turn. `floor` is that time over the time of a call with one row; the other ratios compare
calls with more rows to one row. Wanted: one row >= 0.93 of the limit, 6 rows <= 1.10 of one row,
16 rows <= 1.30 of it. Prefill is one call of many rows for each shape: how fast it multiplies, and
the slowest shape over the fastest. Integer weights with `a8` are multiplied with activations of 8
bits instead of 16. Block types of GGUF files have ggml's names: `--weights Q4_K,Q6_K,Q4_Ka8`.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from bandwidth import reader
from common import (
    Goal,
    Ratio,
    announce,
    at_least,
    at_most,
    finish,
    interleave,
    make_parser,
    ratio_of_medians,
    use_threads,
)
from torch import Tensor

from foretoken.kernels.library import Library, find_library
from foretoken.kernels.linear import (
    Packed,
    empty_packed,
    pack_block_rows,
    pack_float,
    pack_int4,
    pack_int8,
)
from foretoken.ops.linear import KernelLinear
from foretoken.quant.blocks import BlockWeights
from foretoken.shape.block_kinds import BLOCK_KINDS

ROWS = (1, 6, 16)
EIGHT = "a8"
SHAPES = "3072x2048,2048x2048,16384x2048,2048x8192,32000x2048"
WEIGHTS = "bf16,int8,int8a8,int4g32,int4g32a8,int4g128"
LEAST_BYTES = 512 << 20
PREFILL = 1024
WANTED = {6: 1.10, 16: 1.30}
ONE_ROW = 0.93


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A type of weights and a shape, measured."""

    weights: str
    shape: str
    limit_gb_per_s: float
    one_row_gb_per_s: float
    one_row_us: float
    floor: Ratio
    rows: dict[int, Ratio]

    def __str__(self) -> str:
        more = ", ".join(f"{rows} rows {ratio}" for rows, ratio in self.rows.items())
        return (
            f"{self.weights:9} {self.shape:11} limit {self.limit_gb_per_s:5.1f} GB/s, one row "
            f"{self.one_row_gb_per_s:5.1f} = {self.floor} of it ({self.one_row_us:.0f} us); {more}"
        )


def pack(library: Library, weights: str, outputs: int, inputs: int) -> Packed:
    if weights.endswith(EIGHT):
        return replace(pack(library, weights.removesuffix(EIGHT), outputs, inputs), x_bits=8)
    generator = torch.Generator().manual_seed(0)
    if weights in ("bf16", "fp32"):
        dtype = torch.bfloat16 if weights == "bf16" else torch.float32
        return pack_float(library, torch.randn(outputs, inputs, generator=generator).to(dtype))
    if weights in BLOCK_KINDS:  # bytes of no meaning, none of whose floats is infinite
        size = inputs // BLOCK_KINDS[weights].inputs * BLOCK_KINDS[weights].num_bytes
        rows_NB = torch.randint(0, 60, (outputs, size), generator=generator).to(torch.uint8)
        return pack_block_rows(library, BlockWeights.as_stored(weights, rows_NB).rows())
    if weights == "int8":
        values = torch.randint(-127, 128, (outputs, inputs), generator=generator)
        return pack_int8(library, values.to(torch.int8), torch.rand(outputs, 1))
    group = int(weights.removeprefix("int4g"))
    values = torch.randint(0, 16, (outputs, inputs), generator=generator)
    return pack_int4(library, values.to(torch.uint8), torch.rand(outputs, inputs // group))


def copied(library: Library, packed: Packed) -> Packed:
    def copy(part: Tensor | None) -> Tensor | None:
        if part is None:
            return None
        return empty_packed(library, tuple(part.shape), part.dtype).copy_(part)

    weight, scale, zero = copy(packed.weight), copy(packed.scale), copy(packed.zero)
    assert weight is not None
    return replace(packed, weight=weight, scale=scale, zero=zero)


def timed(call: Callable[[Any], object], each: Sequence[Any]) -> Callable[[], float]:
    """Seconds of one call of each."""

    def run() -> float:
        began = time.perf_counter()
        for one in each:
            call(one)
        return time.perf_counter() - began

    return run


def caller(layers: Sequence[KernelLinear], rows: int) -> Callable[[], float]:
    """Seconds of one call of each layer."""
    dtype, inputs = layers[0].dtype, layers[0].packed.inputs
    x_TK = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(dtype)
    return timed(lambda layer: layer(x_TK), layers)


def measure(library: Library, weights: str, shape: str, arguments: argparse.Namespace) -> Case:
    outputs, inputs = (int(size) for size in shape.split("x"))
    first = pack(library, weights, outputs, inputs)
    count = 2 if arguments.quick else max(2, LEAST_BYTES // first.num_bytes)
    packed = [first, *(copied(library, first) for _ in range(count - 1))]
    dtype = torch.float32 if weights == "fp32" else torch.bfloat16
    layers = [KernelLinear(library, one, dtype=dtype) for one in packed]
    arms = {f"{rows}": caller(layers, rows) for rows in ROWS}
    every = [part for one in packed for part in (one.weight, one.scale, one.zero)]
    read, parts = reader(library), [part for part in every if part is not None]
    arms["read"] = timed(lambda part: read(part.data_ptr(), part.nbytes), parts)
    seconds = interleave(arms, arguments.repeats)
    total = sum(one.num_bytes for one in packed)
    one_row, read = (sorted(seconds[arm])[arguments.repeats // 2] for arm in ("1", "read"))
    return Case(
        weights=weights,
        shape=shape,
        limit_gb_per_s=total / read / 1e9,
        one_row_gb_per_s=total / one_row / 1e9,
        one_row_us=one_row / count * 1e6,
        floor=ratio_of_medians(seconds["read"], seconds["1"]),
        rows={rows: ratio_of_medians(seconds[f"{rows}"], seconds["1"]) for rows in ROWS[1:]},
    )


def measure_prefill(
    library: Library, weights: str, arguments: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Milliseconds of all shapes in turns, and two operations per weight and row, 1e9 a second."""
    arms, work = {}, {}
    dtype = torch.float32 if weights == "fp32" else torch.bfloat16
    for shape in arguments.shapes.split(","):
        outputs, inputs = (int(size) for size in shape.split("x"))
        packed = pack(library, weights, outputs, inputs)
        layer = KernelLinear(library, packed, dtype=dtype)
        arms[shape] = caller([layer], arguments.prefill)
        work[shape] = 2e-9 * outputs * inputs * arguments.prefill
    found = {}
    for shape, seconds in interleave(arms, arguments.repeats).items():
        median = sorted(seconds)[arguments.repeats // 2]
        found[shape] = {"ms": median * 1e3, "gflops": work[shape] / median}
        print(f"{weights:9} prefill {arguments.prefill} rows, {shape}: {median * 1e3:.1f} ms, "
              f"{work[shape] / median:.0f} GFLOP/s")  # fmt: skip
    rates = [each["gflops"] for each in found.values()]
    print(f"{weights:9} slowest shape over fastest: {min(rates) / max(rates):.2f}", flush=True)
    return found


def goals(cases: Sequence[Case]) -> list[Goal]:
    """The worst shape of each type of weights."""
    found = []
    for weights in dict.fromkeys(case.weights for case in cases):
        own = [case for case in cases if case.weights == weights]
        floor = min(case.floor.value for case in own)
        found.append(at_least(f"{weights}: one row against the limit", floor, ONE_ROW))
        for rows, wanted in WANTED.items():
            worst = max(case.rows[rows].value for case in own)
            found.append(at_most(f"{weights}: {rows} rows against one", worst, wanted))
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shapes", default=SHAPES, help="outputs x inputs; default: %(default)s")
    parser.add_argument("--weights", default=WEIGHTS, help="default: %(default)s")
    parser.add_argument("--prefill", type=int, default=PREFILL, help="rows; default: %(default)s")
    arguments = parser.parse_args()
    use_threads(arguments.threads)
    library = find_library()
    if library is None:
        raise SystemExit("no compiled kernels here")
    library.use_threads(torch.get_num_threads())
    where = announce(arguments) | {"kernels": library.level}
    if arguments.quick:
        arguments.shapes, arguments.prefill = "256x256", 100
    prefill = {}
    cases: list[Case] = []
    for weights in arguments.weights.split(","):
        prefill[weights] = measure_prefill(library, weights, arguments)
        for shape in arguments.shapes.split(","):
            cases.append(measure(library, weights, shape, arguments))
            print(cases[-1], flush=True)
    finish("kernels", where, arguments, {"cases": cases, "prefill": prefill}, goals(cases))


if __name__ == "__main__":
    main()
