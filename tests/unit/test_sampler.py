"""The sampler: history, filters, penalties, noise, and its edges."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretoken.ops.logits import Filters, Penalties, keep_filtered, narrow, penalise, scale
from foretoken.ops.noise import KeyedNoise, Stream, pack_keys, request_key, row_key, uniform
from foretoken.ops.sampling import draw, draw_filtered
from foretoken.runtime.draft_sampler import DraftSampler
from foretoken.runtime.rows import Rows
from foretoken.runtime.sampler import Sampler
from foretoken.runtime.sequence import Sequence
from foretoken.types import Request, SamplingParams
from tests.property.exact import chi_square_limit

VOCAB = 12


def sequence(
    params: SamplingParams,
    output: tuple[int, ...] = (),
    *,
    prompt: tuple[int, ...] = (0, 1),
    bad_words: tuple[tuple[int, ...], ...] = (),
    name: str = "r",
) -> Sequence:
    request = Request(
        request_id=name,
        prompt_token_ids=prompt,
        params=params,
        seed=5,
        max_tokens=50,
        min_tokens_ids=frozenset({9}),
        bad_words_ids=bad_words,
    )
    return Sequence(request=request, token_ids=[*prompt, *output], num_prompt=len(prompt))


def banned(sampler: Sampler, sequence: Sequence, drafts: tuple[int, ...]) -> list[set[int]]:
    rows = [Rows(sequence=sequence, drafts=drafts)]
    processed_RV = sampler.process(torch.zeros(len(drafts) + 1, VOCAB), rows)
    return [set((row == -math.inf).nonzero().flatten().tolist()) for row in processed_RV]


def test_bad_words_look_at_output_and_drafts_not_at_the_prompt() -> None:
    words = ((7,), (1, 2), (3, 4, 5))
    state = sequence(SamplingParams(), bad_words=words)
    assert banned(Sampler(VOCAB), state, (3, 4, 1)) == [{7}, {7}, {7, 5}, {7, 2}]
    state = sequence(SamplingParams(), (3, 4), bad_words=words)
    assert banned(Sampler(VOCAB), state, (1,)) == [{7, 5}, {7, 2}]


def test_min_tokens_count_drafts() -> None:
    state = sequence(SamplingParams(min_tokens=3), (4,))
    assert banned(Sampler(VOCAB), state, (4, 4, 4)) == [{9}, {9}, set(), set()]


def test_allowed_ids_and_ids_outside_the_vocabulary() -> None:
    params = SamplingParams(allowed_token_ids=[2, 3, 99], logit_bias={3: 2.0, 99: 5.0})
    sampler = Sampler(VOCAB)
    assert banned(sampler, sequence(params), ()) == [set(range(VOCAB)) - {2, 3}]
    (row,) = sampler.process(torch.zeros(1, VOCAB), [Rows(sequence=sequence(params))])
    assert row[[2, 3]].tolist() == [0.0, 2.0]


def test_penalties_follow_committed_tokens_and_drafts() -> None:
    params = SamplingParams(
        frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=2.0, seed=1
    )
    sampler = Sampler(VOCAB)
    state = sequence(params, prompt=(0, 1, 1))
    logits_RV = torch.full((3, VOCAB), 3.0)
    for committed in ((), (4,), (4, 4, 6), (4, 4, 6, *range(2, 12))):
        state.token_ids[3:] = committed
        drafts = (4, 0)
        found_RV = sampler.process(logits_RV, [Rows(sequence=state, drafts=drafts)])
        for row in range(3):
            output = [*committed, *drafts[:row]]
            for i in range(VOCAB):
                count = output.count(i)
                value = 1.5 if count or i in (0, 1) else 3.0
                value -= 0.5 * count + 0.25 * (count > 0)
                assert float(found_RV[row, i]) == pytest.approx(value), (committed, row, i)
    assert torch.equal(logits_RV, torch.full((3, VOCAB), 3.0))


def test_a_new_request_of_the_same_name_starts_afresh() -> None:
    sampler = Sampler(VOCAB)
    params = SamplingParams(presence_penalty=1.0)
    first = sequence(params, (3, 4))
    sampler.process(torch.zeros(1, VOCAB), [Rows(sequence=first)])
    sampler.release("r")
    sampler.release("r")
    for again in (sequence(params, (5,)), sequence(params, (6,))):
        (row,) = sampler.process(torch.zeros(1, VOCAB), [Rows(sequence=again)])
        assert (row < 0).nonzero().flatten().tolist() == [again.token_ids[-1]]


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits_RV = torch.zeros(2, VOCAB)
    logits_RV[0, [4, 8]] = 2.0
    state = sequence(SamplingParams(temperature=0))
    assert Sampler(VOCAB).choose(logits_RV, [Rows(sequence=state, drafts=(1,))]).tolist() == [4, 0]


def test_temperature_near_zero_is_greedy() -> None:
    logits_RV = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    for temperature in (1e-4, 1e-30, 5e-324):
        state = sequence(SamplingParams(temperature=temperature, seed=1))
        chosen = Sampler(VOCAB).choose(logits_RV, [Rows(sequence=state)])
        assert chosen.tolist() == logits_RV.argmax(dim=-1).tolist()


@pytest.mark.parametrize("method", ["auto", "probabilistic", "greedy"])
def test_a_drafter_with_the_targets_logits_drafts_the_targets_tokens(method: str) -> None:
    """Under matching, the same logits give the same tokens: that is why drafters share noise."""
    logits_RV = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(2))
    params = SamplingParams(temperature=0 if method == "greedy" else 0.9, top_p=0.8, seed=3)
    state = sequence(params, (4,))
    sampler = DraftSampler(Sampler(VOCAB), "auto", method)
    drafted: list[int] = []
    for row in range(3):
        choice = sampler.choose(logits_RV[row : row + 1], [state], [drafted])
        assert choice.probs_BV is None
        drafted.extend(choice.ids)
    targets = Sampler(VOCAB).choose(logits_RV, [Rows(sequence=state, drafts=tuple(drafted))])
    assert targets.tolist()[:3] == drafted


def test_drawn_drafts_come_with_their_distribution() -> None:
    logits_BV = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    free = SamplingParams(temperature=0.5, top_k=4)
    states = [
        sequence(free, name="a"),
        sequence(SamplingParams(seed=1), name="b"),
        sequence(SamplingParams(temperature=0), name="c"),
    ]
    sampler = DraftSampler(Sampler(VOCAB))
    assert [sampler.draws(s.request.params) for s in states] == [True, False, False]
    choice = sampler.choose(logits_BV, states, [[], [], []])
    assert choice.probs_BV is not None
    expected = (logits_BV[0] / 0.5).masked_fill(
        logits_BV[0] < logits_BV[0].topk(4).values[-1], -math.inf
    )
    assert torch.equal(choice.probs_BV[0], expected.softmax(dim=-1))
    assert float(choice.probs_BV[0, choice.ids[0]]) > 0
    for row in (1, 2):
        assert choice.probs_BV[row].tolist() == [float(i == choice.ids[row]) for i in range(VOCAB)]
    assert choice.ids[2] == int(logits_BV[2].argmax())


def test_distributions_on_demand() -> None:
    """A batch that draws somewhere needs rows for every draft of every round."""
    logits_BV = torch.zeros(1, VOCAB)
    state = sequence(SamplingParams(temperature=0))
    choice = DraftSampler(Sampler(VOCAB)).choose(logits_BV, [state], [[]], with_probs=True)
    assert choice.probs_BV is not None
    assert choice.probs_BV.tolist() == [[1.0] + [0.0] * (VOCAB - 1)]


def test_a_position_drafted_again_gets_fresh_noise() -> None:
    logits_BV = torch.zeros(1, VOCAB)
    sampler = DraftSampler(Sampler(VOCAB), "standard")
    found = set()
    for committed in range(12):
        state = sequence(SamplingParams(), (3,) * committed)
        drafted = [3] * (12 - committed)
        found.add(sampler.choose(logits_BV, [state], [drafted]).ids[0])
    assert len(found) > 1


CPU = torch.device("cpu")


def kept_by(row: list[float], min_p: float, top_k: int, top_p: float) -> set[int]:
    """Which ids survive, from the definitions; exact for rows whose sums are well apart."""
    kept = {i for i, value in enumerate(row) if value > -math.inf}
    if min_p > 0:
        kept = {i for i in kept if row[i] >= max(row) + math.log(min_p)}
    if 0 < top_k < len(row):
        kth = sorted((row[i] for i in kept), reverse=True)[:top_k]
        kept = {i for i in kept if row[i] >= kth[-1]}
    if top_p < 1:
        total = sum(math.exp(row[i] - max(row)) for i in kept)
        mass, last = 0.0, math.inf
        for i in sorted(kept, key=lambda i: -row[i]):
            if mass >= top_p:
                break
            mass += math.exp(row[i] - max(row)) / total
            last = row[i]
        kept = {i for i in kept if row[i] >= last}
    return kept


def survivors(logits_RV: torch.Tensor) -> list[set[int]]:
    return [set((row > -math.inf).nonzero().flatten().tolist()) for row in logits_RV]


filters = st.tuples(
    st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0]),
    st.sampled_from([0, -1, 1, 2, 5, 63, 64, 65, 200, 5000]),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6]),
)


@pytest.mark.slow
@given(
    rows=st.lists(st.tuples(filters, st.sampled_from([0.1, 1.0, 4.0])), min_size=1, max_size=6),
    vocab=st.sampled_from([3, 64, 65, 300, 1500]),
    seed=st.integers(0, 1000),
)
def test_filters_keep_what_the_definitions_keep(
    rows: list[tuple[tuple[float, int, float], float]], vocab: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.tensor([width for _, width in rows]).unsqueeze(1)
    logits_RV = torch.randn(len(rows), vocab, generator=generator) * spread
    how = [filter_ for filter_, _ in rows]
    filtered_RV = keep_filtered(logits_RV, Filters.of(how, vocab, CPU))
    for row, found, one in zip(logits_RV, survivors(filtered_RV), how, strict=True):
        values = row.double().tolist()
        exact = kept_by(values, *one)
        if found != exact:
            slack = {*kept_by(values, one[0], one[1], min(1.0, one[2] + 2e-6))}
            tight = {*kept_by(values, one[0], one[1], max(1e-9, one[2] - 2e-6))}
            assert tight <= found <= slack, "differs by more than rounding of the mass"
    for i in range(len(rows)):
        alone = keep_filtered(logits_RV[i : i + 1], Filters.of(how[i : i + 1], vocab, CPU))
        assert torch.equal(alone[0], filtered_RV[i]), "a row depends on its neighbours"


@given(
    how=st.lists(filters, min_size=1, max_size=5),
    vocab=st.sampled_from([3, 65, 1500]),
    seed=st.integers(0, 1000),
)
def test_drawing_from_the_shortlist_is_drawing_from_the_row(
    how: list[tuple[float, int, float]], vocab: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits_RV = (torch.randn(len(how), vocab, generator=generator) * 8).round() / 4
    keys = [row_key(request_key(seed, 0), i, Stream.TARGET) for i in range(len(how))]
    keys_R2, noise = pack_keys(keys, CPU), KeyedNoise(vocab, CPU)
    columns = Filters.of(how, vocab, CPU)
    dense_R = draw(keep_filtered(logits_RV, columns), keys_R2, noise)
    assert torch.equal(draw_filtered(logits_RV, columns, keys_R2, noise), dense_R)


def test_ties_are_kept_together() -> None:
    logits_RV = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    top_k = keep_filtered(logits_RV, Filters.of([(0.0, 2, 1.0)], 6, CPU))
    assert survivors(top_k) == [{1, 2, 3, 4}]
    top_p = keep_filtered(logits_RV, Filters.of([(0.0, 0, 0.6)], 6, CPU))
    assert survivors(top_p) == [{1, 2, 3, 4}]
    flat_RV = torch.zeros(1, 2000)
    assert len(survivors(keep_filtered(flat_RV, Filters.of([(0.0, 3, 0.5)], 2000, CPU)))[0]) == 2000


@pytest.mark.parametrize("how", [(0.5, 0, 1.0), (0.0, 2, 1.0), (0.0, 0, 0.5)])
def test_banned_ids_stay_banned(how: tuple[float, int, float]) -> None:
    logits_RV = torch.full((2, 100), -math.inf)
    logits_RV[0, 7] = 1.0
    logits_RV[1, 3], logits_RV[1, 4] = 1.0, -30.0
    found = survivors(keep_filtered(logits_RV, Filters.of([how, how], 100, CPU)))
    assert found[0] == {7}
    assert found[1] <= {3, 4} and 3 in found[1]


def test_a_row_without_any_allowed_id_does_not_break_its_neighbours() -> None:
    logits_RV = torch.zeros(2, 100)
    logits_RV[0] = -math.inf
    logits_RV[1, 5] = 9.0
    how = Filters.of([(0.0, 5, 0.9)] * 2, 100, CPU)
    keys_R2 = pack_keys([1, 2], CPU)
    ids = draw_filtered(logits_RV, how, keys_R2, KeyedNoise(100, CPU)).tolist()
    assert ids == [0, 5]


def test_rows_come_back_once() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_RV = torch.randn(7, 3000, generator=generator) * torch.tensor(
        [8.0, 0.1, 2.0, 8.0, 1.0, 0.01, 4.0]
    ).unsqueeze(1)
    parts = list(narrow(logits_RV, Filters.of([(0.0, 0, 0.9)] * 7, 3000, CPU)))
    assert {part.values_GC.shape[1] for part in parts} == {64, 1024, 3000}
    rows = [row for part in parts if part.rows_G is not None for row in part.rows_G.tolist()]
    assert sorted(rows) == list(range(7))


def test_penalties_follow_their_formulas() -> None:
    generator = torch.Generator().manual_seed(1)
    logits_RU = torch.randn(3, 20, generator=generator)
    counts_RU = torch.randint(0, 3, (3, 20), generator=generator).float()
    prompt_U = torch.rand(20, generator=generator) < 0.3
    by = Penalties(repetition=1.4, frequency=0.5, presence=-0.25)
    found = penalise(logits_RU, counts_RU, prompt_U, by)
    for row in range(3):
        for i in range(20):
            value, count = float(logits_RU[row, i]), float(counts_RU[row, i])
            if count > 0 or bool(prompt_U[i]):
                value = value / 1.4 if value > 0 else value * 1.4
            value -= 0.5 * count - 0.25 * (count > 0)
            assert float(found[row, i]) == pytest.approx(value, rel=1e-5, abs=1e-6)


def test_temperatures_do_not_overflow() -> None:
    logits_RV = torch.tensor([[1000.0, -1000.0], [1000.0, -math.inf]])
    scaled = scale(logits_RV, [1e-300, 0.5])
    assert bool(scaled[0].isfinite().all())
    assert scaled.softmax(dim=-1).tolist() == [[1.0, 0.0], [1.0, 0.0]]
    for hot in (scale(logits_RV, [1e300, 1e300]), scale(logits_RV, [1e300, 0.5])):
        assert hot[0].softmax(dim=-1).tolist() == [0.5, 0.5]
    assert torch.equal(scale(logits_RV, [0.7, 0.7])[1:], scale(logits_RV, [1.0, 0.7])[1:])


NOISE_VOCAB = 4099


def keys(count: int, stream: Stream = Stream.TARGET, seed: int = 7) -> torch.Tensor:
    key = request_key(seed, 0)
    return pack_keys([row_key(key, position, stream) for position in range(count)], CPU)


def noise_of(keys_R2: torch.Tensor, vocab: int = NOISE_VOCAB) -> torch.Tensor:
    noise = KeyedNoise(vocab, CPU)
    pieces = torch.split(keys_R2, noise.rows_at_once)
    return torch.cat([noise.exponential(piece).clone() for piece in pieces])


def uniforms(keys_R2: torch.Tensor, vocab: int = NOISE_VOCAB) -> torch.Tensor:
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
