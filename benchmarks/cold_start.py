"""A start with nothing in the page cache, against reading the same files from the disk.

    python benchmarks/cold_start.py --model MODELS/cycle-target [--quantization int8]

Each start is a fresh interpreter; seconds count from `LLM(...)` to the first token, imports done. A
first start reads the checkpoint, packs it and keeps what it packed; a second one maps that. Before
each start, and before each plain reading of the same files, the system is told to drop them from
its page cache. A first start is bounded by the disk where packing keeps up with it. Wanted: a first
start within 1.5 readings of the checkpoint and half a second, a second one within 1.25 readings of
what is kept and half a second. A disk that caches below the system is read as fast as it then is.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from common import announce, at_most, finish, interleave, make_parser

START = """
import sys, time
from foretoken import LLM, SamplingParams
began = time.perf_counter()
settings = {"quantization": sys.argv[2]} if sys.argv[2] != "none" else {}
llm = LLM(sys.argv[1], kv_cache_memory_bytes=1 << 28, max_model_len=512, **settings)
params = SamplingParams(temperature=0.0, max_tokens=1)
llm.generate({"prompt_token_ids": [1, 2, 3]}, params, use_tqdm=False)
print("seconds", time.perf_counter() - began)
"""
AT_ONCE = 8 << 20
AROUND_S = 0.5
FIRST, SECOND = 1.5, 1.25


def weights_in(folder: Path) -> list[Path]:
    """Large files below a folder."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.stat().st_size > 1 << 20
    ]


def drop(files: Sequence[Path]) -> None:
    """Have the system forget what it holds of these files."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_seconds(folder: Path) -> float:
    """Seconds of reading a folder's weights, none of them in the page cache."""
    files, buffer = weights_in(folder), bytearray(AT_ONCE)
    drop(files)
    began = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - began


def start_seconds(settings: argparse.Namespace, caches: Path) -> float:
    """Seconds from `LLM(...)` to the first token, with user caches there."""
    drop([*weights_in(Path(settings.model)), *weights_in(caches)])
    command = [sys.executable, "-c", START, settings.model, settings.quantization]
    where = {**os.environ, "XDG_CACHE_HOME": str(caches)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=where)
    return float(done.stdout.split()[-1])


def main() -> None:
    """Measure both starts and both readings in turns."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", required=True, help="a folder")
    parser.add_argument("--quantization", default="none", choices=["none", "int8", "int4"])
    parser.set_defaults(repeats=7)
    settings = parser.parse_args()
    if settings.quick:
        settings.repeats = 1
    where = announce(settings)
    with tempfile.TemporaryDirectory(dir=Path.home()) as made:
        kept = Path(made)

        def first() -> float:
            for folder in kept.iterdir():
                shutil.rmtree(folder)
            return start_seconds(settings, kept)

        first()
        model = Path(settings.model)
        arms: dict[str, Callable[[], float]] = {
            "reading the checkpoint": lambda: read_seconds(model),
            "first start": first,
            "reading what is kept": lambda: read_seconds(kept),
            "second start": lambda: start_seconds(settings, kept),
        }
        times = interleave(arms, settings.repeats)
        sizes = [sum(path.stat().st_size for path in weights_in(one)) for one in (model, kept)]
    middle = {name: statistics.median(seconds) for name, seconds in times.items()}
    for name, seconds in times.items():
        print(f"{name}: {middle[name]:.2f} s [{min(seconds):.2f}, {max(seconds):.2f}]")
    print(f"{sizes[0] / 1e9:.2f} GB of checkpoint, {sizes[1] / 1e9:.2f} GB kept")
    bars = {
        "first start": FIRST * middle["reading the checkpoint"] + AROUND_S,
        "second start": SECOND * middle["reading what is kept"] + AROUND_S,
    }
    goals = [at_most(f"{name}, s", middle[name], bar) for name, bar in bars.items()]
    results = {"seconds": times, "checkpoint_bytes": sizes[0], "kept_bytes": sizes[1]}
    finish("cold_start", where, settings, results, goals)


if __name__ == "__main__":
    main()
