"""Whether the system holds a file in huge pages, and how it comes to.

Every page that a step reads of mapped weights is looked up, so small pages cost time at every
token. How a file lies in memory was decided when it came there: what was written, or read piece by
piece, stays in small pages until the system forgets it. Knows files and mappings, no weights.
"""

import mmap
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

from foretoken.hardware import advise_memory

HUGE: Final = 2 << 20
_POPULATE_READ: Final = 22
"""Linux: read what is not in memory and map all of it."""
_TRIED: Final = 16 << 20
"""Bytes of a mapping by which it shows whether the system has huge pages for it."""
_SOME, _MOSTLY = 0.5, 0.9
"""Shares in huge pages: of what is tried, from which on all may be; of a mapping, from which on it
is as fast as memory of its own."""
_PIECE: Final = 256 << 20
"""Bytes that are read again at once: what is lost if the process ends meanwhile."""


def comes_in_huge_pages(mapped: mmap.mmap) -> bool:
    """Bring all of a file into memory, if its first part shows that it can lie in huge pages;
    whether it then does."""
    if not _are_known():
        return False
    size = len(mapped)
    try:
        # The beginning has been read already, in whatever pages that brought in.
        for share, start, stop in ((_SOME, HUGE, HUGE + _TRIED), (_MOSTLY, 0, size)):
            start, stop = min(start, size & -HUGE), min(stop, size)
            if _read(mapped, start, stop) < share * (stop - start & -HUGE):
                return False
    except OSError:  # an older system, or one that does not say
        return False
    return True


def bring_back_in_huge_pages(path: Path) -> bool:
    """Have the system hold a file in huge pages; whether it does by the end.

    Pieces that lie in small ones are forgotten and read from the disk again, the rest is left as it
    is. Ends at the first piece that comes back as it was: there are no such pages for this file, or
    another process has it mapped. Meant for a thread that nobody waits for.
    """
    if not _are_known():
        return False
    with suppress(OSError), path.open("rb") as file:
        fd = file.fileno()
        os.fsync(fd)  # What is not on the disk yet is not forgotten.
        for start, length in _pieces(os.fstat(fd).st_size):
            if _read_piece(fd, start, length) < length:
                os.posix_fadvise(fd, start, length, os.POSIX_FADV_DONTNEED)
                if _read_piece(fd, start, length) < _MOSTLY * length:
                    return False
        return True
    return False


def _are_known() -> bool:
    """Whether this system, and this Python, know of huge pages."""
    return hasattr(mmap, "MADV_HUGEPAGE")


def _pieces(size: int) -> Iterator[tuple[int, int]]:
    """Start and length of each; what is behind the last whole huge page belongs to none. The first
    shows whether there is any hope, and is small."""
    stop, start = size & -HUGE, 0
    while start < stop:
        length = min(_PIECE if start else _TRIED, stop - start)
        yield start, length
        start += length


def _read_piece(fd: int, start: int, length: int) -> int:
    """Bring a piece of a file into memory; bytes of it that lie in huge pages."""
    return _read(mmap.mmap(fd, length, access=mmap.ACCESS_COPY, offset=start), 0, length)


def _read(mapped: mmap.mmap, start: int, stop: int) -> int:
    """Bring a part of a mapping into memory, in huge pages if it is not there yet; bytes of the
    whole mapping that the page table then has in huge pages."""
    address = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
    mapped.madvise(mmap.MADV_HUGEPAGE)
    advise_memory(address + start, stop - start, _POPULATE_READ)
    maps = "\n" + Path("/proc/self/smaps").read_text()
    _, _, rest = maps.partition(f"\n{address:08x}-")
    found = re.search(r"^FilePmdMapped: +(\d+) kB", rest, re.MULTILINE)
    return 0 if found is None else int(found[1]) << 10
