"""The examples run as they stand, and print what they promise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run_example(path: Path) -> str:
    """Standard output of an example in a fresh interpreter with warnings as errors."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path: Path) -> None:
    shown = run_example(path)
    assert shown.strip()
    if path.stem == "compare_methods":
        assert shown.count("same tokens: True") == 3, shown
    if path.stem == "streaming":
        assert "48 tokens in" in shown, shown
    if path.stem == "new_proposer":
        assert shown.count(": kept") == 6, shown
        assert "same tokens: True" in shown, shown
        assert "0 tokens drafted" not in shown.splitlines()[-2], shown
