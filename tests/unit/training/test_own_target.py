"""A head and a draft for a target of one's own: from prompts to the engine, on a tiny target."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.errors import ConfigError
from foretoken.kv.features import FINAL
from foretoken.proposers.heads.eagle3.network import Eagle3
from foretoken.testing import write_tiny_llama
from foretoken.training import run_folder
from foretoken.training.data.answers import FILE, read_answers
from foretoken.training.data.loaded_target import LoadedTarget
from foretoken.training.data.packed_rows import PackedRows
from foretoken.training.data.prompts import read_prompt_set
from foretoken.training.heads.export import export_run
from foretoken.training.heads.task import HeadTraining, guess_quality
from foretoken.training.llama import Llama, copy_tokenizer, keep_special_ids, special_ids
from foretoken.training.runs import build_job, prepare_data, train
from foretoken.training.settings import DataSettings, read_settings
from tests.unit.training.own_runs import silent, write_config


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers, as EAGLE-3's three points ask for; no tokenizer."""
    return write_tiny_llama(tmp_path_factory.mktemp("own"), seed=2, num_hidden_layers=8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "mlp"])
def test_from_prompts_to_a_running_head(kind: str, target: Path, tmp_path: Path) -> None:
    """Answers, steps, provenance, export; the head drafts and changes no token."""
    run = tmp_path / "run"
    done = train(write_config(tmp_path, kind), run, target, silent, kind=kind)
    assert done.step == 6 and {"tokens_a_step", "depth_3"} <= set(done.history[-1])
    assert len(read_answers(run)) == 12
    [start] = json.loads((run / "provenance.json").read_text())
    assert start["settings"]["head"]["kind"] == kind and len(start["data"]) == 16
    export_run(run, tmp_path / "head", verifier=str(target))
    spec = {"model": str(tmp_path / "head"), "num_speculative_tokens": 3}
    params = SamplingParams(max_tokens=24, temperature=0.0, detokenize=False, ignore_eos=True)
    texts = []
    for speculative in (None, spec):
        with LLM(
            str(target), dtype="float32", batch_invariant=True, speculative_config=speculative
        ) as llm:
            [found] = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
            texts.append(found.outputs[0].token_ids)
            metrics = found.outputs[0].metrics
    assert metrics is not None and sum(metrics.drafted_per_step) > 0
    assert texts[0] == texts[1]


def test_captured_states_are_those_of_the_engine(target: Path) -> None:
    """The last state gives the engine's next token; rows do not see each other."""
    own = LoadedTarget(target)
    rows = torch.tensor([[5, 6, 7, 8, 9], [20, 21, 22, 23, 24]])
    both = own.capture(rows, (2, FINAL))
    alone = own.capture(rows[1:], (2, FINAL))
    assert torch.equal(both.features_BTF[1], alone.features_BTF[0])
    assert torch.equal(both.features_BTF[..., 64:], both.final_BTD)
    best = torch.nn.functional.linear(both.final_BTD[:, -1], own.parts.head_VD).argmax(-1)
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    with LLM(str(target)) as llm:
        prompts = [{"prompt_token_ids": row} for row in rows.tolist()]
        found = llm.generate(prompts, params, use_tqdm=False)
    assert best.tolist() == [one.outputs[0].token_ids[0] for one in found]


def test_answers_go_on_where_a_killed_run_stopped(target: Path, tmp_path: Path) -> None:
    """A half-written line is written anew; what is there is not answered twice."""
    settings = read_settings(write_config(tmp_path, more=f'target = "{target}"'))
    whole = tmp_path / "whole"
    prepare_data(settings, whole, silent)
    cut = tmp_path / "cut"
    cut.mkdir()
    text = (whole / FILE).read_bytes()
    lines = text.splitlines(keepends=True)
    (cut / FILE).write_bytes(b"".join(lines[:8]) + lines[8][:11])
    seen: list[str] = []
    prepare_data(settings, cut, seen.append)
    assert (cut / FILE).read_bytes() == text
    assert len(seen) == 1, seen


@pytest.mark.slow
def test_a_killed_run_loses_one_interval_at_most(target: Path, tmp_path: Path) -> None:
    """kill -9 in the middle; the next start goes on from the newest checkpoint."""
    config, run = write_config(tmp_path, steps=100_000), tmp_path / "run"
    command = [sys.executable, "-m", "foretoken.training", str(config), str(run), str(target)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=dict(os.environ))
    try:
        deadline = time.monotonic() + 120
        while not list(run.glob("step-*.pt")) and time.monotonic() < deadline:
            assert process.poll() is None, "the run ended by itself"
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    state = run_folder.load_newest(run)
    assert state is not None
    step = state["progress"]["step"]
    assert step >= 1
    config = write_config(tmp_path, steps=step + 2)
    done = train(config, run, target, silent)
    assert done.step == step + 2
    assert len(json.loads((run / "provenance.json").read_text())) == 2


@pytest.mark.parametrize(
    ("line", "number"),
    [("{broken", 2), ('{"prompt": 3}', 2), ('{"prompt_token_ids": []}', 2), ('{"prompt": "x"}', 2)],
)
def test_a_broken_line_is_named(line: str, number: int, tmp_path: Path) -> None:
    good = '{"prompt_token_ids": [1, 2]}'
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join([good, line, good, ""]))
    settings = DataSettings(prompts=str(path), held_out=1)
    with pytest.raises(ConfigError, match=f"line {number}"):
        read_prompt_set(settings, None, 10)
    skipping = DataSettings(prompts=str(path), held_out=1, skip_broken=True)
    found = read_prompt_set(skipping, None, 1)
    assert found.skipped == 1 and found.ids == ((2,), (2,))


def test_too_few_prompts_and_wrong_files(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt_token_ids": [1, 2]}\n')
    with pytest.raises(ConfigError, match="held out"):
        read_prompt_set(DataSettings(prompts=str(path)), None, 10)
    with pytest.raises(ConfigError, match=r"data\.prompts"):
        read_prompt_set(DataSettings(prompts=str(tmp_path / "none.txt")), None, 10)
    with pytest.raises(ConfigError, match=r"data\.temperatures"):
        DataSettings(prompts="x", temperatures=())


def test_packed_rows_cover_every_token_once_an_epoch() -> None:
    rows = PackedRows.of([[1, 2, 3], [3, 3, 4, 5]], seed=0)
    assert rows.rows([0, 1, 2], 3).tolist() == [[1, 2, 3], [3, 3, 4], [3, 4, 5]]
    assert rows.rows([0], 10).tolist() == [[1, 2, 3, 3, 3, 4, 5, 1, 2, 3]]
    assert sorted(rows.order(0, 3, 3)) == sorted(rows.order(1, 3, 3)) == [0, 1, 2]
    assert rows.order(0, 2, 3) + rows.order(1, 2, 3)[:1] == rows.order(0, 3, 3)
    assert len({tuple(rows.order(epoch, 3, 3)) for epoch in range(9)}) > 1
    assert rows.frequent_ids(6)[0] == 3


def test_held_out_answers_do_not_choose_the_draft_vocabulary(target: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, "eagle3")
    config.write_text(config.read_text().replace("depth = 3", "depth = 3\ndraft_vocab_size = 3"))
    answers = [[90] * 60] * 3 + [[5, 6, 7] * 4] * 2
    lines = [json.dumps({"ids": ids}) for ids in answers]
    (tmp_path / FILE).write_text("\n".join(lines) + "\n")
    job = build_job(replace(read_settings(config), target=str(target)), tmp_path)
    assert isinstance(job.model, Eagle3)
    assert (job.model.d2t + torch.arange(3)).tolist() == [5, 6, 7]


def test_a_line_that_broke_since_the_last_start_harms_nothing(target: Path, tmp_path: Path) -> None:
    """The error names the line; answers and checkpoint stay, and the mended file goes on."""
    run = tmp_path / "run"
    train(write_config(tmp_path, steps=2), run, target, silent)
    kept = {path.name: path.read_bytes() for path in run.iterdir()}
    config = write_config(tmp_path, steps=3)
    prompts = tmp_path / "prompts.jsonl"
    whole = prompts.read_text()
    lines = whole.splitlines()
    prompts.write_text("\n".join([*lines[:4], '{"prompt_token_ids": [5', *lines[5:]]) + "\n")
    with pytest.raises(ConfigError, match=r"prompts\.jsonl line 5"):
        train(config, run, target, silent)
    assert {path.name: path.read_bytes() for path in run.iterdir()} == kept
    prompts.write_text(whole)
    assert train(config, run, target, silent).step == 3


SHAPE = """
[shape]
vocab_size = 97
hidden_size = 32
layers = {layers}
heads = 4
kv_heads = 2
ffn_size = 48
max_positions = {positions}
"""


@pytest.fixture(scope="module")
def draft_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("own"), seed=2)


def _config(
    folder: Path, kind: str, *, steps: int = 6, start: Path | None = None, positions: int = 256
) -> Path:
    shape = SHAPE.format(layers=1 if start is None else 2, positions=positions)
    path = write_config(folder, kind, steps, tables=shape)
    begin = "" if start is None else f'\nstart = "{start}"\nmask_token_id = 3'
    path.write_text(path.read_text().replace("inner_size = 24", f"inner_size = 24{begin}"))
    return path


def _texts(draft_target: Path, drafter: Path | None) -> tuple[list[tuple[int, ...]], int]:
    """Greedy tokens, and how many were drafted."""
    speculative = None
    if drafter is not None:
        speculative = {"model": str(drafter), "num_speculative_tokens": 3}
    params = SamplingParams(max_tokens=20, temperature=0.0, detokenize=False, ignore_eos=True)
    with LLM(
        str(draft_target), dtype="float32", batch_invariant=True, speculative_config=speculative
    ) as llm:
        prompts = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [9, 8]}]
        found = [one.outputs[0] for one in llm.generate(prompts, params, use_tqdm=False)]
    metrics = [one.metrics for one in found]
    drafted = sum(sum(m.drafted_per_step) for m in metrics if m is not None)
    return [tuple(one.token_ids) for one in found], drafted


@pytest.mark.slow
def test_a_draft_and_then_a_parallel_one(draft_target: Path, tmp_path: Path) -> None:
    """Trained, exported, run: no token changes; the parallel one begins with the other."""
    done = train(_config(tmp_path, "draft"), tmp_path / "run", draft_target, silent, kind="draft")
    assert done.step == 6 and {"tokens_a_step", "depth_3"} <= set(done.history[-1])
    export_run(tmp_path / "run", tmp_path / "draft", verifier=str(draft_target), form="vllm")
    ids = json.loads((tmp_path / "draft" / "config.json").read_text())
    wanted = json.loads((draft_target / "config.json").read_text())
    assert all(ids[n] == wanted.get(n) for n in ("bos_token_id", "eos_token_id", "vocab_size"))
    config = _config(tmp_path, "parallel", start=tmp_path / "draft")
    train(config, tmp_path / "other", draft_target, silent, kind="parallel")
    export_run(tmp_path / "other", tmp_path / "pard", verifier=str(draft_target))
    assert json.loads((tmp_path / "pard" / "config.json").read_text())["pard_token"] == 3
    plain, _ = _texts(draft_target, None)
    for name in ("draft", "pard"):
        texts, drafted = _texts(draft_target, tmp_path / name)
        assert texts == plain and drafted > 0, name


def test_a_draft_learns_what_the_target_says(draft_target: Path, tmp_path: Path) -> None:
    """Its distance from the target falls; what it is at each depth is one pass over true tokens."""
    settings = replace(read_settings(_config(tmp_path, "draft")), target=str(draft_target))
    prepare_data(settings, tmp_path / "run", silent)
    net, task = build_job(settings, tmp_path / "run")
    assert isinstance(net, Llama) and isinstance(task, HeadTraining)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    losses = []
    for index in range(40):
        loss = task.loss(index, 64, settings.stages[0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0], (losses[0], losses[-1])
    net.eval()
    captured = task.source.held_out()
    found = guess_quality(task.head.guesser, captured, 2, task.source.logits)
    best = task.source.logits(captured.final_BTD).argmax(-1)
    right = net.logits(net.hidden(captured.tokens_BT)).argmax(-1) == best
    assert found.agreement[0] == pytest.approx(right[:, 1:].float().mean().item())
    both = right[:, 1:-1] & right[:, 2:]
    share = both.sum() / right[:, 1:-1].sum()
    assert found.agreement[1] == pytest.approx(share.item(), abs=1e-6)


def test_a_draft_of_the_targets_width_begins_with_its_embedding(
    draft_target: Path, tmp_path: Path
) -> None:
    config = _config(tmp_path, "draft")
    config.write_text(config.read_text().replace("hidden_size = 32", "hidden_size = 64"))
    settings = replace(read_settings(config), target=str(draft_target))
    prepare_data(settings, tmp_path / "run", silent)
    net, task = build_job(settings, tmp_path / "run")
    assert isinstance(net, Llama) and isinstance(task, HeadTraining)
    known = read_exported_embedding(draft_target)
    assert torch.equal(net.embed_tokens.weight, known)


def read_exported_embedding(folder: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        if "model.embed_tokens.weight" in tensors:
            return tensors["model.embed_tokens.weight"].float()
    raise AssertionError("no embedding")


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("vocab_size = 97", "vocab_size = 96", r"shape\.vocab_size"),
        ("max_positions = 256", "max_positions = 34", r"shape\.max_positions"),
    ],
)
def test_a_draft_that_does_not_fit_is_refused_before_anything_is_done(
    old: str, new: str, field: str, draft_target: Path, tmp_path: Path
) -> None:
    config = _config(tmp_path, "draft")
    config.write_text(config.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=field):
        train(config, tmp_path / "run", draft_target, silent)
    assert not (tmp_path / "run").exists()


def test_the_targets_tokenizer_goes_with_its_draft(tmp_path: Path) -> None:
    """As far as there is one; and the ids that end a text, from GGUF files none."""
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "tokenizer.json").write_text("{}")
    (tmp_path / "target" / "config.json").write_text('{"eos_token_id": [5, 6]}')
    copy_tokenizer(tmp_path / "target", tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["tokenizer.json"]
    keep_special_ids(tmp_path / "target", tmp_path / "run")
    assert special_ids(tmp_path / "run") == {"bos_token_id": None, "eos_token_id": [5, 6]}
    keep_special_ids(tmp_path / "some.gguf", tmp_path / "run")
    assert special_ids(tmp_path / "run") == {"bos_token_id": None, "eos_token_id": None}
    assert special_ids(tmp_path)["eos_token_id"] == 1
