"""Checkpoints that are quantized already, against the floats that they stand for.

The guarded bugs: values, zero points or scales read in another order than they were written; heads
reordered across groups; a layer whose bits depend on the number of rows.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.shape import ModelShape
from foretoken.training.quantize.calibration import Calibration
from tests.golden import families
from tests.golden import quantized as q
from tests.golden.scenario import cut, forward, in_pieces, open_runner, tables


def compressed(layout: str, bits: int, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 32, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def gptq(bits: int = 4, group: int = 32, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, **more}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FLOAT = {"type": "float", "strategy": "channel"}
Case = tuple[dict[str, Any], q.Writer, dict[str, Any]]
CASES: dict[str, Case] = {
    "gptq 4": (gptq(), q.gptq(), {}),
    "gptq 4, wide groups over heads": (gptq(group=128), q.gptq(group=128), {}),
    "gptq 4, per output": (gptq(group=-1), q.gptq(group=0), {}),
    "gptq 4, asymmetric, head": (gptq(sym=False), q.gptq(symmetric=False), {"head": True}),
    "gptq 4, second format": (
        gptq(sym=False, checkpoint_format="gptq_v2"),
        q.gptq(symmetric=False, v2=True, index=False),
        {},
    ),
    "gptq 4, order of activations": (gptq(desc_act=True), q.gptq(shuffled=True), {}),
    "gptq 8": (gptq(8, 64), q.gptq(bits=8, group=64), {}),
    "gptq 8, asymmetric": (gptq(8, sym=False), q.gptq(bits=8, symmetric=False), {}),
    "gptq 4, groups of 16": (gptq(group=16), q.gptq(group=16), {}),
    "gptq 4, narrow heads": (gptq(), q.gptq(), {"head_dim": 16}),
    "awq": (AWQ, q.awq(), {}),
    "awq, groups of 64": (AWQ, q.awq(group=64), {}),
    "packed 4": (compressed("pack-quantized", 4), q.packed(), {}),
    "packed 4, asymmetric": (
        compressed("pack-quantized", 4, symmetric=False),
        q.packed(symmetric=False, group=64),
        {},
    ),
    "packed 4, order of activations": (
        compressed("pack-quantized", 4, actorder="group"),
        q.packed(shuffled=True),
        {},
    ),
    "packed 8": (compressed("pack-quantized", 8), q.packed(bits=8, group=128), {}),
    "int8 per output, head": (
        compressed("int-quantized", 8, strategy="channel"),
        q.plain_int8(),
        {"head": True},
    ),
    "int8 in groups": (compressed("int-quantized", 8), q.plain_int8(group=64), {}),
    "int8, asymmetric": (
        compressed("int-quantized", 8, symmetric=False),
        q.plain_int8(symmetric=False),
        {},
    ),
    "fp8 per matrix": (compressed("naive-quantized", 8, **FLOAT), q.fp8(per="matrix"), {}),
    "fp8 per matrix, activations too": (
        compressed("naive-quantized", 8, **FLOAT),
        q.fp8(per="matrix", inputs="input_scale"),
        {},
    ),
    "fp8 per matrix, as Mistral": (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        q.fp8(per="matrix", suffix="weight_scale_inv", inputs="activation_scale"),
        {},
    ),
    "fp8 per output": (compressed("float-quantized", 8, **FLOAT), q.fp8(per="output"), {}),
    "fp8 per block": (
        compressed("float-quantized", 8, type="float", strategy="block", block_structure=[48, 64]),
        q.fp8(per="block"),
        {},
    ),
    "fp8, blocks, as DeepSeek": (
        {"quant_method": "fp8", "weight_block_size": [48, 64]},
        q.fp8(per="block", suffix="weight_scale_inv"),
        {},
    ),
}
INTEGERS = ("gptq 4, wide groups over heads", "awq", "packed 8", "int8 per output, head")


@pytest.fixture(params=CASES)
def both(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    config, writer, more = CASES[request.param]
    return q.write_both(tmp_path, config, writer, **more)


def test_matrices_are_read_exactly(both: tuple[Path, Path]) -> None:
    found, expected = q.open_both(both)
    for name in expected.names():
        shape = expected.peek(name).shape
        if len(shape) == 2:
            weights = found.matrix(name.removesuffix(".weight"), (shape[0], shape[1]))
            if not isinstance(weights, Tensor):
                weights = weights.dequantized(torch.float32)
            assert torch.equal(weights, expected.peek(name)), name
        else:
            found.take(name, shape)
    found.finish()


def test_logits_are_those_of_the_floats(both: tuple[Path, Path]) -> None:
    ids = [1 + 7 * i % 90 for i in range(40)]
    pages = list(range(20))
    found = forward(open_runner(both[0]), [(ids, 0, 40, pages)])
    expected = forward(open_runner(both[1]), [(ids, 0, 40, pages)])
    assert (found - expected).abs().max() < 2e-3 * expected.std()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", INTEGERS)
def test_rows_keep_their_bits(tmp_path: Path, case: str, dtype: torch.dtype) -> None:
    config, writer, more = CASES[case]
    folder, _ = q.write_both(tmp_path, config, writer, **more)
    runner = open_runner(folder, dtype=dtype, batch_invariant=True)
    draw = random.Random(4)
    ids = [draw.randrange(97) for _ in range(60)]
    [pages] = tables(draw, [60], together=False)
    expected = in_pieces(runner, ids, pages, [1] * 60)
    for choices in ([60], [1, 2, 3, 5], [7, 16, 17]):
        assert torch.equal(in_pieces(runner, ids, pages, cut(draw, 60, choices)), expected)


# What calibration sees, against transformers' own modules. The guarded bugs: inputs of the output
# projection in attention's order of heads instead of the file's; layers of another window; a
# layer that is fed what the one before it was fed.
CALIBRATED = (
    "olmo2", "smollm3 some layers with a window", "llama grouped tied", "mistral window",
    "qwen3 biases and window", "phi3 window", "gemma2", "gemma3 two kinds of positions",
)  # fmt: skip


def expected_moments(model: Any, rows_ST: Tensor) -> dict[str, Tensor]:
    """Mean x x^T of the inputs of every linear layer, by its name."""
    seen: dict[str, list[Tensor]] = {}

    def watch(name: str) -> Any:
        def note(module: Any, given: tuple[Tensor, ...], result: Any) -> None:
            seen.setdefault(name, []).append(given[0].detach().flatten(0, -2))

        return note

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_hook(watch(name))
    with torch.no_grad():
        for row in rows_ST:
            model(row[None])
    joined = {name: torch.cat(parts) for name, parts in seen.items()}
    return {name: x_TK.T @ x_TK / x_TK.shape[0] for name, x_TK in joined.items()}


@pytest.mark.parametrize("case", CALIBRATED)
def test_moments_are_those_of_the_inputs(tmp_path: Path, case: str) -> None:
    kind, changes = families.OWN[case]
    model = families.write_checkpoint(tmp_path, kind, changes)
    rows_ST = torch.randint(families.VOCAB, (3, 30), generator=torch.Generator().manual_seed(0))
    expected = expected_moments(model, rows_ST)
    shape = ModelShape.from_config(tmp_path)
    calibration = Calibration(tmp_path, shape, rows_ST)
    for index in range(shape.num_hidden_layers):
        found = calibration.moments(index)
        prefix = f"model.layers.{index}."
        names = [name for name in expected if name.startswith(prefix)]
        assert names, (prefix, list(expected))
        for name in names:
            moments = found[name.rpartition(".")[2]]
            torch.testing.assert_close(moments, expected[name], rtol=2e-3, atol=2e-3)
        calibration.advance(index, {})
