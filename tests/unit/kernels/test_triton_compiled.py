"""Triton's kernels, compiled for GPUs that are not there: what decides a row's bits, and what would
make them slow, can be read off the machine code. The guarded bugs: rows of another number by
another class of matrix instruction (another order of sums), registers or shared memory that leave
no room for a second program, narrow loads."""

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from foretoken.kernels.gpu_kernels import (
    UNIT_INTS,
    AddNorm,
    AttentionCall,
    AttentionInts,
    AttentionShape,
    Drafted,
    Draw,
    ExpertChoice,
    ExpertMatrices,
    ExpertPairs,
    GpuKernels,
    GpuWeights,
    Heads,
    Kept,
    KVLayer,
    Partials,
    QueryKeyNorm,
    Rotary,
)
from foretoken.shape.mixtures.experts import Experts, Routing
from tests.unit.kernels.triton_harness import Compiled, Compiler, compiles, triton_kernels

pytestmark = compiles
CAPABILITIES: Final = (80, 90, 100)
each_capability = pytest.mark.parametrize(
    "capability",
    [pytest.param(one, marks=pytest.mark.xdist_group(f"sm{one}")) for one in CAPABILITIES],
)
"""In one process each: what is compiled is asked several things."""
SHARED: Final = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
REGISTERS: Final = 1 << 16
Call = Callable[[GpuKernels], None]
BF16, HALF, INT = torch.bfloat16, torch.float16, torch.int32
INPUTS, OUTPUTS = 4096, 4096
WEIGHED: Final = {"matrix.linear", "matrix.gate_up"}
DENSE: Final = WEIGHED | {
    "rows.turn_and_write", "rows.add_norm", "attention.attend", "attention.combine"
}  # fmt: skip
"""Kernels of a dense layer's nine launches."""


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def matrix(kind: str) -> GpuWeights:
    """`bf16`, `float32`, `8`, or bits and a group: `4g32`; with zero points `4g32z`."""
    if kind in ("bf16", "float32"):
        values = empty(OUTPUTS, INPUTS, dtype=BF16 if kind == "bf16" else torch.float32)
        return GpuWeights(values_NK=values, segment=1024, inputs=INPUTS)
    bits, group = int(kind[0]), int(kind.rstrip("z")[2:] or INPUTS)
    values = empty(OUTPUTS, INPUTS // 2, dtype=torch.uint8)
    if bits == 8:
        values = empty(OUTPUTS, INPUTS, dtype=torch.int8)
    numbers = empty(OUTPUTS, INPUTS // group, dtype=HALF if group < 128 else torch.float32)
    return GpuWeights(
        values_NK=values,
        segment=1024,
        inputs=INPUTS,
        scale_NG=numbers,
        zero_NG=numbers if kind.endswith("z") else None,
        bits=bits,
    )


def linear(kind: str, rows: int) -> Call:
    def call(kernels: GpuKernels) -> None:
        w, x_TK = matrix(kind), empty(rows, INPUTS)
        if rows > kernels.few_rows:
            kernels.linear_long(x_TK, w, empty(1, rows, OUTPUTS, dtype=torch.float32))
        else:
            kernels.linear_splits(x_TK, w, empty(w.segments, rows, OUTPUTS, dtype=torch.float32))

    return call


def gate_up(kind: str, rows: int) -> Call:
    x_TK, y_TF = empty(rows, INPUTS), empty(rows, OUTPUTS // 2)
    return lambda kernels: kernels.gate_up(x_TK, matrix(kind), None, 0, y_TF)


def attend(
    size: int = 128,
    trees: bool = False,
    stored: torch.dtype = BF16,
    window: int = 0,
    whole: bool = False,
) -> Call:
    """Of 32 heads that share 8; with a window, also soft caps and rows that end in a split."""
    shape = AttentionShape(32, 8, size, 16, window, 50.0 if window else 0.0, 0.1)
    row, units = empty(64, dtype=INT), empty(8, UNIT_INTS, dtype=INT)
    ints = AttentionInts(
        row, row, row, units, row, empty(4, 8, dtype=INT), trees=trees, splits=not window,
        lasts_T=row if whole else None,
    )  # fmt: skip
    layer = KVLayer(empty(4096, 16, size))
    if stored != BF16:
        numbers, scales = empty(4096, 16 * (size + 4), dtype=stored).split((16 * size, 64), 1)
        layer = KVLayer(numbers.unflatten(1, (16, size)), scales.view(torch.float32))
    partials = Partials(
        empty(9, 32, size, dtype=torch.float32), empty(9, 32, 2, dtype=torch.float32)
    )
    out = empty(64, 32 * size)
    on = AttentionCall(empty(64, 32, size), layer, shape, ints, partials, out)
    return lambda kernels: kernels.attend(on)


EXPERTS = Experts(
    count=2, used=2, width=OUTPUTS // 4, layers=(True,), shared="gated", shared_width=8,
    routing=Routing(weights="normalized", bias=True, choice_bias=True),
)  # fmt: skip


def experts_down(kind: str, rows: int) -> Call:
    def call(kernels: GpuKernels) -> None:
        of = ExpertMatrices(matrix(kind), empty(OUTPUTS))
        tile = kernels.pair_tile(2 * rows, 2, of.weights.bits)
        pairs = ExpertPairs.empty(rows, EXPERTS, torch.device("meta")).of(rows, 2, tile)
        y_STN = empty(2, rows, OUTPUTS // 2, dtype=torch.float32)
        kernels.experts_down(empty(2 * rows, INPUTS), of, EXPERTS, pairs, y_STN)

    return call


def experts_gate_up(kind: str, rows: int, activation: Any = "silu") -> Call:
    def call(kernels: GpuKernels) -> None:
        experts = replace(EXPERTS, activation=activation)
        of = ExpertMatrices(matrix(kind), empty(OUTPUTS) if activation == "clamped" else None)
        tile = kernels.pair_tile(2 * rows, 2, of.weights.bits)
        pairs = ExpertPairs.empty(rows, EXPERTS, torch.device("meta")).of(rows, 2, tile)
        y_PF = empty(2 * rows, EXPERTS.width)
        kernels.experts_gate_up(empty(rows, INPUTS), of, experts, pairs, y_PF)

    return call


MATRICES: Final[dict[str, Call]] = {
    "linear 1 row": linear("bf16", 1),
    "linear 64 rows": linear("bf16", 64),
    "linear 512 rows": linear("bf16", 512),
    "linear float32": linear("float32", 1),
    "linear int8": linear("8", 1),
    "linear int8, 512 rows": linear("8", 512),
    "linear int4": linear("4g32", 1),
    "linear int4, 512 rows": linear("4g128", 512),
    "linear int4 with zero points": linear("4g32z", 64),
    "gate_up 1 row": gate_up("bf16", 1),
    "gate_up 512 rows": gate_up("bf16", 512),
    "gate_up int4": gate_up("4g32", 64),
    "experts_gate_up 1 row": experts_gate_up("bf16", 1),
    "experts_gate_up 64 rows, clamped": experts_gate_up("bf16", 64, "clamped"),
    "experts_gate_up int4": experts_gate_up("4g32", 32),
    "experts_down 1 row": experts_down("bf16", 1),
    "experts_down 64 rows": experts_down("bf16", 64),
    "experts_down int8": experts_down("8", 1),
    "attend": attend(),
    "attend a tree, a window, soft caps": attend(trees=True, window=1024),
    "attend blocks": attend(whole=True),
    "attend int8": attend(trees=True, stored=torch.int8),
    "attend heads of 256": attend(256, trees=True),
}


def add_norm(kernels: GpuKernels) -> None:
    kept = Kept(empty(99, 3 * 4096)[:, :4096], empty(8, dtype=INT))
    parts, stream = empty(4, 8, 4096, dtype=torch.float32), empty(8, 4096)
    kernels.add_norm(AddNorm(parts, None, stream, empty(4096), stream, 1e-6, kept=kept))


def turn_and_write(kernels: GpuKernels) -> None:
    layer = KVLayer(empty(99, 16, 128, dtype=torch.int8), empty(99, 16, dtype=torch.float32))
    norm, rotary = QueryKeyNorm(empty(128), empty(128), 1e-6), Rotary(*[empty(999, 128)] * 2)
    parts, row = empty(4, 8, 48 * 128, dtype=torch.float32), empty(8, dtype=INT)
    kernels.turn_and_write(Heads(parts, None, norm, rotary, row, row, empty(8, 32, 128), layer))


def combine(kernels: GpuKernels) -> None:
    shape = AttentionShape(32, 8, 128, 16, 0, 0.0, 0.1)
    row = empty(64, dtype=INT)
    ints = AttentionInts(row, row, row, row, row, row, trees=False, splits=True)
    sums = empty(9, 32, 128, dtype=torch.float32)
    room, q = Partials(sums, sums[..., :2]), empty(64, 32, 128)
    kernels.combine(AttentionCall(q, KVLayer(q), shape, ints, room, empty(64, 4096)))


def choose(kernels: GpuKernels) -> None:
    """All that is done with logits."""
    logits, numbers, ints = empty(8, 128256, dtype=torch.float32), empty(8), empty(64, dtype=INT)
    how = empty(8, 4, dtype=torch.float32)
    kernels.keep(logits, how, how[:, :3])
    kernels.draw(Draw(logits, empty(8, 2, dtype=INT), how, ints[:8], ints, how[:, :3]))
    kernels.chance(logits, numbers.float())
    kernels.cap(logits, 30.0)


def route(kernels: GpuKernels) -> None:
    """Of 128 experts eight, in groups or not, and the pairs in order."""
    one = empty(1, dtype=INT)
    for groups in (1, 8):
        routing = replace(EXPERTS.routing, groups=groups, groups_used=4)
        experts = replace(EXPERTS, count=128, used=8, routing=routing)
        choice = ExpertChoice(experts, BF16, empty(128), empty(128, dtype=torch.float32))
        pairs = ExpertPairs.empty(8, experts, torch.device("meta")).of(8, 128, 16)
        kernels.choose_experts(empty(4, 8, 129, dtype=torch.float32), choice, one, pairs)
    kernels.sort_pairs(pairs, 128, one)


def weigh(kernels: GpuKernels) -> None:
    """Drafts, one by one and as blocks, one-hot and drawn."""
    logits, spans = empty(8, 128256, dtype=torch.float32), empty(2, 4, dtype=INT)
    how, keys, ids = empty(8, 4, dtype=torch.float32), empty(8, 2, dtype=INT), empty(6, dtype=INT)
    for probs in (None, logits):
        drafted = Drafted(
            logits, how, keys, probs, spans, ids, empty(6, dtype=torch.float64), most=3
        )
        kernels.accept(drafted, spans[:, :2], block=probs is None)
        kernels.accept(drafted, spans[:, :2], block=probs is not None)


def copy(kernels: GpuKernels) -> None:
    ints, rows = empty(8, dtype=INT), empty(8, 4096)
    kernels.embed(ints, empty(128256, 4096), 2.0, rows)
    kernels.take_rows(rows, ints, rows)
    kernels.take_rows(ints[:, None], ints, ints[:, None])
    parts, weights = (empty(4, 8, width, dtype=torch.float32) for width in (4096, 1))
    kernels.add_parts(parts, None, rows, rows)
    kernels.add_parts(parts, None, None, parts[0], weights[..., 0].T)
    kernels.add_parts(rows[None], None, None, rows)


ROWS: Final[dict[str, Call]] = {
    "add_norm": add_norm,
    "turn_and_write": turn_and_write,
    "combine": combine,
    "choose": choose,
    "route": route,
    "weigh": weigh,
    "copy": copy,
}


@functools.cache
def compiled(name: str, capability: int) -> Compiled:
    compiler = _compiler[capability]
    (launch,) = compiler.launches(MATRICES[name])
    return compiler(launch)


_compiler: dict[int, Compiler] = {}


@pytest.fixture(autouse=True, scope="module")
def compilers(tmp_path_factory: pytest.TempPathFactory) -> None:
    for capability in CAPABILITIES:
        _compiler[capability] = Compiler(capability, tmp_path_factory.mktemp(f"sm{capability}"))


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@each_capability
@pytest.mark.parametrize("name", MATRICES)
def test_products_fit_and_spill_nothing(name: str, capability: int) -> None:
    made = compiled(name, capability)
    assert made.shared <= SHARED[capability]
    # Queries and sums of heads of 256 fill the registers; prompts over 4 bits lack one or two.
    most = {"attend heads of 256": 24, "linear int4, 512 rows": 8}
    assert made.spills <= most.get(name, 0)
    # A group of 4-bit integers has no more than 16 bytes.
    assert made.instructions["LDGSTS.64"] if "int4" in name else made.wide_loads
    if "512" not in name and "256" not in name:
        assert 2 * made.registers * made.threads <= REGISTERS, "no room for a second program"
        assert 2 * made.shared <= SHARED[capability]


@each_capability
@pytest.mark.parametrize("kernel", ["linear", "gate_up", "experts", "attend"])
def test_a_kernel_has_one_class_of_matrix_instruction(kernel: str, capability: int) -> None:
    """Whatever the number of rows, whatever the weights: instructions of another class may add in
    another order."""
    classes = [
        compiled(name, capability).matrix_classes for name in MATRICES if name.startswith(kernel)
    ]
    wanted = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}[capability]
    assert all(found == {wanted} for found in classes), classes


@pytest.mark.parametrize("name", ["linear 1 row", "linear 64 rows", "gate_up 1 row"])
@each_capability
def test_float_weights_come_16_bytes_at_a_time(name: str, capability: int) -> None:
    found = compiled(name, capability).instructions
    assert found["LDGSTS"] == found["LDGSTS.128"] > 0 and found["LDG"] == 0


@pytest.mark.xdist_group("sm90")
@pytest.mark.parametrize("name", ROWS)
def test_rows_compile_and_spill_nothing(name: str) -> None:
    launches = _compiler[90].launches(ROWS[name])
    assert launches
    for launch in launches:
        made = _compiler[90](launch)
        assert made.spills == 0 and made.registers <= 128 and not made.matrix_classes


@each_capability
@pytest.mark.parametrize("name", [*(MATRICES | ROWS)])
def test_a_launch_waits_before_it_reads_or_writes(name: str, capability: int) -> None:
    """From 9.0 on those of a dense layer begin before the launch before them has ended; of what
    that writes nothing is touched until then. Weights may be fetched."""
    for launch in _compiler[capability].launches((MATRICES | ROWS)[name]):
        function = launch.kernel.fn
        kernel = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        overlaps = kernel in DENSE and capability >= 90
        assert launch.options.get("launch_pdl", False) is overlaps
        if kernel not in DENSE:
            continue
        made = compiled(name, capability) if name in MATRICES else _compiler[capability](launch)
        before, wait, after = made.ptx.partition("griddepcontrol.wait")
        assert (wait != "") == overlaps and "griddepcontrol" not in before
        if overlaps:
            assert not re.search(r"(ld|st|red|atom)\.global|cp\.async", before)
            assert "griddepcontrol.launch_dependents" in after
            assert ("prefetch.global.L2" in before) == (kernel in WEIGHED)


def test_nothing_is_fused() -> None:
    """Multiplication and addition round apart, in every version of Triton."""
    asked: list[dict[str, object]] = []

    class Kernel:
        arg_names = ("x",)

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **options: asked.append(options)

    kernels: Any = triton_kernels()
    kernels._run("any", Kernel(), (1,))
    assert asked[0]["enable_fp_fusion"] is False and kernels.launched["any"] == 1


def test_a_graph_is_recorded_beside_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """First run on a stream of its own, then captured; what other threads ask the driver for
    meanwhile, such as memory for a copy, does not end the capture."""
    from foretoken.kernels.triton import launches as triton_kernels

    done, ways = list[str](), dict[str, Any]()

    class Stream:
        def wait_stream(self, other: "Stream") -> None:
            done.append("wait")

    class Graph:
        def replay(self) -> None:
            done.append("replay")

    @contextmanager
    def within(name: str, **options: Any) -> Iterator[None]:
        ways.update(options)
        done.append(name)
        yield
        done.append(f"end of {name}")

    for name, made in {
        "graph_pool_handle": lambda: "pool",
        "current_stream": Stream,
        "Stream": Stream,
        "CUDAGraph": Graph,
        "stream": lambda stream: within("stream"),
        "graph": lambda graph, **options: within("graph", **options),
    }.items():
        monkeypatch.setattr(torch.cuda, name, made)
    kernels = triton_kernels.TritonKernels((9, 0))
    replay = triton_kernels._Graphs(kernels).record(
        lambda: done.append("dry run" if kernels.recording else "run")
    )
    replay()
    first = ["wait", "stream", "dry run", "end of stream", "wait"]
    assert done == [*first, "graph", "run", "end of graph", "replay"]
    assert ways == {"pool": "pool", "capture_error_mode": "thread_local"}
