"""The examples run as they stand, and print what they promise."""

from pathlib import Path

import pytest

from tests.shown import complaints, run_shown

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path: Path) -> None:
    shown = run_shown([str(path)])
    if path.stem == "compare_methods":
        assert shown.count("same tokens: True") == 3, shown
    if path.stem == "streaming":
        assert "64 tokens in" in shown, shown
    if path.stem == "offline_inference":
        assert shown.count("--- prompt") == 3, shown
    if path.stem == "new_proposer":
        assert shown.count(": kept") == 6, shown
        assert "same tokens: True" in shown, shown
        assert "0 tokens drafted" not in shown.splitlines()[-2], shown


@pytest.mark.parametrize(
    "shown",
    ["", "\n", "#\n" * 4, "import threading\n" * 17, "acceptance length: 2.5555555555555554",
     "the form of the form", "abstract abstract abstract abstract"],
)  # fmt: skip
def test_what_a_stranger_stumbles_over_is_found(shown: str) -> None:
    assert bool(complaints(shown)) == (shown != "the form of the form")
