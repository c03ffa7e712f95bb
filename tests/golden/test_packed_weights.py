"""A start from kept packed weights computes the bits of the start that left them.

The guarded bugs: a tensor read from another's place, a bias or norm forgotten, parts of different
kinds joined, a scheme of the wrong head.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from foretoken.kernels.library import find_library
from foretoken.models import LoadOptions, load
from foretoken.runtime.runner import Runner
from tests.golden import quantized as q
from tests.golden.families import MIXTURES, OWN, write_checkpoint
from tests.golden.scenario import NUM_PAGES, PAGE, forward
from tests.golden.test_ready_made import CASES
from tests.marks import slow_but
from tests.packed import keep_packed

pytestmark = pytest.mark.skipif(find_library() is None, reason="packed for kernels only")

IDS = [1 + 7 * at % 60 for at in range(40)]


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return keep_packed(tmp_path, monkeypatch)


def logits(folder: Path, dtype: torch.dtype, quantization: str | None = None) -> Tensor:
    options = LoadOptions(
        dtype=dtype,
        device=torch.device("cpu"),
        batch_invariant=True,
        page_size=PAGE,
        quantization=quantization,
    )
    runner = Runner.load(folder, options, num_pages=NUM_PAGES)
    return forward(runner, [(IDS, 0, 40, list(range(20)))])


def check(
    folder: Path,
    kept: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    quantization: str | None = None,
) -> None:
    """The second load opens no checkpoint, and computes the same."""
    before = logits(folder, dtype, quantization)
    assert len(list(kept.glob("*.packed"))) == 1
    assert not list(kept.glob("*.tmp"))
    monkeypatch.setattr(load, "Checkpoint", None)
    assert torch.equal(logits(folder, dtype, quantization), before)


@pytest.mark.parametrize("case", slow_but(OWN, *list(OWN)[::3]))
def test_families(case: str, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "model", *OWN[case])
    dtype = (torch.float32, torch.bfloat16)[len(case) % 2]
    check(tmp_path / "model", kept, monkeypatch, dtype)


@pytest.mark.parametrize("case", slow_but(MIXTURES, "glm4_moe", "gpt_oss"))
def test_mixtures(case: str, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers of float32 beside bfloat16, biases for a choice, sinks; experts in int8."""
    write_checkpoint(tmp_path / "model", *MIXTURES[case])
    rounded = None if case == "gpt_oss" else "int8"
    check(tmp_path / "model", kept, monkeypatch, torch.bfloat16, rounded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded(
    quantization: str,
    dtype: torch.dtype,
    kept: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_checkpoint(tmp_path / "model", "Llama", {"hidden_size": 64, "attention_bias": True})
    check(tmp_path / "model", kept, monkeypatch, dtype, quantization)


@pytest.mark.parametrize("case", slow_but(CASES, *list(CASES)[::3]))
def test_ready_made(case: str, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, writer, more = CASES[case]
    folder, _ = q.write_both(tmp_path, config, writer, **more)
    check(folder, kept, monkeypatch, torch.float32)
