"""A mapped file that others cannot change or cut while it is used.

A mapping shows what the file is now: bytes that are written in place are read as weights, and a
file that is truncated ends the process (SIGBUS). Linux has leases against both (fcntl(2)): whoever
would open the file for writing, or truncate it, waits until its holder lets go. The holder looks
every second whether somebody waits, puts memory of its own with the same contents in the place of
the mapping, and lets go. Removing and renaming the file need no permission and do no harm.
Knows files and mappings, no weights.
"""

import ctypes
import fcntl
import logging
import mmap
import os
import signal
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self, final

import torch

from foretoken.hardware import advise_memory

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
    """The right to be asked before a file changes."""

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
