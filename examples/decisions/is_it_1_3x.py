"""Is it at least 1.3x, so that a second model is worth its keep?

One pair of runs cannot say: two starts of one build differ by 5 to 10 percent. So both servers
start anew for every block, in turns, and the rule asks for the whole interval.
"""

from commands import OFF, ON, lab, measure, new_folder, ratio, sizes

LEAST = 1.3


def main() -> None:
    """An A/B, and what `lab decide` makes of the rule alone."""
    out = new_folder("is_it_1_3x")
    measure("--workload", "demo", "--max-tokens", 64, *sizes(7, 60), "--out", out,
        "--baseline", OFF, "--candidate", ON)  # fmt: skip
    # Tails and the first token take more requests than this: the policy leaves them out.
    found = lab("decide", out, "--set", f"speedup.least={LEAST}", "--set", "tail_tpot=null",
                "--set", "ttft=null", allowed=(0, 1, 4))  # fmt: skip
    decision = found["decisions"][0]
    gain = next(one["result"]["value"] for one in decision["rules"] if one["rule"] == "speedup")
    missing = decision["needed_blocks"]
    more = f", and {missing} starts of each server would be needed to tell" if missing else ""
    against = [one["rule"] for one in decision["rules"] if one["weight"] != "note"
               and one["result"]["outcome"] in ("fail", "invalid")]  # fmt: skip
    why = f", against it: {', '.join(against)}" if against else ""
    print(
        f"\n{found['verdict']}: the gain per token is {ratio(gain)} in {decision['num_blocks']} "
        f"starts of each server, against a limit of {LEAST:g}x{why}{more}."
    )


if __name__ == "__main__":
    main()
