"""Should speculation be off above 16 requests in flight?

A cut-off is a schedule with two steps. On a machine that is not at hand, the real scheduler and
control run on a virtual clock: no drafts, fixed lengths, the cut-off, and control, which decides
by what it learns.
"""

import json
from typing import Any

from commands import QUICK, listed, simulate

CUT = 16
MOST = 5
LOADS = (8, 16, 24, 64)


def main() -> None:
    """A simulation of each at several loads."""
    loads = LOADS[::2] if QUICK else LOADS
    cut_off = json.dumps([[1, CUT, MOST], [CUT + 1, 4096, 0]])
    found = simulate("llama-3.1-70b", "--draft", "llama-3.1-8b", "--quantization", "fp8",
                     "--device", "h100-sxm", "--count", 2, "-k", MOST, "--schedule", cut_off,
                     "--clients", ",".join(map(str, loads)))  # fmt: skip
    runs: dict[int, dict[str, float]] = {}
    for one in found["runs"]:
        runs.setdefault(one["clients"], {})[one["arm"]] = one["throughput"]
    for load, gains in runs.items():
        print(f"{load:3} in flight:", *(f"{arm} {gain:.2f}x " for arm, gain in gains.items()))
    print("\n" + answer(runs))


def answer(runs: dict[int, dict[str, float]]) -> str:
    """What the cut-off gives at each load, and what the best fixed length would."""
    fixed = {load: {arm: own for arm, own in gains.items() if arm not in ("schedule", "control")}
             for load, gains in runs.items()}  # fmt: skip
    best: dict[int, Any] = {load: max(own, key=lambda arm: own[arm]) for load, own in fixed.items()}
    shown = "; ".join(
        f"at {load} {gains['schedule']:.2f}x where {best[load]} has {gains[best[load]]:.2f}x and "
        f"control {gains['control']:.2f}x"
        for load, gains in runs.items()
    )
    early = [str(load) for load in runs if load > CUT and best[load] != "off"]
    late = [str(load) for load in runs if load <= CUT and best[load] == "off"]
    told = [f"comes too early for {listed(early)}"] if early else []
    told += [f"comes too late for {listed(late)}"] if late else []
    return (
        f"Drafting {MOST} up to {CUT} in flight and none above gives {shown}: the cut-off "
        f"{' and '.join(told) or 'is where it should be'}."
    )


if __name__ == "__main__":
    main()
