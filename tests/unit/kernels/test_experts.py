"""Mixtures in one call against their twin, on every instruction set of this machine. The guarded
bugs: a row whose bits depend on who shares its experts, a tie that falls elsewhere, an expert that
is read though no row chose it, prepared rows that are laid out for another number of rows."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import gguf
import pytest
import torch
from gguf.quants import quantize
from torch import Tensor

from foretoken.backend import LinearSpec, backend_for
from foretoken.kernels.library import find_library
from foretoken.layers.mixture import Expert, Mixture, Router, inner_activation
from foretoken.layers.mlp import GatedMLP
from foretoken.ops.activation import silu
from foretoken.ops.linear import Linear
from foretoken.ops.mixture_kernel import MixtureKernel, find_kernel
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
    "no gate": replace(PLAIN, activation="relu2", routing=Routing(floor=0.9, weights="normalized")),
}  # fmt: skip
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
    found.handle.ft_set_level(before)


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_mixture(
    experts: Experts, dtype: torch.dtype, quantization: str | None, spoiled: tuple[int, ...] = ()
) -> Mixture:
    """Random weights; those of `spoiled` experts are no numbers."""

    def linear(
        outputs: int, inputs: int, seed: int, *, wide: bool = False, bias: bool = False,
        rounds: bool = True, sums: bool = False,
    ) -> Linear:  # fmt: skip
        kind = torch.float32 if wide else dtype
        weights = randn(outputs, inputs, seed=seed) / inputs**0.5
        if seed // 2 in spoiled:
            weights.fill_(torch.nan)
        kind_of_blocks = quantization if quantization in BLOCK_KINDS else None
        blocks = None
        if rounds and kind_of_blocks and inputs % STEP == 0:
            rows = quantize(weights.numpy(), gguf.GGMLQuantizationType[kind_of_blocks])
            blocks = BlockWeights.as_stored(kind_of_blocks, torch.from_numpy(rows))
        return backend_for(weights.device).linear(
            LinearSpec(
                weights=weights.to(kind) if blocks is None else blocks,
                dtype=kind,
                bias_N=randn(outputs, seed=-seed - 1, dtype=kind) if bias else None,
                quantization=quantization if rounds and not kind_of_blocks else None,
                keeps_sums=sums,
            )
        )

    routing, halves = experts.routing, 2 if experts.is_gated else 1
    router = Router(
        linear=linear(
            experts.count, WIDTH, 5001, wide=routing.wide, bias=routing.bias, rounds=False
        ),
        used=experts.used,
        routing=routing,
        choice_bias_E=randn(experts.count, seed=5002) if routing.choice_bias else None,
    )
    pairs = [
        (
            linear(halves * INNER, WIDTH, 2 * number, bias=experts.biases),
            linear(WIDTH, INNER, 2 * number + 1, bias=experts.biases, sums=True),
        )
        for number in range(experts.count)
    ]
    shared, gate, inner = None, None, experts.shared_width
    if experts.shared != "none":
        up, down = linear(2 * inner, WIDTH, 5003), linear(WIDTH, inner, 5004, sums=True)
        shared = GatedMLP(gate_up=up, down=down, activate=silu)
    if experts.shared == "gated":
        gate = linear(1, WIDTH, 5005, rounds=False)
    kernel = find_kernel(
        experts,
        router=router.linear,
        choice_bias_E=router.choice_bias_E,
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
        kernel=kernel,
    )


def kernel_of(mixture: Mixture) -> MixtureKernel:
    assert mixture.kernel is not None
    return mixture.kernel


@pytest.mark.parametrize("dtype,quantization", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_mixture(level: int, case: str, dtype: torch.dtype, quantization: str | None) -> None:
    mixture = make_mixture(CASES[case], dtype, quantization)
    kernel = kernel_of(mixture)
    x, residual = randn(ROWS, WIDTH, seed=1, dtype=dtype), randn(ROWS, WIDTH, seed=2, dtype=dtype)
    found = kernel(x, residual)
    rows = range(ROWS) if case == "softmax" else range(0, ROWS, 10)
    for row in rows:
        assert torch.equal(kernel(x[row : row + 1], residual[row : row + 1])[0], found[row]), row
    for size in (3, 8, 17):
        pieces = [kernel(*both) for both in zip(x.split(size), residual.split(size), strict=True)]
        assert torch.equal(torch.cat(pieces), found), size
    twin = replace(mixture, kernel=None)(x, residual)
    # A row whose last two scores are within rounding may have another expert than its twin.
    near = (found - twin).abs().amax(1) < (0.08 if dtype == torch.bfloat16 else 1e-4)
    assert near.float().mean() > 0.97, (found - twin).abs().amax()


def test_experts_are_chosen_alike_on_every_level(level: int) -> None:
    kernel, library = (
        kernel_of(make_mixture(CASES["groups"], torch.float32, "int8")),
        find_library(),
    )
    assert library is not None
    x, found = randn(ROWS, WIDTH, seed=1), []
    for one in (level, 0):
        library.handle.ft_set_level(one)
        found.append(torch.empty(ROWS, PLAIN.used, dtype=torch.int32))
        kernel(x, None, found[-1])
    library.handle.ft_set_level(level)
    assert torch.equal(*found)


def test_ties_go_to_the_lower_number(level: int) -> None:
    mixture = make_mixture(replace(PLAIN, count=16, used=3), torch.float32, None)
    kernel = kernel_of(mixture)
    choices = torch.empty(2, 3, dtype=torch.int32)
    kernel(torch.zeros(2, WIDTH), None, choices)
    assert choices.tolist() == [[0, 1, 2]] * 2


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
    choices = torch.empty(6, 4, dtype=torch.int32)
    want = kernel_of(make())(x, None, choices)
    others = tuple(set(range(PLAIN.count)) - set(choices.flatten().tolist()))
    assert others
    assert torch.equal(kernel_of(make(spoiled=others))(x, None), want)
