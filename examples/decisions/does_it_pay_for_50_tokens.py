"""Does it pay for answers of 50 tokens, and from which length on?

Whole answers are timed, first token included, for that is what somebody waits for; the same
prompts with both servers, each started several times.
"""

from commands import OFF, ON, QUICK, measure, new_folder, ratio, sizes, sorted_out

LENGTHS = (10, 50, 200)


def main() -> None:
    """A grid over the length of the answer."""
    lengths = ",".join(map(str, LENGTHS[:2] if QUICK else LENGTHS))
    found = measure("--workload", "demo", "--grid", f"max_tokens={lengths}",
                *sizes(4, 40), "--out", new_folder("does_it_pay_for_50_tokens"),
                "--baseline", OFF, "--candidate", ON)  # fmt: skip
    gains = {str(one["values"]["max_tokens"]): one["gains"]["e2e_mean"] for one in found["cells"]}
    shown = ", ".join(f"{ratio(gain)} for {length} tokens" for length, gain in gains.items())
    print(f"\nThe speed-up of whole answers is {shown}: it {sorted_out(gains)} tokens.")


if __name__ == "__main__":
    main()
