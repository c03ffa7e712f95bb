"""The shortest time in which this machine can do a step: the floor under every engine.

Either all weights, keys and values have to be read, or all products made: the longer of the two.
How fast memory is read and how fast products are made is measured, in the minute in which it is
used. `products.c` makes products and nothing else, in the instructions of the level that the
library uses. Without a C compiler products count nothing, and the floor is memory's alone.
"""

import ctypes
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bandwidth import ReadProbe

from foretoken.kernels.build import BY_SUFFIX, BuildError, compiler
from foretoken.kernels.library import find_library
from foretoken.shape.memory_formula import engine_storage, weight_bytes
from foretoken.shape.model import ModelShape

SOURCE = Path(__file__).with_name("products.c")
KINDS = ("bf16", "int16", "int8")
"""Numbers that are multiplied: of 16-bit models, of integer weights with 16-bit activations, and
with 8-bit ones."""
LOOP_S = 0.01
TRIES = 3
SCHEMES = {"16 bit": None, "int8": "int8", "int4": "int4"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of the machine, at one moment."""

    read_bytes_per_s: float
    products_per_s: Mapping[str, float]
    """By kind of number; empty or 0 where nothing could be compiled."""

    def seconds(self, read_bytes: float, products: Mapping[str, float]) -> float:
        """The longer of reading and multiplying; 0 if neither limit is known."""
        reading = read_bytes / self.read_bytes_per_s if self.read_bytes_per_s else 0.0
        peaks = {kind: self.products_per_s.get(kind, 0.0) for kind in products}
        if not all(peaks.values()):
            return reading
        return max(reading, sum(number / peaks[kind] for kind, number in products.items()))

    def mean(self, after: "Limits") -> "Limits":
        """Of this moment and a later one."""
        kinds, other = self.products_per_s, after.products_per_s
        return Limits(
            read_bytes_per_s=(self.read_bytes_per_s + after.read_bytes_per_s) / 2,
            products_per_s={
                kind: (kinds[kind] + other[kind]) / 2 for kind in kinds.keys() & other.keys()
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A target of one shape, its weights in 16 bits, int8 or int4."""

    shape: ModelShape
    weights: str
    eight_bit_activations: bool = False

    @property
    def kind(self) -> str:
        """What its matrices multiply."""
        if self.weights == "16 bit":
            return "bf16"
        return "int8" if self.eight_bit_activations else "int16"

    def step_bytes(self) -> float:
        """Weights that a pass reads once, whatever its rows: all but the table of embeddings."""
        counts = self.shape.weight_counts()
        storage = engine_storage(2, SCHEMES[self.weights])
        return weight_bytes(counts, storage) - counts.table * storage.table

    def pass_s(self, limits: Limits, context: float, rows: float) -> float:
        """Seconds for a pass over `rows` tokens after `context` positions, the head for each."""
        counts, shape = self.shape.weight_counts(), self.shape
        keys = context * shape.num_hidden_layers
        read = self.step_bytes() + 2 * keys * shape.kv_size * 2
        products = _added(
            {self.kind: rows * float(counts.matrices + counts.head)},
            "bf16",
            2 * rows * keys * shape.query_size,
        )
        return limits.seconds(read, products)

    def decode_s(self, limits: Limits, first: int, last: int) -> float:
        """Seconds for a token, the mean over contexts from `first` to `last` positions."""
        return self.pass_s(limits, (first + last) / 2, 1)

    def prompt_s(self, limits: Limits, tokens: int) -> float:
        """Seconds for a prompt: weights once, all rows' products, the head for one of them."""
        counts, shape = self.shape.weight_counts(), self.shape
        pairs = tokens * (tokens + 1) / 2 * shape.num_hidden_layers
        products = _added(
            {self.kind: float(counts.matrices) * tokens + counts.head},
            "bf16",
            2 * pairs * shape.query_size,
        )
        return limits.seconds(self.step_bytes(), products)


def _added(products: dict[str, float], kind: str, more: float) -> dict[str, float]:
    return {**products, kind: products.get(kind, 0.0) + more}


class LimitsProbe:
    """Measures both limits with as many threads as engines are given."""

    def __init__(self, threads: int) -> None:
        """Compile `products.c` for the level in use."""
        self._threads = min(threads, len(os.sched_getaffinity(0)))
        self._read = ReadProbe(threads)
        self._loops = _compiled_loops()
        self._pool = ThreadPoolExecutor(self._threads)

    def now(self) -> Limits:
        """Some 0.2 s of measuring."""
        return Limits(
            read_bytes_per_s=self._read.gb_per_s() * 1e9,
            products_per_s={kind: self._peak(kind) for kind in KINDS if kind in self._loops},
        )

    def _peak(self, kind: str) -> float:
        """Products a second of all threads, the fastest of a few tries."""
        loop = self._loops[kind]

        def work(_: int) -> float:
            began, made, rounds = time.perf_counter(), 0, 1 << 16
            while time.perf_counter() - began < LOOP_S:
                made += loop(rounds)
            return made / (time.perf_counter() - began)

        return max(sum(self._pool.map(work, range(self._threads))) for _ in range(TRIES))


def _compiled_loops() -> dict[str, "ctypes._NamedFuncPointer"]:
    """A loop for each kind of number that the level has instructions for; none without a compiler.

    Raises:
        subprocess.CalledProcessError: the compiler refused; its words are on stderr.
    """
    library = find_library()
    machine, *flags = BY_SUFFIX.get(f"_{library.level}", ("",)) if library else ("",)
    if machine != "x86_64":
        return {}
    try:
        command = [compiler(), "-O2", "-shared", "-fPIC", *flags, str(SOURCE)]
    except BuildError as error:
        print(f"floors count no products: {error}", flush=True)
        return {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "products.so"
        subprocess.run([*command, "-o", str(file)], check=True)
        handle = ctypes.CDLL(str(file))
    found = {}
    for kind in KINDS:
        loop = handle[f"products_{kind}"]
        loop.argtypes, loop.restype = (ctypes.c_uint64,), ctypes.c_uint64
        found[kind] = loop
    return found
