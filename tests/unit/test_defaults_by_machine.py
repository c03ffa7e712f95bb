"""What `auto` comes to on processors with and without an instruction for bfloat16.

Kernels of ours widen bfloat16 in registers and keep a row's bits on every processor, so a machine
with AVX2 alone has the 16-bit type, the promise and speculation that others have.
"""

from dataclasses import replace

import pytest

from foretoken.checkpoint import packaged_model
from foretoken.config import EngineConfig, resolve
from foretoken.config.resolve import ResolvedConfig
from foretoken.hardware import Hardware
from foretoken.shape import ModelShape

DEMO = ModelShape.from_config(packaged_model("demo"))
OTHERS = replace(DEMO, rope=None)
"""Run by transformers."""
NONE: tuple[str, ...] = ()
KERNELS = ("cpu",)
AVX2, AVX512 = frozenset({"avx2", "fma"}), frozenset({"avx512_bf16"})


def resolved(
    flags: frozenset[str], packs: tuple[str, ...], shape: ModelShape = DEMO, dtype: str = "auto"
) -> ResolvedConfig:
    machine = Hardware(cpu_name="any", num_cores=2, free_memory=2**34, cpu_flags=flags)
    return resolve(EngineConfig(model="demo", dtype=dtype), machine, shape, packs=packs)


@pytest.mark.parametrize(
    ("flags", "packs", "dtype", "invariant"),
    [
        (AVX512, KERNELS, "bfloat16", True),
        (AVX2, KERNELS, "bfloat16", True),
        (AVX512, NONE, "bfloat16", True),
        (AVX2, NONE, "float32", False),
    ],
)
def test_kernels_need_no_instruction_for_16_bits(
    flags: frozenset[str], packs: tuple[str, ...], dtype: str, invariant: bool
) -> None:
    found = resolved(flags, packs)
    assert (found.dtype, found.batch_invariant) == (dtype, invariant)


@pytest.mark.parametrize(("packs", "invariant"), [(KERNELS, True), (NONE, False)])
def test_a_float32_checkpoint_stays_so(packs: tuple[str, ...], invariant: bool) -> None:
    found = resolved(AVX2, packs, replace(DEMO, dtype="float32"))
    assert (found.dtype, found.batch_invariant) == ("float32", invariant)


def test_kernels_have_no_float16() -> None:
    assert not resolved(AVX2, KERNELS, dtype="float16").batch_invariant


@pytest.mark.parametrize(("flags", "dtype"), [(AVX2, "float32"), (AVX512, "bfloat16")])
def test_what_transformers_runs_needs_the_instruction(flags: frozenset[str], dtype: str) -> None:
    """Between our layers are PyTorch's operations."""
    found = resolved(flags, KERNELS, OTHERS)
    assert found.dtype == dtype and found.batch_invariant == (dtype == "bfloat16")
