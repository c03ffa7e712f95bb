"""Block verification emits the target's distribution, and keeps at least as many drafts.

By enumeration over all chains of drafts: the chances of the real function are measured by
bisection, its residual is the real one. tests/property/test_distribution.py simulates it through
the verifier, several verifications in a row.
"""

import itertools
import random
from collections import Counter

import pytest
import torch
from torch import Tensor

from foretoken.ops.block_verification import BlockTests, keep_blocks
from foretoken.ops.rejection import residual
from tests.property.exact import Rows, plain_probs, rows_of

NEVER = 2.0
"""A uniform that no chance reaches."""


def chain_rows(rows: Rows, prefix: tuple[int, ...], chain: tuple[int, ...]) -> Tensor:
    return torch.stack([rows((*prefix, *chain[:i])) for i in range(len(chain))])


def chances(
    target: Rows, drafter: Rows, prefix: tuple[int, ...], chains: list[tuple[int, ...]], hot: bool
) -> Tensor:
    """[chains, k]: largest uniform at which each number of drafts is kept if no other passes."""
    k = len(chains[0])
    each = [chain for chain in chains for _ in range(k)]
    target_KV = torch.cat([chain_rows(target, prefix, chain) for chain in each])
    drafted_KV = None if hot else torch.cat([chain_rows(drafter, prefix, c) for c in each])
    low, high = torch.zeros(len(each), dtype=torch.double), torch.ones(len(each)).double()
    numbers = torch.arange(1, k + 1).repeat(len(chains))
    for _ in range(40):
        middle = (low + high) / 2
        uniforms = torch.full((len(each), k), NEVER, dtype=torch.double)
        uniforms[torch.arange(len(each)), numbers - 1] = middle
        kept = keep_blocks(
            BlockTests(
                ids_K=[token for chain in each for token in chain],
                uniforms_K=uniforms.flatten().tolist(),
                lengths_S=[k] * len(each),
                target_KV=target_KV,
                drafted_KV=drafted_KV,
            )
        ).kept_S
        passed = torch.tensor(kept) == numbers
        low, high = torch.where(passed, middle, low), torch.where(passed, high, middle)
    return low.view(len(chains), k)


def after(
    target: Rows, drafter: Rows, history: tuple[int, ...], token: int, weight: float
) -> Tensor:
    """What follows `history` in place of the draft `token`."""
    p_1V, q_1V = target(history).unsqueeze(0), drafter(history).unsqueeze(0)
    logits = residual(p_1V.log(), p_1V, q_1V, [token], weights_S=[weight])
    return logits.double().softmax(dim=-1)[0]


def weight_of(
    target: Rows, drafter: Rows, prefix: tuple[int, ...], chain: tuple[int, ...]
) -> float:
    weight, history = 1.0, prefix
    for token in chain:
        weight *= float(target(history).double()[token] / drafter(history).double()[token])
        weight, history = min(weight, 1.0), (*history, token)
    return weight


def emitted(
    target: Rows, drafter: Rows, k: int, hot: bool
) -> tuple[dict[tuple[int, ...], float], float]:
    """Exact probabilities of the next k + 1 tokens, the rest decoded plainly; mean kept."""
    prefix: tuple[int, ...] = (0, 1)
    vocab = range(target(prefix).shape[0])
    result: Counter[tuple[int, ...]] = Counter()
    mean = 0.0
    drafted = plain_probs(drafter, prefix, k)
    chains = [chain for chain, probability in drafted.items() if probability > 0]
    found = chances(target, drafter, prefix, chains, hot).tolist()
    for chain, chance in zip(chains, found, strict=True):
        none_longer = drafted[chain]
        for count in range(k, -1, -1):
            here = none_longer * (chance[count - 1] if count else 1.0)
            none_longer -= here
            mean += here * count
            history: tuple[int, ...] = (*prefix, *chain[:count])
            if count == k or here == 0:
                next_V = target(history).double()
            else:
                weight = weight_of(target, drafter, prefix, chain[:count])
                next_V = after(target, drafter, history, chain[count], weight)
            for token in vocab:
                start = (*chain[:count], token)
                rest = plain_probs(target, (*prefix, *start), k - count)
                for others, probability in rest.items():
                    result[(*start, *others)] += here * float(next_V[token]) * probability  # type: ignore[assignment]
    return dict(result), mean


def standard_mean(target: Rows, drafter: Rows, k: int) -> float:
    """Mean drafts kept by the standard rule."""
    prefix: tuple[int, ...] = (0, 1)
    mean = 0.0
    for chain, probability in plain_probs(drafter, prefix, k).items():
        alive, history = probability, prefix
        for token in chain:
            if alive == 0:
                break
            ratio = target(history).double()[token] / drafter(history).double()[token]
            alive *= min(1.0, float(ratio))
            mean += alive
            history = (*history, token)
    return mean


@pytest.mark.parametrize("kind", ["always", "sometimes", "never", "one_hot"])
@pytest.mark.parametrize(("vocab", "k"), [(3, 3), (4, 2), (5, 1)])
def test_block_is_exact_by_enumeration(kind: str, vocab: int, k: int) -> None:
    target, drafter = rows_of(kind, vocab, seed=vocab)
    found, mean = emitted(target, drafter, k, kind == "one_hot")
    for outcome, expected in plain_probs(target, (0, 1), k + 1).items():
        assert found.get(outcome, 0.0) == pytest.approx(expected, abs=2e-6)
    standard = standard_mean(target, drafter, k)
    assert mean >= standard - 1e-6
    if kind == "sometimes" and k > 1:
        assert mean > standard + 1e-4
    if kind == "always":
        assert mean == pytest.approx(k)
    if kind == "never":
        assert mean == pytest.approx(0, abs=1e-9)


def test_a_paper_example() -> None:
    """p = (1/3, 2/3), q = (2/3, 1/3), two drafts: 11/9 tokens more than one, not 10/9."""
    p, q = torch.tensor([1 / 3, 2 / 3]), torch.tensor([2 / 3, 1 / 3])

    def target(history: tuple[int, ...]) -> Tensor:
        return p

    def drafter(history: tuple[int, ...]) -> Tensor:
        return q

    assert emitted(target, drafter, 2, False)[1] == pytest.approx(11 / 9, abs=1e-6)
    assert standard_mean(target, drafter, 2) == pytest.approx(10 / 9)


def test_chains_do_not_see_each_other() -> None:
    """Ragged chains together give what each gives alone; -1 ends a chain."""
    draw = random.Random(3)
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        lengths = [draw.randint(1, 5) for _ in range(4)]
        total = sum(lengths)
        ids = [draw.randrange(-1, 6) for _ in range(total)]
        uniforms = [draw.random() for _ in range(total)]
        target_KV = torch.rand(total, 6, generator=generator).softmax(dim=-1)
        drafted_KV = torch.rand(total, 6, generator=generator).softmax(dim=-1)
        together = keep_blocks(
            BlockTests(
                ids_K=ids,
                uniforms_K=uniforms,
                lengths_S=lengths,
                target_KV=target_KV,
                drafted_KV=drafted_KV,
            )
        )
        start = 0
        for s, length in enumerate(lengths):
            part = slice(start, start + length)
            known = ids[part].index(-1) if -1 in ids[part] else length
            alone = keep_blocks(
                BlockTests(
                    ids_K=ids[part],
                    uniforms_K=uniforms[part],
                    lengths_S=[length],
                    target_KV=target_KV[part],
                    drafted_KV=drafted_KV[part],
                )
            )
            assert together.kept_S[s] == alone.kept_S[0] <= known
            assert together.weight_S[s] == alone.weight_S[0]
            at = alone.failed_S[0]
            assert together.failed_S[s] == (None if at is None else at + start)
            start += length


def test_before_a_minus_one_the_chain_counts_as_whole() -> None:
    for chain in itertools.product(range(3), repeat=2):
        target_KV = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3], [0.1, 0.1, 0.8]])
        drafted_KV = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.4, 0.4], [0.3, 0.3, 0.4]])
        for uniform in (0.05, 0.3, 0.6, 0.9):
            kept = []
            for ids, uniforms in (
                ([*chain, -1], [0.5, uniform, 0.01]),
                (list(chain), [0.5, uniform]),
            ):
                tests = BlockTests(
                    ids_K=ids,
                    uniforms_K=uniforms,
                    lengths_S=[len(ids)],
                    target_KV=target_KV[: len(ids)],
                    drafted_KV=drafted_KV[: len(ids)],
                )
                kept.append(keep_blocks(tests).kept_S)
            assert kept[0] == kept[1]
