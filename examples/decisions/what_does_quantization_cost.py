"""Quantize the target, or the draft: how much acceptance is lost, and is it more than 5 points?

The same prompts with the weights as stored and rounded while loading, each as an A/B of its own
with and without drafts: what a target gains by int4 it may lose again in rejected drafts.
"""

from math import hypot
from pathlib import Path
from typing import Any

from commands import OFF, ON, QUICK, measure, new_folder, ratio, sizes

MOST = 0.05
"""Of acceptance that a rounding may cost."""
ROUNDED = {
    "int8 target": (f"{OFF} -q int8", f"{ON} -q int8"),
    "int4 target": (f"{OFF} -q int4", f"{ON} -q int4"),
    "int8 draft": (OFF, f"{ON} --speculative-config.quantization int8"),
}


def main() -> None:
    """An A/B with the weights as stored, and one for each rounding that is held against it."""
    out = new_folder("what_does_quantization_cost")
    names = list(ROUNDED)[1:2] if QUICK else list(ROUNDED)
    stored = measured(out / "stored", OFF, ON)
    told = []
    for name in names:
        run = out / name.replace(" ", "-")
        found = measured(run, *ROUNDED[name])
        told.append(f"{name} {loss(acceptance(found), acceptance(stored))}, speed-up {gain(found)}")
    print(
        f"\nAcceptance is {acceptance(stored)['estimate']:.0%} with weights as stored, speed-up "
        f"{gain(stored)}; {'; '.join(told)}."
    )


def measured(run: Path, baseline: str, candidate: str) -> dict[str, Any]:
    """The A/B of a pair of models."""
    return measure("--workload", "demo", "--max-tokens", 64, *sizes(3, 40), "--out", run,
               "--baseline", baseline, "--candidate", candidate)  # fmt: skip


def acceptance(found: dict[str, Any]) -> dict[str, float]:
    """Accepted per drafted token, with its interval."""
    arm = next(one for one in found["arms"] if one["arm"] == found["candidate"])
    rate: dict[str, float] = next(one for one in arm["acceptance"] if one["by"] == "all")["rate"]
    return rate


def gain(found: dict[str, Any]) -> str:
    """The gain per token against the same weights without drafts."""
    return ratio(next(one["ratio"] for one in found["gains"] if one["metric"] == "tpot_p50"))


def loss(rate: dict[str, float], stored: dict[str, float]) -> str:
    """The loss in points with its interval: half-widths of independent rates add in squares."""
    middle = stored["estimate"] - rate["estimate"]
    low = middle - hypot(stored["estimate"] - stored["low"], rate["high"] - rate["estimate"])
    high = middle + hypot(stored["high"] - stored["estimate"], rate["estimate"] - rate["low"])
    word = "more than" if low > MOST else "perhaps more than" if high > MOST else "not more than"
    return (
        f"loses {100 * middle:.1f} points ({100 * low:.1f} to {100 * high:.1f}), {word} "
        f"{100 * MOST:.0f}"
    )


if __name__ == "__main__":
    main()
