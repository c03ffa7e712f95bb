"""Which way of drafting: a draft model, a head, or looking up what was written before?

First what is expected of a 70B target by kind of work, then what was measured on the packaged
models with the methods that they come with.
"""

from commands import OFF, QUICK, SERVE, listed, measure, new_folder, plan, ratio, sizes

DRAFTERS = {
    "--spec-method ngram": "n-gram",
    "--spec-method suffix": "suffix",
    "--spec-model demo-draft": "draft model",
    "--spec-model demo-eagle3": "EAGLE-3 head",
    "--spec-model demo-medusa": "Medusa heads",
}


def main() -> None:
    """A plan by work and a grid over methods."""
    expected = by_work()
    drafters = list(DRAFTERS)[::2] if QUICK else list(DRAFTERS)
    found = measure("--workload", "demo", "--max-tokens", 64, "--grid",
                f"drafter={','.join(drafters)}", *sizes(3, 40),
                "--out", new_folder("which_method"), "--baseline", OFF, "--candidate",
                f"{SERVE} --no-adaptive-speculation --spec-tokens 4 {{drafter}}")  # fmt: skip
    gains = {DRAFTERS[one["values"]["drafter"]]: one["gains"]["tpot_p50"]
             for one in found["cells"]}  # fmt: skip
    order = sorted(gains, key=lambda name: -gains[name]["estimate"])
    first, second = (gains[name] for name in order[:2])
    apart = first["low"] is not None and second["high"] is not None and (
        first["low"] > second["high"]
    )  # fmt: skip
    sure = "surely first" if apart else "first, but not surely"
    shown = listed([f"{name} {ratio(gains[name])}" for name in order])
    print(f"\nMeasured on the packaged models, the {order[0]} is {sure}: {shown}; {expected}.")


def by_work() -> str:
    """What nobody has to train, by kind of work, for a 70B target."""
    best: dict[str, list[str]] = {}
    for work in ("chat", "code", "summarize", "edit"):
        found = plan("llama-3.1-70b", "--draft", "llama-3.2-1b", "--engine", "vllm",
                     "--quantization", "fp8", "--device", "h100-sxm", "--count", 2,
                     "--workload", work)  # fmt: skip
        gains = {
            one["method"]: load["best"]
            for one in found["outlooks"] if one["available"]
            for load in one["prediction"]["loads"] if load["requests"] == found["setup"]["usual"]
        }  # fmt: skip
        print(f"{work:10}", *(f"{name} {own:.2f}x" for name, own in gains.items()))
        best.setdefault(max(gains, key=lambda name: gains[name]), []).append(work)
    told = [f"{method} for {listed(works)}" for method, works in best.items()]
    return f"predicted for a 70B target on two H100 are {listed(told)}"


if __name__ == "__main__":
    main()
