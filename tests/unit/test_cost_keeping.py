"""Costs that were learnt are written now and then, at the end, and never half."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from foretoken.control.cost import StepShape
from foretoken.control.learned.cost import LearnedCost
from foretoken.control.learned.cost_file import CostFile, SavedCosts
from foretoken.control.learned.keeping import CostKeeper
from tests.unit.test_cost_file import KEY

ROOT = Path(__file__).parents[2]
TIMED = [(StepShape(rows, rows, 32.0), 1e-3 + 1e-4 * rows) for rows in (1, 2, 4, 8, 16, 32)]


class Engine:
    """What one engine knows and keeps."""

    def __init__(self, folder: Path) -> None:
        self.file = CostFile(KEY, folder)
        self.target = LearnedCost(TIMED, sd=0.1, passes_only=True)
        self.keeper = CostKeeper(self.file, self.known)

    def known(self) -> SavedCosts:
        return SavedCosts(target=self.target.to_dict(), drafters={}, timed=tuple(TIMED))

    def serve(self, steps: int, seconds: float) -> None:
        for _ in range(steps):
            self.target.observe(StepShape(4, 4, 32.0), seconds)
            self.keeper.passed(seconds)
        for thread in threading.enumerate():
            if thread.name == "costs":
                thread.join()


def test_what_was_learnt_is_written_while_serving_and_at_the_end(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.serve(59, 1.0)
    assert engine.file.read() is None
    engine.serve(2, 1.0)
    kept = engine.file.read()
    assert kept is not None and kept.target["passes_only"], "too few steps"
    engine.serve(300, 0.1)
    engine.keeper.close()
    kept = engine.file.read()
    assert kept is not None and not kept.target["passes_only"]
    again = LearnedCost.from_dict(kept.target)
    shape = StepShape(4, 4, 32.0)
    assert abs(again.seconds(shape).seconds / engine.target.seconds(shape).seconds - 1.0) < 0.25
    written = engine.file.path.stat().st_mtime_ns
    engine.keeper.close()
    assert engine.file.path.stat().st_mtime_ns == written, "nothing new"


def test_a_process_that_did_little_writes_nothing(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.serve(9, 0.1)
    engine.keeper.close()
    assert engine.file.read() is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    engine = Engine(tmp_path / "file" / "below")
    engine.serve(61, 1.0)
    engine.serve(5, 1.0)
    engine.keeper.close()


@pytest.mark.slow
def test_a_killed_process_leaves_a_whole_file(tmp_path: Path) -> None:
    """It does nothing but write and is killed in the middle of that."""
    engine = Engine(tmp_path)
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from tests.unit.test_cost_keeping import Engine\n"
        "engine = Engine(Path(sys.argv[1]))\n"
        "while True:\n    engine.file.write(engine.known())\n    print('.', flush=True)\n"
    )
    for written in (1, 2, 5, 12):
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"},
        )  # fmt: skip
        with child:
            assert child.stdout is not None
            for _ in range(written):
                assert child.stdout.readline()
            child.kill()
        assert engine.file.read() == engine.known()


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    """A half-written file has another name until it is whole."""
    engine = Engine(tmp_path)
    old, new, others = (
        tmp_path / name
        for name in (f"{KEY.digest}a.tmp", f"{KEY.digest}b.tmp", "somebody-else.tmp")
    )
    for left in (old, new, others):
        left.write_text('{"format": 2, "key"')
    for left in (old, others):
        os.utime(left, (time.time() - 3600,) * 2)
    assert engine.file.write(engine.known())
    assert {path.name for path in tmp_path.iterdir()} == {
        engine.file.path.name, new.name, others.name
    }  # fmt: skip
    assert engine.file.read() == engine.known()
