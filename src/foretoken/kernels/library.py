"""Loads the compiled kernels once and says which instruction set they use.

FORETOKEN_KERNELS chooses: `auto` (default), `off`, or the highest level to use: `portable`, on x86
`avx2`, `avxvnni`, `avx512`, `avx512bf16` or `amx`, on aarch64 `neon`, `neondot` or `neonbf16`; or
`twins`, which runs a GPU's steps on the CPU in PyTorch's operations, slowly, to test them. Owns no
kernel: those who call one declare its arguments themselves (`Library.function`). Calls into C
release the GIL.
"""

import ctypes
import functools
import logging
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.errors import ConfigError
from foretoken.hardware import usable_cores
from foretoken.kernels import build
from foretoken.kernels.structures import check_sizes

logger = logging.getLogger("foretoken")

VARIABLE = "FORETOKEN_KERNELS"
_BY_ARCHITECTURE = {
    "x86_64": ("portable", "avx2", "avxvnni", "avx512", "avx512bf16", "amx"),
    "aarch64": ("portable", "neon", "neondot", "neonbf16"),
}
LEVELS = _BY_ARCHITECTURE.get(build.architecture(platform.machine()), ("portable",))
"""Those of this machine's architecture, as numbered in C, each with what those before it have; but
`avxvnni` is of processors without AVX-512, and not all that have that have it."""
TWINS = "twins"
_CHOICES = ("auto", "off", TWINS, *LEVELS)


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded library; `level` is the instruction set in use."""

    handle: ctypes.CDLL
    level: str
    cores: int
    """Cores that this process could use when the library was loaded."""

    def function(self, name: str, arguments: Sequence[Any], result: Any = None) -> Any:
        """The C function `name` with its argument types, as ctypes calls it."""
        found = self.handle[name]
        found.argtypes = tuple(arguments)
        found.restype = result
        return found

    def use_threads(self, threads: int) -> None:
        """How many threads share a call, no more than the cores that this process may use.

        An engine calls it before every step (`foretoken.kernels.threads`).
        """
        self.handle.ft_set_threads(min(threads, self.cores))

    def advise_huge(self, address: int, num_bytes: int) -> None:
        """Ask for huge pages; do it before the memory is written for the first time."""
        self.handle.ft_advise_huge(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes))


@functools.cache
def find_library() -> Library | None:
    """The kernels, or None where they are off or could not be compiled, which is said once. Raises
    ConfigError: FORETOKEN_KERNELS has an unknown value, or a level that this machine lacks."""
    wanted = _wanted()
    if wanted in ("off", TWINS):
        return None
    path = _library_file()
    if path is None:
        return None
    handle = ctypes.CDLL(str(path))
    check_sizes(handle)
    most = LEVELS[handle.ft_cpu_level()]
    level = most if wanted == "auto" else wanted
    if LEVELS.index(level) > LEVELS.index(most):
        raise ConfigError(VARIABLE, wanted, f"auto, off, or at most {most} on this machine")
    if handle.ft_set_level(LEVELS.index(level)) != LEVELS.index(level):
        raise ConfigError(VARIABLE, wanted, "another level: this machine has no AVX-VNNI")
    library = Library(handle, level, usable_cores())
    library.use_threads(library.cores)
    return library


def wants_twins() -> bool:
    """Whether the steps of a GPU are to run on the CPU. Raises ConfigError: FORETOKEN_KERNELS has
    an unknown value."""
    return _wanted() == TWINS


def _wanted() -> str:
    wanted = os.environ.get(VARIABLE, "auto").lower()
    if wanted not in _CHOICES:
        raise ConfigError(VARIABLE, wanted, ", ".join(_CHOICES))
    return wanted


def describe_kernels() -> str:
    """Kernels on or off, which or why not, in words. Compiles nothing. Raises ConfigError:
    FORETOKEN_KERNELS has an unknown value, or a level that this machine lacks."""
    if wants_twins():
        return f"off ({VARIABLE}={TWINS}: a GPU's steps in PyTorch's operations, to test them)"
    if build.library_path().is_file():
        library = find_library()
        return f"off ({VARIABLE}=off), {_COST}" if library is None else f"on, {library.level}"
    why = _uncompilable()
    return "compiled at the first run" if why is None else f"off ({why}), {_COST}"


_COST = "decoding is many times slower"
_REMEDY = (
    "Install gcc or clang, then reinstall Foretoken with pip's --no-cache-dir --force-reinstall"
)
"""pip keeps the wheel that it built, and would install it once more."""


def _uncompilable() -> str | None:
    """Why nothing here can compile the kernels; None: the first run will."""
    if platform.system() != "Linux":
        return "they run on Linux only"
    if not (build.FOLDER.parents[2] / "hatch_build.py").is_file():
        return "Foretoken was installed without a C compiler"
    try:
        build.compiler()
    except build.BuildError as error:
        return str(error)
    return None


def _library_file() -> Path | None:
    """What the installation built; in a checkout, built now if the sources have changed."""
    path = build.library_path()
    if path.is_file():
        return path
    why, details = _uncompilable(), ""
    if why is None:
        try:
            return build.build_library()
        except build.BuildError as error:
            first, *rest = str(error).splitlines()
            why, details = first.rstrip(":"), "\n".join(rest)
    logger.warning(
        "No compiled kernels (%s): %s. %s; %s=off silences this.", why, _COST, _REMEDY, VARIABLE
    )
    if details:
        logger.info("The compiler said: %s", details)
    return None
