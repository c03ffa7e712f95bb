"""Mixtures by a GPU's steps, with twins in the place of its kernels: transformers' logits, a row's
own bits, the same tokens with drafts, and what a step says that it read."""

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.kernels.gpu_kernels import ExpertPairs
from foretoken.layers.mixture import Mixture
from foretoken.models import LoadOptions
from foretoken.models.decoder import Decoder
from foretoken.models.gpu.mixture import GpuMixture, bind_mixture
from foretoken.models.tensors import SpanLayout, StepDraws
from foretoken.ops.drawing import BEST, pack_rows
from foretoken.ops.gpu.twin_kernels import TwinKernels
from foretoken.runtime.runner import Runner
from tests.golden.families import MIXTURES, VOCAB, expected_logits, write_checkpoint
from tests.golden.scenario import NUM_PAGES, PAGE, forward, in_pieces, open_runner
from tests.golden.test_mixtures import check_speculation
from tests.gpu_twins import asked, twins
from tests.marks import slow_but

LENGTH, PIECES = 46, [24, 16, 4, 1, 1]
"""Two chunks of a prompt, a verification of three drafts, two tokens one by one."""
CASES = (
    "qwen3_moe", "gpt_oss", "qwen2_moe", "olmoe", "mixtral", "qwen3_moe some plain layers",
    "glm4_moe norms, no groups", "minimax_m2", "glm4_moe", "dots1",
)  # fmt: skip


@pytest.fixture
def kernels() -> Iterator[TwinKernels]:
    with twins() as found:
        yield found


@pytest.mark.parametrize("case", slow_but(CASES, *CASES[:3]))
def test_logits_and_bits(case: str, kernels: TwinKernels, tmp_path: Path) -> None:
    """Rows alone, among others of their prompt, and beside other sequences."""
    reference = write_checkpoint(tmp_path, *MIXTURES[case])
    ids = [place * place * 7 % VOCAB for place in range(LENGTH)]
    pages = [(5 * page + 3) % NUM_PAGES for page in range(-(-LENGTH // PAGE))]
    runner = open_runner(tmp_path, batch_invariant=True)
    whole = forward(runner, [(ids, 0, LENGTH, pages)])
    assert kernels.launched["experts_down"] > 0
    torch.testing.assert_close(whole, expected_logits(reference, ids), rtol=0, atol=1e-4)
    assert torch.equal(in_pieces(runner, ids, pages, PIECES), whole)
    others = [(ids[at:], 0, 9, [(pages[-1] + 7 + at) % NUM_PAGES] * 3) for at in range(0, 30, 3)]
    together = forward(runner, [*others, (ids, LENGTH - 5, LENGTH, pages)])
    assert torch.equal(together[-5:], whole[-5:])


@pytest.mark.parametrize(
    "broken", ["choose_experts", "experts_gate_up", "experts_down", "linear_long"]
)
def test_experts_that_give_other_bits_in_other_company_are_found(
    broken: str,
    kernels: TwinKernels,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A kernel whose results of many rows differ in their last bit: layers run one by one where
    bits are promised, which is said; elsewhere steps are recorded."""
    write_checkpoint(tmp_path, *MIXTURES["qwen2_moe"])
    sound = getattr(TwinKernels, broken)

    def other(self: TwinKernels, *given: Any) -> None:
        sound(self, *given)
        pairs = [one for one in given if isinstance(one, ExpertPairs)]
        results = pairs[0].weights_TS if broken == "choose_experts" else given[-1]
        if len(pairs[0].weights_TS if pairs else given[0]) > 16:
            results.mul_(1 + 2**-23)

    monkeypatch.setattr(TwinKernels, broken, other)
    monkeypatch.setattr(logging.getLogger("foretoken"), "propagate", True)
    for promised in (True, False):
        caplog.clear()
        model = open_runner(tmp_path, batch_invariant=promised).model
        assert isinstance(model, Decoder) and (model.captured is None) is promised
        assert ("probe of its experts failed" in caplog.text) is promised


@pytest.mark.parametrize("others", [True, False])
def test_ranks_agree_on_what_the_probe_found(
    others: bool, kernels: TwinKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one would wait for what another does not send."""

    class Ranks:
        size = 2

        def gather_into(self, x: Tensor, found_RX: Tensor) -> None:
            found_RX[0] = x
            found_RX[1] = others

    write_checkpoint(tmp_path, *MIXTURES["qwen2_moe"])
    model = open_runner(tmp_path, batch_invariant=True).model
    assert isinstance(model, Decoder) and isinstance(model.layers[0].mlp, Mixture)
    assert model.shape.experts is not None
    bound = bind_mixture(model.layers[0].mlp, model.shape.experts)
    assert bound is not None
    monkeypatch.setattr(GpuMixture, "give", lambda self, kernels, x_TD, *_: x_TD)
    shared: Any = replace(bound, ranks=Ranks())  # type: ignore[arg-type]
    found = shared.why_bits_differ(kernels, model.embedding.floats())
    assert (found is not None) is others


def test_experts_in_integers(tmp_path: Path) -> None:
    """The numbers of the C kernels; rows alone and together."""
    kind, changes = MIXTURES["gpt_oss"]
    write_checkpoint(tmp_path, kind, {**changes, "hidden_size": 128, "intermediate_size": 64})
    options = LoadOptions(
        dtype=torch.float32, device=torch.device("cpu"), batch_invariant=True, page_size=PAGE,
        quantization="int8",
    )  # fmt: skip
    ids, pages, found = [7 * at % VOCAB for at in range(30)], list(range(8)), []
    for context in (nullcontext(), twins()):
        with context:
            runner = Runner.load(tmp_path, options, num_pages=NUM_PAGES)
            found.append(forward(runner, [(ids, 0, 30, pages)]))
            assert torch.equal(in_pieces(runner, ids, pages, [19, 1, 6, 4]), found[-1])
    assert (found[0] - found[1]).abs().max() < 0.01 * found[0].std()


def test_a_step_reads_once_and_says_what(tmp_path: Path) -> None:
    """A recorded step of three sequences, padded to four: padding has no expert. The number is
    that of the C kernels."""
    write_checkpoint(tmp_path, *MIXTURES["qwen3_moe"])
    prompts = [[7 * at % VOCAB for at in range(start, start + 8)] for start in (0, 3, 40)]
    tables = [[at, at + 1, at + 2] for at in (1, 5, 9)]
    layouts = [SpanLayout(start=8, num_tokens=1, page_table=pages) for pages in tables]

    def prompted() -> Runner:
        runner = open_runner(tmp_path, batch_invariant=True)
        both = zip(prompts, tables, strict=True)
        forward(runner, [(ids, 0, 8, pages) for ids, pages in both])
        return runner

    wanted = prompted().forward(layouts, [[5]] * 3, range(3)).experts_read
    with twins() as kernels, torch.inference_mode():
        runner = prompted()
        for _ in range(2):
            kernels.launched.clear()
            draws = StepDraws(pack_rows([0] * 3, BEST))
            with asked() as counts:
                found = runner.model.step(layouts, [[5]] * 3, range(3), runner.store, None, draws)
                assert found is not None and found.arrived().experts_read == wanted > 3.0
        assert counts == {"copy_": 2, "read by the host": 1}
        assert kernels.launched.total() <= 12 * runner.model.shape.num_hidden_layers + 6


def test_speculation_changes_nothing(kernels: TwinKernels, tmp_path: Path) -> None:
    """Look-up, and a draft model that is a mixture too."""
    check_speculation("qwen3_moe", tmp_path, tokens=8)
    assert kernels.launched["experts_down"] > 0
