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
_MEMORY_FILES = (
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
"""Limit, what is used, and what names in memory.stat begin with: of version 2, and of version 1."""
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
    """Cores that this process may keep busy: its affinity, and its control group's share."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    share = _cores_left()
    return max(1, cores if share is None else min(cores, share))


def user_caches() -> Path:
    """Where this user's processes keep what can be made again: below XDG_CACHE_HOME, or .cache of
    the home folder."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The specification wants relative paths to be ignored.
    base = Path(given) if given and Path(given).is_absolute() else Path("~/.cache").expanduser()
    return base / "foretoken"


def anonymous_memory(process: int | str = "self") -> int | None:
    """Bytes of memory of its own that a process has; None: this system does not say."""
    found = re.search(r"RssAnon:\s+(\d+) kB", _said(Path(f"/proc/{process}/status")))
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
    first = _said(Path("/proc/cpuinfo")).split("\n\n")[0]
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _free_memory() -> int:
    found = re.search(r"^MemAvailable:\s+(\d+)", _said(Path("/proc/meminfo")), re.MULTILINE)
    free = int(found[1]) << 10 if found else 8 << 30
    left = _memory_left()
    return free if left is None else min(free, left)


def _memory_left() -> int | None:
    """Bytes that the tightest group leaves; files that it has read are no use, since the kernel
    forgets them when it has to, as in MemAvailable. None: there is no limit."""
    left = []
    for folder in _groups("memory"):
        for limit, used, prefix in _MEMORY_FILES:
            most, now = _said(folder / limit), _said(folder / used)
            if most.isdigit() and now.isdigit():
                stat = dict(map(str.split, _said(folder / "memory.stat").splitlines()))
                files = sum(int(stat.get(f"{prefix}{one}active_file", 0)) for one in ("", "in"))
                left.append(max(0, int(most) - max(0, int(now) - files)))
    return min(left, default=None)


def _cores_left() -> int | None:
    """Cores that the tightest group lets be busy, rounded up; None: there is no limit."""
    shares = []
    for folder in _groups("cpu"):
        shares.append(_said(folder / "cpu.max").split())
        shares.append([_said(folder / f"cpu.cfs_{one}_us") for one in ("quota", "period")])
    given = [share for share in shares if len(share) == 2 and all(map(str.isdigit, share))]
    return min((-(-int(quota) // int(period)) for quota, period in given), default=None)


def _groups(controller: str) -> Iterator[Path]:
    """Folders of this process's control group and of those around it (of containers, slices of
    systemd, batch systems): of version 2, and of version 1's controller. What a container says of
    its own may not be there; what it sees as the root is.

    Source: the kernel's admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst."""
    own = {"": "", controller: ""}
    lines = re.findall(r"^\d+:([^:]*):(.*)$", _said(Path("/proc/self/cgroup")), re.MULTILINE)
    for names, path in lines:
        own |= {name: path for name in names.split(",") if name in own}
    for mounted, name in (("", ""), ("/unified", ""), (f"/{controller}", controller)):
        parts = [part for part in own[name].split("/") if part not in ("", "..")]
        for count in range(len(parts), -1, -1):
            yield Path("/".join((f"/sys/fs/cgroup{mounted}", *parts[:count])))


def _said(file: Path) -> str:
    """What stands in it; nothing if it cannot be read."""
    try:
        return file.read_text().strip()
    except (OSError, ValueError):
        return ""


def check_temporary_folder() -> None:
    """PyTorch, for one, makes files in a temporary folder when it is first used. Raises
    ConfigError: there is none that can be written to."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        allowed = f"a folder that can be written to, for temporary files ({error.strerror})"
        raise ConfigError("TMPDIR", os.environ.get("TMPDIR"), allowed) from error
