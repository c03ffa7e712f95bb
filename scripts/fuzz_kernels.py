"""Build every program of tests/fuzz with the kernels under sanitizers, and run it.

    fuzz_kernels.py [--aarch64] [ROUNDS [SEED]]

`make check` calls it. Without a C compiler there is nothing to check, which it says. With --aarch64
(`make test-aarch64`) the programs are compiled for that machine and run in an emulator, and what
is missing for it is an error.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from foretoken.kernels.build import BuildError, build_programs, compiler

PROGRAMS = Path(__file__).parents[1] / "tests" / "fuzz"
CROSS = "aarch64-linux-gnu-gcc"
EMULATORS = ("qemu-aarch64", "qemu-aarch64-static")
NEEDED = "gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"


def run_programs(prefix: list[str], arguments: list[str]) -> int:
    """Run the programs after `prefix` with `arguments`; the first failure is the exit status."""
    mains, helpers = (sorted(PROGRAMS.glob(f"{folder}*.c")) for folder in ("", "helpers/"))
    with tempfile.TemporaryDirectory() as folder:
        for program in build_programs(mains, helpers, Path(folder)):
            status = subprocess.run([*prefix, str(program), *arguments], timeout=600).returncode
            if status:
                print(f"{program.name}: exit status {status}")
                return status
    return 0


def emulated(arguments: list[str]) -> int:
    """The programs as aarch64 runs them."""
    emulator = next(filter(None, map(shutil.which, EMULATORS)), None)
    if emulator is None or shutil.which(CROSS) is None:
        print(f"kernels not run for aarch64: Debian's packages {NEEDED} are needed")
        return 1
    os.environ["CC"] = CROSS
    # The leak sanitizer traces its own process, which the emulator cannot do.
    os.environ["ASAN_OPTIONS"] = "detect_leaks=0"
    return run_programs([emulator, "-L", "/usr/aarch64-linux-gnu"], arguments)


def main(arguments: list[str]) -> int:
    """Here, or for aarch64 if told so."""
    if arguments[:1] == ["--aarch64"]:
        return emulated(arguments[1:])
    try:
        compiler()
    except BuildError as error:
        print(f"kernels not fuzzed: {error}")
        return 0
    return run_programs([], arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
