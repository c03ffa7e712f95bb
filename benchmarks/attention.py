"""Paged attention against the time its keys and values take to be read once.

    python benchmarks/attention.py [--threads 1]

Shapes of a 1 B model (32 query heads on 8 key heads of 64, bfloat16), pages of 16 in disorder, as
many layers' stores as do not fit a cache. Spans of one row (plain decoding) and of six (k=5). The
floor is the same bytes read by the same threads, nothing computed. `int8` keeps keys and values in
int8 and reads about half the bytes; its own floor is beside it. `tiled` is the PyTorch twin that
serves without kernels. Wanted: <= 1.4 floors at batch 16, context 1,024. With one thread its
processor time is taken, which leaves out the time that other processes had the core.
"""

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from bandwidth import reader
from common import (
    Ratio,
    announce,
    at_most,
    finish,
    interleave,
    make_parser,
    ratio_of_medians,
    use_threads,
)

from foretoken.backend import backend_for
from foretoken.kernels.library import Library, find_library
from foretoken.ops.attention import Attention, Geometry, SpanWindow, TiledAttention
from foretoken.ops.attention.tiled import Tiling
from foretoken.ops.quantize_kv import quantize_kv

HEADS, KV_HEADS, SIZE, PAGE = 32, 8, 64, 16
CASES = ((1, 128), (1, 1024), (1, 8192), (16, 128), (16, 1024))
MAIN = (16, 1024)
ROWS = (1, 6)
LEAST_BYTES = 192 << 20
"""Of all layers' keys and values together: more than any cache of the machine holds."""


def timed(call: Callable[[torch.Tensor], object], layers: list[torch.Tensor]) -> float:
    """Seconds for a layer, of this thread alone where there is only one."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    for layer_SKh in layers:
        call(layer_SKh)
    return (clock() - began) / len(layers)


class Setting:
    """Keys and values of `batch` sequences of `context` tokens, layer by layer: random numbers,
    pages in random order."""

    def __init__(self, batch: int, context: int, least_bytes: int, kv_store_dtype: Any) -> None:
        self.geometry = Geometry(
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=SIZE,
            page_size=PAGE,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            kv_store_dtype=kv_store_dtype,
        )
        self.batch, self.context, each = batch, context, -(-context // PAGE)
        pages = random.Random(0).sample(range(batch * each), batch * each)
        self.tables = [pages[i * each : (i + 1) * each] for i in range(batch)]
        numbers = torch.randn(batch * each * PAGE + 1024, 2 * KV_HEADS, SIZE).bfloat16()
        one = quantize_kv(numbers, self.geometry.store_dtype)
        self.layers = [one.clone() for _ in range(max(1, -(-least_bytes // one.nbytes)))]
        self.kv_bytes = batch * context * one[0].nbytes
        """Of one layer's tokens."""

    def attend(self, attention: Attention, rows: int) -> Callable[[], float]:
        """Seconds per layer of spans of `rows` rows at the end of each sequence."""
        spans = [SpanWindow(self.context - rows, rows, table) for table in self.tables]
        q_THh = torch.randn(self.batch * rows, HEADS, SIZE).bfloat16()

        @torch.inference_mode()
        def measure() -> float:
            attend = attention.plan(spans)
            return timed(lambda layer_SKh: attend(q_THh, layer_SKh), self.layers)

        return measure

    def read(self, library: Library) -> Callable[[], float]:
        """Seconds per layer of reading the keys and values once."""
        library.use_threads(torch.get_num_threads())
        read = reader(library)
        return lambda: timed(lambda one: read(one.data_ptr(), self.kv_bytes), self.layers)


def compare(wide: Setting, rounded: Setting, repeats: int, library: Library) -> dict[str, Any]:
    """Milliseconds and ratios of one batch and context, with 16-bit and int8 keys and values."""
    attention = backend_for(wide.geometry.device).attention
    compiled = attention(wide.geometry, batch_invariant=True)
    tiled = TiledAttention(wide.geometry, Tiling(8, 64))
    int8 = attention(rounded.geometry, batch_invariant=True)
    arms = {"floor": wide.read(library), "int8 floor": rounded.read(library)}
    pairs = [("compiled 6", "compiled 1")]
    for rows in ROWS:
        arms[f"compiled {rows}"] = wide.attend(compiled, rows)
        arms[f"int8 {rows}"] = rounded.attend(int8, rows)
        arms[f"tiled {rows}"] = wide.attend(tiled, rows)
        pairs += [
            (f"compiled {rows}", "floor"),
            (f"int8 {rows}", f"compiled {rows}"),
            (f"int8 {rows}", "int8 floor"),
            (f"tiled {rows}", f"compiled {rows}"),
        ]
    times = interleave(arms, repeats)
    found: dict[str, Any] = {f"{n} ms": statistics.median(s) * 1e3 for n, s in times.items()}
    found["floor GB/s"] = wide.kv_bytes / statistics.median(times["floor"]) / 1e9
    return found | {f"{a} / {b}": ratio_of_medians(times[a], times[b]) for a, b in pairs}


def main() -> None:
    parser = make_parser(__doc__)
    settings = parser.parse_args()
    use_threads(settings.threads)
    library = find_library()
    if library is None:
        parser.error("there are no compiled kernels here")
    cases, least = (((2, 64),), 1) if settings.quick else (CASES, LEAST_BYTES)
    where = announce(settings)
    results: dict[str, Any] = {"level": library.level}
    for batch, context in cases:
        wide, rounded = (Setting(batch, context, least, dtype) for dtype in (None, torch.int8))
        found = compare(wide, rounded, settings.repeats, library)
        results[f"batch {batch}, context {context}"] = found
        print(f"batch {batch}, context {context}")
        for name, value in found.items():
            print(f"  {name}: {value if isinstance(value, Ratio) else round(value, 4)}", flush=True)
    main_case = results.get("batch {}, context {}".format(*MAIN), {})
    goals = [
        at_most(f"batch 16, context 1024, {rows} rows / floor", ratio.value, 1.4)
        for rows in ROWS
        if (ratio := main_case.get(f"compiled {rows} / floor")) is not None
    ]
    finish("attention", where, settings, results, goals)


if __name__ == "__main__":
    main()
