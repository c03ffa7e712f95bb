"""The compiled rejection rules and draws decide what PyTorch's operations decide, or leave it to
them."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.backend import GpuSteps, backend_for
from foretoken.kernels.gpu_kernels import GpuKernels
from foretoken.ops.drawing import BEST, UNDECIDED, Drawing, DrawKernel, pack_rows
from foretoken.ops.gpu.twin_kernels import TwinKernels
from foretoken.ops.logits import Filters, keep_filtered, scale
from foretoken.ops.native_rejection import RejectKernel
from foretoken.ops.noise import KeyedNoise, Stream, pack_keys, request_key, row_key
from foretoken.ops.sampling import draw, draw_filtered
from foretoken.runtime.draft_tree import Tree, tree_of
from foretoken.runtime.rows import Rows
from foretoken.runtime.rules.base import Check, TreeCheck
from foretoken.runtime.rules.block import BlockRule
from foretoken.runtime.rules.native_rules import weigh
from foretoken.runtime.rules.standard import StandardRule
from foretoken.runtime.rules.trees import TreeRejection
from foretoken.runtime.sampler import Sampler
from foretoken.runtime.sequence import Sequence
from foretoken.types import Request, SamplingParams
from tests.marks import needs_kernels
from tests.unit.filters import FILTERS
from tests.unit.proposing import make_sequence

CPU = torch.device("cpu")
pytestmark = needs_kernels
PARAMS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.9},
    {"top_k": 20},
    {"min_p": 0.02, "top_k": 40, "top_p": 0.8},
    {"logit_bias": {3: 2.0, 5: -100.0}, "repetition_penalty": 1.3},
]


def kernel() -> RejectKernel:
    found = backend_for(CPU).reject
    assert isinstance(found, RejectKernel)
    return found


def some_sequence(rng: random.Random, vocab: int, number: int) -> Sequence:
    params = {"temperature": rng.choice([0.3, 0.8, 1.0, 2.0]), **rng.choice(PARAMS)}
    prompt = [rng.randrange(vocab) for _ in range(rng.randrange(1, 9))]
    return make_sequence(prompt, request_id=f"r{number}", seed=rng.getrandbits(64), params=params)


@pytest.mark.parametrize("how", FILTERS)
def test_distributions_are_those_of_the_twin(how: tuple[float, int, float] | None) -> None:
    rng, generator = random.Random(5), torch.Generator().manual_seed(5)
    same = rows = 0
    for trial in range(40):
        vocab = rng.choice([1, 3, 17, 613, 3000])
        logits_RV = torch.randn(4, vocab, generator=generator) * rng.choice([0.1, 1, 3, 10])
        if trial % 3 == 0:
            logits_RV = (logits_RV * 2).round() / 2
        if trial % 4 == 0 and vocab > 3:
            logits_RV[:, 1::3] = -torch.inf
        temperature = rng.choice([0.2, 0.8, 1.0, 3.0])
        found_RV = kernel().distributions(
            logits_RV, pack_rows((0,) * 4, Drawing.of(temperature, how))
        )
        expected_RV = scale(logits_RV, [temperature] * 4)
        if how is not None:
            expected_RV = keep_filtered(expected_RV, Filters.of([how] * 4, vocab, CPU))
        expected_RV = expected_RV.softmax(dim=-1)
        assert found_RV is not None
        assert torch.allclose(found_RV.sum(dim=-1), torch.ones(4), atol=1e-5)
        kept_RV = found_RV > 1e-30
        for row in range(4):
            rows += 1
            # Where rounding decides which id is the last within top_p, the sets may differ by it.
            if torch.equal(kept_RV[row], expected_RV[row] > 1e-30):
                same += 1
                assert torch.allclose(found_RV[row], expected_RV[row], rtol=1e-4, atol=1e-7)
            else:
                assert how is not None and how[2] < 1
    assert same >= 0.9 * rows


def test_nothing_to_weigh_is_said() -> None:
    logits_RV = torch.full((1, 8), -torch.inf)
    assert kernel().distributions(logits_RV, pack_rows((0,), Drawing.of(1.0, None))) is None


class Case:
    """Random drafts of a few requests, drawn from distributions near the target's."""

    def __init__(self, seed: int, trees: bool) -> None:
        self.rng, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        rng = self.rng
        self.vocab = rng.choice([7, 50, 700])
        self.sampler = Sampler(self.vocab)
        self.one_hot = rng.random() < 0.3
        self.chains: list[Check] = []
        self.trees: list[TreeCheck] = []
        self.logits: list[Tensor] = []
        self.probs: list[Tensor] = []
        row = drafted_row = 0
        for number in range(rng.randrange(1, 5)):
            sequence = some_sequence(rng, self.vocab, number)
            count = rng.randrange(1, 7)
            places = {"index": number, "row": row, "drafted_row": drafted_row}
            row, drafted_row = row + count + 1, drafted_row + count
            if trees:
                parents = tuple(rng.randrange(-1, node) for node in range(count))
                self._add_tree(sequence, tree_of(parents), places)
            else:
                self._add_chain(sequence, count, places)
        self.logits_PV = torch.cat(self.logits)
        self.probs_KV = None if self.one_hot else torch.cat(self.probs)

    def _row(self) -> Tensor:
        return torch.randn(self.vocab, generator=self.generator) * self.rng.choice([0.5, 2, 5])

    def _drafted(self, logits_V: Tensor, rows: Rows, banned: tuple[int, ...] = ()) -> int:
        """Draw a draft from something like the target, and remember what it was drawn from."""
        near_V = logits_V + 0.7 * torch.randn(self.vocab, generator=self.generator)
        (q_V,) = self.sampler.distributions(near_V[None], [rows])
        q_V[list(banned)] = 0
        if not q_V.sum() > 0:
            q_V = torch.ones(self.vocab)
            q_V[list(banned)] = 0
        q_V = q_V / q_V.sum()
        self.probs.append(q_V[None])
        if self.one_hot:
            return int(q_V.argmax())
        return int(torch.multinomial(q_V, 1, generator=self.generator))

    def _add_chain(self, sequence: Sequence, count: int, places: dict[str, int]) -> None:
        drafts: tuple[int, ...] = ()
        for _ in range(count):
            logits_V = self._row()
            self.logits.append(logits_V[None])
            rows = Rows(sequence=sequence, drafts=drafts, first=len(drafts))
            token = self._drafted(logits_V, rows)
            drafts = (*drafts, -1 if self.rng.random() < 0.05 else token)
        self.logits.append(self._row()[None])
        rows = Rows(sequence=sequence, drafts=drafts)
        self.chains.append(Check(rows=rows, num_rows=count + 1, **places))

    def _add_tree(self, sequence: Sequence, tree: Tree, places: dict[str, int]) -> None:
        ids: list[int] = []
        logits = [self._row() for _ in range(len(tree.parents) + 1)]
        for node, parent in enumerate(tree.parents):
            path = tuple(ids[i] for i in tree.paths[node][:-1])
            elder = tuple(ids[i] for i in range(node) if tree.parents[i] == parent)
            rows = Rows(sequence=sequence, drafts=path, first=len(path))
            ids.append(self._drafted(logits[parent + 1], rows, elder))
        self.logits.extend(logits_V[None] for logits_V in logits)
        runs: list[Rows] = []
        for run in tree.runs:
            path = tree.paths[run[-1]] if run else ()
            drafts = tuple(ids[node] for node in path)
            first = 0 if not runs else len(drafts) - len(run) + 1
            runs.append(Rows(sequence=sequence, drafts=drafts, first=first))
        self.trees.append(
            TreeCheck(runs=tuple(runs), ids=tuple(ids), tree=tree, num_rows=len(ids) + 1, **places)
        )


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("name", ["standard", "block"])
def test_chains_are_decided_as_by_the_twin(name: str, device: str) -> None:
    chains_are_decided(name, 150, None if device == "cpu" else TwinKernels())


def chains_are_decided(name: str, seeds: int, kernels: GpuKernels | None) -> None:
    undecided = checks = kept = 0
    for seed in range(seeds):
        case = Case(seed, trees=False)
        if kernels is not None:
            case.sampler.backend = GpuSteps(kernels, CPU)
        rule: StandardRule | BlockRule = StandardRule(case.sampler)
        if name == "block":
            rule = BlockRule(case.sampler, name)
        given = (case.logits_PV, case.chains, case.probs_KV)
        expected = rule._twin(*given)
        found = weigh(case.sampler, *given, block=name == "block")
        for mine, twin in zip(found, expected, strict=True):
            checks += 1
            if mine is None:
                undecided += 1
            else:
                assert mine.new_ids == twin, seed
                kept += len(twin) - 1
        assert rule.decide(*given) == expected
    assert undecided <= 0.02 * checks
    assert kept > 0.3 * checks


@pytest.mark.slow
@pytest.mark.parametrize("name", ["standard", "traversal"])
def test_trees_are_decided_as_by_the_twin(name: str) -> None:
    undecided = checks = kept = 0
    for seed in range(150):
        case = Case(1000 + seed, trees=True)
        rule = TreeRejection(case.sampler, name)
        given = (case.logits_PV, case.trees, case.probs_KV)
        expected = rule._twin(*given)
        found = weigh(case.sampler, *given, block=name != "standard")
        for mine, twin in zip(found, expected, strict=True):
            checks += 1
            if mine is None:
                undecided += 1
            else:
                assert mine == twin, seed
                kept += len(twin.path)
        assert rule.decide(*given) == expected
    assert undecided < 0.03 * checks
    assert kept > 0.3 * checks


def test_a_row_without_any_id_is_left_to_the_twin() -> None:
    case = Case(3, trees=False)
    case.logits_PV[:] = -torch.inf
    found = weigh(case.sampler, case.logits_PV, case.chains, case.probs_KV, block=False)
    assert all(one is None for one in found)
    assert UNDECIDED == -1


def draw_kernel() -> DrawKernel:
    found = backend_for(CPU).draw
    assert isinstance(found, DrawKernel)
    return found


def twin(
    logits_RV: Tensor, keys: list[int], temperature: float, how: tuple[float, int, float] | None
) -> list[int]:
    rows, vocab = logits_RV.shape
    noise, scaled_RV = KeyedNoise(vocab, CPU), scale(logits_RV, [temperature] * rows)
    if how is None:
        found: list[int] = draw(scaled_RV, pack_keys(keys, CPU), noise).tolist()
    else:
        filters = Filters.of([how] * rows, vocab, CPU)
        found = draw_filtered(scaled_RV, filters, pack_keys(keys, CPU), noise).tolist()
    return found


@pytest.mark.parametrize("how", FILTERS)
def test_what_is_decided_is_what_the_twin_decides(how: tuple[float, int, float] | None) -> None:
    rng = random.Random(7)
    generator = torch.Generator().manual_seed(7)
    undecided = rows = 0
    for trial in range(60):
        vocab = rng.choice([1, 3, 17, 613, 3000])
        logits_RV = torch.randn(5, vocab, generator=generator) * rng.choice([0.1, 1, 3, 10])
        if trial % 4 == 1:
            logits_RV[:, torch.rand(vocab, generator=generator) < 0.5] = float("-inf")
        if trial % 4 == 2:
            logits_RV = (2 * logits_RV).round() / 2
        keys = [rng.getrandbits(64) for _ in range(5)]
        temperature = rng.choice([0.05, 0.7, 0.8, 1.0, 1.7, 1e-300, 1e300])
        found = draw_kernel()(logits_RV, pack_rows(keys, Drawing.of(temperature, how)))
        expected = twin(logits_RV, keys, temperature, how)
        left = [i for i, token in enumerate(found) if token == UNDECIDED]
        undecided, rows = undecided + len(left) * (how is None or how[1] < 1024), rows + 5
        assert [e for i, e in enumerate(expected) if i not in left] == [
            token for token in found if token != UNDECIDED
        ]
        assert draw_kernel()(logits_RV, pack_rows(keys, BEST)) == logits_RV.argmax(dim=-1).tolist()
    assert undecided < rows / 10, (undecided, rows)


def test_what_cannot_be_told_is_left_to_the_twin() -> None:
    """Nothing allowed, an infinite logit, a vocabulary of equal scores, a top_k beyond the room."""
    keys = [row_key(request_key(1, 0), at, Stream.TARGET) for at in range(1)]
    rows = pack_rows(keys, Drawing.of(1.0, None))
    assert draw_kernel()(torch.full((1, 40), float("-inf")), rows) == [UNDECIDED]
    assert draw_kernel()(torch.tensor([[0.0, float("inf"), 1.0]]), rows) == [UNDECIDED]
    wide = pack_rows(keys, Drawing.of(1.0, (0.0, 1025, 1.0)))
    assert draw_kernel()(torch.zeros(1, 3000), wide) == [UNDECIDED]


def sequence(params: SamplingParams, name: str) -> Sequence:
    request = Request(
        request_id=name, prompt_token_ids=(1, 2), params=params, seed=len(name), max_tokens=9
    )
    return Sequence(request=request, token_ids=[1, 2], num_prompt=2)


def test_a_sampler_without_the_kernel_chooses_the_same() -> None:
    """Every kind of request in one call, undecided rows among them."""
    several: list[SamplingParams] = [
        SamplingParams(temperature=0.8, seed=3),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, top_p=0.9, top_k=7),
        SamplingParams(temperature=1e-9, seed=4),
    ]
    one, other = Sampler(97), Sampler(97)
    other._kernel = None
    generator = torch.Generator().manual_seed(3)
    for trial in range(20):
        rows = [
            Rows(sequence=sequence(params, f"{trial} {i}"), drafts=(4, 5), first=i % 2)
            for i, params in enumerate(several)
        ]
        count = sum(group.num_rows for group in rows)
        logits_RV = torch.randn(count, 97, generator=generator)
        logits_RV[0, :] = float("-inf") if trial % 2 else 0.0
        assert one.choose(logits_RV, rows).tolist() == other.choose(logits_RV, rows).tolist()
