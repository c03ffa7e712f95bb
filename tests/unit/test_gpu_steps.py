"""What a step on a GPU asks of PyTorch and of the device: launches, copies, waiting, memory.

Steps are those of a GPU but for the kernels, which are PyTorch's twins; what is asked inside of
them does not count.
"""

from collections.abc import Iterator

import pytest
import torch

from foretoken.models import LoadOptions
from foretoken.models.rollout import plan_best
from foretoken.models.tensors import SpanLayout, StepDraws
from foretoken.ops.attention.base import Geometry, SpanWindow
from foretoken.ops.attention.gpu import GpuAttention
from foretoken.ops.drawing import BEST, Drawing, pack_rows
from foretoken.ops.gpu.twin_kernels import TwinKernels
from foretoken.runtime.rules.block import BlockRule
from foretoken.runtime.rules.standard import StandardRule
from foretoken.runtime.runner import Runner
from foretoken.testing import write_tiny_llama
from tests.gpu_twins import asked, twins
from tests.unit.test_native_rejection import Case

LAYERS = 3


@pytest.fixture(scope="module")
def kernels() -> Iterator[TwinKernels]:
    with twins() as found:
        yield found


@pytest.fixture(scope="module")
def runner(kernels: TwinKernels, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    folder = write_tiny_llama(tmp_path_factory.mktemp("llama"), num_hidden_layers=LAYERS)
    options = LoadOptions(
        dtype=torch.float32, device=torch.device("cpu"), batch_invariant=True, page_size=16
    )
    return Runner.load(folder, options, num_pages=200)


def _layouts(batch: int, start: int, rows: int) -> list[SpanLayout]:
    pages = [list(range(10 * i, 10 * i + 10)) for i in range(batch)]
    return [SpanLayout(start=start, num_tokens=rows, page_table=table) for table in pages]


@pytest.mark.parametrize("filters", [None, (0.02, 40, 0.9)])
@pytest.mark.parametrize("start", [20, 120])
@pytest.mark.parametrize(
    ("batch", "drafts", "follows"),
    [(1, 0, False), (1, 5, False), (8, 0, False), (8, 3, False), (8, 0, True)],
)
def test_a_step_is_nine_launches_a_layer_a_copy_in_and_a_copy_out(
    runner: Runner,
    kernels: TwinKernels,
    batch: int,
    drafts: int,
    follows: bool,
    start: int,
    filters: tuple[float, int, float] | None,
) -> None:
    """And nothing else: no memory is asked for, and the host waits once, at the end. One that is
    begun before the tokens of the last are read takes them from there."""
    rows = drafts + 1
    layouts, tokens = _layouts(batch, start, rows), [[3] * rows] * batch
    how = pack_rows(range(batch * rows), Drawing.of(0.8, filters))

    def step(follows: bool = follows) -> None:
        draws = StepDraws(how, follows)
        output = runner.model.step(layouts, tokens, range(batch * rows), runner.store, None, draws)
        assert output is not None
        assert len(output.arrived().chosen_R or ()) == batch * rows

    with asked() as found, torch.inference_mode():
        step(False)  # It is recorded here.
        found.clear()
        kernels.launched.clear()
        step()
    assert found == {"copy_": 2, "read by the host": 1}
    # A row that sees one split alone needs nothing combined.
    most = (9 if start + rows > kernels.split else 8) * LAYERS + 6 + (filters is not None) + follows
    assert kernels.launched.total() <= most


@pytest.mark.parametrize("steps", [1, 4, 9])
@pytest.mark.parametrize("batch", [1, 6])
def test_a_chain_waits_once_however_long_it_is(
    runner: Runner, kernels: TwinKernels, batch: int, steps: int
) -> None:
    """A draft model's drafts: all passes and draws in one recording."""
    layouts, tokens = _layouts(batch, 20, 2), [[3, 5]] * batch
    plan = plan_best(batch, steps)

    def chain() -> None:
        found = runner.model.roll_out(layouts, tokens, plan, runner.store)
        assert found is not None and [len(ids) for ids in found.ids] == [steps] * batch

    with asked() as found, torch.inference_mode():
        chain()
        found.clear()
        kernels.launched.clear()
        chain()
    assert found == {"copy_": 2, "read by the host": 1}
    assert kernels.launched.total() <= steps * (9 * LAYERS + 8)


@pytest.mark.parametrize("name", ["standard", "block"])
def test_weighing_drafts_waits_once(kernels: TwinKernels, name: str) -> None:
    """Filtered and drawn by other distributions; edits of logits aside."""
    case = Case(6, trees=False)
    rule: StandardRule | BlockRule = StandardRule(case.sampler)
    if name == "block":
        rule = BlockRule(case.sampler, name)
    case.sampler.edited = lambda logits_RV, rows: logits_RV  # type: ignore[method-assign]
    with asked() as found, torch.inference_mode():
        tokens = rule.decide(case.logits_PV, case.chains, case.probs_KV)
    assert found["read by the host"] == 1 and len(tokens) == len(case.chains) > 1


def test_padding_changes_nothing(runner: Runner) -> None:
    """Nine sequences run in a recording for sixteen rows: the logits of each alone, to the bit."""
    layouts, tokens = _layouts(9, 100, 3), [[5, i, 7] for i in range(9)]
    with torch.inference_mode():
        together = runner.forward(layouts, tokens, range(27)).logits_RV.clone()
        for i, (layout, ids) in enumerate(zip(layouts, tokens, strict=True)):
            alone = runner.forward([layout], [ids], range(3)).logits_RV
            assert torch.equal(alone, together[3 * i : 3 * i + 3]), i


@pytest.mark.parametrize("size", [8, 14, 16])
def test_a_twins_row_has_its_bits_wherever_it_stands(kernels: TwinKernels, size: int) -> None:
    """The library below adds the columns at the edge of a matrix otherwise; no head has one. What
    lies before all windows and behind the last row is no number, and counts for nothing."""
    made = Geometry(
        num_heads=2,
        num_kv_heads=2,
        head_dim=size,
        page_size=16,
        dtype=torch.float32,
        device=torch.device("cpu"),
        window=9,
    )
    draw, pages = torch.Generator().manual_seed(size), list(range(6))
    kv = torch.randn(96, 4, size, generator=draw)
    kv[:2] = kv[74:] = torch.nan
    q = torch.randn(64, 2, size, generator=draw)
    attention = GpuAttention(made, kernels)
    whole = attention.plan([SpanWindow(10, 64, pages)])(q, kv)
    for row in range(64):
        alone = attention.plan([SpanWindow(10 + row, 1, pages)])(q[row : row + 1], kv)
        assert torch.equal(alone[0], whole[row]), row


def test_a_prompt_in_one_pass_is_one_in_pieces(runner: Runner) -> None:
    """Long passes are launched, short ones recorded; the bits are those of one row at a time."""
    [layout], tokens = _layouts(1, 0, 150), [i % 90 for i in range(150)]
    with torch.inference_mode():
        whole = runner.forward([layout], [tokens], range(150)).logits_RV.clone()
        at = 0
        for count in (100, 1, 6, 1, 17, 25):
            piece = SpanLayout(start=at, num_tokens=count, page_table=layout.page_table)
            found = runner.forward([piece], [tokens[at : at + count]], range(count)).logits_RV
            assert torch.equal(found, whole[at : at + count]), at
            at += count


def test_what_is_drawn_in_the_step_is_what_is_drawn_after_it(runner: Runner) -> None:
    """Greedy and drawn rows, from the logits of the same step."""
    from foretoken.backend import backend_for

    layouts, tokens = _layouts(4, 30, 1), [[5], [6], [7], [8]]
    how = pack_rows(range(2), Drawing.of(0.9, (0.0, 0, 0.9))) + pack_rows((0, 0), BEST)
    draw = backend_for(torch.device("cpu")).draw
    assert draw is not None
    with torch.inference_mode():
        output = runner.model.step(layouts, tokens, range(4), runner.store, None, StepDraws(how))
        assert output is not None
        assert output.arrived().chosen_R == draw(output.logits_RV, how)
