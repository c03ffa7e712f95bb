"""Build every program of tests/fuzz with the kernels under sanitizers, and run it.

    fuzz_kernels.py [--aarch64] [ROUNDS [SEED]]

`make fuzz` calls it. Without a C compiler there is nothing to check, which it says. With --aarch64
(`make check-arm`) the programs are compiled for that machine and run in an emulator, as processors
of three ages, and the bits that `across.c` hashes are compared with this machine's; without the
tools for it, it says which are missing.
"""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from foretoken.kernels.build import (
    BuildError,
    architecture,
    build_library,
    compile_objects,
    compiler,
    link,
    sources,
)
from foretoken.kernels.library import LEVELS

PROGRAMS = Path(__file__).parents[1] / "tests" / "fuzz"
ACROSS = PROGRAMS / "across.c"
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1")
CROSS = "aarch64-linux-gnu-gcc"
EMULATORS = ("qemu-aarch64", "qemu-aarch64-static")
NEEDED = "gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"
PROCESSORS = {"max": 3, "cortex-a76": 2, "cortex-a72": 1}
"""What the emulator is told to be, and the highest level of kernels there (foretoken.h). The newest
runs every level; an older one shows that what is chosen there has no newer instruction."""


def build(mains: Sequence[Path], folder: Path, without: Sequence[str] = ()) -> list[Path]:
    """Programs of these files, all with the kernels and what the tests share, under sanitizers;
    sets `without` are left out: what cannot run here takes most of the time."""
    files = [*mains, *sorted(PROGRAMS.glob("helpers/*.c")), *sources()]
    objects = compile_objects(files, folder, SANITIZERS, tuple(without))
    programs = [folder / main.stem for main in mains]
    for own, program in zip(objects, programs, strict=False):
        link([own, *objects[len(mains) :]], program, SANITIZERS)
    return programs


def not_here() -> list[str]:
    """Endings of files of instruction sets that this machine cannot run. AMX is emulated by the
    one below it."""
    able = LEVELS[: ctypes.CDLL(str(build_library())).ft_cpu_level() + 1]
    if "avx512bf16" in able:
        return []
    return [f"_{level}" for level in LEVELS if level not in able]


def run(programs: Sequence[Path], prefix: Sequence[str], arguments: Sequence[str]) -> int:
    """Run each after `prefix` with `arguments`; the first failure is the exit status."""
    for program in programs:
        status = subprocess.run([*prefix, str(program), *arguments], timeout=1200).returncode
        if status:
            print(f"{program.name}: exit status {status}")
            return status
    return 0


def hashes_of(program: Path, prefix: Sequence[str]) -> list[dict[str, str]]:
    """What `across.c` prints of each level, from the lowest on: kinds of kernels and their hash."""
    done = subprocess.run(
        [*prefix, str(program)], timeout=1200, check=True, capture_output=True, text=True
    )
    words = [line.split()[3:] for line in done.stdout.splitlines()]
    return [dict(zip(line[::2], line[1::2], strict=True)) for line in words]


def differences(here: list[dict[str, str]], there: list[dict[str, str]]) -> list[str]:
    """Bits that should be the same on this machine and on aarch64 and are not, in words.

    Args:
        here, there: of this machine, x86 or not, and of aarch64, as `hashes_of` has them.
    """
    wrong = [
        f"level {level} of aarch64: integer weights"
        for level, found in enumerate(there)
        if found["whole"] != here[0]["whole"]
    ]
    alike = [(0, 0)]  # plain C
    if architecture(platform.machine()) == "x86_64" and len(here) > 1:
        alike += [(1, level) for level in range(1, len(there))]  # AVX2, NEON
    for ours, theirs in alike:
        # Above, pairs of bfloat16 are multiplied as the processor's instruction rounds them.
        kinds = ("fused", "pairs") if theirs < 3 else ("fused",)
        wrong += [
            f"level {theirs} of aarch64 and {ours} of this machine: {kind}"
            for kind in kinds
            if here[ours][kind] != there[theirs][kind]
        ]
    return wrong


def emulated(arguments: list[str]) -> int:
    """The programs as aarch64 runs them, and their bits beside this machine's."""
    emulator = next(filter(None, map(shutil.which, EMULATORS)), None)
    if emulator is None or shutil.which(CROSS) is None:
        print(f"skipped: kernels not run for aarch64, Debian's packages {NEEDED} are needed")
        return 0
    # The leak sanitizer traces its own process, which the emulator cannot do.
    os.environ["ASAN_OPTIONS"] = "detect_leaks=0"
    with tempfile.TemporaryDirectory() as here, tempfile.TemporaryDirectory() as there:
        own = hashes_of(build([ACROSS], Path(here))[0], [])
        os.environ["CC"] = CROSS
        programs = build(sorted(PROGRAMS.glob("*.c")), Path(there))
        across = next(program for program in programs if program.name == ACROSS.stem)
        for processor, best in PROCESSORS.items():
            prefix = [emulator, "-cpu", processor, "-L", "/usr/aarch64-linux-gnu"]
            print(f"as {processor}:", flush=True)
            if status := run(programs, prefix, arguments):
                return status
            found = hashes_of(across, prefix)
            wrong = differences(own, found)
            if len(found) != best + 1:
                wrong.append(f"levels up to {len(found) - 1} were found, not to {best}")
            if wrong:
                print("\n".join(wrong))
                return 1
            print(f"the bits of {len(found)} levels are those of this machine's {len(own)}")
    return 0


def main(arguments: list[str]) -> int:
    """Here, or for aarch64 if told so."""
    try:
        compiler()
    except BuildError as error:
        print(f"kernels not fuzzed: {error}")
        return 0
    if arguments[:1] == ["--aarch64"]:
        return emulated(arguments[1:])
    with tempfile.TemporaryDirectory() as folder:
        programs = build(sorted(PROGRAMS.glob("*.c")), Path(folder), not_here())
        return run(programs, [], arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
