"""The table of `foretoken train eval`."""

import io

from rich.console import Console

from foretoken.cli.train import worth_table
from foretoken.training.evaluation import Accepted, DecodingStep, Worth


def test_every_number_is_in_its_place() -> None:
    lengths = {"0": (1.6, 2.0), "0.8": (1.5, 1.7)}
    kept = {
        name: Accepted(by_position=(0.6, 0.44), lengths=found, num_verifications=9)
        for name, found in lengths.items()
    }
    costs = tuple(
        DecodingStep(drafts=k, total_s=s, drafting_s=0.0, verifying_s=s)
        for k, s in enumerate((0.002, 0.0025, 0.004))
    )
    speedups: dict[str, tuple[float, ...]] = {"0": (1.28, 1.0), "0.8": (1.2, 0.85)}
    found = Worth(acceptance=kept, costs=costs, speedups=speedups)
    file = io.StringIO()
    Console(file=file, width=100).print(worth_table(found, "head for target"))
    lines = [" ".join(line.split()) for line in file.getvalue().splitlines() if line.strip()]
    assert lines[0] == "head for target"
    assert "speed-up: what tokens a step and the times of steps come to" in " ".join(lines)
    assert "over steps of 2.0 ms without drafts" in " ".join(lines)
    assert "temp. drafts 1 2" in lines
    assert "0 accepted 60% 44%" in lines and "0.8 accepted 60% 44%" in lines
    assert "tokens a step 1.60 2.00" in lines and "tokens a step 1.50 1.70" in lines
    assert "speed-up 1.28 1.00" in lines
    assert lines[-1] == "any step, ms 2.5 4.0"


def test_a_drafter_that_never_drafts_has_a_table_too() -> None:
    kept = {"0": Accepted(by_position=(), lengths=(1.0,), num_verifications=0)}
    cost = DecodingStep(drafts=0, total_s=0.002, drafting_s=0.0, verifying_s=0.002)
    found = Worth(acceptance=kept, costs=(cost,), speedups={"0": ()})
    Console(file=io.StringIO()).print(worth_table(found, "none"))
