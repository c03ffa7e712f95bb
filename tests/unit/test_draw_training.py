"""scripts/draw_training.py on made-up runs: which line is whose, and which one is the best."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from foretoken.training import run_folder
from tests.outside import module_outside


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    yield from module_outside("scripts", "draw_training")


def make_run(folder: Path, lengths: list[float]) -> Path:
    history = [
        {"step": i, "tokens": 4096 * 100 * (i + 1), "tokens_a_step": length}
        for i, length in enumerate(lengths)
    ]
    folder.mkdir()
    run_folder.save(folder, 100, {"progress": {"history": history}})
    return folder


def test_the_best_is_named_first(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [make_run(tmp_path / "weak", [1.2, 1.4]), make_run(tmp_path / "strong", [1.5, 2.5])]
    picture = tmp_path / "picture.svg"
    monkeypatch.setattr(sys, "argv", ["draw_training", *map(str, runs), "--to", str(picture)])
    script.main()
    drawn = picture.read_text("utf-8")
    names = re.findall(r"strong|weak", drawn)
    assert names[0] == "strong" and "weak" in names


def test_points_are_of_tokens_seen(script: ModuleType) -> None:
    history = [{"tokens": 2e6, "tokens_a_step": 1.5, "minutes": 3.0}]
    assert script.points_of(history) == [(2.0, 1.5)]
