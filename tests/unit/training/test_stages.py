"""Two stages of a head: text and its own tokens first, the target's answers then."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from foretoken.errors import ConfigError
from foretoken.proposers.heads.mlp import MLPSpeculator
from foretoken.testing import write_tiny_llama
from foretoken.training.config_file import read_settings
from foretoken.training.data.text import read_text
from foretoken.training.heads.kind import fresh_head
from foretoken.training.heads.target import Captured, TargetParts
from foretoken.training.heads.task import HeadTraining, token_loss
from foretoken.training.llama import LlamaShape
from foretoken.training.runs import build_job, prepare_data, train
from foretoken.training.schedule import Stage, Staged
from foretoken.training.settings import HeadSettings, Settings
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
    """Stored states of both sets give the losses of computed ones."""
    done = train(_two_stages(tmp_path, kind), tmp_path / "a", target, silent)
    config = _two_stages(tmp_path, kind, tables="[states]\n")
    stored = train(config, tmp_path / "b", target, silent)
    names = {path.name.rsplit("-", 1)[0] for path in (tmp_path / "b" / "states").glob("*-*")}
    assert names == {"held-out-32", "text-64", "answers-32"}
    assert [r["loss"] for r in stored.history] == [r["loss"] for r in done.history]
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
    course = Staged(stages=stages, warmup_steps=10, max_steps=2000)
    scales = [course.scale(step, step / 2000) for step in range(2000)]
    assert scales[0] == pytest.approx(1 - 0.9**2) and scales[1] == pytest.approx(1 - 0.8**2)
    assert max(scales[:1000]) == pytest.approx(1.0, abs=1e-3)
    assert scales[:9] == sorted(scales[:9])
    assert scales[10:1000] == sorted(scales[10:1000], reverse=True)
    assert scales[999] == pytest.approx(0.1, abs=1e-3)
    assert scales[1000] == pytest.approx(0.1 * scales[0], rel=1e-6)
    assert max(scales[1000:]) == pytest.approx(0.1, abs=1e-4)
    assert course.scale(2000, 1.0) == pytest.approx(0.01, abs=1e-4)
    short = Staged(stages=stages, warmup_steps=1000, max_steps=200)
    assert short.scale(5, 5 / 200) == pytest.approx(1.0, abs=0.02)


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
