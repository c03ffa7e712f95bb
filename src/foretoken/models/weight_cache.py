"""Packed weights kept between two processes: which file belongs to a load, and where it lies.

A second start maps the file instead of reading, converting and packing the checkpoint. A file
belongs to the files of the checkpoint (names, sizes, times, first megabyte), to the options that
change what is packed, and to the code that packs; any of these changed, there is another file.
Nothing here is worth an error: a folder that cannot be written, or is full, is a folder without
files, and a broken file is replaced. Which is said in one line.

A builder asks for tensors and makes linear layers in an order that follows from the model's shape:
`RecordingWeightSource` hands it the checkpoint's and writes down what became of them,
`CachedWeightSource` what was written, and matrices without contents.
"""

import errno
import fcntl
import hashlib
import json
import logging
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self, final

import torch
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.hardware import Hardware, advise_memory, trim_heap, user_caches
from foretoken.kernels.build import library_path
from foretoken.kernels.library import Library
from foretoken.kernels.linear import Packed
from foretoken.models.base import LoadOptions
from foretoken.models.checkpoint import Checkpoint
from foretoken.models.huge_pages import bring_back_in_huge_pages
from foretoken.models.packed_file import (
    NOT_IN_HUGE_PAGES,
    BrokenFileError,
    PackedFile,
    PackedWriter,
    mark_on_disk,
    yield_to_others,
)
from foretoken.ops.linear import KernelLinear, Linear
from foretoken.quant import Weights
from foretoken.shape import ModelShape

logger = logging.getLogger("foretoken")

VARIABLE: Final = "FORETOKEN_PACKED_WEIGHTS_GIB"
DEFAULT_GIB: Final = 50.0
BESIDE: Final = "packed"
"""The folder beside a checkpoint's files where `foretoken quantize --packed` writes."""
_FORMAT: Final = 4
_SUFFIX: Final = ".packed"
_TEMPORARY: Final = ".tmp"
_LEAST_BYTES: Final = 64 << 20
"""Smaller checkpoints are packed in less time than is worth a file."""
_FREE_SHARE, _FREE_MOST = 0.1, 5 << 30
"""What stays free on the disk: a tenth of it, and no more than 5 GiB."""
_HEADER_BYTES: Final = 1 << 20
_TRIMMED: Final = 16
"""After so many layers the holes between forgotten experts are the system's too."""
_CODE: Final = (
    "quant",
    "models",
    "kernels/linear.py",
    "kernels/block_types.py",
    "backend.py",
    "shape",
    "ops/linear",
)
"""Whatever decides how a matrix is packed, below the package."""
_PARTS = ("weight", "scale", "zero")


class WeightSource(Protocol):
    """Where a builder has its tensors from; `Checkpoint` says what each call means."""

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        """A tensor of this shape."""

    def keep(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """The same, in memory of its own, and in another type if one is given."""

    def matrix(self, module: str, shape: tuple[int, int]) -> Weights:
        """The weights of a linear layer."""

    def table(self, module: str, shape: tuple[int, int]) -> Weights:
        """The embedding table: floats in memory of their own, or what a linear layer is made of."""

    def ignore(self, name: str) -> None:
        """Allow a tensor, or all of a module, that is there and not used."""

    def finish(self) -> None:
        """Nothing may be left over."""


class PackedLayers(Protocol):
    """What became of linear layers in an earlier load, or what becomes of them in this one."""

    def ready(self) -> list[Packed] | None:
        """The next layer's parts, packed; None: it has to be made."""

    def made(self, parts: Sequence[Linear]) -> None:
        """The next layer's parts, as they were made."""


@final
class RecordingWeightSource(WeightSource, PackedLayers):
    """A checkpoint whose load is written to a file as it goes on."""

    def __init__(
        self, checkpoint: Checkpoint, writer: PackedWriter, *, forgets_experts: bool = False
    ) -> None:
        """Both end with whoever made them. `forgets_experts`: once experts are written their memory
        is the system's again, so that what is built is good for nothing but the file."""
        self._checkpoint, self._writer = checkpoint, writer
        self._forgets, self._module = forgets_experts, ""
        self._tensors: dict[str, int] = {}
        self._linears: list[list[dict[str, Any]]] = []
        self.is_complete = True
        """Whether all layers are of a kind that a file can hold."""

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        return self._noted(name, self._checkpoint.take(name, shape))

    def keep(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        return self._noted(name, self._checkpoint.keep(name, shape, dtype))

    def matrix(self, module: str, shape: tuple[int, int]) -> Weights:
        """The checkpoint's; what is made of it is what will be written."""
        self._module = module
        return self._checkpoint.matrix(module, shape)

    def table(self, module: str, shape: tuple[int, int]) -> Weights:
        """The checkpoint's; floats are written, of others what is made of them."""
        found = self._checkpoint.table(module, shape)
        return self._noted(f"{module}.weight", found) if isinstance(found, Tensor) else found

    def ignore(self, name: str) -> None:
        self._checkpoint.ignore(name)

    def finish(self) -> None:
        self._checkpoint.finish()

    def ready(self) -> list[Packed] | None:
        return None

    def made(self, parts: Sequence[Linear]) -> None:
        """Write the packed weights of each."""
        packed = [part.packed for part in parts if isinstance(part, KernelLinear)]
        self.is_complete &= len(packed) == len(parts)
        self._linears.append([self._described(one) for one in packed])
        if self._forgets and ".experts." in self._module:
            self._writer.flush()
            for part in (getattr(one, name) for one in packed for name in _PARTS):
                if part is not None:
                    _forget(part)
            if len(self._linears) % _TRIMMED == 0:
                trim_heap()

    def about(self) -> dict[str, Any]:
        """What `CachedWeightSource` needs to know beside the tensors."""
        return {"tensors": self._tensors, "linears": self._linears}

    def _noted(self, name: str, tensor: Tensor) -> Tensor:
        self._tensors[name] = self._writer.add(tensor.contiguous())
        return tensor

    def _described(self, packed: Packed) -> dict[str, Any]:
        parts = {name: getattr(packed, name) for name in _PARTS}
        return {
            "weight_type": packed.weight_type,
            "outputs": packed.outputs,
            "inputs": packed.inputs,
            "gated": packed.gated,
            "group": packed.group,
            "kind": packed.kind,
            "unit": packed.unit,
            **{
                name: self._writer.add(part.contiguous())
                for name, part in parts.items()
                if part is not None
            },
        }


def _forget(tensor: Tensor) -> None:
    """Give the pages of a tensor back to the system; it has other contents then."""
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (tensor.data_ptr() + tensor.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if size > 0:
        advise_memory(start, size, mmap.MADV_DONTNEED)


@final
class CachedWeightSource(WeightSource, PackedLayers):
    """A load from a file: what was checked when it was written is not checked again."""

    def __init__(self, file: PackedFile) -> None:
        self._file, self._at = file, 0

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        tensor = self._file.tensor(self._about["tensors"][name])
        assert tuple(tensor.shape) == tuple(shape), (name, tensor.shape, shape)
        return tensor

    def keep(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """As it was written; the file is memory of its own."""
        return self.take(name, shape)

    def matrix(self, module: str, shape: tuple[int, int]) -> Weights:
        """Its shape without contents."""
        return torch.empty(shape, device="meta")

    def table(self, module: str, shape: tuple[int, int]) -> Weights:
        """Floats as they were written; else its shape without contents."""
        name = f"{module}.weight"
        return (
            self.take(name, shape) if name in self._about["tensors"] else self.matrix(module, shape)
        )

    def ignore(self, name: str) -> None:
        """Settled when the file was written."""

    def finish(self) -> None:
        """Settled when the file was written."""

    def ready(self) -> list[Packed]:
        """The next layer's parts, where they lie in the file."""
        described = self._about["linears"][self._at]
        self._at += 1
        return [self._packed(one) for one in described]

    def made(self, parts: Sequence[Linear]) -> None:
        """They are known."""

    @property
    def _about(self) -> Mapping[str, Any]:
        return self._file.about

    def _packed(self, described: Mapping[str, Any]) -> Packed:
        tensors = {name: self._file.tensor(described[name]) for name in _PARTS if name in described}
        return Packed(**{**described, **tensors})


def most_bytes() -> int:
    """Bytes that all files together may take: FORETOKEN_PACKED_WEIGHTS_GIB, or 50 GiB. Raises
    ConfigError: the variable is not a number."""
    given = os.environ.get(VARIABLE, "")
    try:
        gib = float(given) if given else DEFAULT_GIB
    except ValueError:
        gib = -1.0
    if not 0.0 <= gib < 1 << 30:
        raise ConfigError(VARIABLE, given, "a number of GiB, 0 to keep no packed weights")
    return int(gib * (1 << 30))


def packed_folder() -> Path:
    """Where packed weights are kept: beside the costs, below the user's caches."""
    return user_caches() / "weights"


@final
@dataclass(frozen=True, slots=True)
class WeightCache:
    """The file of one load, wherever it lies."""

    name: str
    model: str
    """How lines about it call the model."""
    beside: Path
    """The folder where `quantize` leaves it."""
    num_bytes: int
    """Of the checkpoint's files: no less than the packed weights take, as a rule."""
    library: Library
    most: int
    """Bytes that all files together may take; 0: none is kept."""

    @classmethod
    def of(
        cls, files: list[Path], shape: ModelShape, options: LoadOptions, library: Library
    ) -> "WeightCache | None":
        """For a load of these files; None: it is not worth a file, or they cannot be read."""
        try:
            found = [(path, path.stat()) for path in sorted(files)]
            size = sum(status.st_size for _, status in found)
            if size < _LEAST_BYTES:
                return None
            key = {
                "format": _FORMAT,
                "files": [
                    (path.name, status.st_size, status.st_mtime_ns, _header_hash(path))
                    for path, status in found
                ],
                "shape": repr(shape),
                "options": [str(options.dtype), options.quantization],
                "code": [_code_hash(), library_path().name, library.level, torch.__version__],
            }
        except OSError:
            return None
        digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
        folder = files[0].parent
        return cls(digest + _SUFFIX, folder.name, folder / BESIDE, size, library, most_bytes())

    def find(self, *, stays_mapped: bool = False) -> PackedFile | None:
        """The file, if there is one that is whole; `stays_mapped`: it is not copied, come what
        may."""
        for folder in (self.beside, packed_folder()):
            path = folder / self.name
            try:
                file = PackedFile(path, self.library, stays_mapped=stays_mapped)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (BrokenFileError, OSError, ValueError) as error:  # no file can be mapped empty
                logger.warning("packed weights of %s are made anew: %s", self.model, error)
                if getattr(error, "errno", None) != errno.ENOMEM:
                    with suppress(OSError):
                        path.unlink()
                continue
            with suppress(OSError):
                used = (time.time_ns(), path.stat().st_mtime_ns)
                os.utime(path, ns=used)  # the least recently used go first
            how = f"copied: {file.why_copied}" if file.why_copied else "mapped"
            logger.info("packed weights of %s: %.1f GB, %s", self.model, file.num_bytes / 1e9, how)
            if file.why_copied == NOT_IN_HUGE_PAGES:
                _settle_later(path)
            return file
        return None

    def begin(self) -> "PackedWriting | None":
        """Write the file among all others; None: there is no room, or another process writes it."""
        if not self.most:
            return None
        try:
            folder = _made(packed_folder())
            self._make_room(folder)
            return self._begin(folder)
        except OSError as error:
            logger.warning("packed weights of %s are not kept: %s", self.model, error)
            return None

    def await_other(self) -> bool:
        """Wait while another process writes the file; False: none does."""
        temporary = (packed_folder() / self.name).with_suffix(_TEMPORARY)
        try:
            with temporary.open("rb") as file:
                logger.info("packed weights of %s: waiting for who writes them", self.model)
                fcntl.flock(file, fcntl.LOCK_SH)
        except OSError:
            return False
        return True

    def begin_beside(self) -> "PackedWriting | None":
        """Write the file beside the checkpoint; None: another process writes it. Raises OSError:
        the folder cannot be written, or is full."""
        return self._begin(_made(self.beside))

    def _begin(self, folder: Path) -> "PackedWriting | None":
        free = shutil.disk_usage(folder).free
        if free < self.num_bytes:
            raise OSError(f"{free / 1e9:.1f} GB are free, {self.num_bytes / 1e9:.1f} wanted")
        return PackedWriting.open(folder / self.name, self.model)

    def _make_room(self, folder: Path) -> None:
        """Remove files, the least recently used first, until this one may come."""
        if self.num_bytes > self.most:
            wanted = f"{self.num_bytes / 1e9:.1f} GB are wanted"
            raise OSError(f"{VARIABLE} allows {self.most / 1e9:.1f} GB, {wanted}")
        for path in folder.glob(f"*{_TEMPORARY}"):
            _remove_unlocked(path)
        there = [(path.stat(), path) for path in folder.glob(f"*{_SUFFIX}")]
        there.sort(key=lambda pair: pair[0].st_atime_ns)
        left = sum(status.st_size for status, _ in there)
        for status, path in there:
            if left + self.num_bytes <= self.most and not self._lacks(folder):
                return
            path.unlink(missing_ok=True)
            left -= status.st_size
        if lacking := self._lacks(folder):
            raise OSError(lacking)

    def _lacks(self, folder: Path) -> str:
        """Why the disk has no room for it; empty: it has. What can be made again fills no disk."""
        disk = shutil.disk_usage(folder)
        stays = min(int(_FREE_SHARE * disk.total), _FREE_MOST)
        if disk.free >= stays + self.num_bytes:
            return ""
        free, wanted = f"{disk.free / 1e9:.1f} GB are free", f"{self.num_bytes / 1e9:.1f} wanted"
        return f"{free}, {wanted}, and {stays / 1e9:.1f} stay free"


@final
class PackedWriting:
    """A file that is being written, under a name that nobody reads."""

    def __init__(self, fd: int, temporary: Path, target: Path, model: str) -> None:
        """`fd` holds the lock of `temporary`."""
        self._fd, self._temporary, self._target, self._model = fd, temporary, target, model
        self.writer = PackedWriter(fd)
        self._thread: threading.Thread | None = None

    @classmethod
    def open(cls, target: Path, model: str) -> "PackedWriting | None":
        """Begin; what a process left that was killed meanwhile is written over. Raises OSError: the
        folder cannot be written."""
        temporary = target.with_suffix(_TEMPORARY)
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # The lock goes with its process, however that ends.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever had it may have renamed the file meanwhile.
            if os.fstat(fd).st_ino != temporary.stat().st_ino:
                raise BlockingIOError
            os.ftruncate(fd, 0)
        except (BlockingIOError, FileNotFoundError):
            os.close(fd)
            logger.info("packed weights of %s are written by another process", model)
            return None
        except OSError:
            os.close(fd)
            raise
        return cls(fd, temporary, target, model)

    def keep(self, about: Mapping[str, Any]) -> None:
        """The file is whole with this; once it is written it is found. Nobody waits for that but
        the end of the process, and `wait`."""
        self._thread = _begin_behind(partial(self._finish, about))

    def wait(self) -> None:
        """Until a file that is kept is there, or could not be written."""
        if self._thread is not None:
            self._thread.join()

    def _finish(self, about: Mapping[str, Any]) -> None:
        try:
            size = self.writer.finish(about)
            self._temporary.replace(self._target)
        except OSError as error:
            logger.warning("packed weights of %s are not kept: %s", self._model, error)
            self._give_up()
            return
        self.writer.close()
        os.close(self._fd)
        kept = "packed weights of %s are kept for the next start: %.1f GB in %s"
        logger.info(kept, self._model, size / 1e9, self._target.parent)
        _settle_later(self._target)

    def _give_up(self) -> None:
        self.writer.close()
        with suppress(OSError):
            self._temporary.unlink(missing_ok=True)
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End; without `keep` nothing is left."""
        if self._thread is None:
            self._give_up()


def _begin_behind(work: Callable[[], None], *, daemon: bool = False) -> threading.Thread:
    """Have this done by a thread that yields to all others."""

    def run() -> None:
        yield_to_others()
        work()

    thread = threading.Thread(target=run, name="packed-weights", daemon=daemon)
    thread.start()
    return thread


def _settle_later(path: Path) -> None:
    """Have a whole file on the disk, and in huge pages for whoever maps it next.

    Within this boot it is believed without the one, and it is copied without the other, so nobody
    waits for a disk. One that memory has no room for is left alone.
    """

    def settle() -> None:
        with suppress(OSError):  # it is gone
            if path.stat().st_size > Hardware.detect().free_memory:
                return
        mark_on_disk(path)
        bring_back_in_huge_pages(path)

    _begin_behind(settle, daemon=True)


def _remove_unlocked(temporary: Path) -> None:
    """Remove what a process left that was killed while it wrote."""
    with suppress(OSError), temporary.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        temporary.unlink()


def _made(folder: Path) -> Path:
    """A folder that is there now, of this user alone."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _header_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.sha256(file.read(_HEADER_BYTES)).hexdigest()


@cache
def _code_hash() -> str:
    """Of the sources that decide what is packed."""
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for part in _CODE:
        root = package / part
        for path in [root] if root.is_file() else sorted(root.rglob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
