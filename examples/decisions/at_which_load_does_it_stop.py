"""At which number of requests in flight does speculation stop paying?

With many requests in a step the verification of their drafts is no longer free. The answer differs
by machine and model: here the packaged pair with four drafts for every request, at every load.
"""

from typing import Any

from commands import OFF, ON, QUICK, measure, new_folder, ratio, sizes, sorted_out

LOADS = (1, 4, 16)


def main() -> None:
    """A grid over the requests in flight."""
    loads = LOADS[::2] if QUICK else LOADS
    found = measure("--workload", "demo", "--max-tokens", 64, "--grid",
                f"concurrency={','.join(map(str, loads))}", *sizes(4, 48),
                "--out", new_folder("at_which_load_does_it_stop"),
                "--baseline", OFF, "--candidate", ON)  # fmt: skip
    gains = {str(one["values"]["concurrency"]): one["gains"]["tpot_p50"] for one in found["cells"]}
    shown = ", ".join(f"{ratio(gain)} at {load}" for load, gain in gains.items())
    print(
        f"\nBy requests in flight the gain per token is {shown}: it {sorted_out(gains)}"
        f"{passes(found['crossings'])}."
    )


def passes(crossings: list[dict[str, Any]]) -> str:
    """Where the gain passes 1, with the ends of its interval as far as they were measured."""
    if not crossings:
        return ""
    at = crossings[0]["at"]
    low = f"{at['low']:.2g}" if at["low"] is not None else f"below {LOADS[0]}"
    high = f"{at['high']:.2g}" if at["high"] is not None else f"above {LOADS[-1]}"
    return f", and passes 1 at {at['estimate']:.2g} ({low} to {high})"


if __name__ == "__main__":
    main()
