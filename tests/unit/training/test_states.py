"""Hidden states on disk: as many bytes as was said, the same losses, and safe from a kill."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from foretoken.errors import ConfigError, TrainingError
from foretoken.testing import write_tiny_llama
from foretoken.training import run_folder, runs
from foretoken.training.config_file import read_settings
from foretoken.training.data.shards import (
    RowSet,
    StatePlan,
    StoredStates,
    agree,
    read_plan,
    require_room,
    write_plan,
    write_states,
    write_whole,
)
from foretoken.training.runs import store_states, train
from tests.unit.training.own_runs import silent, write_config

STATES = "\n[states]\n"
SETS = (RowSet(name="held-out", length=4, count=1), RowSet(name="answers", length=4, count=5))
PLAN = StatePlan(
    source="s", sets=SETS, points=(2, -1), hidden_size=3, dtype="float32", shard_bytes=2 * 4 * 28
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("own"), seed=2, num_hidden_layers=8)


def _row(rows: RowSet, number: int) -> torch.Tensor:
    return torch.arange(number, number + rows.length)


def _states(tokens_T: torch.Tensor) -> torch.Tensor:
    return tokens_T[:, None].float() + torch.arange(6) / 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "mlp"])
def test_stored_states_give_the_losses_of_computed_ones(
    kind: str, target: Path, tmp_path: Path
) -> None:
    """Bit for bit: every record of the run and every weight at its end."""
    online = train(write_config(tmp_path, kind), tmp_path / "online", target, silent)
    config = write_config(tmp_path, kind, tables=STATES)
    offline = train(config, tmp_path / "offline", target, silent)
    for mine, theirs in zip(offline.history, online.history, strict=True):
        assert {**mine, "minutes": 0.0} == {**theirs, "minutes": 0.0}
    weights = [run_folder.newest_state(tmp_path / name)["model"] for name in ("online", "offline")]
    assert all(torch.equal(weights[1][name], value) for name, value in weights[0].items())


def test_the_estimate_is_what_is_written(target: Path, tmp_path: Path) -> None:
    """Said before anything is there; afterwards the files have as many bytes, headers apart."""
    config, run = write_config(tmp_path, "eagle3", tables=STATES), tmp_path / "run"
    seen: list[str] = []
    store_states(config, run, target, seen.append, only_estimate=True)
    assert not run.exists() and any("at most" in line for line in seen)
    lines: list[str] = []
    store_states(config, run, target, lines.append)
    said = [line for line in lines if line.startswith("hidden states: ")]
    needed = int(said[0].split()[2].replace(",", ""))
    assert "shard 1 of 2" in said[1], said
    files = sorted((run / "states").glob("*.safetensors"))
    written = sum(path.stat().st_size for path in files)
    assert len(files) == 3 and needed <= written < needed + 1024 * len(files)
    again: list[str] = []
    store_states(config, run, target, again.append)
    assert "hidden states: 0 bytes to write" in again[-1]


def test_training_on_stored_states_loads_no_target(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another head that reads some of the same layers needs no states of its own either."""
    config, run = write_config(tmp_path, "eagle3", tables=STATES), tmp_path / "run"
    more = f'target = "{target}"'
    store_states(config, run, target, silent)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in (run / "states").iterdir())
    store_states(write_config(tmp_path, "mlp", tables=STATES), run, target, silent)
    after = sorted((path.name, path.stat().st_mtime_ns) for path in (run / "states").iterdir())
    assert [entry for entry in after if "safetensors" in entry[0]] == [
        entry for entry in before if "safetensors" in entry[0]
    ]
    monkeypatch.setattr(runs, "LoadedTarget", None)
    settings = read_settings(write_config(tmp_path, "mlp", more=more, tables=STATES))
    job = runs.build_job(settings, run)
    assert job.task.loss(0, 32, settings.stages[0]).item() > 0


def test_a_disk_too_small_is_refused_with_the_arithmetic(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(9999, 0, 9999))
    config = write_config(tmp_path, "eagle3", tables=STATES)
    wanted = r"rows x 32 tokens x \(4 x 64 values x 4 bytes \+ 4\) = [\d,]+ bytes.*it has 9,999"
    with pytest.raises(ConfigError, match=wanted):
        train(config, tmp_path / "run", target, silent)
    assert not list((tmp_path / "run" / "states").iterdir())


def test_other_answers_are_refused(target: Path, tmp_path: Path) -> None:
    """Stored states of other tokens, and answers to other prompts, are never used."""
    config, run = write_config(tmp_path, tables=STATES), tmp_path / "run"
    store_states(config, run, target, silent)
    answers = (run / "answers.jsonl").read_text().splitlines()
    ids = json.loads(answers[-1])["ids"]
    answers[-1] = json.dumps({"ids": [*ids[:-1], (ids[-1] + 1) % 90]})
    (run / "answers.jsonl").write_text("\n".join(answers) + "\n")
    with pytest.raises(ConfigError, match="source"):
        store_states(config, run, target, silent)
    answers[0] = json.dumps({"ids": [1, *ids]})
    (run / "answers.jsonl").write_text("\n".join(answers) + "\n")
    with pytest.raises(ConfigError, match=r"answers\.jsonl line 1: .*another prompt"):
        store_states(config, run, target, silent)
    answers[1] = '{"ids": 3}'
    (run / "answers.jsonl").write_text("\n".join(answers) + "\n")
    with pytest.raises(ConfigError, match=r"answers\.jsonl line 2"):
        store_states(config, run, target, silent)


def test_plans_agree_or_say_what_differs(tmp_path: Path) -> None:
    assert read_plan(tmp_path) is None and agree(PLAN, tmp_path) == PLAN
    write_plan(PLAN, tmp_path)
    assert read_plan(tmp_path) == PLAN
    fewer = StatePlan(
        source="s", sets=SETS[1:], points=(-1,), hidden_size=3, dtype="float32", shard_bytes=1
    )
    assert agree(fewer, tmp_path) == PLAN
    other = StatePlan(
        source="s", sets=SETS, points=(5, -1), hidden_size=3, dtype="float32", shard_bytes=1
    )
    with pytest.raises(ConfigError, match="points"):
        agree(other, tmp_path)
    (tmp_path / "states.json").write_text("{")
    with pytest.raises(ConfigError, match=r"states\.json"):
        read_plan(tmp_path)


@pytest.mark.slow
def test_a_killed_writer_goes_on_at_the_next_shard(tmp_path: Path) -> None:
    """kill -9 between shards: what is there stays as it is, the rest is written, all is whole."""
    script = (
        "import sys, time, pathlib; from tests.unit.training import test_states as t\n"
        "out = pathlib.Path(sys.argv[1])\n"
        "def stuck(tokens):\n"
        "    while len(list(out.glob('*.safetensors'))) >= 2: time.sleep(0.05)\n"
        "    return t._states(tokens)\n"
        "t.write_states(t.PLAN, out, t._row, stuck, t.silent)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], env=_environment())
    try:
        deadline = time.monotonic() + 200
        while len(list(tmp_path.glob("*.safetensors"))) < 2 and time.monotonic() < deadline:
            assert process.poll() is None, "it ended by itself"
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    (tmp_path / "answers-4-00001.part").write_bytes(b"cut off")
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    assert 2 <= len(kept) < len(PLAN.shards()) == 4
    seen: list[str] = []
    write_states(PLAN, tmp_path, _row, _states, seen.append)
    assert len(seen) == 4 - len(kept)
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in kept.items())
    assert require_room(PLAN, tmp_path) == 0
    stored = StoredStates(tmp_path, PLAN, (-1, 2), torch.device("cpu"))
    found = stored.captured("answers", [4, 0], 4)
    assert found.tokens_BT.tolist() == [[4, 5, 6, 7], [0, 1, 2, 3]]
    wanted = torch.stack([_states(row) for row in found.tokens_BT])
    assert torch.equal(found.features_BTF, torch.cat((wanted[..., 3:], wanted[..., :3]), dim=-1))
    assert torch.equal(found.final_BTD, wanted[..., 3:])


def _environment() -> dict[str, str]:
    root = Path(__file__).parents[3]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}


def test_what_cannot_be_written_leaves_the_rest(tmp_path: Path) -> None:
    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(TrainingError, match="No space left"):
        write_whole(tmp_path / "x.safetensors", full)
    assert not list(tmp_path.iterdir())


def test_a_broken_shard_is_named(tmp_path: Path) -> None:
    write_states(PLAN, tmp_path, _row, _states, silent)
    broken = tmp_path / "answers-4-00000.safetensors"
    assert load_file(broken)["states"].shape == (2, 4, 6)
    broken.write_bytes(broken.read_bytes()[:50])
    stored = StoredStates(tmp_path, PLAN, (-1,), torch.device("cpu"))
    with pytest.raises(ConfigError, match="answers-4-00000"):
        stored.captured("answers", [0], 4)
