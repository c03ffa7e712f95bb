"""Two processes under torchrun do what one does with the doubled batch."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foretoken.errors import ConfigError, TrainingError
from foretoken.testing import write_tiny_llama
from foretoken.training import run_folder
from foretoken.training.config_file import read_settings
from foretoken.training.data.answers import read_answers
from foretoken.training.ranks import Ranks, joined
from foretoken.training.runs import build_job, train
from tests.unit.training import tiny, two_ranks
from tests.unit.training.own_runs import silent, write_config

ROOT = Path(__file__).parents[3]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


def _torchrun(*words: str) -> str:
    """What two ranks of a module print."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, *TORCHRUN, "-m", *words]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert found.returncode == 0, (found.stderr[:3000], found.stderr[-1000:])
    return found.stdout


def _require_close(one: Path, two: Path, start: torch.nn.Module, share: float) -> None:
    """Both moved the same way from `start`, but for the order of sums (Muon rounds to bfloat16)."""
    first, second = (run_folder.newest_state(folder)["model"] for folder in (one, two))
    for name, begun in start.named_parameters():
        if begun.requires_grad:
            moved, apart = (first[name] - begun).norm(), (first[name] - second[name]).norm()
            assert moved > 0 and apart < share * moved, (name, apart / moved)


@pytest.mark.slow
def test_two_ranks_are_one_with_the_doubled_batch(tmp_path: Path) -> None:
    """Weights, counted tokens and history; clipped by the mean gradient; resumed half way."""
    printed = _torchrun("tests.unit.training.two_ranks", str(tmp_path / "two"), "64")
    two_ranks.main(tmp_path / "one", 128)
    _require_close(tmp_path / "one", tmp_path / "two", tiny.tiny_job().model, 0.02)
    assert {path.name for path in (tmp_path / "two").iterdir()} == {
        path.name for path in (tmp_path / "one").iterdir()
    }
    ends = sorted(re.findall(r"rank (\d) of 2: (\d+) (\d+)", printed))
    assert ends == [("0", "4", "512"), ("0", "8", "1024"), ("1", "4", "512"), ("1", "8", "1024")]
    states = [run_folder.newest_state(tmp_path / name)["progress"] for name in ("one", "two")]
    losses = [[record["loss"] for record in state["history"]] for state in states]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.slow
def test_a_head_is_trained_by_two_ranks(tmp_path: Path) -> None:
    """From prompts on: rank 0 answers and writes, both step; the files are those of one process."""
    target = write_tiny_llama(tmp_path / "target", seed=2, num_hidden_layers=8)
    states = "\n[states]\n"
    config = write_config(tmp_path, "eagle3", tables=states)
    printed = _torchrun("foretoken.training", str(config), str(tmp_path / "two"), str(target))
    assert printed.count("done: 6 steps") == 1 and printed.count("answered 12 prompts") == 1
    config = write_config(tmp_path, "eagle3", tables=states)
    config.write_text(config.read_text().replace("batch_tokens = 64", "batch_tokens = 128"))
    train(config, tmp_path / "one", target, silent)
    assert read_answers(tmp_path / "one") == read_answers(tmp_path / "two")
    settings = replace(read_settings(config), target=str(target))
    fresh = build_job(settings, tmp_path / "one").model
    _require_close(tmp_path / "one", tmp_path / "two", fresh, 0.1)
    [start] = json.loads((tmp_path / "two" / "provenance.json").read_text())
    assert start["processes"] == 2


@pytest.mark.slow
def test_helpers_do_the_work_of_one(tmp_path: Path) -> None:
    """A step of two processes is the step of one: the same tokens, the same losses and weights."""
    target = write_tiny_llama(tmp_path / "target", seed=2)
    runs = {}
    for name, more in (("alone", ""), ("shared", "helpers = 1")):
        config = write_config(tmp_path, "mlp", more=more)
        runs[name] = train(config, tmp_path / name, target, silent)
    losses = [[record["loss"] for record in runs[name].history] for name in runs]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert runs["shared"].tokens == runs["alone"].tokens == 6 * 64
    fresh = build_job(replace(read_settings(config), target=str(target)), tmp_path / "alone").model
    _require_close(tmp_path / "alone", tmp_path / "shared", fresh, 0.1)
    [start] = json.loads((tmp_path / "shared" / "provenance.json").read_text())
    assert start["processes"] == 2


def test_helpers_that_a_step_cannot_be_shared_with_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"helpers.*equal shares of batch_tokens 64"):
        train(write_config(tmp_path, more="helpers = 2"), tmp_path / "run", tmp_path, silent)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_mistake_is_said_as_if_there_were_no_helpers(tmp_path: Path) -> None:
    config = write_config(tmp_path, more="helpers = 1")
    with pytest.raises(TrainingError, match=r"^model: got .*allowed: ") as found:
        train(config, tmp_path / "run", tmp_path / "nowhere", silent)
    assert found.value.exit_code == 3


def test_alone_there_is_nothing_to_agree_on() -> None:
    with joined() as ranks:
        assert ranks == Ranks(rank=0, size=1) and ranks.leads
        assert ranks.mean(2.0, 3.0) == (2.0, 3.0)
        assert ranks.lead(lambda: 5) == 5
