"""Build every program of tests/fuzz with the kernels under sanitizers, and run it.

`make check` calls it. Without a C compiler there is nothing to check, which it says.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from foretoken.kernels.build import BuildError, build_programs, compiler

PROGRAMS = Path(__file__).parents[1] / "tests" / "fuzz"


def main(arguments: list[str]) -> int:
    """Run the programs with `arguments` (rounds, seed); the first failure is the exit status."""
    try:
        compiler()
    except BuildError as error:
        print(f"kernels not fuzzed: {error}")
        return 0
    mains, helpers = (sorted(PROGRAMS.glob(f"{folder}*.c")) for folder in ("", "helpers/"))
    with tempfile.TemporaryDirectory() as folder:
        for program in build_programs(mains, helpers, Path(folder)):
            status = subprocess.run([str(program), *arguments], timeout=600).returncode
            if status:
                print(f"{program.name}: exit status {status}")
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
