"""Logits agree with Hugging Face's own model classes, however the sequence is cut and paged.

The guarded bugs: a wrong head order, rotation, norm, scale, window or mask; keys of somebody
else's tokens; a weight read under the wrong name.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from foretoken import LLM, SamplingParams
from foretoken.runtime.runner import Runner
from foretoken.shape import ModelShape
from tests.golden.families import (
    BY_TRANSFORMERS,
    LONGROPE,
    OWN,
    VOCAB,
    expected_greedy,
    expected_logits,
    transformers_cases,
    write_checkpoint,
)
from tests.golden.scenario import cut, forward, in_pieces, open_runner, tables
from tests.marks import slow_but

LENGTH, TOLERANCE = 75, 1e-4
PHI3 = {"hidden_size": 32, "rope_parameters": LONGROPE, "original_max_position_embeddings": 40}


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    assert expected.std() > 0.3, "logits too small to tell right from wrong"
    assert (found - expected).abs().max().item() < TOLERANCE


def assert_all_cuts_agree(runner: Runner, model: Any, seed: str, lengths: tuple[int, ...]) -> None:
    """Whole, in pieces, and in batches; pages in order and scattered, full of old numbers."""
    draw = random.Random(seed)
    sequences = [[draw.randrange(VOCAB) for _ in range(n)] for n in lengths]
    wanted = [expected_logits(model, ids) for ids in sequences]
    for together in (True, False):
        ids, want = sequences[0], wanted[0]
        pages = tables(draw, [len(ids)], together=together)[0]
        assert_close(forward(runner, [(ids, 0, len(ids), pages)]), want)
        pieces = cut(draw, len(ids), [1, 1, 2, 5, 9, 30])
        assert_close(in_pieces(runner, ids, pages, pieces), want)
        all_pages = tables(draw, [len(s) for s in sequences], together=together)
        whole = [(s, 0, len(s), p) for s, p in zip(sequences, all_pages, strict=True)]
        assert_close(forward(runner, whole), torch.cat(wanted))


def assert_greedy_agrees(folder: Path, model: Any, **settings: Any) -> None:
    """`LLM` writes what transformers' generate writes, prompts in one batch."""
    draw = random.Random(1)
    prompts = [[draw.randrange(VOCAB) for _ in range(n)] for n in (30, 7)]
    with LLM(str(folder), dtype="float32", max_model_len=60, **settings) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=24, detokenize=False)
        batch = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = llm.generate(batch, params, use_tqdm=False)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    assert found == [expected_greedy(model, ids, 24) for ids in prompts]
    assert len({*found[0], *found[1]}) > 2, "a model that says one thing"


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("case", OWN)
def test_logits_agree(case: str, batch_invariant: bool, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, *OWN[case])
    runner = open_runner(tmp_path, batch_invariant=batch_invariant)
    assert_all_cuts_agree(runner, model, case, (LENGTH, 9, 40, 23))


@pytest.mark.parametrize("case", slow_but(OWN))
def test_greedy_tokens_agree(case: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, *OWN[case])
    assert_greedy_agrees(tmp_path, model)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("case", transformers_cases())
def test_logits_agree_through_transformers(
    case: str, batch_invariant: bool, tmp_path: Path
) -> None:
    model = write_checkpoint(tmp_path, *BY_TRANSFORMERS[case])
    assert not ModelShape.from_config(tmp_path).is_own
    runner = open_runner(tmp_path, batch_invariant=batch_invariant)
    assert_all_cuts_agree(runner, model, case, (LENGTH, 9, 40, 23))


@pytest.mark.parametrize("case", transformers_cases())
def test_greedy_tokens_agree_through_transformers(case: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, *BY_TRANSFORMERS[case])
    assert_greedy_agrees(tmp_path, model)


def test_longrope_long(tmp_path: Path) -> None:
    """Sequences longer than the original context: transformers takes the long factors for all."""
    model = write_checkpoint(tmp_path, "Phi3", PHI3)
    runner = open_runner(tmp_path)
    assert_all_cuts_agree(runner, model, "long", (LENGTH, 41, 52))


def test_longrope_short(tmp_path: Path) -> None:
    """An engine that stays within the original context takes the short factors."""
    model = write_checkpoint(tmp_path, "Phi3", PHI3)
    runner = open_runner(tmp_path, max_model_len=40)
    assert_all_cuts_agree(runner, model, "short", (40, 9, 23))


def test_dynamic_rope(tmp_path: Path) -> None:
    """Each position as in transformers' decoding, token by token, past the original context."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    changes = {"rope_parameters": rope, "max_position_embeddings": 40}
    model = write_checkpoint(tmp_path, "Llama", changes)
    assert ModelShape.from_config(tmp_path).max_position_embeddings == 80
    draw = random.Random(2)
    ids = [draw.randrange(VOCAB) for _ in range(LENGTH)]
    rows, cache = [], DynamicCache()
    with torch.no_grad():
        for at in range(LENGTH):
            # The cache by its place: its name is another one since transformers 5.24.
            out = model(torch.tensor([ids[at : at + 1]]), None, None, cache, use_cache=True)
            rows.append(out.logits[0])
    want, runner = torch.cat(rows), open_runner(tmp_path)
    pages = tables(draw, [LENGTH], together=False)[0]
    assert_close(forward(runner, [(ids, 0, LENGTH, pages)]), want)
    assert_close(in_pieces(runner, ids, pages, cut(draw, LENGTH, [1, 2, 9])), want)
    assert_greedy_agrees(tmp_path, model)


def test_old_names_of_rope_fields(tmp_path: Path) -> None:
    """rope_scaling beside rope_theta, `type` for `rope_type`, as in most files on the hub."""
    rope = {**OWN["llama llama3 rope"][1]["rope_parameters"]}
    model = write_checkpoint(tmp_path, "Llama", {"rope_parameters": rope})
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    path.write_text(json.dumps({**config, "rope_scaling": scaling}))
    assert_all_cuts_agree(open_runner(tmp_path), model, "old", (LENGTH, 9))


def test_sharded_checkpoint(tmp_path: Path) -> None:
    kind, changes = OWN["llama plain heads untied"]
    model = write_checkpoint(tmp_path, kind, changes, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ids = list(range(30))
    runner = open_runner(tmp_path)
    pages = tables(random.Random(0), [30], together=True)[0]
    assert_close(forward(runner, [(ids, 0, 30, pages)]), expected_logits(model, ids))


def test_parameter_count(tmp_path: Path) -> None:
    for name, (kind, changes) in OWN.items():
        folder = tmp_path / name.replace(" ", "-")
        model = write_checkpoint(folder, kind, changes)
        shape = ModelShape.from_config(folder)
        count = sum(p.numel() for p in model.parameters())
        assert shape.parameter_count() == count, name
        assert shape.weight_bytes(2) == 2 * count
        heads = json.loads((folder / "config.json").read_text())["num_key_value_heads"]
        per_token = shape.kv_bytes_per_token(4)
        assert per_token == shape.num_hidden_layers * 2 * heads * shape.head_dim * 4
