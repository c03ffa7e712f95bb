"""Draft models for a target of one's own: distilled, then made parallel, and run in the engine."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.errors import ConfigError
from foretoken.testing import write_tiny_llama
from foretoken.training.config_file import read_settings
from foretoken.training.heads.export import export_run
from foretoken.training.heads.task import HeadTraining, guess_quality
from foretoken.training.llama import Llama
from foretoken.training.llama_folder import copy_tokenizer, keep_special_ids, special_ids
from foretoken.training.runs import build_job, prepare_data, train
from tests.unit.training.own_runs import silent, write_config

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
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("own"), seed=2)


def _config(
    folder: Path, kind: str, *, steps: int = 6, start: Path | None = None, positions: int = 256
) -> Path:
    shape = SHAPE.format(layers=1 if start is None else 2, positions=positions)
    path = write_config(folder, kind, steps, tables=shape)
    begin = "" if start is None else f'\nstart = "{start}"\nmask_token_id = 3'
    path.write_text(path.read_text().replace("inner_size = 24", f"inner_size = 24{begin}"))
    return path


def _texts(target: Path, drafter: Path | None) -> tuple[list[tuple[int, ...]], int]:
    """Greedy tokens, and how many were drafted."""
    speculative = None
    if drafter is not None:
        speculative = {"model": str(drafter), "num_speculative_tokens": 3}
    params = SamplingParams(max_tokens=20, temperature=0.0, detokenize=False, ignore_eos=True)
    with LLM(
        str(target), dtype="float32", batch_invariant=True, speculative_config=speculative
    ) as llm:
        prompts = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [9, 8]}]
        found = [one.outputs[0] for one in llm.generate(prompts, params, use_tqdm=False)]
    metrics = [one.metrics for one in found]
    drafted = sum(sum(m.drafted_per_step) for m in metrics if m is not None)
    return [tuple(one.token_ids) for one in found], drafted


@pytest.mark.slow
def test_a_draft_and_then_a_parallel_one(target: Path, tmp_path: Path) -> None:
    """Trained, exported, run: no token changes; the parallel one begins with the other."""
    done = train(_config(tmp_path, "draft"), tmp_path / "run", target, silent, kind="draft")
    assert done.step == 6 and {"tokens_a_step", "depth_3"} <= set(done.history[-1])
    export_run(tmp_path / "run", tmp_path / "draft", verifier=str(target), form="vllm")
    ids = json.loads((tmp_path / "draft" / "config.json").read_text())
    wanted = json.loads((target / "config.json").read_text())
    assert all(ids[n] == wanted.get(n) for n in ("bos_token_id", "eos_token_id", "vocab_size"))
    config = _config(tmp_path, "parallel", start=tmp_path / "draft")
    train(config, tmp_path / "other", target, silent, kind="parallel")
    export_run(tmp_path / "other", tmp_path / "pard", verifier=str(target))
    assert json.loads((tmp_path / "pard" / "config.json").read_text())["pard_token"] == 3
    plain, _ = _texts(target, None)
    for name in ("draft", "pard"):
        texts, drafted = _texts(target, tmp_path / name)
        assert texts == plain and drafted > 0, name


def test_a_draft_learns_what_the_target_says(target: Path, tmp_path: Path) -> None:
    """Its distance from the target falls; what it is at each depth is one pass over true tokens."""
    settings = replace(read_settings(_config(tmp_path, "draft")), target=str(target))
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
    right = net.logits(net(captured.tokens_BT).hidden).argmax(-1) == best
    assert found.agreement[0] == pytest.approx(right[:, 1:].float().mean().item())
    both = right[:, 1:-1] & right[:, 2:]
    share = both.sum() / right[:, 1:-1].sum()
    assert found.agreement[1] == pytest.approx(share.item(), abs=1e-6)


def test_a_draft_of_the_targets_width_begins_with_its_embedding(
    target: Path, tmp_path: Path
) -> None:
    config = _config(tmp_path, "draft")
    config.write_text(config.read_text().replace("hidden_size = 32", "hidden_size = 64"))
    settings = replace(read_settings(config), target=str(target))
    prepare_data(settings, tmp_path / "run", silent)
    net, task = build_job(settings, tmp_path / "run")
    assert isinstance(net, Llama) and isinstance(task, HeadTraining)
    known = read_exported_embedding(target)
    assert torch.equal(net.embed.weight, known)


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
    old: str, new: str, field: str, target: Path, tmp_path: Path
) -> None:
    config = _config(tmp_path, "draft")
    config.write_text(config.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=field):
        train(config, tmp_path / "run", target, silent)
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
