"""How a run learns: its loop, its schedule, its model, its optimizer, and what it shows."""

import copy
import fcntl
import io
import json
import os
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaForCausalLM

from foretoken.errors import ConfigError, TrainingError
from foretoken.hardware import Hardware
from foretoken.testing import write_tiny_llama
from foretoken.training import optimizer, precision, run_folder
from foretoken.training.data.answers import read_answers
from foretoken.training.heads.draft import begin_with
from foretoken.training.heads.export import export_llama
from foretoken.training.llama import Llama, read_exported
from foretoken.training.loop import Display, Progress, Trainer, brief, tell_compiling, terminal_of
from foretoken.training.losses import Head, distance, head_loss, mixed_divergence
from foretoken.training.optimizer import Muon, orthogonal
from foretoken.training.ranks import Ranks, joined
from foretoken.training.runs import build_job, train
from foretoken.training.schedule import Stage, current_stage
from foretoken.training.settings import read_settings
from tests.unit.training import tiny, two_ranks
from tests.unit.training.own_runs import silent, write_config
from tests.unit.training.tiny import tiny_settings


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
        ("helpers = 1", "config.helpers: got 1; allowed: .*torchrun"),
    ],
)
def test_wrong_settings_name_the_field(tmp_path: Path, text: str, field: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=field):
        read_settings(path)


def test_wsd() -> None:
    run = tiny_settings(max_steps=100, warmup_steps=10, decay_share=0.25)
    scales = [run.rate_scale(step, run.progress(step, 0.0)) for step in range(101)]
    assert scales[0] == pytest.approx(0.1)
    assert scales[9:76] == [1.0] * 67
    assert scales[88] == pytest.approx(0.48)
    assert scales[100] == 0.0
    assert all(later <= earlier for earlier, later in zip(scales[75:], scales[76:], strict=False))


def test_cosine() -> None:
    """Warm-up, then the peak, half of it in the middle, zero at the end."""
    run = tiny_settings(schedule="cosine", warmup_steps=4)
    assert run.rate_scale(0, 0.0) == 0.25
    assert run.rate_scale(10, 0.0) == 1.0
    assert run.rate_scale(50, 0.5) == pytest.approx(0.5)
    assert run.rate_scale(99, 1.0) == pytest.approx(0.0)


def test_the_schedule_is_a_setting() -> None:
    flat, falling = tiny_settings(), tiny_settings(schedule="cosine")
    assert flat.rate_scale(10, 0.5) == 1.0 and falling.rate_scale(10, 0.5) == pytest.approx(0.5)
    for wrong in ({"schedule": "flat"}, {"clip_norm": 0.0}, {"precision": "int8"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            tiny_settings(**wrong)


def test_whichever_budget_ends_first() -> None:
    budget = tiny_settings(max_steps=100, max_minutes=10.0)
    assert budget.progress(10, 300) == 0.5
    assert budget.progress(60, 300) == 0.6
    assert budget.progress(10, 9999) == 1.0


def test_a_longer_budget_leaves_the_decay() -> None:
    short, long = (
        tiny_settings(max_steps=steps, warmup_steps=1, decay_share=0.25) for steps in (100, 200)
    )
    assert short.rate_scale(90, short.progress(90, 0)) < 1
    assert long.rate_scale(90, long.progress(90, 0)) == 1


def test_stages() -> None:
    stages = (Stage(until=0.5, length=256), Stage(until=0.9, length=512))
    assert [current_stage(stages, share).length for share in (0.0, 0.5, 0.95)] == [256, 512, 512]


@pytest.mark.parametrize("flags", [frozenset({"avx2"}), frozenset({"avx512_bf16"})])
def test_products_are_narrow_where_the_processor_multiplies_them(
    flags: frozenset[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the instruction they would take many times as long."""
    machine = Hardware(cpu_name="", num_cores=2, free_memory=1, cpu_flags=flags)
    monkeypatch.setattr("foretoken.training.precision.Hardware.detect", lambda: machine)
    precision._cpu_multiplies_bfloat16.cache_clear()
    try:
        found = {}
        for asked in ("auto", "bfloat16", "float32"):
            with precision.autocast(torch.device("cpu"), asked):
                found[asked] = torch.is_autocast_enabled("cpu")
    finally:
        precision._cpu_multiplies_bfloat16.cache_clear()
    assert found == {"auto": "avx512_bf16" in flags, "bfloat16": True, "float32": False}


@pytest.fixture
def model() -> Llama:
    torch.manual_seed(1)
    return Llama(tiny.SHAPE).eval()


def test_export_agrees_with_transformers(model: Llama, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    export_llama(model, tmp_path, tmp_path / "out", torch.float32)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokens = torch.randint(0, 64, (2, 40))
    with torch.inference_mode():
        mine = model.logits(model.hidden(tokens))
        assert (theirs(tokens).logits - mine).abs().max() < 1e-4
        back = read_exported(tmp_path / "out")
        assert torch.equal(back.logits(back.hidden(tokens)), mine)


def test_chunked_head_loss_and_gradients() -> None:
    torch.manual_seed(2)
    hidden = torch.randn(1100, 8, requires_grad=True)
    weight = torch.randn(30, 8, requires_grad=True)
    targets = torch.randint(-1, 30, (1100,))
    plain = F.cross_entropy(hidden @ weight.T, targets, ignore_index=-1)
    expected = torch.autograd.grad(plain, (hidden, weight))
    loss = head_loss(hidden, weight, targets)
    torch.testing.assert_close(loss, plain)
    for mine, theirs in zip(torch.autograd.grad(loss, (hidden, weight)), expected, strict=True):
        torch.testing.assert_close(mine, theirs)


SHAPES = ((48, 16), (16, 48), (24, 24), (48, 16), (24, 24))


def _matrices() -> list[nn.Parameter]:
    torch.manual_seed(3)
    return [nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def _take_three_steps(step: Callable[[], object], matrices: list[nn.Parameter]) -> None:
    """Gradients that change, and a step in which the last matrix has none."""
    source = torch.Generator().manual_seed(5)
    for turn in range(3):
        for matrix in matrices:
            matrix.grad = torch.randn(matrix.shape, generator=source)
        if turn == 1:
            matrices[-1].grad = None
        step()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_update_keeps_directions_and_evens_out_lengths(shape: tuple[int, int]) -> None:
    """The singular vectors of the matrix, with singular values near one whatever they were."""
    left, _, right = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    uneven = torch.logspace(0, -1.5, min(shape))
    (found,) = orthogonal((left @ torch.diag(uneven) @ right)[None], torch.float32)
    values = left.T @ found @ right.T
    assert torch.allclose(values, torch.diag(values.diagonal()), atol=1e-4)
    assert 0.6 < values.diagonal().min() and values.diagonal().max() < 1.3


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="PyTorch before 2.9 has no Muon")
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_three_steps_are_those_of_pytorch(
    kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Apart by what bfloat16 rounds off, in either type."""
    monkeypatch.setattr(optimizer, "product_type", lambda device: kind)
    begun = _matrices()
    ours, theirs = copy.deepcopy(begun), copy.deepcopy(begun)
    own, other = Muon(ours, 0.05), torch.optim.Muon(theirs, lr=0.1, weight_decay=0.05)
    _take_three_steps(lambda: own.step(0.1), ours)
    _take_three_steps(other.step, theirs)
    for start, here, there in zip(begun, ours, theirs, strict=True):
        assert (here - there).norm() <= 0.03 * (there - start).norm()


def test_it_goes_on_from_a_checkpoint() -> None:
    """One step, saved and loaded, then another: as two steps."""
    begun = _matrices()
    whole, halves = copy.deepcopy(begun), copy.deepcopy(begun)
    first, second, both = (Muon(matrices, 0.05) for matrices in (halves, halves, whole))
    _take_three_steps(lambda: both.step(0.1), whole)
    _take_three_steps(lambda: both.step(0.1), whole)
    _take_three_steps(lambda: first.step(0.1), halves)
    second.load_state_dict(first.state_dict())
    _take_three_steps(lambda: second.step(0.1), halves)
    assert all(torch.equal(*pair) for pair in zip(whole, halves, strict=True))


HEAD = {"tokens_a_step": 2.214, "depth_1": 0.61, "depth_2": 0.444}


def _show(display: Display, step: int) -> None:
    done = Progress(step=step, tokens=640, seconds=60.0, history=[])
    display.step(done, share=step / 40, loss=1.5, speed=812.4, scale=0.5)


def test_a_bar_shows_loss_accuracy_and_length() -> None:
    """On a terminal: one bar, what was measured last stays in it, and no lines of steps."""
    lines: list[str] = []
    terminal = io.StringIO()
    display = Display(lines.append, "own", terminal)
    _show(display, 10)
    assert "loss 1.500, 812 tokens/s" in terminal.getvalue()
    display.measured(HEAD)
    _show(display, 20)
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
        _show(display, step)
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


@pytest.mark.parametrize(
    ("failure", "said"),
    [("memory", "memory"), ("loss", "loss of nan"), ("gradient", "a gradient norm of (nan|inf)")],
)
def test_a_step_that_cannot_be_made_changes_no_weight(
    failure: str, said: str, tmp_path: Path
) -> None:
    """The error says which step and which checkpoint; a gradient may fail though no loss did."""
    trainer = _trainer(tmp_path)
    kept = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    plain = trainer.task.loss

    def broken(index: int, tokens: int, stage: Stage) -> torch.Tensor:
        if failure == "memory":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        loss = plain(index, tokens, stage)
        if failure == "loss":
            return loss * float("nan")
        loss.register_hook(lambda grad: grad * float("inf"))
        return loss

    trainer.task.loss = broken  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match=rf"step 1: .*{said}.*step-0000001\.pt is intact"):
        trainer.step()
    assert all(torch.equal(kept[n], v) for n, v in trainer.model.state_dict().items())
    state = run_folder.load_newest(tmp_path)
    assert state is not None and state["progress"]["step"] == 1


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
    newest = run_folder.newest(tmp_path)[0]
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


@pytest.mark.parametrize("tv_share", [0.0, 0.5, 1.0])
def test_gradient(tv_share: float) -> None:
    torch.manual_seed(0)
    draft = torch.randn(5, 11, dtype=torch.float64, requires_grad=True)
    target = torch.randn(5, 11, dtype=torch.float64)
    p, q = target.softmax(-1), draft.softmax(-1)
    plain = (1 - tv_share) * (p * (p / q).log()).sum() + tv_share * 0.5 * (p - q).abs().sum()
    (expected,) = torch.autograd.grad(plain, draft)
    found = mixed_divergence(draft.detach(), target, tv_share)
    torch.testing.assert_close(found.loss, plain.detach())
    torch.testing.assert_close(found.gradient, expected)


def test_added_logits_have_the_right_gradients() -> None:
    """Rows and matrices of both products, where a frozen matrix gets none."""
    torch.manual_seed(1)
    rows, matrix = torch.randn(5, 6, requires_grad=True), torch.randn(11, 6)
    more_rows, more = (torch.randn(count, 2, requires_grad=True) for count in (5, 11))
    wanted = Head(torch.randn(5, 6), torch.randn(11, 6))
    found = distance(Head(rows, matrix), wanted, 0.5, added=Head(more_rows, more)).loss
    trained = (rows, more_rows, more)
    gradients = torch.autograd.grad(found, trained)
    p, q = (
        (wanted.hidden @ wanted.weight.T).softmax(-1),
        (rows @ matrix.T + more_rows @ more.T).softmax(-1),
    )
    plain = (0.5 * (p * (p / q).log()).sum(-1) + 0.25 * (p - q).abs().sum(-1)).mean()
    torch.testing.assert_close(found, plain)
    for mine, theirs in zip(gradients, torch.autograd.grad(plain, trained), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_deeper_draft_begins_as_the_shallower_one() -> None:
    torch.manual_seed(0)
    shape = replace(tiny.SHAPE, layers=1)
    shallow, deep = Llama(shape), Llama(replace(shape, layers=3))
    begin_with(deep, shallow)
    tokens = torch.randint(2, 50, (2, 9))
    torch.testing.assert_close(deep.hidden(tokens), shallow.hidden(tokens))
    assert all(weight.any() for name, weight in deep.named_parameters() if "qkv" in name)
    with pytest.raises(ConfigError, match=r"head\.start.*fewer layers"):
        begin_with(shallow, deep)


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
    folders = ("--out", str(tmp_path / "two"), "--target", str(target))
    printed = _torchrun("foretoken", "train", "eagle3", str(config), *folders)
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


def test_alone_there_is_nothing_to_agree_on() -> None:
    with joined() as ranks:
        assert ranks == Ranks(rank=0, size=1) and ranks.leads
        assert ranks.mean(2.0, 3.0) == (2.0, 3.0)
        assert ranks.lead(lambda: 5) == 5
