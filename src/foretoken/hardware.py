"""What the machine offers, as plain data. No torch; what it cannot read it reports as unknown."""

import ctypes
import mmap
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self, cast

from foretoken.errors import ConfigError

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
"""Parameters of glibc's mallopt."""
_NO_RESERVE = 0x4000
"""Linux's MAP_NORESERVE."""
_LARGE_BLOCK = 8 << 20
"""Larger than what packing makes for a piece of a matrix: 4 MiB as floats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Memory in bytes; `cpu_flags` are the kernel's names of instruction sets."""

    cpu_name: str
    num_cores: int
    """Cores this process may use."""
    free_memory: int
    """Memory that can be allocated without swapping, cgroup limits included."""
    cpu_flags: frozenset[str]

    @property
    def has_bf16(self) -> bool:
        """Whether the CPU multiplies bfloat16 in hardware."""
        return not self.cpu_flags.isdisjoint(("avx512_bf16", "amx_bf16", "bf16"))

    @property
    def gives_memory_back(self) -> bool:
        """Whether a part of a tensor in main memory can be given back to the system."""
        return sys.platform == "linux"

    @classmethod
    def detect(cls) -> Self:
        """Read /proc and the cgroup; elsewhere fall back to what Python knows."""
        info = _read_cpuinfo()
        return cls(
            cpu_name=info.get("model name", "unknown"),
            num_cores=usable_cores(),
            free_memory=_free_memory(),
            cpu_flags=frozenset((info.get("flags") or info.get("Features", "")).split()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """The CUDA devices of this machine, as PyTorch sees them."""

    count: int
    free_memory: int
    """Bytes, of the one that has least among those that are to be used."""
    has_nccl: bool
    """Whether PyTorch was built with NCCL, by which several exchange tensors."""
    name: str = ""
    """Of the first, and its compute capability."""
    keeps_bits: bool = False
    """Whether a probe found that rows keep their bits there, with the kernels that run on it."""
    why_not: str | None = None
    """Why this PyTorch cannot compute on it; None: it can."""

    @staticmethod
    def names() -> list[str]:
        """Of the NVIDIA devices that the driver has, without PyTorch."""
        found = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        models = (re.search(r"Model:\s+(.+)", file.read_text()) for file in found)
        return [model[1].strip() for model in models if model]


def usable_cores() -> int:
    """Cores that this process may keep busy: its affinity, and its cgroup's share rounded up."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    share = quota.read_text().split() if quota.is_file() else []
    if len(share) == 2 and share[0].isdigit():
        cores = min(cores, -(-int(share[0]) // int(share[1])))
    return max(1, cores)


def user_caches() -> Path:
    """Where this user's processes keep what can be made again: below XDG_CACHE_HOME, or .cache of
    the home folder."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The specification wants relative paths to be ignored.
    base = Path(given) if given and Path(given).is_absolute() else Path("~/.cache").expanduser()
    return base / "foretoken"


def anonymous_memory(process: int | str = "self") -> int | None:
    """Bytes of memory of its own that a process has; None: this system does not say."""
    status = Path(f"/proc/{process}/status")
    found = re.search(r"RssAnon:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) << 10 if found else None


def map_file(fd: int) -> mmap.mmap:
    """A whole file in memory; what is written there does not reach it. Under Linux no memory is set
    aside for that, so that it may be larger than what there is. Raises OSError: it cannot be
    mapped; ValueError: it is empty."""
    if sys.platform != "linux":
        return mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
    access = mmap.PROT_READ | mmap.PROT_WRITE
    return mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE | _NO_RESERVE, prot=access)


def advise_memory(address: int, num_bytes: int, advice: int) -> None:
    """Linux's madvise; unlike that of Python's mappings it lets other threads go on meanwhile.
    Raises OSError: the system refuses, or could not read what it was to bring into memory."""
    if _madvise()(address, num_bytes, advice) != 0:
        raise OSError(ctypes.get_errno(), "madvise")


@cache
def _madvise() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return cast("Callable[[int, int, int], int]", function)


@contextmanager
def lean_heap() -> Iterator[None]:
    """Give every block of 8 MiB that is freed in this `with` block back to the system at once.

    The C library raises the size from which it does so as large blocks are freed, and the heap
    that it keeps instead fills with holes: packing a model would leave behind half its size. On
    leaving, that size is what it grows to by itself. Without effect where there is no glibc.
    """
    library = ctypes.CDLL(None) if os.name == "posix" else None
    choose = getattr(library, "mallopt", None)
    if choose is not None:
        choose(_MMAP_THRESHOLD, _LARGE_BLOCK)
        choose(_TRIM_THRESHOLD, 64 << 20)
    try:
        yield
    finally:
        if choose is not None:
            choose(_MMAP_THRESHOLD, 32 << 20)
        trim_heap()


def trim_heap() -> bool:
    """Give freed memory that the C library keeps back to the system; whether any was. False where
    there is no glibc."""
    library = ctypes.CDLL(None) if os.name == "posix" else None
    release = getattr(library, "malloc_trim", None)
    return release is not None and release(0) == 1


def _read_cpuinfo() -> dict[str, str]:
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return {}
    first = path.read_text().split("\n\n")[0]
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _free_memory() -> int:
    limits = [8 << 30]
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits = [int(line.split()[1]) << 10]
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and limit.read_text().strip().isdigit():
        limits.append(max(0, int(limit.read_text()) - int(used.read_text())))
    return min(limits)


def check_temporary_folder() -> None:
    """PyTorch, for one, makes files in a temporary folder when it is first used. Raises
    ConfigError: there is none that can be written to."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        allowed = f"a folder that can be written to, for temporary files ({error.strerror})"
        raise ConfigError("TMPDIR", os.environ.get("TMPDIR"), allowed) from error
