"""Does it pay at the temperature of production?

Every temperature is measured by itself, from the answers' own counts: a gauge that a server sums
up since its start would mix them. Acceptance falls with heat; whether the rest still pays is
judged by the gain, not by a fixed rate.
"""

from typing import Any

from commands import OFF, ON, QUICK, measure, new_folder, ratio, sizes, sorted_out

TEMPERATURES = (0, 0.4, 0.8, 1)


def main() -> None:
    """A grid over temperatures."""
    heats = TEMPERATURES[::3] if QUICK else TEMPERATURES
    found = measure("--workload", "demo", "--max-tokens", 64, "--grid",
                f"temperature={','.join(map(str, heats))}", *sizes(4, 40),
                "--out", new_folder("does_it_pay_at_temperature"),
                "--baseline", OFF, "--candidate", ON)  # fmt: skip
    cells = {one["values"]["temperature"]: one for one in found["cells"]}
    shown = "; ".join(
        f"T = {heat:g}: {rate(one):.0%} accepted, {ratio(one['gains']['tpot_p50'])}"
        for heat, one in cells.items()
    )
    gains = {f"{heat:g}": one["gains"]["tpot_p50"] for heat, one in cells.items()}
    print(f"\n{shown}: it {sorted_out(gains)}.")


def rate(cell: dict[str, Any]) -> float:
    """Accepted per drafted token of all requests of a cell."""
    found: float = next(one for one in cell["acceptance"] if one["by"] == "all")["rate"]["estimate"]
    return found


if __name__ == "__main__":
    main()
