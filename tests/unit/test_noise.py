"""Keyed noise: uniform, independent, and the same however it is asked for.

Statistical tests use fixed seeds; on fresh seeds each would fail correct noise with probability
below 1e-6.
"""

import itertools
import math

import pytest
import torch

from foretoken.ops.noise import KeyedNoise, Stream, pack_keys, request_key, row_key, uniform
from tests.property.exact import chi_square_limit

CPU = torch.device("cpu")
VOCAB = 4099


def keys(count: int, stream: Stream = Stream.TARGET, seed: int = 7) -> torch.Tensor:
    key = request_key(seed, 0)
    return pack_keys([row_key(key, position, stream) for position in range(count)], CPU)


def noise_of(keys_R2: torch.Tensor, vocab: int = VOCAB) -> torch.Tensor:
    noise = KeyedNoise(vocab, CPU)
    pieces = torch.split(keys_R2, noise.rows_at_once)
    return torch.cat([noise.exponential(piece).clone() for piece in pieces])


def uniforms(keys_R2: torch.Tensor, vocab: int = VOCAB) -> torch.Tensor:
    return 1 - (-noise_of(keys_R2, vocab).double()).exp()


def assert_flat(counts: torch.Tensor) -> None:
    expected = counts.sum().double() / counts.numel()
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert float(statistic) < chi_square_limit(counts.numel() - 1)


@pytest.mark.parametrize("stream", list(Stream))
def test_uniform_over_ids_and_positions(stream: Stream) -> None:
    u_RV = uniforms(keys(128, stream))
    assert_flat(torch.histc(u_RV.float(), bins=1000, min=0, max=1))
    assert_flat(torch.histc(u_RV.float() * 4096 % 1, bins=256, min=0, max=1))


def test_small_uniforms_are_uniform_too() -> None:
    """The smallest uniforms decide who wins."""
    u = uniforms(keys(512)).flatten()
    low = u[u < 2.0**-8]
    assert abs(low.numel() - u.numel() * 2.0**-8) < 6 * math.sqrt(u.numel() * 2.0**-8)
    assert_flat(torch.histc(low.float() * 2.0**8, bins=64, min=0, max=1))


@pytest.mark.parametrize("apart", [(0, 1), (1, 0), (1, 1), (1, -1), (0, 2), (2, 0), (7, 3)])
def test_neighbouring_positions_and_ids_are_independent(apart: tuple[int, int]) -> None:
    rows, ids = apart
    u_RV = uniforms(keys(256))
    shifted = torch.roll(u_RV, shifts=(rows, ids), dims=(0, 1))
    cells = (u_RV * 16).long() * 16 + (shifted * 16).long()
    assert_flat(torch.bincount(cells.flatten(), minlength=256))


def test_streams_seeds_and_samples_are_independent() -> None:
    key = request_key(3, 0)
    anchored = [row_key(key, position, Stream.DRAFT, 9) for position in range(64)]
    sets = [uniforms(keys(64, stream, seed=3)) for stream in Stream]
    sets.append(uniforms(pack_keys(anchored, CPU)))
    other = request_key(3, 1)
    sample = [row_key(other, position, Stream.TARGET) for position in range(64)]
    sets.append(uniforms(pack_keys(sample, CPU)))
    sets.append(uniforms(keys(64, seed=4)))
    for a, b in itertools.combinations(sets, 2):
        cells = (a * 16).long() * 16 + (b * 16).long()
        assert_flat(torch.bincount(cells.flatten(), minlength=256))


def test_winners_are_uniform_over_a_flat_row() -> None:
    """With equal logits every id wins equally often."""
    winners = noise_of(keys(40_000), vocab=50).argmin(dim=-1)
    assert_flat(torch.bincount(winners, minlength=50))


def test_acceptance_uniforms() -> None:
    key = request_key(-5, 2)
    drawn = [uniform(row_key(key, position, Stream.ACCEPT)) for position in range(50_000)]
    assert_flat(torch.histc(torch.tensor(drawn), bins=100, min=0, max=1))
    pairs = torch.tensor(drawn).mul(16).long()
    assert_flat(torch.bincount(pairs[1:] * 16 + pairs[:-1], minlength=256))
    assert uniform(0) > 0
    assert uniform(2**64 - 1) < 1


def test_keys_differ_and_any_integer_is_a_seed() -> None:
    seeds = [0, 1, -1, 2**63, 2**64 - 2, 10**30]
    found = {
        row_key(request_key(seed, sample), position, stream, anchor)
        for seed in seeds
        for sample in range(3)
        for position in (0, 1, 2, 1000, 10**6)
        for stream in Stream
        for anchor in (0, 1, 2)
    }
    assert len(found) == len(seeds) * 3 * 5 * 4 * 3
    assert all(0 <= key < 2**64 for key in found)


@pytest.mark.parametrize("vocab", [3, 50, 1001, 8192, 32771])
def test_noise_is_the_same_for_any_number_of_rows(vocab: int) -> None:
    keys_R2 = keys(9)
    whole = torch.cat([KeyedNoise(vocab, CPU).exponential(k.unsqueeze(0)) for k in keys_R2])
    noise = KeyedNoise(vocab, CPU)
    for count in range(1, min(9, noise.rows_at_once) + 1):
        start = 9 - count
        assert torch.equal(noise.exponential(keys_R2[start:]), whole[start:])
    ids_RC = torch.randint(vocab, (9, 37), generator=torch.Generator().manual_seed(1))
    assert torch.equal(noise.exponential_at(keys_R2, ids_RC), whole.gather(1, ids_RC))
    assert torch.equal(
        noise.exponential_at(keys_R2[4:5], ids_RC[4:5]), whole.gather(1, ids_RC)[4:5]
    )


def test_noise_is_finite_and_positive_at_the_ends() -> None:
    u = (torch.tensor([0, 1, 2**31 - 1, 2**31 - 65], dtype=torch.int32)).float()
    unit = (1.0 - 2.0**-24) * 2.0**-31
    ends = u.add_(0.5).mul_(-unit).log1p_().neg_()
    assert bool((ends > 0).all()) and bool(ends.isfinite().all())
    values = noise_of(keys(256))
    assert bool((values > 0).all()) and bool(values.isfinite().all())


def test_noise_is_pinned() -> None:
    """A seed means the same tokens in every later version: these numbers may not change."""
    assert request_key(0, 0) == PINNED_REQUEST
    assert row_key(request_key(1, 0), 5, Stream.TARGET) == PINNED_ROW
    values = KeyedNoise(5, CPU).exponential(pack_keys([PINNED_ROW], CPU))[0]
    assert values.tolist() == pytest.approx(PINNED_NOISE, rel=1e-6)


PINNED_REQUEST = 12035550249420947055
PINNED_ROW = 14133941789960728681
PINNED_NOISE = [5.9092517, 0.3852150, 3.5074055, 0.9994881, 0.3030661]
