"""A file of packed weights: how tensors lie in it, how it is written, and when it is believed.

    preamble   what it is, who wrote it and when, place, length and SHA-256 of the contents
    tensors    one after the other, each at a multiple of 4 KiB
    contents   JSON: the writer's own description, and of each tensor its type, shape, place and the
               SHA-256 of its bytes

The preamble is written last, under a name that nobody reads, so a process that is killed leaves
nothing that looks whole. What a crash of the *machine* loses is found by who wrote it, which is the
boot of the system: within that boot the file is what was written; after another one all of it is
read and compared with its hashes, once. What others write into it later is found by the time of its
last change, which is one of two: that of the preamble, or, once the file is known to be whole on
the disk, a second later. Nobody opens it for writing once it has its name, since it may be mapped
by others.
Knows tensors and bytes, no models.
"""

import ctypes
import fcntl
import hashlib
import json
import logging
import mmap
import os
import signal
import struct
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, final

import torch
from torch import Tensor

from foretoken.hardware import advise_memory, map_file
from foretoken.kernels.library import Library
from foretoken.kernels.linear import empty_packed
from foretoken.models.huge_pages import comes_in_huge_pages
from foretoken.placement import keeps_to_one_node

NOT_IN_HUGE_PAGES: Final = "the system has it in small pages"
_NOT_HELD: Final = "it cannot be held against changes"
_MAGIC: Final = b"foretoken packed weights 2"
_PREAMBLE: Final = struct.Struct("<32s40sQQQ32s")
"""Magic, boot, second of writing, offset and length of the contents, SHA-256 of the contents."""
_BOOT_BYTES: Final = 40
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_PAGE: Final = 4096
_PIECE: Final = 32 << 20
"""Bytes that are read or written at once: whole huge pages."""
_MOST_PARTS: Final = 512
"""Of a piece that are written in one call; Linux allows 1,024."""
_LAST: Final = 19
"""A priority as `nice` counts."""
_MOST_CONTENTS: Final = 64 << 20
_DTYPES: Final = {
    str(kind).removeprefix("torch."): kind
    for kind in (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int8, torch.uint8)
}
logger = logging.getLogger("foretoken")

_LOOK_S: Final = 1.0
_BREAK_TIME: Final = Path("/proc/sys/fs/lease-break-time")
"""Seconds after which the system no longer waits for a holder; 0: it waits for ever."""
_LEAST_BREAK_S: Final = 20
"""What copying a large file may take."""
_MAY_MOVE, _FIXED = 1, 2
"""Flags of mremap(2)."""
_FAILED: Final = ctypes.c_void_p(-1).value


@final
class Lease:
    """The right to be asked before a mapped file changes.

    A mapping shows what the file is now: bytes that are written in place are read as weights, and a
    file that is truncated ends the process (SIGBUS). Linux has leases against both (fcntl(2)):
    whoever would open the file for writing, or truncate it, waits until its holder lets go. The
    holder looks every second whether somebody waits, puts memory of its own with the same contents
    in the place of the mapping, and lets go. Removing and renaming the file need no permission and
    do no harm.
    """

    def __init__(self, fd: int) -> None:
        """`fd` has the lease, and is closed with it."""
        self._fd = fd

    @classmethod
    def take(cls, fd: int) -> Self | None:
        """For an open file, read only; None: the system, or the file system, has no leases, the
        file is somebody else's, or it is open for writing."""
        if not hasattr(fcntl, "F_SETLEASE") or not _leaves_time():
            return None
        held = os.dup(fd)
        try:
            # We look; the signal that would tell us ends a process that does not expect it. Until
            # there is nobody to tell it is one that does not.
            fcntl.fcntl(held, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            fcntl.fcntl(held, fcntl.F_SETOWN, 0)
        except OSError:
            os.close(held)
            return None
        return cls(held)

    @property
    def is_wanted_back(self) -> bool:
        """Whether somebody waits for the file."""
        return fcntl.fcntl(self._fd, fcntl.F_GETLEASE) != fcntl.F_RDLCK

    def end(self) -> None:
        """Let go of the file; once."""
        with suppress(OSError):
            fcntl.fcntl(self._fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        os.close(self._fd)

    def guard(self, mapped: mmap.mmap, name: str) -> None:
        """Hold the file for as long as `mapped` is there or until somebody wants it, whichever is
        sooner; then let go.

        Args:
            mapped: all of it, private.
            name: of the file, for the log.
        """
        gone = threading.Event()
        weakref.finalize(mapped, gone.set).atexit = False
        arguments = (weakref.ref(mapped), name, gone)
        threading.Thread(target=self._watch, args=arguments, name="held-file", daemon=True).start()

    def _watch(self, find: "weakref.ref[mmap.mmap]", name: str, gone: threading.Event) -> None:
        while not gone.wait(_LOOK_S):
            mapped = find() if self.is_wanted_back else None
            if mapped is None:
                continue
            if not _gives_way(mapped, name):
                return  # the file is held for as long as the process takes to end
            break
        self.end()


def _leaves_time() -> bool:
    try:
        seconds = int(_BREAK_TIME.read_text())
    except (OSError, ValueError):
        return False
    return seconds == 0 or seconds >= _LEAST_BREAK_S


def _gives_way(mapped: mmap.mmap, name: str) -> bool:
    """Do without the file; a process that cannot is told to end, rather than to go on wrongly."""
    try:
        _replace(mapped)
    except OSError as error:
        logger.critical(
            "another program is about to change %s, and there is no memory for a copy (%s): this "
            "process ends, since it would read what is not its own",
            name,
            error,
        )
        os.kill(os.getpid(), signal.SIGTERM)
        return False
    logger.warning("another program is about to change %s, which is in use: it was copied", name)
    return True


def _replace(mapped: mmap.mmap) -> None:
    """Put memory with the same contents in the place of a private mapping, in one stroke: threads
    that read it meanwhile find the same bytes before and after.

    Raises:
        OSError: there is no such memory.
    """
    library = _memory_calls()
    address = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
    size = -(-len(mapped) // mmap.PAGESIZE) * mmap.PAGESIZE
    access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    made = library.mmap(None, size, access, kind, -1, 0)
    if made == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with suppress(OSError):
        advise_memory(made, size, mmap.MADV_HUGEPAGE)
    ctypes.memmove(made, address, len(mapped))
    if library.mremap(made, size, size, _MAY_MOVE | _FIXED, address) == _FAILED:
        number = ctypes.get_errno()
        library.munmap(made, size)
        raise OSError(number, os.strerror(number))


def _memory_calls() -> Any:
    """The C library, which knows what its calls about memory take and give."""
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = library.mremap.restype = pointer
    library.mmap.argtypes = (pointer, size, number, number, number, ctypes.c_long)
    library.mremap.argtypes = (pointer, size, size, number, pointer)
    library.munmap.argtypes = (pointer, size)
    return library


class BrokenFileError(Exception):
    """It is not a whole file of this kind; the message says what is wrong with it."""


class _Writing(NamedTuple):
    """When and by which boot of the system a file was written."""

    boot: bytes
    second: int
    """Even, so that every file system can keep it."""

    @property
    def written(self) -> int:
        """Time of the last change of a file that nobody has changed since, in nanoseconds."""
        return self.second * 10**9

    @property
    def on_disk(self) -> int:
        """The same, of one that is known to be on the disk."""
        return self.written + 10**9


class _Place(NamedTuple):
    """Where one tensor lies; a row of the contents."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    sha256: str


@final
class PackedWriter:
    """Writes tensors while others are still made: one thread hashes and writes, in order."""

    def __init__(self, fd: int) -> None:
        """Write to an empty file, whose name and end are the caller's affair."""
        self._stream, self._end = _Stream(fd), _PAGE
        self._written: list[Future[_Place]] = []
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="packed-weights", initializer=yield_to_others
        )

    def add(self, tensor: Tensor) -> int:
        """Write this tensor of the CPU soon; it must stay as it is. Its number is returned."""
        assert tensor.is_contiguous(), tensor.stride()
        self._written.append(self._thread.submit(self._write, tensor, self._end))
        self._end += -(-tensor.nbytes // _PAGE) * _PAGE
        return len(self._written) - 1

    def flush(self) -> None:
        """Wait until everything that was added is written. Raises OSError: no room, or the disk
        failed."""
        if self._written:
            self._written[-1].result()
        self._thread.submit(self._stream.flush).result()

    def finish(self, about: Mapping[str, Any]) -> int:
        """Wait for the tensors and make the file whole, with what its reader is to know.

        Returns:
            Bytes of the file.

        Raises:
            OSError: no room, or the disk failed.
        """
        places = [future.result() for future in self._written]
        contents = json.dumps({"about": about, "tensors": places}, separators=(",", ":")).encode()
        self._stream.write(memoryview(contents), self._end)
        self._stream.flush()
        sha256 = hashlib.sha256(contents).digest()
        writing = _Writing(_boot(), int(time.time()) & -2)
        preamble = _PREAMBLE.pack(_MAGIC, *writing, self._end, len(contents), sha256)
        os.pwrite(self._stream.fd, preamble, 0)
        os.utime(self._stream.fd, ns=(time.time_ns(), writing.written))
        return self._end + len(contents)

    def close(self) -> None:
        """End the thread; what it has not begun is not written."""
        self._thread.shutdown(cancel_futures=True)

    def _write(self, tensor: Tensor, offset: int) -> _Place:
        data = tensor.reshape(-1).view(torch.uint8).numpy().data
        self._stream.write(data, offset)
        return _Place(
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            offset,
            tensor.nbytes,
            hashlib.sha256(data).hexdigest(),
        )


@final
class _Stream:
    """Bytes in the order of the file, written in large pieces at multiples of their size.

    A system that has huge pages for files makes them of such writes.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._waiting: list[memoryview] = []
        self._first = self._end = 0

    def write(self, data: memoryview, offset: int) -> None:
        """These bytes at this place, and zeros between them and those before. They must stay as
        they are: nothing is copied, which would keep other threads from running."""
        assert offset >= self._end, (offset, self._end)
        self._add(memoryview(bytes(offset - self._end)))
        self._add(data)

    def flush(self) -> None:
        """Write what is still here."""
        waiting = self._waiting
        while waiting:
            written = os.pwritev(self.fd, waiting[:_MOST_PARTS], self._first)
            self._first += written
            while waiting and written >= len(waiting[0]):
                written -= len(waiting.pop(0))
            if written:
                waiting[0] = waiting[0][written:]

    def _add(self, data: memoryview) -> None:
        while data:
            room = _PIECE - (self._end - self._first)
            taken, data = data[:room], data[room:]
            self._waiting.append(taken)
            self._end += len(taken)
            if len(taken) == room:
                self.flush()


def yield_to_others() -> None:
    """Have this thread run when no other wants to, for work that nobody waits for."""
    if sys.platform == "linux":  # elsewhere threads have no priority of their own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LAST)


def _boot() -> bytes:
    """The name of this run of the system; where there is none, one that never comes again."""
    with suppress(OSError):
        return _BOOT_ID.read_bytes().strip()[:_BOOT_BYTES]
    return os.urandom(_BOOT_BYTES // 2).hex().encode()


def mark_on_disk(path: Path) -> None:
    """Wait until a file is on the disk, and note that any later boot may believe it.

    Without effect where it was changed since it was written, or is somebody else's.
    """
    with suppress(OSError, BrokenFileError), path.open("rb") as file:
        writing, *_ = _read_preamble(file.fileno())
        os.fsync(file.fileno())
        if os.fstat(file.fileno()).st_mtime_ns == writing.written:
            os.utime(file.fileno(), ns=(time.time_ns(), writing.on_disk))


@final
class PackedFile:
    """A file in memory. Its tensors are views that keep it there."""

    def __init__(self, path: Path, library: Library, *, stays_mapped: bool = False) -> None:
        """Map the file and make sure that it is whole.

        It stays mapped, shared with every other process that uses it, where the system lets it be
        held against changes and has huge pages for files. Elsewhere it is copied into memory that
        has them: small pages would take time at every token. So it is for a process that keeps to
        one of several NUMA nodes, since the file lies with whoever read it first. `stays_mapped`:
        nor is one copied that memory has no room for, nor read before it is used.

        Raises:
            BrokenFileError: it is not whole.
            OSError: it is not there, or cannot be read.
        """
        with path.open("rb") as file:
            fd = file.fileno()
            lease = Lease.take(fd)
            try:
                self._places, self.about, writing = _read_contents(fd)
                _believe(path, fd, writing, self._places)
                holds = lease is not None or stays_mapped
                mapped = map_file(fd) if holds else None
                self.why_copied = _NOT_HELD if mapped is None else ""
                """Empty: it is not."""
                if mapped is not None and not stays_mapped:
                    self.why_copied = _why_copied(mapped)
                if mapped is None or self.why_copied:
                    self._memory = _copy(fd, library)
                else:
                    self._memory = torch.frombuffer(mapped, dtype=torch.uint8)
                    if lease is not None:
                        lease.guard(mapped, path.name)
                    lease = None
            finally:
                if lease is not None:
                    lease.end()
        self.num_bytes = self._memory.numel()

    def tensor(self, number: int) -> Tensor:
        """A tensor by its number, where it lies."""
        place = self._places[number]
        part = self._memory[place.offset : place.offset + place.num_bytes]
        return part.view(_DTYPES[place.dtype]).view(place.shape)


def _believe(path: Path, fd: int, writing: _Writing, places: Sequence[_Place]) -> None:
    """As it was written in this boot, or known to be on the disk; else compare every byte, once."""
    changed = os.fstat(fd).st_mtime_ns
    if changed == writing.on_disk or (changed == writing.written and writing.boot == _boot()):
        return
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        broken = [*pool.map(lambda place: _is_whole(fd, place), places)].count(False)
    if broken:
        raise BrokenFileError(f"{broken} of {len(places)} tensors are not as written")
    with suppress(OSError):
        os.utime(fd, ns=(time.time_ns(), writing.written))
    mark_on_disk(path)


def _is_whole(fd: int, place: _Place) -> bool:
    """Whether a tensor has the bytes that were written; read, since a mapping may be cut."""
    digest, stop = hashlib.sha256(), place.offset + place.num_bytes
    for at in range(place.offset, stop, _PIECE):
        digest.update(memoryview(os.pread(fd, min(_PIECE, stop - at), at)))
    return digest.hexdigest() == place.sha256


def _read_preamble(fd: int) -> tuple[_Writing, int, int, bytes]:
    """Who wrote the file and when; offset, length and SHA-256 of its contents."""
    start = os.pread(fd, _PREAMBLE.size, 0)
    if len(start) < _PREAMBLE.size or not start.startswith(_MAGIC):
        raise BrokenFileError("it does not begin as such a file does")
    _, boot, second, offset, length, sha256 = _PREAMBLE.unpack(start)
    return _Writing(boot.rstrip(b"\0"), second), offset, length, sha256


def _read_contents(fd: int) -> tuple[Sequence[_Place], Mapping[str, Any], _Writing]:
    writing, offset, length, sha256 = _read_preamble(fd)
    contents = os.pread(fd, min(length, _MOST_CONTENTS), offset)
    if hashlib.sha256(contents).digest() != sha256:
        raise BrokenFileError(f"{os.fstat(fd).st_size} of {offset + length} bytes, or others")
    found = json.loads(contents)
    return [_Place(*row) for row in found["tensors"]], found["about"], writing


def _copy(fd: int, library: Library) -> Tensor:
    """The file in memory of our own. Raises BrokenFileError: it was changed meanwhile."""
    before = os.fstat(fd)
    memory = empty_packed(library, (before.st_size,), torch.uint8)
    _read_into(memory, fd)
    changed = os.fstat(fd).st_mtime_ns
    # Whoever wrote it may have noted meanwhile that it is on the disk.
    if changed not in (before.st_mtime_ns, _read_preamble(fd)[0].on_disk):
        raise BrokenFileError("it was changed while it was read")
    return memory


def _why_copied(mapped: mmap.mmap) -> str:
    """Why a mapping is not used as it is; empty: it is."""
    if keeps_to_one_node():
        return "it may lie on another NUMA node"
    return "" if comes_in_huge_pages(mapped) else NOT_IN_HUGE_PAGES


def _read_into(memory: Tensor, fd: int) -> None:
    """Fill memory with the beginning of a file, on all cores."""
    view = memory.numpy().data

    def read(start: int) -> None:
        at, stop = start, min(start + _PIECE, len(view))
        while at < stop:
            count = os.preadv(fd, [view[at:stop]], at)
            if not count:
                raise BrokenFileError(f"it ends after {at} of {len(view)} bytes")
            at += count

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(read, range(0, len(view), _PIECE)))
