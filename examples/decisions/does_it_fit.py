"""Does a 70B target with an 8B draft fit on two H100, on two H200, and for how many tokens?

Weights are not all that a draft takes: it keeps keys and values of its own.
"""

from typing import Any

from commands import listed, plan

DEVICES = {"h100-sxm": "2 x H100", "h200": "2 x H200"}
CONTEXT = 4096
WIDE, USUAL = ("bf16", "bf16"), ("int8", "bf16")


def main() -> None:
    """A table per device, and what differs between them."""
    fits = {device: table(device) for device in DEVICES}
    print(answer(fits))


def table(device: str) -> dict[tuple[str, str], dict[str, Any]]:
    """What each pair of quantizations, of target and draft, leaves for keys and values."""
    print(f"\n{DEVICES[device]}   weights  tokens  without the draft")
    rows = {}
    for own, other in (WIDE, USUAL):
        found = plan("llama-3.1-70b", "--draft", "llama-3.1-8b", "--engine", "vllm",
                     "--device", device, "--count", 2, "--context", CONTEXT,
                     "--quantization", own, "--draft-quantization", other)  # fmt: skip
        plain, both = found["plain"], found["speculating"]
        pool = max(both["kv_pool_bytes"], 0.0)
        row = {
            "weights_gb": (both["weight_bytes"] + both["draft_weight_bytes"]) / 1e9,
            "tokens": both["tokens"],
            "tokens_plain": plain["tokens"],
            "tokens_one_for_one": pool / plain["kv_bytes_per_token"],
        }
        rows[own, other] = row
        print(f"{own} + {other} {row['weights_gb']:5.0f} GB {row['tokens']:8,} "
              f"{row['tokens_plain']:12,}")  # fmt: skip
    return rows


def answer(fits: dict[str, dict[tuple[str, str], dict[str, Any]]]) -> str:
    """What does not load, what the draft costs, and how much more the larger devices hold."""
    told = []
    for device, rows in fits.items():
        lost = [" + ".join(pair) for pair, row in rows.items() if row["tokens"] < CONTEXT]
        usual = rows[USUAL]
        costs, paper = (1 - usual[key] / usual["tokens_plain"]
                        for key in ("tokens", "tokens_one_for_one"))  # fmt: skip
        told.append(
            f"{DEVICES[device]} have {no_room(lost)}, and "
            f"{' + '.join(USUAL)} leaves {usual['tokens'] // CONTEXT} requests of {CONTEXT:,} "
            f"tokens, {costs:.0%} fewer than without the draft (its weights alone: {paper:.0%})"
        )
    small, large = (fits[device] for device in DEVICES)
    times = large[WIDE]["tokens"] / small[USUAL]["tokens"]
    wide, usual_pair = " + ".join(WIDE), " + ".join(USUAL)
    return (
        f"{'; '.join(told)}: {wide} on the H200 holds {times:.1f} times the tokens of "
        f"{usual_pair} on the H100."
    )


def no_room(lost: list[str]) -> str:
    """`no room for bf16 + bf16`, or room for all."""
    return f"no room for {listed(lost)}" if lost else "room for all of these"


if __name__ == "__main__":
    main()
