"""Runs `foretoken lab` as you would type it, and reads its JSON: what these examples share.

Every command is shown before it runs, so that it can be copied; its progress goes to the terminal.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

QUICK = "--quick" in sys.argv[1:]
"""One start of each server and few requests: shows that it runs, and proves nothing."""
SOURCES = Path(__file__).resolve().parents[2]
SERVE = "foretoken serve demo --port {port} --per-request-spec-decode-metrics detailed"
OFF = f"{SERVE} --speculative-config none"
ON = f"{SERVE} --no-adaptive-speculation --spec-model demo-draft --spec-tokens 4"
"""Four drafts in every step, whatever comes of them; the server's own control would stop."""


def lab(*words: str | int | Path, allowed: Sequence[int] = (0,)) -> dict[str, Any]:
    """The JSON document of a lab command.

    Ends the program with the command's exit code if that is not an allowed one.
    """
    return _document("foretoken lab", ("foretoken", "lab"), words, allowed)


def simulate(*words: str | int) -> dict[str, Any]:
    """The JSON document of the simulator, which lies beside the package in its sources."""
    return _document("python -m benchmarks.simulate", ("benchmarks.simulate",), words)


def _document(
    shown: str,
    module: Sequence[str],
    words: Sequence[str | int | Path],
    allowed: Sequence[int] = (0,),
) -> dict[str, Any]:
    told = [str(word) for word in words]
    print("$", shown, shlex.join(told), flush=True)
    # Servers are started by name: the `foretoken` beside this Python is meant.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    known = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(SOURCES)]))
    done = subprocess.run(
        [sys.executable, "-m", *module, *told, "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PATH": path, "PYTHONPATH": known},
        check=False,
    )
    if done.returncode not in allowed:
        sys.exit(done.returncode)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def measure(*words: str | int | Path) -> dict[str, Any]:
    """The JSON of `lab ab`, whose exit codes 1 and 4 are verdicts, as are those of `lab decide`."""
    return lab("ab", *words, "--no-page", allowed=(0, 1, 4))


def plan(*words: str | int) -> dict[str, Any]:
    """The JSON of `lab plan`, whose exit codes 1 and 4 are answers: leave it off, measure more."""
    return lab("plan", *words, allowed=(0, 1, 4))


def new_folder(name: str) -> Path:
    """`runs/NAME`, or `runs/NAME-2` and so on where one was measured before."""
    names = (name if number == 1 else f"{name}-{number}" for number in range(1, 10_000))
    return next(folder for one in names if not (folder := Path("runs") / one).exists())


def sizes(blocks: int, requests: int) -> tuple[str, ...]:
    """How much is measured: starts of each server, and requests of each start."""
    if QUICK:
        blocks, requests = 1, min(requests, 10)
    return ("--blocks", str(blocks), "--requests", str(requests))


def ratio(found: Mapping[str, Any]) -> str:
    """`1.42x (1.35 to 1.50)`: a gain with its interval, which too few starts do not have."""
    if found["low"] is None or found["high"] is None:
        return f"{found['estimate']:.2f}x (no interval)"
    return f"{found['estimate']:.2f}x ({found['low']:.2f} to {found['high']:.2f})"


def above(found: Mapping[str, Any], limit: float = 1.0) -> bool:
    """Whether all of an interval is above a limit."""
    return found["low"] is not None and found["low"] > limit


def below(found: Mapping[str, Any], limit: float = 1.0) -> bool:
    """Whether all of an interval is below a limit."""
    return found["high"] is not None and found["high"] < limit


def sorted_out(gains: Mapping[str, Mapping[str, Any]]) -> str:
    """`pays at 0 and 0.4, loses at 1, is open at 0.8`: where whole intervals are above or below 1.

    The names are what stands behind "at".
    """
    wins = [name for name, gain in gains.items() if above(gain)]
    loses = [name for name, gain in gains.items() if below(gain)]
    rest = [name for name in gains if name not in wins + loses]
    told = (("pays", wins), ("loses", loses), ("is open", rest))
    return ", ".join(f"{word} at {listed(names)}" for word, names in told if names)


def listed(words: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
