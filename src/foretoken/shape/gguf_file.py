"""What stands in a GGUF file before its weights: metadata and where each tensor lies.

The file is mapped, and read once from its beginning; no tensor is touched, and no token of the
vocabulary becomes a Python object before it is asked for. Nothing in the file is believed: every
length is held against what is left of the file before anything is made of it, so that any bytes
end in bounded time with a table or with an error that names the field. Torch-free; knows no models.
Format: the GGUF specification of ggml, versions 2 and 3.
"""

import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn, Self, final

import numpy as np
import numpy.typing as npt

from foretoken.errors import CheckpointError
from foretoken.hardware import map_file

Bytes = npt.NDArray[np.uint8]

TYPES: Final[Mapping[int, tuple[str, int, int]]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4),
    27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip
"""ggml's types by number: name, numbers of a block, bytes of a block."""
_PLAIN: Final = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I8": "i1", "I16": "<i2", "I32": "<i4",
                 "I64": "<i8"}  # fmt: skip
"""Types whose tensors NumPy has; of all others it has the bytes."""
_NUMBERS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q",
                   11: "q", 12: "d"}  # fmt: skip
"""Numbers among metadata, as `struct` writes them."""
_STRING, _ARRAY = 8, 9
_LENGTH: Final = struct.Struct("<Q")
_VERSIONS: Final = (2, 3)
_MOST_ENTRIES: Final = 1 << 22
"""Entries of a list, metadata, or tensors: several times what the largest vocabulary has."""
_MOST_NAME: Final = 1 << 16
_MOST_DIMENSIONS: Final = 4


class Strings(NamedTuple):
    """A list of strings, which are read when they are asked for."""

    name: str
    raw: memoryview
    """What stands of it in the file: of each string its length and its bytes."""
    starts: npt.NDArray[np.int64]
    """Where the bytes of each string begin in `raw`."""

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.starts)

    @property
    def ends(self) -> npt.NDArray[np.int64]:
        """Where the bytes of each string end in `raw`."""
        return np.append(self.starts[1:] - _LENGTH.size, len(self.raw))[: self.size]

    def __iter__(self) -> Iterator[Any]:
        """Each as text. Raises CheckpointError: one is no UTF-8."""
        return (self.at(index) for index in range(self.size))

    def at(self, index: int) -> str:
        """One as text. Raises CheckpointError: it is no UTF-8."""
        start = int(self.starts[index])
        (length,) = _LENGTH.unpack_from(self.raw, start - _LENGTH.size)
        return _text(self.name, self.raw[start : start + length])

    def texts(self) -> list[str]:
        """All as texts: several times quicker than one after the other. Raises CheckpointError: one
        is no UTF-8."""
        apart = np.frombuffer(self.raw, np.uint8).copy()
        kept = np.ones(apart.size, bool)
        for place in range(2, _LENGTH.size + 1):
            kept[self.starts - place] = False
        apart[self.starts - 1] = 0  # of a length one byte is left, which keeps its neighbours apart
        try:
            found = apart[kept].tobytes().decode().split("\0")[1:]
        except UnicodeDecodeError:
            return [*iter(self)]  # which names the one that is broken
        return found if len(found) == self.size else [*iter(self)]  # one holds the character NUL

    def find(self, texts: Iterable[str]) -> dict[str, int]:
        """Where each of some texts stands first; those that are not there are left out."""
        content, found = bytes(self.raw), {}
        for text in texts:
            wanted = text.encode()
            wanted, at = _LENGTH.pack(len(wanted)) + wanted, -1
            while (at := content.find(wanted, at + 1)) >= 0:
                index = int(np.searchsorted(self.starts, at + _LENGTH.size))
                if index < self.size and self.starts[index] == at + _LENGTH.size:
                    found[text] = index
                    break
        return found


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of the file."""

    name: str
    kind: str
    """ggml's name of its type."""
    shape: tuple[int, ...]
    """As in the file: the numbers that lie side by side first."""
    raw: Bytes

    def of_expert(self, number: int) -> Self:
        """What it holds of one of the experts that its last dimension counts."""
        size = self.raw.size // self.shape[-1]
        part = self.raw[number * size : (number + 1) * size]
        return replace(self, shape=self.shape[:-1], raw=part)

    def half(self, number: int) -> Self:
        """The first half of its rows, or the second."""
        size, rows = self.raw.size // 2, self.shape[-1] // 2
        part = self.raw[number * size : (number + 1) * size]
        return replace(self, shape=(*self.shape[:-1], rows), raw=part)

    @property
    def num_elements(self) -> int:
        """Numbers of it."""
        return math.prod(self.shape)

    @property
    def data(self) -> npt.NDArray[Any]:
        """It, mapped: numbers [rows, columns] (or as many dimensions as it has), or of blocks their
        bytes [rows, bytes of a row]."""
        rows = self.shape[:0:-1]
        plain = _PLAIN.get(self.kind)
        return self.raw.reshape(*rows, -1) if plain is None else self.raw.view(plain).reshape(
            *rows, self.shape[0]
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTable:
    """The table of a file."""

    path: Path
    metadata: Mapping[str, Any]
    """Numbers, texts, arrays of NumPy, and `Strings`, by name."""
    tensors: Mapping[str, GgufTensor]

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """A value of the metadata; `default` if there is none. Raises CheckpointError: it is not of
        this kind."""
        value = self.metadata.get(name)
        if value is None:
            return default
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if kind is float and number and math.isfinite(value):
            return float(value)
        if kind is not float and isinstance(value, kind) and (number or kind not in (int, float)):
            return value
        words = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}
        if isinstance(value, np.ndarray | Strings):
            value = f"a list of {value.size}"
        raise CheckpointError(name, value, words.get(kind, "a list"))


def read_gguf(path: Path) -> GgufTable:
    """Map a file and read its table. Raises CheckpointError: it is no GGUF file, is cut short, or
    says what cannot be; OSError: it cannot be read."""
    if path.stat().st_size < 24:
        raise CheckpointError(path.name, f"{path.stat().st_size} bytes", "a complete GGUF file")
    with path.open("rb") as file:
        mapped = map_file(file.fileno())
    return _Reading(path, memoryview(mapped)).file()


def _text(name: str, raw: memoryview) -> str:
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError:
        raise CheckpointError(name, bytes(raw[:40]), "text in UTF-8") from None


@final
@dataclass(slots=True)
class _Reading:
    path: Path
    data: memoryview
    at: int = 0
    names: set[str] = field(default_factory=set)

    def file(self) -> GgufTable:
        """All of it."""
        magic = bytes(self._take("magic", 4))
        if magic != b"GGUF":
            raise CheckpointError(self.path.name, magic, "a GGUF file, which begins with GGUF")
        version = self._number("version", "I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            given = f"version {version}" + (", of a big-endian machine" if swapped else "")
            raise CheckpointError("GGUF version", given, " or ".join(map(str, _VERSIONS)))
        num_tensors, num_metadata = (
            self._count(what, self._number(what, "Q"), least)
            for what, least in (("tensor count", 24), ("metadata count", 13))
        )
        metadata = dict(self._entry() for _ in range(num_metadata))
        heads = [self._head() for _ in range(num_tensors)]
        return GgufTable(self.path, metadata, self._placed(heads, self._alignment(metadata)))

    def _fail(self, name: str, given: object, allowed: str) -> NoReturn:
        shown = given if isinstance(given, int) else str(given)[:200]
        raise CheckpointError(f"{self.path.name}: {name}"[:200], shown, allowed)

    def _take(self, name: str, count: int) -> memoryview:
        left = len(self.data) - self.at
        if count > left:
            self._fail(name, f"{count:,} bytes", f"at most the {left:,} that are left of the file")
        self.at += count
        return self.data[self.at - count : self.at]

    def _number(self, name: str, form: str) -> Any:
        size = struct.calcsize(f"<{form}")
        return struct.unpack(f"<{form}", self._take(name, size))[0]

    def _count(self, name: str, count: int, least: int) -> int:
        """A number of entries of at least so many bytes each."""
        most = min(_MOST_ENTRIES, (len(self.data) - self.at) // least)
        if count > most:
            self._fail(name, count, f"at most {most} in the rest of the file")
        return count

    def _name(self, what: str) -> str:
        length = self._number(what, "Q")
        if length > _MOST_NAME:
            self._fail(what, f"{length:,} bytes", f"at most {_MOST_NAME:,}")
        name = _text(what, self._take(what, length))
        if name in self.names:
            self._fail(what, name[:80], "each name once")
        self.names.add(name)
        return name

    def _entry(self) -> tuple[str, Any]:
        name = self._name("name of a metadata field")
        kind = self._number(name, "I")
        if kind == _STRING:
            return name, _text(name, self._take(name, self._number(name, "Q")))
        if kind == _ARRAY:
            return name, self._array(name)
        if kind not in _NUMBERS:
            self._fail(name, f"type {kind}", "one of GGUF's types, 0 to 12")
        return name, self._number(name, _NUMBERS[kind])

    def _array(self, name: str) -> Any:
        kind, count = self._number(name, "I"), self._number(name, "Q")
        if kind == _STRING:
            self._count(name, count, 8)
            start, at, end, starts = self.at, self.at, len(self.data), []
            for _ in range(count):
                if at + 8 > end:
                    at = end + 1
                    break
                starts.append(at + 8 - start)
                at += 8 + _LENGTH.unpack_from(self.data, at)[0]
            if at > end:
                given = f"{count:,} texts of more bytes than there are"
                self._fail(name, given, f"at most the {end - start:,} that are left of the file")
            self.at = at
            return Strings(name, self.data[start:at], np.array(starts, np.int64))
        if kind not in _NUMBERS:
            what = "a list of lists" if kind == _ARRAY else f"a list of type {kind}"
            self._fail(name, what, "a list of numbers or of texts")
        entry = np.dtype(f"<{_NUMBERS[kind]}" if kind != 7 else "?")
        self._count(name, count, entry.itemsize)
        return np.frombuffer(self._take(name, count * entry.itemsize), entry)

    def _head(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and place of a tensor."""
        name = self._name("name of a tensor")
        dimensions = self._number(name, "I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            self._fail(name, f"{dimensions} dimensions", f"1 to {_MOST_DIMENSIONS}")
        shape = tuple(self._number(name, "Q") for _ in range(dimensions))
        return name, shape, self._number(name, "I"), self._number(name, "Q")

    def _alignment(self, metadata: Mapping[str, Any]) -> int:
        given = metadata.get("general.alignment", 32)
        if not isinstance(given, int) or given <= 0 or given & (given - 1) or given > 1 << 20:
            self._fail("general.alignment", given, "a power of two")
        return int(given)

    def _placed(
        self, heads: list[tuple[str, tuple[int, ...], int, int]], alignment: int
    ) -> dict[str, GgufTensor]:
        start = -(-self.at // alignment) * alignment
        found, taken = {}, []
        for name, shape, number, offset in heads:
            if number not in TYPES:
                self._fail(name, f"type {number}", f"one of ggml's: {_known()}")
            kind, block, block_bytes = TYPES[number]
            count = math.prod(shape)
            if count <= 0 or shape[0] % block:
                self._fail(name, f"shape {list(shape)}", f"rows of blocks of {block} for {kind}")
            size, begin = count // block * block_bytes, start + offset
            if offset % alignment or begin + size > len(self.data):
                given = f"{size:,} bytes at {offset:,}"
                left = max(0, len(self.data) - start)
                self._fail(
                    name, given, f"in a complete GGUF file, below {left:,}, at {alignment} x n"
                )
            taken.append((begin, begin + size, name))
            found[name] = GgufTensor(
                name, kind, shape, np.frombuffer(self.data[begin : begin + size], np.uint8)
            )
        taken.sort()
        for (_, end, name), (begin, _, other) in zip(taken, taken[1:], strict=False):
            if begin < end:
                self._fail(other, f"bytes of {name}", "a place of its own")
        return found


def _known() -> str:
    return ", ".join(name for name, _, _ in TYPES.values())
