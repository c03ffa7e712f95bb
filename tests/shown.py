"""What a reader of an example sees: a program run in a fresh interpreter, and its output judged."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_REPEATS = 3


def run_shown(program: list[str]) -> str:
    """Standard output of Python with these arguments; it must end well and read well."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    environment.pop("FORETOKEN_LOGGING_LEVEL", None)
    done = subprocess.run(
        [sys.executable, *program], capture_output=True, text=True, timeout=240, env=environment,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", f"a library is quiet, and this is shown:\n{done.stderr}"
    assert complaints(done.stdout) == [], done.stdout
    return done.stdout


def complaints(shown: str) -> list[str]:
    """What a stranger would stumble over: nothing shown, the same line over and over, and
    numbers that nobody rounded."""
    lines = Counter(line.strip() for line in shown.splitlines() if line.strip())
    found = [f"{n} times {line!r}" for line, n in lines.items() if n > MOST_REPEATS]
    stutter = rf"\b(\w{{2,}})(?:\W+\1\b){{{MOST_REPEATS},}}"
    found += [f"{word!r} again and again" for word in re.findall(stutter, shown)]
    found += [f"not rounded: {number}" for number in re.findall(r"\d+\.\d{5,}", shown)]
    return found if lines else ["nothing is shown"]
