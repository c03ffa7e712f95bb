"""Quantize the target, or the draft: how much acceptance is lost, and is it more than 5 points?

The same prompts with the weights as stored and rounded while loading, each as an A/B of its own
with and without drafts: what a target gains by int4 it may lose again in rejected drafts.
"""

from pathlib import Path
from typing import Any

from commands import OFF, ON, QUICK, lab, measure, new_folder, ratio, sizes

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
        told.append(f"{name} {loss(run, out / 'stored')}, speed-up {gain(found)}")
    print(
        f"\nAcceptance is {acceptance(stored):.0%} with weights as stored, speed-up "
        f"{gain(stored)}; {'; '.join(told)}."
    )


def measured(run: Path, baseline: str, candidate: str) -> dict[str, Any]:
    """The A/B of a pair of models."""
    return measure("--workload", "demo", "--max-tokens", 64, *sizes(3, 40), "--out", run,
               "--baseline", baseline, "--candidate", candidate)  # fmt: skip


def acceptance(found: dict[str, Any]) -> float:
    """Accepted per drafted token."""
    arm = next(one for one in found["arms"] if one["arm"] == found["candidate"])
    rate: float = next(one for one in arm["acceptance"] if one["by"] == "all")["rate"]["estimate"]
    return rate


def gain(found: dict[str, Any]) -> str:
    """The gain per token against the same weights without drafts."""
    return ratio(next(one["ratio"] for one in found["gains"] if one["metric"] == "tpot_p50"))


def loss(run: Path, stored: Path) -> str:
    """The loss in points with its interval, by the rule of `lab decide`."""
    found = lab("decide", run, "--reference", stored, allowed=(0, 1, 4))
    rules = {one["rule"]: one["result"] for one in found["decisions"][0]["rules"]}
    result = rules["quantization_drop"]
    drop = result["value"]
    word = {
        "fail": "more than",
        "pass": "not more than",
        "inconclusive": "perhaps more than",
    }
    points = 100 * result["threshold"]
    return (
        f"loses {100 * drop['estimate']:.1f} points ({100 * drop['low']:.1f} to "
        f"{100 * drop['high']:.1f}), {word[result['outcome']]} {points:.0f}"
    )


if __name__ == "__main__":
    main()
