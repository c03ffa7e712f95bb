"""GPTQ, its grids and its text. The guarded bugs: compensation that goes the wrong way or to the
wrong input, an order that leaks into the result, mistakes of a file that are read as text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.checkpoint import packaged_model
from foretoken.errors import CheckpointError, ConfigError, UnsupportedModelError
from foretoken.quant import Scheme, round_weights, scheme_of
from foretoken.shape import ModelShape
from foretoken.testing import write_tiny_llama
from foretoken.text.tokenizer import Tokenizer
from foretoken.training.quantize.gptq import Moments, SeenInputs, best_grid, gptq, output_error
from foretoken.training.quantize.job import CalibrationText, read_text_rows
from foretoken.training.quantize.settings import CalibrationSettings, QuantizeSettings, check_fits

INPUTS = 192
SCHEMES = [
    Scheme(name="int4", bits=4, group=32),
    Scheme(name="int4", bits=4, group=64, asymmetric=True),
    scheme_of("int8"),
]


def inputs(seed: int, rows: int = 2000) -> Tensor:
    """Correlated inputs of very different sizes, as those of a layer are."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(24, INPUTS, generator=generator)
    sizes = torch.rand(INPUTS, generator=generator).mul_(2).exp_()
    generator.manual_seed(seed)
    shared = torch.randn(rows, 24, generator=generator) @ mixing
    return (shared + 0.5 * torch.randn(rows, INPUTS, generator=generator)) * sizes


def moments_of(x_TK: Tensor) -> Tensor:
    moments = Moments(x_TK.shape[1])
    for piece in x_TK.split(700):
        moments.add(piece)
    return moments.mean("a layer")


def weights() -> Tensor:
    return torch.randn(80, INPUTS, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_outputs_change_less_than_by_rounding(scheme: Scheme) -> None:
    weight_NK, seen, held_out = weights(), moments_of(inputs(1)), moments_of(inputs(2))
    nearest = round_weights(weight_NK, scheme)
    found = gptq(weight_NK, SeenInputs(seen), scheme)
    assert found.scale_NG.shape == nearest.scale_NG.shape
    for moments in (seen, held_out):
        before = output_error(nearest, weight_NK, moments)
        assert output_error(found, weight_NK, moments) < 0.7 * before


def test_output_error_is_that_of_the_outputs() -> None:
    weight_NK, x_TK = weights(), inputs(1, rows=50)
    rounded = round_weights(weight_NK, SCHEMES[0])
    change = x_TK @ (rounded.dequantized(torch.float32) - weight_NK).T
    expected = change.norm() / (x_TK @ weight_NK.T).norm()
    found = output_error(rounded, weight_NK, moments_of(x_TK))
    assert found == pytest.approx(float(expected), rel=1e-3)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_independent_inputs_are_rounded_to_the_grid(scheme: Scheme) -> None:
    weight_NK = weights()
    weight_NK[3] = 0
    diagonal = torch.diag(torch.linspace(0.1, 2, INPUTS))
    found = gptq(weight_NK, SeenInputs(diagonal), scheme)
    grid = best_grid(weight_NK, diagonal.diagonal(), scheme)
    group = scheme.group or INPUTS
    levels = [grid.levels(weight_NK[:, k], k // group) for k in range(INPUTS)]
    expected = grid.weights(torch.stack(levels, 1), scheme)
    assert torch.equal(found.values_NK, expected.values_NK)
    assert not found.dequantized(torch.float32)[3].any()
    nearest = round_weights(weight_NK, scheme)
    assert output_error(found, weight_NK, diagonal) <= output_error(nearest, weight_NK, diagonal)


def test_few_rows_and_silent_inputs_are_no_trouble() -> None:
    x_TK = inputs(1, rows=5)
    x_TK[:, 40:60] = 0
    weight_NK = weights()
    found = gptq(weight_NK, SeenInputs(moments_of(x_TK)), SCHEMES[0]).dequantized(torch.float32)
    assert found.isfinite().all()
    nearest = round_weights(weight_NK, SCHEMES[0]).dequantized(torch.float32)
    silent = (found - weight_NK)[:, 40:60].abs().mean()
    assert silent < 2 * (nearest - weight_NK)[:, 40:60].abs().mean()
    silence = SeenInputs(torch.zeros(INPUTS, INPUTS))
    none = gptq(weight_NK, silence, SCHEMES[0]).dequantized(torch.float32)
    assert none.isfinite().all()


def test_inputs_that_are_no_numbers() -> None:
    x_TK = inputs(1, rows=5)
    x_TK[2, 7] = torch.inf
    with pytest.raises(CheckpointError, match="a layer"):
        moments_of(x_TK)


def rows(source: Path | str, *, tokens: bool = False, **changes: Any) -> CalibrationText:
    tokenizer = Tokenizer.of_folder(packaged_model("demo")) if tokens else None
    settings = CalibrationSettings(source=str(source), **changes)
    return read_text_rows(settings, tokenizer, vocab_size=8000, longest=64)


def test_rows_are_spread_over_the_text(tmp_path: Path) -> None:
    file = tmp_path / "ids.jsonl"
    parts = [list(range(at, at + 50)) for at in range(0, 1000, 50)]
    file.write_text("".join(json.dumps({"prompt_token_ids": ids}) + "\n" for ids in parts))
    found = rows(file, sequences=5, length=40)
    assert found.rows_ST.tolist() == [list(range(at, at + 40)) for at in range(0, 1000, 200)]
    assert found.tokens == 1000
    assert rows(file, sequences=5, length=40).digest == found.digest
    assert rows(file, sequences=4, length=40).digest != found.digest
    assert rows(file, sequences=999, length=512).rows_ST.shape == (15, 64)


def test_text_and_json_lines_are_the_same_tokens(tmp_path: Path) -> None:
    text = "def f(x):\n    return x + 1\n" * 20
    plain, lines = tmp_path / "code.py", tmp_path / "code.jsonl"
    plain.write_text(text)
    lines.write_text(json.dumps({"text": text}) + "\n\n")
    found = rows(plain, tokens=True)
    assert found.rows_ST.shape == (found.tokens // 64, 64)
    assert torch.equal(found.rows_ST, rows(lines, tokens=True).rows_ST)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", '{"text": "x"}\n{"text": 5}\n', r"line 2: got \{'text': 5\}"),
        ("a.jsonl", '{"text": "x"}\n\nnonsense\n', "line 3: got b'nonsense"),
        ("a.jsonl", '{"prompt_token_ids": [1, -2]}\n', "line 1"),
        ("a.jsonl", '{"prompt_token_ids": [1, 8000]}\n', "token ids below 8000"),
        ("a.jsonl", "", "a file with text in it"),
        ("a.txt", "", "a file with text in it"),
        ("a.txt", b"\xff\xfe", "UTF-8"),
    ],
)
def test_broken_text(tmp_path: Path, name: str, text: str | bytes, said: str) -> None:
    file = tmp_path / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=said):
        rows(file, tokens=True)


def test_the_packaged_text_is_enough_for_the_default() -> None:
    found = rows("python", tokens=True)
    length = CalibrationSettings(source="python").length
    assert found.tokens > 120 * length and found.rows_ST.shape[0] > 1


def test_text_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--calibrate: got 'nowhere.txt'.*python"):
        rows("nowhere.txt", tokens=True)
    file = tmp_path / "a.txt"
    file.write_text("x = 1\n")
    with pytest.raises(ConfigError, match="the model has no tokenizer"):
        rows(file)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"scheme": "int5"}, "--scheme: got 'int5'; allowed: int8, int4"),
        ({"scheme": "gptq"}, "--calibrate gives them what GPTQ and AWQ are for"),
        ({"scheme": "bitsandbytes"}, "allowed: int8, int4"),
        ({"scheme": "int4", "group_size": 48}, "--group-size: got 48; allowed: 32, 64, 128"),
        ({"scheme": "int8", "symmetric": False}, "--symmetric with int8"),
    ],
)
def test_settings_that_no_kernel_has(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        QuantizeSettings(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{"sequences": 0}, {"length": 1}])
def test_calibration_out_of_range(given: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="--"):
        CalibrationSettings(source="x", **given)


def test_models_that_cannot_be_written(tmp_path: Path) -> None:
    odd = ModelShape.from_config(write_tiny_llama(tmp_path / "odd", intermediate_size=100))
    check_fits(odd, scheme_of("int8"))
    with pytest.raises(ConfigError, match="intermediate_size 100.*--scheme int8"):
        check_fits(odd, scheme_of("int4"))
    usual = ModelShape.from_config(write_tiny_llama(tmp_path / "usual"))
    with pytest.raises(ConfigError, match="intermediate_size 96'; allowed: 32$") as caught:
        check_fits(usual, QuantizeSettings(scheme="int4", group_size=64).as_scheme)
    assert caught.value.field == "--group-size"
    config = {"quant_method": "fp8"}
    stored = write_tiny_llama(tmp_path / "stored", quantization_config=config)
    with pytest.raises(UnsupportedModelError, match="quantized already: fp8"):
        check_fits(ModelShape.from_config(stored), scheme_of("int8"))
