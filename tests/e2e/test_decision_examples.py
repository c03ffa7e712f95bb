"""The examples of decisions run, and end in one sentence with the numbers that were found."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.shown import complaints, run_shown

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "decisions"
SHARED = "commands"
MEASURED_OFTEN = ("is_it_1_3x",)
MEASURED = (
    "at_which_load_does_it_stop", "does_it_pay_at_temperature", "does_it_pay_for_50_tokens",
    "what_does_quantization_cost", "which_method", "whose_is_the_slow_tail",
)  # fmt: skip
PLANNED = (
    "disable_above_16_requests",
    "does_it_fit",
    "from_4_1_to_2_seconds",
    "which_draft_for_70b",
)


def last_line(name: str, folder: Path, *words: str) -> str:
    """What an example ends in, run from a folder in its short form; it must end well."""
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py"), "--quick", *words],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert complaints(done.stdout) == [], done.stdout
    shown = "$ foretoken lab ", "$ python -m benchmarks.simulate "
    assert any(one in done.stdout for one in shown), "the commands are shown"
    return done.stdout.splitlines()[-1]


def assert_sentence(line: str) -> None:
    """One sentence, with numbers and nothing unsaid."""
    assert line[0].isalnum() and line.endswith("."), line
    assert not re.search(r"[.!?] [A-Z]", line), f"more than one sentence: {line}"
    assert len(re.findall(r"\d+(?:\.\d+)?", line)) >= 3, line
    assert not re.search(r"\b(?:nan|inf|None)\b", line), line


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An example as a module, its folder being where its shared part is found."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module(name)


def test_every_example_is_tested_and_listed() -> None:
    names = {path.stem for path in FOLDER.glob("*.py")} - {SHARED}
    assert names == {*MEASURED_OFTEN, *MEASURED, *PLANNED}
    listed = re.findall(
        r"`python examples/decisions/(\w+)\.py`", (FOLDER / "README.md").read_text()
    )
    assert sorted(listed) == sorted(names)
    assert len(EXAMPLES) >= 3, "those that are run below"


@pytest.mark.slow
@pytest.mark.parametrize("name", (*PLANNED, *MEASURED_OFTEN, *MEASURED))
def test_it_ends_in_a_sentence(name: str, tmp_path: Path) -> None:
    assert_sentence(last_line(name, tmp_path))


@pytest.mark.parametrize(
    ("late", "early", "said"),
    [(1.2, 0.9, "is where it should be"), (0.9, 0.9, "comes too late for 8"),
     (1.2, 1.1, "comes too early for 24")],
)  # fmt: skip
def test_the_cut_off_is_judged_by_the_best_length(
    late: float, early: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = example("disable_above_16_requests", monkeypatch)
    runs = {
        8: {"off": 1.0, "k=5": late, "control": 1.0, "schedule": late},
        24: {"off": 1.0, "k=5": early, "control": 1.0, "schedule": 1.0},
    }
    line = judge.answer(runs)
    assert_sentence(line)
    assert said in line and f"{late:.2f}x" in line


@pytest.mark.parametrize(
    ("least", "most", "said"),
    [(1.0, 1.9, "for 2 s is enough"), (1.5, 2.5, "may be enough"), (2.1, 3.0, "is not enough")],
)
def test_two_seconds_are_promised_by_the_whole_interval(
    least: float, most: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = example("from_4_1_to_2_seconds", monkeypatch)

    def times(plain_s: float) -> Any:
        return moves.Times(plain_s, 2.0, least, most, "a draft, k = 3")

    line = moves.answer(
        {"as it is": times(4.1), "not quantized": times(7.0), "int4 weights": times(2.9)}, 2.0
    )
    assert_sentence(line)
    assert said in line
    assert "saved 2.9 s already" in line and "int4 weights 1.2 s, none of which" in line


def test_a_gain_without_an_interval_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = example(SHARED, monkeypatch)
    lucky = {"estimate": 2.0, "low": None, "high": None}
    assert not shared.above(lucky) and not shared.below(lucky)
    assert shared.ratio(lucky) == "2.00x (no interval)"
    sure = {"estimate": 1.2, "low": 1.1, "high": 1.3}
    assert shared.above(sure) and not shared.above(sure, 1.2) and shared.below(sure, 1.4)
    told = shared.sorted_out({"1": sure, "4": lucky, "8": {**sure, "high": 1.0, "low": 0.8}})
    assert told == "pays at 1, is open at 4 and 8"
    told = shared.sorted_out({"8": {"estimate": 0.9, "low": 0.8, "high": 0.99}})
    assert told == "loses at 8"
    assert shared.ratio(sure) == "1.20x (1.10 to 1.30)"


ASKS_FOR_A_FILE = "read_load_generator"
"""Has a test of its own, tests/unit/lab/test_read_load_generator.py."""
EXAMPLES = sorted(p for p in (ROOT / "examples").glob("*.py") if p.stem != ASKS_FOR_A_FILE)


@pytest.mark.parametrize(
    "shown",
    ["", "\n", "#\n" * 4, "import threading\n" * 17, "acceptance length: 2.5555555555555554",
     "the form of the form", "abstract abstract abstract abstract"],
)  # fmt: skip
def test_what_a_stranger_stumbles_over_is_found(shown: str) -> None:
    assert bool(complaints(shown)) == (shown != "the form of the form")


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
