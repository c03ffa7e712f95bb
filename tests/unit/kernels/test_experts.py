"""Mixtures in one call against their twin, on every instruction set of this machine. The guarded
bugs: a row whose bits depend on who shares its experts, a tie that falls elsewhere, an expert that
is read though no row chose it, prepared rows that are laid out for another number of rows."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial

import gguf
import pytest
import torch
from gguf.quants import quantize
from torch import Tensor

from foretoken.backend import LinearSpec, backend_for
from foretoken.distributed import Share
from foretoken.kernels.library import find_library
from foretoken.layers.mixture import Expert, Mixture, Router, inner_activation
from foretoken.layers.mlp import GatedMLP
from foretoken.ops.activation import silu
from foretoken.ops.linear import Linear
from foretoken.ops.mixture_kernel import ExpertCounter, MixtureKernel, MixtureParts, find_kernel
from foretoken.quant.blocks import BlockWeights
from foretoken.shape.block_kinds import BLOCK_KINDS, STEP
from foretoken.shape.mixtures.experts import Experts, Routing
from tests.marks import KERNEL_LEVELS, level_of

WIDTH, INNER, ROWS = 160, 96, 150
PLAIN = Experts(count=40, used=4, width=INNER, layers=(True,))
CASES = {
    "softmax": replace(PLAIN, routing=Routing(weights="normalized", wide=True)),
    "one": replace(PLAIN, used=1),
    "all": replace(PLAIN, count=5, used=5),
    "groups": replace(
        PLAIN,
        routing=Routing(
            score="sigmoid", choice_bias=True, groups=5, groups_used=2, weights="normalized",
            eps=1e-3, scale=2.5,
        ),
        shared="always",
        shared_width=64,
    ),
    "clamped": replace(
        PLAIN,
        routing=Routing(score="none", weights="softmax", bias=True),
        activation="clamped",
        limit=1.0,
        biases=True,
    ),
    "gated": replace(PLAIN, routing=Routing(softcap=2.0), shared="gated", shared_width=48),
    "floor": replace(
        PLAIN,
        routing=Routing(score="none", weights="sigmoid", floor=0.5),
        activation="gelu_pytorch_tanh",
    ),
    "scales": replace(PLAIN, routing=Routing(weights="normalized", expert_scales=True)),
    "no gate": replace(PLAIN, activation="relu2", routing=Routing(floor=0.9, weights="normalized")),
}  # fmt: skip
ALONE = Share()
KINDS = [
    (torch.float32, None),
    (torch.bfloat16, None),
    (torch.float32, "int8"),
    (torch.bfloat16, "int4"),
    (torch.bfloat16, "Q4_1"),
]


@pytest.fixture(scope="module", params=KERNEL_LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[int]:
    found = find_library()
    wanted = level_of(request.param, found)
    if found is None or wanted > found.handle.ft_cpu_level():
        pytest.skip("no such kernels here")
    before = found.handle.ft_level()
    found.handle.ft_set_level(wanted)
    yield wanted
    make_linear.cache_clear()  # weights lie as this level's calls read them
    found.handle.ft_set_level(before)


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@cache
def make_linear(
    outputs: int, inputs: int, seed: int, kind: torch.dtype, quantization: str | None,
    share: Share, shared: int, bias: bool, sums: bool, spoiled: bool,
) -> Linear:  # fmt: skip
    """Random weights, or none that are numbers; of `shared` matrices, one above the other, this
    rank's outputs."""
    weights = randn(outputs, inputs, seed=seed) / inputs**0.5
    if spoiled:
        weights.fill_(torch.nan)
    each = outputs // max(shared, 1)
    own = share.of(each) if shared else range(each)
    kept = [i * each + at for i in range(max(shared, 1)) for at in own]
    weights = weights[kept]
    blocks = None
    if quantization in BLOCK_KINDS and inputs % STEP == 0:
        rows = quantize(weights.numpy(), gguf.GGMLQuantizationType[quantization])
        blocks = BlockWeights.as_stored(quantization, torch.from_numpy(rows))
    return backend_for(weights.device).linear(
        LinearSpec(
            weights=weights.to(kind) if blocks is None else blocks,
            dtype=kind,
            bias_N=randn(outputs, seed=-seed - 1, dtype=kind)[kept] if bias else None,
            quantization=None if quantization in BLOCK_KINDS else quantization,
            keeps_sums=sums,
        )
    )


def make_mixture(
    experts: Experts,
    dtype: torch.dtype,
    quantization: str | None,
    spoiled: tuple[int, ...] = (),
    share: Share = ALONE,
) -> Mixture:
    """The weights of `spoiled` experts are no numbers. Of the matrices of experts this rank has its
    outputs."""

    def linear(
        outputs: int, inputs: int, seed: int, *, wide: bool = False, bias: bool = False,
        rounds: bool = True, sums: bool = False, shared: int = 0,
    ) -> Linear:  # fmt: skip
        return make_linear(
            outputs, inputs, seed, torch.float32 if wide else dtype,
            quantization if rounds else None, share, shared, bias, sums, seed // 2 in spoiled,
        )  # fmt: skip

    routing, halves = experts.routing, 2 if experts.is_gated else 1
    router = Router(
        linear=linear(
            experts.count, WIDTH, 5001, wide=routing.wide, bias=routing.bias, rounds=False
        ),
        used=experts.used,
        routing=routing,
        choice_bias_E=randn(experts.count, seed=5002) if routing.choice_bias else None,
        scale_E=randn(experts.count, seed=5006) if routing.expert_scales else None,
    )
    pairs = [
        (
            linear(halves * INNER, WIDTH, 2 * number, bias=experts.biases, shared=halves),
            linear(WIDTH, INNER, 2 * number + 1, bias=experts.biases, sums=True, shared=1),
        )
        for number in range(experts.count)
    ]
    shared, gate, inner = None, None, experts.shared_width
    if experts.shared != "none":
        up = linear(2 * inner, WIDTH, 5003, shared=2)
        down = linear(WIDTH, inner, 5004, sums=True, shared=1)
        shared = GatedMLP(gate_up=up, down=down, activate=silu)
    if experts.shared == "gated":
        gate = linear(1, WIDTH, 5005, rounds=False)
    parts = MixtureParts(
        router=router.linear,
        choice_bias_E=router.choice_bias_E,
        scale_E=router.scale_E,
        pairs=pairs,
        shared=None if shared is None else (shared.gate_up, shared.down, shared.activate),
        shared_gate=gate,
    )
    return Mixture(
        router=router,
        experts=tuple(Expert(*pair) for pair in pairs),
        activate=inner_activation(experts),
        shared=shared,
        shared_gate=gate,
        kernel=find_kernel(experts, parts),
    )


def kernel_of(mixture: Mixture) -> MixtureKernel:
    assert isinstance(mixture.kernel, MixtureKernel)
    return mixture.kernel


@pytest.mark.parametrize("dtype,quantization", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_mixture(level: int, case: str, dtype: torch.dtype, quantization: str | None) -> None:
    mixture = make_mixture(CASES[case], dtype, quantization)
    kernel = kernel_of(mixture)
    x, residual, by = (randn(ROWS, WIDTH, seed=seed, dtype=dtype) for seed in (1, 2, 3))
    by = by if case == "scales" else x
    found = kernel(x, residual, by_TD=by)
    assert case == "scales" or torch.equal(kernel(x, residual), found)
    rows = range(ROWS) if case == "softmax" else range(0, ROWS, 10)
    for row in rows:
        own = slice(row, row + 1)
        assert torch.equal(kernel(x[own], residual[own], by_TD=by[own])[0], found[row]), row
    for size in (3, 8, 17):
        pieces = zip(x.split(size), residual.split(size), by.split(size), strict=True)
        parts = [kernel(own, rest, by_TD=read) for own, rest, read in pieces]
        assert torch.equal(torch.cat(parts), found), size
    twin = replace(mixture, kernel=None)(x, residual, by)
    # A row whose last two scores are within rounding may have another expert than its twin.
    near = (found - twin).abs().amax(1) < (0.08 if dtype == torch.bfloat16 else 1e-4)
    assert near.float().mean() > 0.97, (found - twin).abs().amax()


def chosen_by(kernel: MixtureKernel, x: Tensor) -> list[list[int]]:
    """The experts of each row, by number."""
    routes = kernel.gate(x, None, None)[0]
    experts = routes.view(torch.int32).view(*routes.shape, 2)[:, :-1, 1]
    return [sorted(row) for row in experts.tolist()]


def test_experts_are_chosen_alike_on_every_level(level: int) -> None:
    kernel = kernel_of(make_mixture(CASES["groups"], torch.float32, "int8"))
    library, x, found = find_library(), randn(ROWS, WIDTH, seed=1), []
    assert library is not None
    for one in (level, 0):
        library.handle.ft_set_level(one)
        found.append(chosen_by(kernel, x))
    library.handle.ft_set_level(level)
    assert found[0] == found[1]


def test_ties_go_to_the_lower_number(level: int) -> None:
    mixture = make_mixture(replace(PLAIN, count=16, used=3), torch.float32, None)
    assert chosen_by(kernel_of(mixture), torch.zeros(2, WIDTH)) == [[0, 1, 2]] * 2


def test_what_is_no_number_stays_in_its_row(level: int) -> None:
    kernel = kernel_of(make_mixture(CASES["softmax"], torch.bfloat16, "int8"))
    x = randn(20, WIDTH, seed=3, dtype=torch.bfloat16)
    before = kernel(x, None)
    x[7, 5] = torch.nan
    after = kernel(x, None)
    assert after[7].isnan().all()
    assert torch.equal(after[torch.arange(20) != 7], before[torch.arange(20) != 7])


def test_experts_that_no_row_chose_are_not_read(level: int) -> None:
    x, make = randn(6, WIDTH, seed=4), partial(make_mixture, PLAIN, torch.float32, None)
    kernel = kernel_of(make())
    want = kernel(x, None)
    others = tuple(set(range(PLAIN.count)).difference(*chosen_by(kernel, x)))
    assert others
    assert torch.equal(kernel_of(make(spoiled=others))(x, None), want)


@pytest.mark.parametrize("case", ["groups", "gated", "no gate"])
def test_processes_that_share_experts_have_the_bits_of_one(level: int, case: str) -> None:
    """Each has a third of the outputs of every matrix, and reads no expert that nobody chose."""
    make = partial(make_mixture, CASES[case], torch.bfloat16, "int8")
    x, residual = (randn(540, WIDTH, seed=seed, dtype=torch.bfloat16) for seed in (1, 2))
    for rows in (540, 2):
        x, residual = x[:rows], residual[:rows]
        kernel, counters = kernel_of(make()), ExpertCounter()
        want = kernel(x, residual)
        unread = tuple(set(range(PLAIN.count)).difference(*chosen_by(kernel, x)))
        shares = [Share(rank, 3) for rank in range(3)]
        kernels = [kernel_of(make(spoiled=unread, share=share)) for share in shares]
        firsts = [one.gate(x, None, counters) for one in kernels]
        assert all(torch.equal(first[0], firsts[0][0]) for first in firsts)
        gated, shared = (torch.cat(parts, 1) for parts in list(zip(*firsts, strict=True))[1:])
        found = [
            one.finish(firsts[0][0], gated, shared, residual[:, own.start : own.stop])
            for one, own in zip(kernels, (share.of(WIDTH) for share in shares), strict=True)
        ]
        assert torch.equal(torch.cat(found, 1), want) and counters.total.value > 0
    assert len(unread) > 20
