"""What a checkpoint that is quantized already is said to take, against the bytes that it takes.

The guarded bugs: `quantization="int4"` over a checkpoint of 8 bits is believed; asymmetric 8 bits,
8-bit floats and K-quants, which become floats, are counted as integers, or the other way round.
"""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from foretoken.config.memory import ModelMemory
from foretoken.kernels.library import find_library
from foretoken.layers.attention import AttentionBlock
from foretoken.layers.mlp import GatedMLP
from foretoken.models import LoadOptions, load_model
from foretoken.models.decoder import Decoder
from foretoken.ops.linear import KernelLinear, Linear
from foretoken.shape import ModelShape
from foretoken.shape.gguf import _open
from tests.golden import quantized as q
from tests.golden.test_gguf import MIXED
from tests.golden.test_gguf import write_both as write_gguf
from tests.golden.test_ready_made import AWQ, FLOAT, Case, compressed, gptq
from tests.marks import slow_but

pytestmark = pytest.mark.skipif(find_library() is None, reason="only kernels hold integers")

Kind = gguf.GGMLQuantizationType
CASES: dict[str, Case] = {
    "gptq 4": (gptq(group=64), q.gptq(group=64), {}),
    "gptq 4, per output": (gptq(group=-1), q.gptq(group=0), {}),
    "gptq 4, groups of 16": (gptq(group=16), q.gptq(group=16), {}),
    "gptq 4, order of activations": (gptq(desc_act=True), q.gptq(shuffled=True), {}),
    "gptq 8, asymmetric": (gptq(8, sym=False), q.gptq(bits=8, symmetric=False), {}),
    "awq": (AWQ, q.awq(), {}),
    "packed 4, asymmetric": (
        compressed("pack-quantized", 4, symmetric=False),
        q.packed(symmetric=False),
        {},
    ),
    "packed 8": (compressed("pack-quantized", 8), q.packed(bits=8), {}),
    "int8 per output": (compressed("int-quantized", 8, strategy="channel"), q.plain_int8(), {}),
    "fp8": (compressed("float-quantized", 8, **FLOAT), q.fp8(per="output"), {}),
}
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
ROUNDED = [None, "int8", "int4"]


def held_bytes(path: Path, quantization: str | None) -> int:
    """What the matrices of the loaded model take, embedding included."""
    cpu = torch.device("cpu")
    model = load_model(
        path,
        LoadOptions(
            dtype=torch.bfloat16,
            device=cpu,
            batch_invariant=True,
            page_size=16,
            quantization=quantization,
        ),
    )
    assert isinstance(model, Decoder)
    linears: list[Linear | None] = [model.top]
    for layer in model.layers:
        assert isinstance(layer.mlp, GatedMLP) and isinstance(layer.attention, AttentionBlock)
        linears += [layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down]
    kernels = [one for one in linears if isinstance(one, KernelLinear)]
    assert len(kernels) == len(linears), linears
    packed = sum(part.packed.num_bytes for one in kernels for part in one.parts)
    shared = model.embedding.is_packed and model.shape.tie_word_embeddings
    return packed + (0 if shared else model.embedding.num_bytes)


def said_bytes(path: Path, quantization: str | None) -> int:
    shape = ModelShape.from_config(path)
    assert shape.stored is not None
    return ModelMemory(shape=shape, quantization=quantization).weight_bytes(2)


@pytest.mark.parametrize("quantization", slow_but(ROUNDED, None))
@pytest.mark.parametrize("case", CASES)
def test_folders_take_what_is_said(tmp_path: Path, case: str, quantization: str | None) -> None:
    config, writer, more = CASES[case]
    path, _ = q.write_both(tmp_path, config, writer, **{**SIZES, **more})
    said = said_bytes(path, quantization)
    assert said == pytest.approx(held_bytes(path, quantization), rel=0.02)


@pytest.mark.parametrize("quantization", ROUNDED)
@pytest.mark.parametrize(
    ("kinds", "sizes"),
    [
        ({"": Kind.Q8_0}, {}),
        ({"": Kind.Q4_0}, {"tie_word_embeddings": True}),
        ({**MIXED, "": Kind.Q4_K}, {}),
        ({"": Kind.F16}, {}),
    ],
)
def test_gguf_files_take_what_is_said(
    tmp_path: Path, kinds: dict[str, Any], sizes: dict[str, Any], quantization: str | None
) -> None:
    path, _ = write_gguf(tmp_path, kinds, **sizes)
    said = said_bytes(path, quantization)
    assert said == pytest.approx(held_bytes(path, quantization), rel=0.02)


def test_integers_do_not_become_fewer(tmp_path: Path) -> None:
    config, writer, _ = CASES["packed 8"]
    path, _ = q.write_both(tmp_path, config, writer, **SIZES)
    head = 97 * 256
    assert said_bytes(path, None) - said_bytes(path, "int4") == head - 4 * 97


def test_what_is_read_of_a_gguf_file_is_forgotten(tmp_path: Path) -> None:
    """The names of a vocabulary take 100 MB as the reader keeps them."""
    path, _ = write_gguf(tmp_path, {"": Kind.Q8_0})
    held_bytes(path, None)
    assert _open.cache_info().currsize == 0
    assert ModelMemory(shape=ModelShape.from_config(path)).loads_late
