"""Filters and penalties against one-row references in plain Python."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretoken.ops.logits import Filters, Penalties, keep_filtered, narrow, penalise, scale
from foretoken.ops.noise import KeyedNoise, Stream, pack_keys, request_key, row_key
from foretoken.ops.sampling import draw, draw_filtered

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
