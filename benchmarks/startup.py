"""How long it takes to import Foretoken, to have a model ready, and to see its first token.

    python benchmarks/startup.py [--model demo]

Every measurement is a fresh interpreter; `ready` and `first token` count from the start of that
process, interpreter and imports included. Wanted: import below 0.3 s, ready below 3 s.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from common import announce, at_most, finish, interleave, make_parser

IMPORT = "import time; t = time.perf_counter(); {what}; print(time.perf_counter() - t)"
READY = """
import sys
from foretoken import LLM, SamplingParams
llm = LLM(sys.argv[1])
print("ready", flush=True)
llm.generate("def ", SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
print("first token", flush=True)
"""


def import_seconds(what: str) -> Callable[[], float]:
    """Seconds of an import statement inside a fresh interpreter."""

    def measure() -> float:
        code = IMPORT.format(what=what)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        return float(done.stdout)

    return measure


def until(line: str, model: str) -> Callable[[], float]:
    """Seconds from starting a process to its printing `line`."""

    def measure() -> float:
        began = time.perf_counter()
        command = [sys.executable, "-c", READY, model]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for printed in process.stdout:
                if printed.strip() == line:
                    seconds = time.perf_counter() - began
                    process.terminate()
                    return seconds
        raise SystemExit(f"the process ended without printing {line!r}")

    return measure


def main() -> None:
    """Measure all four, report."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo", help="default: %(default)s")
    parser.set_defaults(repeats=9)
    settings: argparse.Namespace = parser.parse_args()
    if settings.quick:
        settings.repeats = 1
    where = announce(settings)
    times = interleave(
        {
            "import foretoken": import_seconds("import foretoken"),
            "from foretoken import LLM": import_seconds("from foretoken import LLM"),
            "ready": until("ready", settings.model),
            "first token": until("first token", settings.model),
        },
        settings.repeats,
    )
    results = {}
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        results[name] = {"median_s": middle, "min_s": min(seconds), "max_s": max(seconds)}
        print(f"{name}: {middle:.3f} s [{min(seconds):.3f}, {max(seconds):.3f}]")
    goals = [
        at_most("import foretoken, s", results["import foretoken"]["median_s"], 0.3),
        at_most(f"LLM({settings.model!r}) ready, s", results["ready"]["median_s"], 3.0),
    ]
    finish("startup", where, settings, results, goals)


if __name__ == "__main__":
    main()
