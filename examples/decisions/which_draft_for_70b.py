"""Which draft for a 70B target: is 1:8 to 1:12 of its size the right one?

Size tells little. What counts is what a draft step takes and how often the target agrees, so the
candidates are predicted side by side, quiet and busy.
"""

from typing import Any

from commands import listed, plan

DRAFTS = ("llama-3.1-8b", "llama-3.2-3b", "llama-3.2-1b", "qwen2.5-0.5b")
QUIET, BUSY = 1, 64


def main() -> None:
    """A row per draft, then the best ones and what the ratio rule would have taken."""
    words = [word for draft in DRAFTS for word in ("--draft", draft)]
    found = plan("llama-3.1-70b", *words, "--engine", "vllm", "--quantization", "fp8",
                 "--device", "h100-sxm", "--count", 2, "--peak-concurrency", BUSY)  # fmt: skip
    size = found["setup"]["target"]["dense_params"]
    fit = {name_of(one): one for one in found["drafts"] if not one["problem"]}
    for one in found["drafts"]:
        share = f"1:{size / one['params']:.0f}"
        told = one["problem"] or ", ".join(
            f"{gain(one, load)} at {load} in flight" for load in (QUIET, BUSY)
        )
        print(f"{name_of(one):24} {share:>6}   {told}")
    print("\n" + answer(fit, size))


def answer(fit: dict[str, dict[str, Any]], size: float) -> str:
    """The fastest at both loads against those within the ratio."""
    quiet, busy = (max(fit, key=lambda name: at(fit[name], load)["best"]) for load in (QUIET, BUSY))
    best = f"{quiet} is predicted fastest with {gain(fit[quiet], QUIET)} at {QUIET} in flight"
    best += f" and {gain(fit[busy], BUSY)} at {BUSY}" if busy == quiet else (
        f", {busy} with {gain(fit[busy], BUSY)} at {BUSY}"
    )  # fmt: skip
    ruled = [name for name, one in fit.items() if 8 <= size / one["params"] <= 12]
    if not ruled:
        return f"{best}; none of the drafts is between 1:8 and 1:12 of the target."
    own = listed([f"{name} {gain(fit[name], QUIET)}" for name in ruled])
    if quiet in ruled:
        return f"{best}; it is between 1:8 and 1:12 of the target's size."
    unsure = at(fit[ruled[0]], QUIET)["best_high"] > at(fit[quiet], QUIET)["best_low"]
    both = "the intervals overlap, so measure both" if unsure else "the intervals are apart"
    return f"{best}; of 1:8 to 1:12 of its size there is {own}: {both}."


def at(one: dict[str, Any], load: int) -> dict[str, Any]:
    """What is predicted of a draft at a load, with its best number of drafts there."""
    found: dict[str, Any] = next(
        own for own in one["prediction"]["loads"] if own["requests"] == load
    )
    return found


def gain(one: dict[str, Any], load: int) -> str:
    """`2.12x (1.50 to 2.86, k = 4)`."""
    own = at(one, load)
    k = own["best_k"]
    return f"{own['best']:.2f}x ({own['best_low']:.2f} to {own['best_high']:.2f}, k = {k})"


def name_of(one: dict[str, Any]) -> str:
    """The draft without its organisation."""
    return str(one["draft"]).split("/")[-1]


if __name__ == "__main__":
    main()
