"""What a run shows, and what it says when it cannot go on."""

import fcntl
import io
import os
import struct
import termios
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from foretoken.errors import ConfigError, TrainingError
from foretoken.training import run_folder
from foretoken.training.loop import Trainer, tell_compiling
from foretoken.training.progress import Display, Standing, brief, terminal_of
from foretoken.training.schedule import Stage
from tests.unit.training import tiny

HEAD = {"tokens_a_step": 2.214, "depth_1": 0.61, "depth_2": 0.444}


def _standing(step: int) -> Standing:
    return Standing(
        step=step, share=step / 40, tokens=640, seconds=60.0, loss=1.5, speed=812.4, scale=0.5
    )


def test_a_bar_shows_loss_accuracy_and_length() -> None:
    """On a terminal: one bar, what was measured last stays in it, and no lines of steps."""
    lines: list[str] = []
    terminal = io.StringIO()
    display = Display(lines.append, "own", terminal)
    display.step(_standing(10))
    assert "loss 1.500, 812 tokens/s" in terminal.getvalue()
    display.measured(HEAD)
    display.step(_standing(20))
    display.close()
    shown = terminal.getvalue()
    assert "own:  50%" in shown and "step 20" in shown
    assert "loss 1.500, right by position 61 44%, accepts 2.21 a step, 812 tokens/s" in shown
    assert lines == ["  held out: tokens_a_step 2.2140 depth_1 0.6100 depth_2 0.4440"]
    assert terminal_of(terminal) is None


def test_elsewhere_there_are_lines() -> None:
    lines: list[str] = []
    display = Display(lines.append, "own")
    for step in range(1, 21):
        display.step(_standing(step))
    display.measured({"nats": 2.0})
    display.close()
    assert [line.split()[1] for line in lines[:-1]] == ["1", "10", "20"], "the first: it lives"
    assert lines[2].startswith("step 20 loss 1.500 tokens 0.00M 812 tokens/s")
    assert brief({"nats": 2.0, "bits_per_byte": 0.5}) == "nats 2.000, bits_per_byte 0.500"


def _trainer(folder: Path) -> Trainer:
    trainer = Trainer(tiny.tiny_job(), tiny.tiny_settings(), folder)
    trainer.step()
    trainer.save()
    return trainer


@pytest.mark.parametrize("where", ["optimizer", "evaluation"])
def test_no_memory_is_said_wherever_it_runs_out(where: str, tmp_path: Path) -> None:
    trainer = _trainer(tmp_path)

    def broken(*_: object) -> dict[str, float]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    step: Callable[[], object] = trainer.step
    if where == "optimizer":
        trainer.optimizer.step = broken  # type: ignore[assignment]
    else:
        trainer.task.evaluate = broken  # type: ignore[method-assign]

        def step() -> object:
            return trainer.evaluate(0.0)

    with pytest.raises(TrainingError, match=r"out of memory; step-0000001\.pt is intact.*micro"):
        step()


def test_a_gradient_that_is_no_number_changes_no_weight(tmp_path: Path) -> None:
    """Though the loss was one."""
    trainer = _trainer(tmp_path)
    kept = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    plain = trainer.task.loss

    def broken(index: int, tokens: int, stage: Stage) -> torch.Tensor:
        loss = plain(index, tokens, stage)
        loss.register_hook(lambda grad: grad * float("inf"))
        return loss

    trainer.task.loss = broken  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match=r"a gradient norm of (nan|inf); step-0000001\.pt is"):
        trainer.step()
    assert all(torch.equal(kept[n], v) for n, v in trainer.model.state_dict().items())


def test_a_full_disk_leaves_the_checkpoints_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = _trainer(tmp_path)
    trainer.step()

    def full(_: object, file: io.BufferedWriter) -> None:
        file.write(b"some")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(TrainingError, match="No space left on device; the checkpoints before"):
        trainer.save()
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000001.pt"]


def test_a_broken_or_foreign_checkpoint_is_named(tmp_path: Path) -> None:
    """Cut off by a copy; or of a model of other sizes."""
    _trainer(tmp_path)
    [path] = run_folder.newest(tmp_path)
    state = run_folder.newest_state(tmp_path)
    other = {**state, "shape": {**state["shape"], "layers": 3}}
    run_folder.save(tmp_path, 2, other)
    with pytest.raises(ConfigError, match="shape in .*another --out"):
        Trainer(tiny.tiny_job(), tiny.tiny_settings(), tmp_path)
    newest = next(run_folder.newest(tmp_path))
    newest.write_bytes(newest.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"step-0000002\.pt: .*delete it"):
        Trainer(tiny.tiny_job(), tiny.tiny_settings(), tmp_path)
    newest.unlink()
    assert Trainer(tiny.tiny_job(), tiny.tiny_settings(), tmp_path).progress.step == 1
    assert path.is_file()


def test_a_bar_needs_a_terminal_of_known_size() -> None:
    """Some terminals are of size nought until they are told; then there are lines."""
    master, slave = os.openpty()
    with os.fdopen(master, "rb"), os.fdopen(slave, "w") as terminal:
        for lines, columns in ((0, 0), (0, 80), (24, 80)):
            fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
            assert (terminal_of(terminal) is not None) == (lines > 0)


def test_a_run_says_what_takes_minutes_before_its_first_step() -> None:
    lines: list[str] = []
    tell_compiling(tiny.tiny_settings(compile=False), lines.append)
    assert lines == []
    tell_compiling(tiny.tiny_settings(compile=True), lines.append)
    assert len(lines) == 1 and "minutes" in lines[0] and "compile = false" in lines[0]


@pytest.mark.parametrize("compiled", [False, True])
def test_rows_of_another_length_are_announced(compiled: bool, tmp_path: Path) -> None:
    stages = (Stage(until=0.5, length=16), Stage(until=1.0, length=32))
    settings = tiny.tiny_settings(stages=stages, compile=compiled, max_steps=4)
    lines: list[str] = []
    Trainer(tiny.tiny_job(), settings, tmp_path).run(lines.append)
    [said] = [line for line in lines if "rows of" in line]
    assert "32 tokens" in said and ("compiled once more" in said) == compiled


def test_the_first_measurement_is_announced(tmp_path: Path) -> None:
    lines: list[str] = []
    Trainer(tiny.tiny_job(), tiny.tiny_settings(max_steps=8), tmp_path).run(lines.append)
    [at] = [i for i, line in enumerate(lines) if "measuring" in line]
    assert "held out" in lines[at + 1]
    assert sum("held out" in line for line in lines) == 2
