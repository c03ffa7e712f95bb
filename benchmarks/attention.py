"""Paged attention against the time its keys and values take to be read once.

    python benchmarks/attention.py [--threads 1]

Shapes of a 1 B model (32 query heads on 8 key heads of 64, bfloat16), pages of 16 in disorder, as
many layers' stores as do not fit a cache. Spans of one row (plain decoding) and of six (k=5). The
floor is the same bytes read by the same threads, nothing computed. `int8` keeps keys and values in
int8 and reads about half the bytes; its own floor is beside it. `tiled` is the PyTorch twin that
serves without kernels. Wanted: <= 1.4 floors at batch 16, context 1,024. With one thread its
processor time is taken, which leaves out the time that other processes had the core.
"""

import argparse
import ctypes
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
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
from foretoken.ops.stored_kv import stored

HEADS, KV_HEADS, SIZE, PAGE = 32, 8, 64, 16
CASES = ((1, 128), (1, 1024), (1, 8192), (16, 128), (16, 1024))
MAIN = (16, 1024)
ROWS = (1, 6)
LEAST_BYTES = 192 << 20
"""Of all layers' keys and values together: more than any cache of the machine holds."""


def clock() -> float:
    """Seconds, of this thread alone where there is only one."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Keys and values of `batch` sequences of `context` tokens, layer by layer."""

    batch: int
    context: int
    geometry: Geometry
    layers: tuple[torch.Tensor, ...]
    tables: tuple[list[int], ...]

    @classmethod
    def make(
        cls, batch: int, context: int, least_bytes: int, kv_dtype: torch.dtype | None = None
    ) -> "Setting":
        """Random numbers, pages in random order."""
        geometry = Geometry(
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=SIZE,
            page_size=PAGE,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            kv_dtype=kv_dtype,
        )
        each = -(-context // PAGE)
        pages = random.Random(0).sample(range(batch * each), batch * each)
        slots = batch * each * PAGE
        numbers = torch.randn(slots + 1024, 2 * KV_HEADS, SIZE).bfloat16()
        one = stored(numbers, geometry.stored_dtype)
        count = max(1, -(-least_bytes // one.nbytes))
        return cls(
            batch=batch,
            context=context,
            geometry=geometry,
            layers=tuple(one.clone() for _ in range(count)),
            tables=tuple(pages[i * each : (i + 1) * each] for i in range(batch)),
        )

    @property
    def kv_bytes(self) -> int:
        """Of one layer's tokens."""
        return self.batch * self.context * self.layers[0][0].nbytes

    def attend(self, attention: Attention, rows: int) -> Callable[[], float]:
        """Seconds per layer of spans of `rows` rows at the end of each sequence."""
        spans = [SpanWindow(self.context - rows, rows, table) for table in self.tables]
        q_THh = torch.randn(self.batch * rows, HEADS, SIZE).bfloat16()

        @torch.inference_mode()
        def measure() -> float:
            attend = attention.plan(spans)
            began = clock()
            for layer_SKh in self.layers:
                attend(q_THh, layer_SKh)
            return (clock() - began) / len(self.layers)

        return measure

    def read(self, library: Library) -> Callable[[], float]:
        """Seconds per layer of reading the keys and values once."""
        reading = library.function("ft_read_memory", (ctypes.c_void_p, ctypes.c_size_t))

        def measure() -> float:
            library.use_threads(torch.get_num_threads())
            began = clock()
            for layer_SKh in self.layers:
                reading(layer_SKh.data_ptr(), self.kv_bytes)
            return (clock() - began) / len(self.layers)

        return measure


def compare(
    setting: Setting, rounded: Setting, repeats: int, library: Library
) -> dict[str, Ratio | float]:
    """Milliseconds and ratios of one batch and context, with 16-bit and int8 keys and values."""
    attention = backend_for(setting.geometry.device).attention
    compiled = attention(setting.geometry, batch_invariant=True)
    tiled = TiledAttention(setting.geometry, Tiling(8, 64))
    int8 = attention(rounded.geometry, batch_invariant=True)
    arms = {"floor": setting.read(library), "int8 floor": rounded.read(library)}
    for rows in ROWS:
        arms[f"compiled {rows}"] = setting.attend(compiled, rows)
        arms[f"int8 {rows}"] = rounded.attend(int8, rows)
        arms[f"tiled {rows}"] = setting.attend(tiled, rows)
    times = interleave(arms, repeats)
    found: dict[str, Ratio | float] = {
        f"{name} ms": statistics.median(seconds) * 1e3 for name, seconds in times.items()
    }
    found["floor GB/s"] = setting.kv_bytes / statistics.median(times["floor"]) / 1e9
    for rows in ROWS:
        ratio = ratio_of_medians(times[f"compiled {rows}"], times["floor"])
        found[f"compiled {rows} / floor"] = ratio
        found[f"int8 {rows} / compiled"] = ratio_of_medians(
            times[f"int8 {rows}"], times[f"compiled {rows}"]
        )
        found[f"int8 {rows} / int8 floor"] = ratio_of_medians(
            times[f"int8 {rows}"], times["int8 floor"]
        )
        found[f"tiled {rows} / compiled"] = ratio_of_medians(
            times[f"tiled {rows}"], times[f"compiled {rows}"]
        )
    found["compiled 6 / 1"] = ratio_of_medians(times["compiled 6"], times["compiled 1"])
    return found


def show(case: Sequence[int], found: dict[str, Ratio | float]) -> None:
    """Print one case."""
    print(f"batch {case[0]}, context {case[1]}")
    for name, value in found.items():
        print(f"  {name}: {value if isinstance(value, Ratio) else round(value, 4)}", flush=True)


def main() -> None:
    """Measure every case, report."""
    parser = make_parser(__doc__)
    settings: argparse.Namespace = parser.parse_args()
    use_threads(settings.threads)
    library = find_library()
    if library is None:
        parser.error("there are no compiled kernels here")
    cases, least = (((2, 64),), 1) if settings.quick else (CASES, LEAST_BYTES)
    where = announce(settings)
    results = {}
    for case in cases:
        wide, rounded = (Setting.make(*case, least, dtype) for dtype in (None, torch.int8))
        results[case] = compare(wide, rounded, settings.repeats, library)
        show(case, results[case])
    goals = []
    for rows in ROWS if not settings.quick else ():
        ratio = results[MAIN][f"compiled {rows} / floor"]
        assert isinstance(ratio, Ratio)
        goals.append(at_most(f"batch 16, context 1024, {rows} rows / floor", ratio.value, 1.4))
    named = {f"batch {batch}, context {context}": r for (batch, context), r in results.items()}
    finish("attention", where, settings, {"level": library.level, **named}, goals)


if __name__ == "__main__":
    main()
