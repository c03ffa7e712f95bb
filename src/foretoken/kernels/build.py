"""Compiles `native/*.c` into one shared library beside it. Standard library only.

The library's name carries a hash of the sources and flags, so that a stale one is never loaded.
Objects are kept beside it under a hash of what each is made of: an edit compiles what it touches.
The build hook of the package, `library` in a checkout, and `python -m foretoken.kernels.build`
call it; this module imports nothing of the package, because the hook loads it by path.
"""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
NATIVE, BUILT = FOLDER / "native", FOLDER / "lib"
COMMON = (
    "-std=gnu11", "-O3", "-g", "-fPIC", "-pthread", "-fvisibility=hidden", "-ffp-contract=off",
    "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra", "-Werror=vla",
)  # fmt: skip
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (
    *_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512",
)  # fmt: skip
_AVX512BF16 = (*_AVX512, "-mavx512vnni", "-mavx512bf16")
BY_SUFFIX = {
    "_avx2": ("x86_64", *_AVX2),
    "_avxvnni": ("x86_64", *_AVX2, "-mavxvnni"),
    "_avx512": ("x86_64", *_AVX512),
    "_avx512bf16": ("x86_64", *_AVX512BF16),
    "_amx": ("x86_64", *_AVX512BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    "_neondot": ("aarch64", "-march=armv8.2-a+dotprod"),
    "_neonbf16": ("aarch64", "-march=armv8.2-a+dotprod+bf16+i8mm"),
}
"""Of files that end so: what they are for, and the flags that they need there."""
_NO_DEBUG = "-Wl,-S"
"""The library is linked without the debug information of the objects: a tenth of the size."""


class BuildError(Exception):
    """There is no C compiler, or it failed; the message has its words."""


def sources() -> list[Path]:
    """The C files, in order."""
    return sorted(NATIVE.glob("*.c"))


def library_path() -> Path:
    """Where the library of the present sources is, or would be."""
    digest = hashlib.sha256(repr((COMMON, BY_SUFFIX)).encode())
    for path in sorted(NATIVE.glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return BUILT / f"foretoken-{platform.machine()}-{digest.hexdigest()[:16]}.so"


def compiler() -> str:
    """The C compiler: $CC, or cc, gcc, clang. Raises BuildError: none is installed."""
    given = os.environ.get("CC")
    for name in (given,) if given else ("cc", "gcc", "clang"):
        path = shutil.which(name)
        if path:
            return path
    raise BuildError(f"no C compiler: {given or 'cc, gcc, clang'} not found")


def build_library() -> Path:
    """Compile and link unless it is there already; older libraries are removed. Raises BuildError:
    no compiler, an error in the sources, or a folder that cannot be written."""
    target = library_path()
    if target.is_file():
        return target
    folder = BUILT / "objects"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        objects = compile_objects(sources(), folder, ())
        with tempfile.TemporaryDirectory(dir=BUILT) as fresh:
            link(objects, Path(fresh) / target.name, ("-shared", _NO_DEBUG))
            os.replace(Path(fresh) / target.name, target)
    except OSError as error:
        raise BuildError(f"{BUILT} cannot be written: {error}") from error
    for path in {*BUILT.glob("foretoken-*.so"), *folder.iterdir()} - {target, *objects}:
        path.unlink(missing_ok=True)
    return target


def _parts(path: Path, seen: dict[Path, bytes]) -> dict[Path, bytes]:
    """A C file and the files that it includes by name, beside it or in NATIVE."""
    seen[path] = path.read_bytes()
    for name in re.findall(rb'^\s*#\s*include\s+"(.+)"', seen[path], re.MULTILINE):
        for folder in (path.parent, NATIVE):
            part = (folder / name.decode()).resolve()
            if part.is_file() and part not in seen:
                _parts(part, seen)
    return seen


def compile_objects(
    files: Sequence[Path], folder: Path, more: tuple[str, ...], without: tuple[str, ...] = ()
) -> list[Path]:
    """Objects of the files, those compiled that `folder` does not have yet, with `more` flags and
    `without` endings of BY_SUFFIX, as a compiler that does not know these sets leaves them out.
    Raises BuildError: no compiler, or an error in the sources."""
    command = compiler()
    target = _target_of(command)

    def one(path: Path) -> Path:
        base = [command, *COMMON, *more, f"-I{NATIVE}", "-c", str(path)]
        flags = () if path.stem.endswith(without) else _flags(path, target)
        digest = hashlib.sha256(repr((command, COMMON, more, flags)).encode())
        for part, content in sorted(_parts(path.resolve(), {}).items()):
            digest.update(part.name.encode() + b"\0" + content)
        result = folder / f"{path.stem}-{digest.hexdigest()[:16]}.o"
        if result.is_file():
            return result
        with tempfile.TemporaryDirectory(dir=folder.parent) as fresh:
            output = ["-o", str(Path(fresh) / result.name)]
            try:
                _run([*base, *output, *flags])
            except BuildError:
                if not flags or _at_fault(command, base, flags):
                    raise
                _run([*base, *output])
            os.replace(Path(fresh) / result.name, result)
        return result

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(one, files))


def link(objects: Sequence[Path], target: Path, more: Sequence[str]) -> None:
    """Link a library or a program. Raises BuildError: it cannot be."""
    _run([compiler(), *more, "-pthread", *map(str, objects), "-lm", "-o", str(target)])


def architecture(name: str) -> str:
    """One name for what systems and compilers call differently."""
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name.lower(), name.lower())


def _target_of(command: str) -> str:
    """What a compiler compiles for: another machine's architecture, if it is a cross compiler."""
    done = subprocess.run([command, "-dumpmachine"], capture_output=True, text=True)
    named = "" if done.returncode else done.stdout.split("-")[0].strip()
    return architecture(named or platform.machine())


def _flags(path: Path, target: str) -> tuple[str, ...]:
    """Flags of this file's instruction set. A file that cannot be compiled with them, because the
    compiler or its assembler is older than the set, gets none: its guards leave a null table."""
    for suffix, (wanted, *flags) in BY_SUFFIX.items():
        if path.stem.endswith(suffix) and wanted == target:
            return tuple(flags)
    return ()


def _at_fault(command: str, base: Sequence[str], flags: Sequence[str]) -> bool:
    """Whether a file that fails is wrong itself: the compiler takes its flags, and yet comes to no
    assembly. What fails later fails by an older assembler."""
    knows = _translates([command, *flags, "-x", "c", os.devnull])
    return knows and not _translates([*base, *flags])


def _translates(command: Sequence[str]) -> bool:
    to_assembly = [*command, "-S", "-o", os.devnull]
    return subprocess.run(to_assembly, capture_output=True).returncode == 0


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{' '.join(command[:1])} failed:\n{done.stderr[-4000:]}")
    if done.stderr:
        print(done.stderr, file=sys.stderr)


if __name__ == "__main__":
    print(build_library())
