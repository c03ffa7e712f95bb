"""Whole decoders by Triton's kernels alone, in the interpreter: logits are those of transformers'
own classes, and a prompt has the bits of its chunks, of a verification, of one token at a time. And
drafts weighed against PyTorch's rules."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from foretoken.kernels.gpu_kernels import GpuKernels
from foretoken.models.decoder import Decoder
from foretoken.runtime.runner import Runner
from tests.golden.families import MIXTURES, OWN, VOCAB, expected_logits, write_checkpoint
from tests.golden.scenario import NUM_PAGES, PAGE, forward, in_pieces, open_runner
from tests.gpu_twins import forget
from tests.unit.kernels.triton_harness import GPU, runs, tensor_cores, triton_kernels
from tests.unit.test_native_rejection import chains_are_decided

pytestmark = [
    runs,
    pytest.mark.skipif(GPU, reason="benchmarks/gpu_check.py runs whole models on a GPU"),
    pytest.mark.usefixtures("tensor_cores"),
]
__all__ = ["tensor_cores"]
BLOCK, SPLIT, LENGTH = 16, 32, 46
PIECES = [24, 16, 4, 1, 1]
"""Two chunks of a prompt, a verification of three drafts, two tokens one by one."""
CASES = [
    "llama biases",
    "qwen3 tied",
    "phi3 partial rotary",
    "gemma3 two kinds of positions",
    "gpt_oss",
    "glm4_moe",
]


@contextmanager
def interpreted() -> Iterator[GpuKernels]:
    """Inside, the CPU is served by the kernels, in blocks and splits that a short text fills."""
    kernels = triton_kernels(split=SPLIT, tile=16)
    kernels.few_rows, kernels.types = 16, frozenset((torch.float32,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foretoken.kernels.triton.launches.KEY_BLOCK", BLOCK)
        patch.setenv("FORETOKEN_KERNELS", "twins")
        patch.setattr("foretoken.backend.TwinKernels", lambda: kernels)
        forget()
        try:
            yield kernels
        finally:
            forget()


@pytest.mark.parametrize("case", CASES)
def test_logits_and_bits(case: str, tmp_path: Path) -> None:
    reference = write_checkpoint(tmp_path, *{**OWN, **MIXTURES}[case])
    ids = [place * place * 7 % VOCAB for place in range(LENGTH)]
    pages = [(5 * page + 3) % NUM_PAGES for page in range(-(-LENGTH // PAGE))]
    with interpreted() as kernels:
        runner = open_runner(tmp_path, batch_invariant=True)
        assert isinstance(runner.model, Decoder) and runner.model.captured is not None
        whole = forward(runner, [(ids, 0, LENGTH, pages)])
        assert kernels.launched["combine"] > 0 and kernels.launched["linear_long"] > 0
        torch.testing.assert_close(whole, expected_logits(reference, ids), rtol=0, atol=1e-4)
        runner = fresh(runner)
        assert torch.equal(in_pieces(runner, ids, pages, PIECES), whole)
    assert kernels.launched["linear_splits"] > 0


def fresh(runner: Runner) -> Runner:
    """With nothing in its store that it could have left there."""
    for layer in runner.store.layers:
        layer.fill_(7)
    return runner


@pytest.mark.parametrize("name", ["standard", "block"])
def test_chains_are_decided_as_by_the_rules(name: str) -> None:
    chains_are_decided(name, 5, triton_kernels())
