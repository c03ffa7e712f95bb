"""Drafting in one call into C drafts what drafting token by token drafts, drawn ones included."""

from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.models import LoadOptions
from foretoken.models.rollout import plan_best
from foretoken.models.tensors import SpanLayout
from foretoken.proposers.base import Context
from foretoken.proposers.chain import ChainDraft, Confidence, draft_chain
from foretoken.proposers.heads.chain_head import ChainRunner, RecurrentSteps
from foretoken.proposers.kv_progress import DraftLimits, Stretches
from foretoken.proposers.kv_proposer import KVProposer
from foretoken.runtime.batch import Span
from foretoken.runtime.draft_sampler import DraftSampler
from foretoken.runtime.runner import Runner
from foretoken.runtime.sampler import Sampler
from foretoken.runtime.sequence import Sequence
from foretoken.testing import write_tiny_llama
from foretoken.types import Request, SamplingParams
from tests.golden.test_head_kernels import SHAPE, VOCAB, runners
from tests.marks import needs_kernels
from tests.unit.proposing import draft_model, make_sequence, make_span

PAGE, PAGES, STEPS, BEFORE = 8, 20, 12, 4
pytestmark = needs_kernels


def _runner(folder: Path, dtype: torch.dtype, quantization: str | None) -> Runner:
    options = LoadOptions(
        dtype=dtype, device=torch.device("cpu"), batch_invariant=True, page_size=PAGE,
        quantization=quantization,
    )  # fmt: skip
    return Runner.load(folder, options, num_pages=PAGES)


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tokens_and_the_kv_of_token_by_token(
    dtype: torch.dtype, quantization: str | None, tmp_path: Path
) -> None:
    """Three sequences of unequal length over scattered pages, across page borders: from their
    prompts on, and going on from there."""
    folder = write_tiny_llama(tmp_path, seed=4, vocab_size=613, num_hidden_layers=3)
    one, other = (_runner(folder, dtype, quantization) for _ in range(2))
    tables = [[7, 2, 9, 4], [0, 11, 5, 3], [13, 1, 6, 8]]
    prompts = [[5, 9, 13, 400, 2], [8], list(range(20, 37))]
    layouts = [
        SpanLayout(start=0, num_tokens=len(p), page_table=t)
        for p, t in zip(prompts, tables, strict=True)
    ]
    newest = [int(i) for i in other.forward_last(layouts, prompts).argmax(dim=-1)]

    def places(step: int) -> list[SpanLayout]:
        return [
            SpanLayout(start=len(p) + step, num_tokens=1, page_table=t)
            for p, t in zip(prompts, tables, strict=True)
        ]

    first = one.roll_out(layouts, prompts, plan_best(3, BEFORE))
    assert first is not None and [ids[0] for ids in first.ids] == newest
    last = [ids[-1:] for ids in first.ids]
    found = one.roll_out(places(BEFORE - 1), last, plan_best(3, STEPS - BEFORE))
    assert found is not None and [len(ids) for ids in found.ids] == [STEPS - BEFORE] * 3
    drafted = [[*a, *b] for a, b in zip(first.ids, found.ids, strict=True)]
    expected, fed = [[token] for token in newest], newest
    for step in range(STEPS - 1):
        fed = other.forward_last(places(step), [[i] for i in fed]).argmax(dim=-1).tolist()
        for ids, token in zip(expected, fed, strict=True):
            ids.append(token)
    assert drafted == expected
    assert len({tuple(ids) for ids in drafted}) == 3
    for mine, theirs in zip(one.store.layers, other.store.layers, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.slow
def test_what_has_no_kernel_drafts_token_by_token(tmp_path: Path) -> None:
    """Two kinds of attention, or float16: the caller is told to go on by itself."""
    folder = write_tiny_llama(tmp_path, seed=4)
    runner = _runner(folder, torch.float16, None)
    place = [SpanLayout(start=0, num_tokens=1, page_table=[0])]
    assert runner.roll_out(place, [[3]], plan_best(1, 2)) is None


class _OneByOne:
    def __init__(self, runner: Runner) -> None:
        self.forward_last, self.logits_at = runner.forward_last, runner.logits_at
        self.page_size = runner.page_size

    def roll_out(self, *_: object) -> None:
        """Token by token."""


def _proposer(
    runner: Runner | _OneByOne, vocab: int, rule: str, generations: list[int]
) -> KVProposer:
    limits = DraftLimits(max_model_len=64, max_num_batched_tokens=64)
    return draft_model(runner, DraftSampler(Sampler(vocab), rule), generations, limits)


PARAMS: dict[str, dict[str, Any]] = {
    "seeded": {"seed": 5},
    "unseeded": {},
    "filtered": {"seed": 6, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "filtered, unseeded": {"top_p": 0.8},
    "cold": {"seed": 7, "temperature": 0.01},
    "greedy": {"temperature": 0.0},
    "edited": {"seed": 8, "logit_bias": {3: 4.0}},
}


@pytest.mark.parametrize("rule", ["auto", "block", "typical"])
@pytest.mark.parametrize(
    "kinds",
    [[name] for name in PARAMS]
    + [
        ["seeded", "greedy", "filtered"],
        ["unseeded", "filtered, unseeded"],
        ["unseeded", "seeded", "greedy"],
        ["unseeded", "seeded", "edited"],
    ],
)
def test_any_request_is_drafted_as_token_by_token(
    kinds: list[str], rule: str, tmp_path: Path
) -> None:
    """Same tokens and same distributions for unequal budgets, whatever the parameters."""
    folder, vocab = write_tiny_llama(tmp_path, seed=4, vocab_size=613), 613
    runners = [_runner(folder, torch.bfloat16, None) for _ in range(2)]
    generations = [0] * PAGES
    rolling = _proposer(runners[0], vocab, rule, generations)
    one_by_one = _proposer(_OneByOne(runners[1]), vocab, rule, generations)
    for trial in range(6):
        generations[:] = [trial] * PAGES
        spans = []
        for row, kind in enumerate(kinds):
            params = SamplingParams(**{"temperature": 0.8, **PARAMS[kind]})
            prompt = list(range(3 + trial, 8 + 5 * trial + row))
            request = Request(
                request_id=f"{trial} {row}",
                prompt_token_ids=tuple(prompt),
                params=params,
                seed=100 * trial + row,
                max_tokens=9,
            )
            sequence = Sequence(request=request, token_ids=prompt, num_prompt=len(prompt))
            sequence.page_table = list(range(6 * row, 6 * row + 6))
            budget = 7 - 2 * row
            spans.append(
                Span(
                    sequence=sequence, start=len(prompt) - 1, length=1, draft_budget=budget,
                    samples=True,
                )
            )  # fmt: skip
        found, expected = (p.propose(Context(tuple(spans))) for p in (rolling, one_by_one))
        assert found.ids == expected.ids, (trial, kinds)
        assert [len(ids) for ids in found.ids] == [span.draft_budget for span in spans]
        assert (found.probs_KV is None) == (expected.probs_KV is None)
        if found.probs_KV is not None and expected.probs_KV is not None:
            assert torch.equal(found.probs_KV, expected.probs_KV)


TABLES = [[3, 1, 4], [7, 2, 9], [0, 5, 6]]


def draft(
    runner: ChainRunner, count: int, params: dict[str, Any], confidence: Confidence, budget: int
) -> ChainDraft:
    tokens = torch.randint(VOCAB, (30,), generator=torch.Generator().manual_seed(4)).tolist()
    spans = []
    for i in range(count):
        part = tokens[8 * i : 8 * i + 6 + i]
        sequence = make_sequence(part, request_id=str(i), seed=i, params=params)
        sequence.page_table = TABLES[i]
        spans.append(make_span(sequence, budget + i % 2))
    sampler = DraftSampler(Sampler(VOCAB))
    ends = [span.sequence.num_tokens - 1 for span in spans]
    steps = RecurrentSteps(runner, spans, Stretches([0] * count, ends))
    return draft_chain(steps, sampler, spans, confidence)


RULES = {
    "never": Confidence(threshold=1e-6),
    "hardly": Confidence(threshold=0.1),
    "unsure": Confidence(threshold=0.25),
    "at least two": Confidence(threshold=0.9, least=2),
}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"seed": 3, "temperature": 0.8}, {}])
@torch.inference_mode()
def test_the_same_ends(params: dict[str, Any], count: int) -> None:
    compiled, plain = runners(SHAPE)
    assert compiled.kernels is not None
    compiled.features.slots_SF.normal_()
    lengths = set()
    for name, rule in RULES.items():
        found, expected = (draft(one, count, params, rule, 5) for one in (compiled, plain))
        assert found.ids == expected.ids, name
        assert (found.probs_KV is None) == (expected.probs_KV is None)
        if found.probs_KV is not None and expected.probs_KV is not None:
            torch.testing.assert_close(found.probs_KV, expected.probs_KV, rtol=1e-3, atol=1e-4)
        lengths.add(tuple(len(ids) for ids in found.ids))
        if name == "at least two":
            assert min(len(ids) for ids in found.ids) >= 2
    assert len(lengths) > 2, lengths
