"""The median wins and the P99 loses: is it the mix of requests, or one class of its own?

Six requests of ten edit code below a long prompt at temperature 0.1; four write freely at 1.0.
Both classes run together, then each alone. Answers are of different lengths: servers that are
asked equal ones answer all of a batch at once and read all new prompts together, and a server that
does so in one arm only has its prompts' time in the first token, the other in all the others.
"""

import json
from pathlib import Path
from typing import Any

from commands import OFF, ON, QUICK, lab, listed, measure, new_folder, ratio, sizes

from foretoken.text.packaged import packaged_texts


def main() -> None:
    """An A/B of the mix, one of each class alone, and which class is to blame."""
    out = new_folder("whose_is_the_slow_tail")
    out.mkdir(parents=True)
    mix = write_mix(out / "mix.jsonl")
    found = measured(mix, "--out", out / "ab")
    alone = measured(mix, "--grid", "class=edits,creative", "--out", out / "alone")["cells"]
    gains = {one["metric"]: one["ratio"] for one in found["gains"]}
    enough = {one["metric"]: one["enough"] for one in found["gains"]}
    tail = "tpot_p99" if enough["tpot_p99"] else "tpot_p95"
    few = "" if enough[tail] else ", of too few requests to prove anything"
    told = [f"{one['values']['class']} {ratio(one['gains']['e2e_mean'])}" for one in alone]
    print(
        f"\nIn the mix the median gains {ratio(gains['tpot_p50'])} and the {tail[-3:].upper()} "
        f"{ratio(gains[tail])}{few}; run alone, whole answers gain {listed(told)}: "
        f"{blame(out / 'ab')}."
    )


def measured(mix: Path, *words: str | Path) -> dict[str, Any]:
    """The A/B of the mix, or of its classes."""
    return measure("--workload", mix, "--load", "closed:4", *sizes(4, 60),
                   "--baseline", OFF, "--candidate", ON, *words)  # fmt: skip


def write_mix(path: Path) -> Path:
    """Requests of both classes, six to four, in turns."""
    fives = 4 if QUICK else 16
    edits = [
        request(one.text, 0.1, "edits", length(i))
        for i, one in enumerate(packaged_texts("edit", 3 * fives))
    ]
    free = [
        request(one.text, 1.0, "creative", length(i))
        for i, one in enumerate(packaged_texts("code", 2 * fives))
    ]
    mix = [one for i in range(fives) for one in (*edits[3 * i :][:3], *free[2 * i :][:2])]
    path.write_text("\n".join(mix) + "\n", "utf-8")
    return path


def length(number: int) -> int:
    """Tokens of an answer, 24 to 72, that follow no pattern."""
    return 24 + 29 * number % 49


def request(prompt: str, temperature: float, category: str, max_tokens: int) -> str:
    """A line of a workload."""
    row = {
        "prompt": prompt,
        "temperature": temperature,
        "category": category,
        "max_tokens": max_tokens,
    }
    return json.dumps(row)


def blame(run: Path) -> str:
    """What `lab decide` says of classes."""
    found = lab("decide", run, allowed=(0, 1, 4))
    rules: dict[str, Any] = {one["rule"]: one["result"] for one in found["decisions"][0]["rules"]}
    judged = rules["homogeneous"]
    wrong = [f"{name}: {one['says']}" for name, one in rules.items() if one["outcome"] == "invalid"]
    said = f"{judged['says']}" + (f"; {judged['advice']}" if judged["advice"] else "")
    return f"MEASURE MORE ({listed(wrong)}), else {said}" if wrong else said


if __name__ == "__main__":
    main()
