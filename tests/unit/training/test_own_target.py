"""A head for a target of one's own: from a file of prompts to the engine, on a tiny target."""

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
from foretoken.errors import ConfigError, TrainingError
from foretoken.kv.features import FINAL
from foretoken.proposers.heads.eagle3.network import Eagle3
from foretoken.testing import write_tiny_llama
from foretoken.training import run_folder
from foretoken.training.config_file import read_settings
from foretoken.training.data.answers import FILE, read_answers
from foretoken.training.data.loaded_target import LoadedTarget
from foretoken.training.data.packed_rows import PackedRows
from foretoken.training.data.prompts import read_prompt_set
from foretoken.training.heads.export import export_run
from foretoken.training.runs import build_job, prepare_data, train
from foretoken.training.schedule import Stage
from foretoken.training.settings import DataSettings
from tests.unit.training import tiny
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


@pytest.mark.parametrize("failure", ["nan", "memory"])
def test_a_run_that_cannot_go_on_keeps_its_checkpoint(failure: str, tmp_path: Path) -> None:
    """The error says which step and which checkpoint; weights are those before the step."""
    from foretoken.training.loop import Trainer

    trainer = Trainer(tiny.tiny_job(), tiny.tiny_settings(), tmp_path)
    trainer.step()
    trainer.save()
    kept = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    plain = trainer.task.loss

    def broken(index: int, tokens: int, stage: Stage) -> torch.Tensor:
        if failure == "memory":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return plain(index, tokens, stage) * float("nan")

    trainer.task.loss = broken  # type: ignore[method-assign]
    wanted = "memory" if failure == "memory" else "loss of nan"
    with pytest.raises(TrainingError, match=f"step 1: .*{wanted}.*step-0000001.pt is intact"):
        trainer.step()
    assert all(torch.equal(kept[n], v) for n, v in trainer.model.state_dict().items())
    state = run_folder.load_newest(tmp_path)
    assert state is not None and state["progress"]["step"] == 1


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
