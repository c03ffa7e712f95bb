"""Two stages of a head, and hidden states on disk."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from foretoken.errors import ConfigError, TrainingError
from foretoken.proposers.heads.mlp import MLPSpeculator
from foretoken.testing import write_tiny_llama
from foretoken.training import run_folder, runs
from foretoken.training.data.prompts import read_text
from foretoken.training.data.states import (
    RowSet,
    StatePlan,
    StoredStates,
    agree,
    read_plan,
    require_room,
    write_plan,
    write_states,
)
from foretoken.training.heads.kind import fresh_head
from foretoken.training.heads.target import Captured, TargetParts
from foretoken.training.heads.task import HeadTraining, token_loss
from foretoken.training.run_folder import write_whole
from foretoken.training.runs import build_job, prepare_data, store_states, train
from foretoken.training.schedule import Stage, staged
from foretoken.training.settings import HeadSettings, LlamaShape, Settings, read_settings
from tests.unit.training.own_runs import silent, write_config

STAGES = """
[[stages]]
until = 0.5
length = 64
rows = "text"
loss = "tokens"

[[stages]]
until = 1.0
length = 32
rows = "answers"
loss = "tokens"
rate = 0.1
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("own"), seed=2, num_hidden_layers=8)


def _two_stages(folder: Path, kind: str = "mlp", steps: int = 8, tables: str = "") -> Path:
    """A config of both stages, over text that counts upwards again and again."""
    text = folder / "text.jsonl"
    line = json.dumps({"prompt_token_ids": [10 + i % 7 for i in range(140)]})
    text.write_text(f"{line}\n{line}\n")
    more = 'schedule = "stages"'
    path = write_config(folder, kind, steps, more, f'text = "{text}"\n{tables}')
    head, _, _ = path.read_text().rpartition("[[stages]]")
    path.write_text(head + STAGES)
    return path


def test_each_stage_has_its_rows(target: Path, tmp_path: Path) -> None:
    """Long rows of text first; then answers, which begin with the prompts."""
    settings = replace(read_settings(_two_stages(tmp_path)), target=str(target))
    prepare_data(settings, tmp_path / "run", silent)
    job = build_job(settings, tmp_path / "run")
    assert isinstance(job.task, HeadTraining)
    first, second = (job.task.source.batch(0, 64, stage) for stage in settings.stages)
    assert first.tokens_BT.shape == (1, 64) and second.tokens_BT.shape == (2, 32)
    assert set(first.tokens_BT.flatten().tolist()) <= set(range(10, 17))
    assert not set(second.tokens_BT.flatten().tolist()) <= set(range(10, 17))
    assert read_text(tmp_path / "run").shape == (280,)


def test_text_is_read_anew_when_it_is_another(target: Path, tmp_path: Path) -> None:
    settings = replace(read_settings(_two_stages(tmp_path)), target=str(target))
    run, seen = tmp_path / "run", list[str]()
    first = prepare_data(settings, run, seen.append)
    assert prepare_data(settings, run, seen.append) == first
    assert sum(line.startswith("read 280 tokens") for line in seen) == 1
    with (tmp_path / "text.jsonl").open("a") as file:
        file.write('{"prompt_token_ids": [5, 6]}\n')
    assert prepare_data(settings, run, seen.append) != first
    assert seen[-1].startswith("read 282 tokens")
    with (tmp_path / "text.jsonl").open("a") as file:
        file.write("{broken\n")
    with pytest.raises(ConfigError, match=r"text\.jsonl line 4"):
        prepare_data(settings, run, seen.append)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mlp", "eagle3"])
def test_both_stages_train_and_states_may_be_stored(
    kind: str, target: Path, tmp_path: Path
) -> None:
    """Stored states of both sets give the losses and the weights of computed ones, bit for bit."""
    done = train(_two_stages(tmp_path, kind), tmp_path / "a", target, silent)
    config = _two_stages(tmp_path, kind, tables="[states]\n")
    stored = train(config, tmp_path / "b", target, silent)
    weights = [run_folder.newest_state(tmp_path / name)["model"] for name in "ab"]
    assert all(torch.equal(weights[1][name], value) for name, value in weights[0].items())
    names = {path.name.rsplit("-", 1)[0] for path in (tmp_path / "b" / "states").glob("*-*")}
    assert names == {"held-out-32", "text-64", "answers-32"}
    for mine, theirs in zip(stored.history, done.history, strict=True):
        assert {**mine, "minutes": 0.0} == {**theirs, "minutes": 0.0}
    assert done.step == 8 and done.tokens == 8 * 64


@pytest.mark.slow
def test_the_first_stage_teaches_the_text(target: Path, tmp_path: Path) -> None:
    """What follows in the text is learned, whatever the target would say."""
    settings = replace(read_settings(_two_stages(tmp_path)), target=str(target))
    prepare_data(settings, tmp_path / "run", silent)
    net, task = build_job(settings, tmp_path / "run")
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    losses = []
    for index in range(60):
        loss = task.loss(index, 64, settings.stages[0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 3.0 and losses[-1] < 0.3, (losses[0], losses[-1])


@pytest.mark.parametrize("kind", ["mlp", "medusa", "eagle", "eagle3"])
def test_token_loss_is_the_cross_entropy_of_the_tokens_to_be_guessed(kind: str) -> None:
    """Slot t's guess of depth s is of token t + 2 + s; what cannot be drafted does not count."""
    torch.manual_seed(0)
    tokens_BT = torch.randint(0, 40, (2, 12))
    features = torch.randn(2, 12, 24 if kind == "eagle3" else 8)
    captured = Captured(tokens_BT=tokens_BT, features_BTF=features, final_BTD=torch.randn(2, 12, 8))
    table = torch.randn(40, 8)
    parts = TargetParts(
        vocab_size=40, hidden_size=8, layers=8, heads=2, kv_heads=2, head_dim=4,
        max_positions=32, norm_eps=1e-5, rope_theta=1e4, embedding_VD=table, head_VD=table,
    )  # fmt: skip
    size = 25 if kind == "eagle3" else None
    head = HeadSettings(kind=kind, depth=3, inner_size=8, depth_decay=0.5, draft_vocab_size=size)
    settings = Settings(
        name="t", shape=LlamaShape(), stages=(Stage(until=1.0, length=16),), head=head
    )  # fmt: skip
    fresh = fresh_head(parts, settings, torch.randperm(40))
    found = token_loss(fresh.guesser, captured, head)
    total, weights = 0.0, 0.0
    for depth, guess in enumerate(fresh.guesser.guesses(captured, 3)):
        logits = F.linear(guess.states_BTD, guess.weight_VD).double()
        ids = list(range(40)) if guess.ids_V is None else guess.ids_V.tolist()
        losses = [
            F.cross_entropy(logits[row, slot], torch.tensor(ids.index(token))).item()
            for row in range(2)
            for slot in range(12 - 2 - depth)
            if (token := int(tokens_BT[row, slot + 2 + depth])) in ids
        ]
        total += 0.5**depth * sum(losses) / len(losses)
        weights += 0.5**depth
    assert found.item() == pytest.approx(total / weights, rel=1e-5)
    found.backward()
    assert isinstance(fresh.net, nn.Module)
    trained = [p for p in fresh.net.parameters() if p.requires_grad]
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in trained)
    assert kind != "mlp" or isinstance(fresh.net, MLPSpeculator)


def test_each_stage_rises_and_falls() -> None:
    """A parabola up, a cosine down to a tenth, the second stage a tenth as high."""
    stages = (Stage(until=0.5, length=8), Stage(until=1.0, length=8, rate=0.1))
    scales = [staged(stages, step / 2000, 10, 2000) for step in range(2000)]
    assert scales[0] == pytest.approx(1 - 0.9**2) and scales[1] == pytest.approx(1 - 0.8**2)
    assert max(scales[:1000]) == pytest.approx(1.0, abs=1e-3)
    assert scales[:9] == sorted(scales[:9])
    assert scales[10:1000] == sorted(scales[10:1000], reverse=True)
    assert scales[999] == pytest.approx(0.1, abs=1e-3)
    assert scales[1000] == pytest.approx(0.1 * scales[0], rel=1e-6)
    assert max(scales[1000:]) == pytest.approx(0.1, abs=1e-4)
    assert staged(stages, 1.0, 10, 2000) == pytest.approx(0.01, abs=1e-4)
    assert staged(stages, 5 / 200, 1000, 200) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('rows = "text"', 'rows = "news"', r"stages\.rows"),
        ('loss = "tokens"\nrate', 'loss = "l2"\nrate', r"stages\.loss"),
        ("rate = 0.1", "rate = 2.0", r"stages\.rate"),
        ("until = 1.0", "until = 0.5", r"stages\.until"),
        ('schedule = "stages"', 'schedule = "cosine"', r"stages\.rate"),
        ('schedule = "stages"', 'schedule = "stages"\ndecay_share = 0.2', "decay_share"),
        ('rows = "text"', 'rows = "answers"', r"data\.text"),
        ("[head]\n", "[thing]\n", "data"),
    ],
)
def test_wrong_stages_name_the_field(tmp_path: Path, old: str, new: str, field: str) -> None:
    path = _two_stages(tmp_path)
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=field):
        read_settings(path)


def test_stages_of_text_need_text(tmp_path: Path) -> None:
    path = _two_stages(tmp_path)
    lines = [line for line in path.read_text().splitlines() if not line.startswith("text = ")]
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"data\.text"):
        read_settings(path)
    path.write_text('[[stages]]\nuntil = 1.0\nlength = 8\nrows = "text"\n')
    with pytest.raises(ConfigError, match=r"stages\.rows"):
        read_settings(path)


STATES = "\n[states]\n"
SETS = (RowSet(name="held-out", length=4, count=1), RowSet(name="answers", length=4, count=5))
PLAN = StatePlan(
    source="s", sets=SETS, points=(2, -1), hidden_size=3, dtype="float32", shard_bytes=2 * 4 * 28
)


def _row(rows: RowSet, number: int) -> torch.Tensor:
    return torch.arange(number, number + rows.length)


def _states(tokens_T: torch.Tensor) -> torch.Tensor:
    return tokens_T[:, None].float() + torch.arange(6) / 10


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
        "import sys, time, pathlib; from tests.unit.training import test_stages as t\n"
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
