"""What the benchmarks share: the record of where they ran, interleaved repeats, honest ratios.

Knows nothing of models. A compared number is always a ratio of medians over repeats whose order
was rotated, with its spread; the last line a benchmark prints is one JSON document.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from foretoken import __version__
from foretoken.hardware import Hardware
from foretoken.lab.stats.repeats import bootstrap_ends, in_turn

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent
NOTABLE_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
RESAMPLES = 4000
FEWEST_REPEATS = 5
BUSY_SHARE = 0.5

sys.path.append(str(ROOT))  # where `tools` is


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A ratio of medians; `low` and `high` bound 95 % of its bootstrap over repeats."""

    value: float
    low: float
    high: float
    least: float
    """Smallest ratio of a single repeat."""
    most: float
    """Largest ratio of a single repeat."""
    repeats: int

    def __str__(self) -> str:
        """As printed in tables."""
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A number the project wants to reach, and what was measured."""

    name: str
    wanted: str
    measured: float
    met: bool


def at_least(name: str, measured: float, wanted: float) -> Goal:
    return Goal(name=name, wanted=f">= {wanted}", measured=measured, met=measured >= wanted)


def at_most(name: str, measured: float, wanted: float) -> Goal:
    return Goal(name=name, wanted=f"<= {wanted}", measured=measured, met=measured <= wanted)


def interleave(
    arms: Mapping[str, Callable[[], T]], repeats: int, *, pause_s: float = 0.0
) -> dict[str, list[T]]:
    """Run every arm once to warm up, then `repeats` times each in rotated order."""
    results: dict[str, list[T]] = {name: [] for name in arms}
    for name in arms:
        arms[name]()
    for turn in range(repeats):
        for name in in_turn(list(arms), turn):
            time.sleep(pause_s)
            results[name].append(arms[name]())
    return results


def ratio_of_medians(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """median(above) / median(below); both hold one number per repeat, in the same order."""
    assert len(above) == len(below) > 0, (len(above), len(below))
    return ratio_of(list(zip(above, below, strict=True)), statistics.median)


def ratio_of(
    pairs: Sequence[tuple[Any, Any]],
    speed: Callable[[Sequence[Any]], float],
    resamples: int = RESAMPLES,
) -> Ratio:
    """speed(firsts) / speed(seconds), its interval by drawing pairs again."""

    def ratio(drawn: Sequence[tuple[Any, Any]]) -> float:
        return speed([a for a, _ in drawn]) / speed([b for _, b in drawn])

    singles = [ratio([pair]) for pair in pairs]
    low, high = bootstrap_ends(pairs, ratio, resamples=resamples)
    return Ratio(value=ratio(pairs), low=low, high=high, least=min(singles), most=max(singles),
                 repeats=len(pairs))  # fmt: skip


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=FEWEST_REPEATS, help="default: %(default)s")
    parser.add_argument("--threads", type=int, help="threads of PyTorch; default: its own choice")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: a smoke test, no numbers")
    return parser


def use_threads(threads: int | None) -> None:
    """Fix the number of threads of this process; None leaves PyTorch's choice."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def environment() -> dict[str, Any]:
    """The machine, the versions and the command: what a number needs to mean anything."""
    hardware = Hardware.detect()
    record: dict[str, Any] = {
        "cpu": hardware.cpu_name,
        "cores": hardware.num_cores,
        "cpu_flags": [flag for flag in NOTABLE_FLAGS if flag in hardware.cpu_flags],
        "free_memory_gib": round(hardware.free_memory / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "foretoken": __version__,
        "git": _git_hash(),
        "command": " ".join(["python", "benchmarks/" + Path(sys.argv[0]).name, *sys.argv[1:]]),
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    record.update({name: _version(name) for name in PACKAGES})
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        record["threads"] = torch.get_num_threads()
        record["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return record


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_hash() -> str | None:
    """The commit, with a plus if the package or the benchmarks differ from it."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    if head.returncode:
        return None
    status = [*git, "status", "--porcelain", "--", "src", "benchmarks"]
    changed = subprocess.run(status, capture_output=True, text=True).stdout.strip()
    return head.stdout.strip()[:12] + ("+" if changed else "")


def announce(arguments: argparse.Namespace, *, timed: bool = True) -> dict[str, Any]:
    """Print and return where and how this run happens; call it once all is imported. Where nothing
    is `timed`, the machine may be busy."""
    where = environment()
    for key in ("cpu", "cores", "cpu_flags", "load_average", "torch", "threads", "git", "command"):
        print(f"{key}: {where.get(key)}")
    if arguments.quick:
        print("QUICK: sizes are tiny, the numbers mean nothing")
    elif arguments.repeats < FEWEST_REPEATS:
        print(f"fewer than {FEWEST_REPEATS} repeats: do not publish these numbers")
    if timed and where["load_average"] > BUSY_SHARE * where["cores"]:
        print(f"the machine is busy (load {where['load_average']}): do not publish these numbers")
    print(flush=True)
    return where


def finish(
    name: str,
    where: Mapping[str, Any],
    arguments: argparse.Namespace,
    results: Mapping[str, Any],
    goals: Sequence[Goal],
) -> None:
    """Print how each goal fared, then everything as one line of JSON."""
    for goal in goals:
        word = "met   " if goal.met else "MISSED"
        print(f"{word} {goal.name}: {goal.measured:.3f} (wanted {goal.wanted})")
    document = {
        "benchmark": name,
        "quick": arguments.quick,
        "environment": where,
        "settings": {key: _plain(value) for key, value in vars(arguments).items()},
        "results": _plain(results),
        "goals": [asdict(goal) for goal in goals],
    }
    print(json.dumps(document))


def _plain(value: Any) -> Any:
    """`value` in JSON's types, numbers at six digits."""
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return str(value) if isinstance(value, Path) else value
