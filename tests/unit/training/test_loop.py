"""Runs learn, and a run cut short goes on bit for bit."""

from pathlib import Path

import pytest
import torch

from foretoken.errors import ConfigError
from foretoken.training import run_folder
from foretoken.training.config_file import read_settings
from foretoken.training.loop import Trainer
from tests.unit.training import tiny


def make(folder: Path, **changes: object) -> Trainer:
    return Trainer(tiny.tiny_job(), tiny.tiny_settings(**changes), folder)


def test_resume_is_bit_identical(tmp_path: Path) -> None:
    whole = make(tmp_path / "whole")
    expected = [whole.step() for _ in range(8)]
    first = make(tmp_path / "cut")
    got = [first.step() for _ in range(3)]
    first.save()
    first.step()  # lost with the process
    second = make(tmp_path / "cut")
    got += [second.step() for _ in range(5)]
    assert got == expected
    for mine, theirs in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.slow
def test_loss_falls_and_history_is_kept(tmp_path: Path) -> None:
    lines: list[str] = []
    done = make(tmp_path, max_steps=60, evaluate_steps=30).run(lines.append)
    assert done.step == 60 and done.tokens == 60 * 64
    nats = [record["nats"] for record in done.history]
    assert nats[-1] < 0.6 * 4.16, nats
    assert any("tokens/s" in line for line in lines)
    again = make(tmp_path, max_steps=60).run(lines.append)
    assert again.step == 60


def test_two_checkpoints_are_kept_and_parts_ignored(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        run_folder.save(tmp_path, step, {"step": step})
    (tmp_path / "step-0000009.part").write_bytes(b"cut off")
    assert [path.name for path in run_folder.newest(tmp_path)] == [
        "step-0000003.pt",
        "step-0000002.pt",
    ]
    assert run_folder.load_newest(tmp_path) == {"step": 3}
    assert run_folder.load_newest(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("max_steps = 0", "max_steps"),
        ("tv_share = 2", "tv_share"),
        ("colour = 1", "colour"),
        ("[[stages]]\nuntil = 1.0\nlength = 100", "stages.length"),
        ("[shape]\nwidth = 1", "shape.width"),
        ("not toml", "CONFIG"),
        ("max_step = 5", "config.max_step: got 5; allowed: .*did you mean 'max_steps'"),
        ('max_steps = "many"', "config.max_steps: got 'many'; allowed: an integer"),
        ("max_minutes = true", "config.max_minutes: got True; allowed: None or a number"),
        ("[head]\ndepth = 3", "head.kind: got None; allowed: text; it has no default"),
        ('[head]\nkind = "eagle4"', "head.kind: got 'eagle4'; allowed: .*did you mean 'eagle"),
        ('[head]\nkind = "mlp"\n[data]\nprompts = "p"\ntemperatures = 1.0', "data.temperatures"),
        ("head = 3", r"head: got 3; allowed: a table, \[head\]"),
        ("stages = 3", "stages: got 3"),
    ],
)
def test_wrong_settings_name_the_field(tmp_path: Path, text: str, field: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=field):
        read_settings(path)
