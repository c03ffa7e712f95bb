"""Embedding tables of GGUF files: kept in the file's bits, and the bytes of a head that is tied.

The guarded bugs: rows that differ from those of the table multiplied out, a table that is there
twice, compiled layers or rollouts that read another token's row, a scale that is forgotten.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from foretoken.kernels.library import find_library
from foretoken.models import load
from foretoken.models.decoder import Decoder
from foretoken.models.rollout import plan_best
from foretoken.models.tensors import SpanLayout
from foretoken.runtime.runner import Runner
from tests.golden.gguf_files import write_gguf
from tests.golden.scenario import forward, open_runner
from tests.golden.test_gguf import GEMMA, MIXED, Kind, gemma3, own, write_both
from tests.packed import keep_packed

pytestmark = pytest.mark.skipif(find_library() is None, reason="multiplied out without kernels")

KINDS: dict[str, dict[str, Kind]] = {
    "Q8_0": {"": Kind.Q8_0},
    "Q4_0": {"": Kind.Q4_0},
    "Q5_1": {"": Kind.Q5_1},
    "Q4_K_M": {**MIXED, "": Kind.Q4_K},
}
TYPES = [torch.float32, torch.bfloat16]
IDS = [1 + 7 * at % 60 for at in range(30)]


def decoder_of(runner: Runner) -> Decoder:
    assert isinstance(runner.model, Decoder)
    return runner.model


def write(folder: Path, kinds: str, *, tied: bool) -> tuple[Path, Path]:
    return write_both(folder, KINDS[kinds], tie_word_embeddings=tied)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kinds", KINDS)
def test_the_table(tmp_path: Path, kinds: str, dtype: torch.dtype, tied: bool) -> None:
    path, floats = write(tmp_path, kinds, tied=tied)
    model = decoder_of(open_runner(path, dtype=dtype))
    assert model.embedding.is_packed
    assert (model.embedding._table is model.top) == tied
    wanted = load_file(floats / "model.safetensors")["model.embed_tokens.weight"].to(dtype)
    assert torch.equal(model.embedding.floats(), wanted)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
def test_part_by_part(tmp_path: Path, dtype: torch.dtype, tied: bool) -> None:
    """Layers in one call and part by part, over the packed table and over floats: the same bits."""
    path, _ = write(tmp_path, "Q4_K_M", tied=tied)
    runner = open_runner(path, dtype=dtype, batch_invariant=True)
    spans = [(IDS, 0, len(IDS), list(range(8)))]
    found, model = forward(runner, spans), decoder_of(runner)
    assert model.compiled is not None and model.rollout is not None
    floats = type(model.embedding)(model.embedding.floats())
    for changed in (
        replace(model, compiled=None),
        replace(model, embedding=floats),
        replace(model, embedding=floats, compiled=None),
    ):
        runner.model = changed
        assert torch.equal(forward(runner, spans), found)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kinds", ["Q8_0", "Q4_K_M"])
@pytest.mark.parametrize("dtype", TYPES)
def test_rollouts(tmp_path: Path, dtype: torch.dtype, kinds: str, tied: bool) -> None:
    """Drafting in one call reads the rows that drafting token by token reads."""
    path, _ = write(tmp_path, kinds, tied=tied)
    one, other = (open_runner(path, dtype=dtype, batch_invariant=True) for _ in range(2))
    pages = list(range(10))
    layout = SpanLayout(start=0, num_tokens=len(IDS), page_table=pages)
    found = one.roll_out([layout], [IDS], plan_best(1, 8))
    assert found is not None
    ids, layouts, fed = [], layout, IDS
    for _ in range(8):
        [token] = other.forward_last([layouts], [fed]).argmax(dim=-1).tolist()
        ids.append(token)
        start = layouts.start + layouts.num_tokens
        layouts, fed = SpanLayout(start=start, num_tokens=1, page_table=pages), [token]
    assert found.ids == [ids]
    for mine, theirs in zip(one.store.layers, other.store.layers, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kinds", KINDS)
def test_a_second_start(
    tmp_path: Path, kinds: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept has the table once."""
    kept = keep_packed(tmp_path, monkeypatch)
    path, _ = write(tmp_path, kinds, tied=tied)
    spans = [(IDS, 0, len(IDS), list(range(8)))]
    found = forward(open_runner(path), spans)
    assert len(list(kept.glob("*.packed"))) == 1
    monkeypatch.setattr(load, "Checkpoint", None)
    runner = open_runner(path)
    assert torch.equal(forward(runner, spans), found)
    model = decoder_of(runner)
    assert model.embedding.is_packed and (model.embedding._table is model.top) == tied


@pytest.mark.parametrize("dtype", TYPES)
def test_gemmas_scale(tmp_path: Path, dtype: torch.dtype) -> None:
    """Rows are rounded to their type before they are multiplied, as transformers does."""
    own("gemma3 usual layers", **GEMMA, hidden_size=64)(tmp_path)
    path = write_gguf(tmp_path, "gemma3", gemma3, table=Kind.Q8_0)
    runner = open_runner(path, dtype=dtype, batch_invariant=True)
    spans = [(IDS, 0, len(IDS), list(range(8)))]
    found, model = forward(runner, spans), decoder_of(runner)
    assert model.embedding.is_packed and model.embedding_scale is not None
    runner.model = replace(model, embedding=type(model.embedding)(model.embedding.floats()))
    assert torch.equal(forward(runner, spans), found)
    runner.model = replace(model, embedding_scale=None)
    assert not torch.equal(forward(runner, spans), found)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.F32])
def test_a_table_of_floats(
    tmp_path: Path, kind: Kind, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is the head too it is there once, now and at the next start."""
    kept = keep_packed(tmp_path, monkeypatch)
    path, floats = write_both(tmp_path, {"": kind}, tie_word_embeddings=tied)
    runner, again = open_runner(path), open_runner(path)
    assert len(list(kept.glob("*.packed"))) == 1
    wanted = load_file(floats / "model.safetensors")["model.embed_tokens.weight"]
    spans = [(IDS, 0, len(IDS), list(range(8)))]
    for one in (runner, again):
        model = decoder_of(one)
        assert (model.embedding._table is model.top) == tied
        assert torch.equal(model.embedding.floats(), wanted.to(model.embedding.dtype))
    assert torch.equal(forward(again, spans), forward(runner, spans))


def test_what_has_no_kernel_is_multiplied_out(tmp_path: Path) -> None:
    """Rows of float16, which kernels do not compute."""
    path, _ = write_both(tmp_path, KINDS["Q8_0"], tie_word_embeddings=True)
    assert not decoder_of(open_runner(path, dtype=torch.float16)).embedding.is_packed
