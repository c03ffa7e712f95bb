"""`foretoken quantize`: what is written is what `quantization=` computes, and others read it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

from foretoken import LLM, SamplingParams
from foretoken.cli.app import app
from foretoken.models import LoadOptions
from foretoken.models.checkpoint import Checkpoint
from foretoken.models.tensors import SpanLayout
from foretoken.quant import BlockWeights, IntWeights
from foretoken.quant.formats import format_of
from foretoken.runtime.runner import Runner
from foretoken.shape import ModelShape
from foretoken.testing import write_tiny_llama
from foretoken.training.quantize import job
from tests.golden.families import write_checkpoint
from tests.golden.quantized import SIZES

IDS = [1 + 7 * i % 90 for i in range(60)]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["quantize", *map(str, arguments)])


def write(source: Path, out: Path, *options: object) -> Path:
    result = run(source, out, *options)
    assert result.exit_code == 0, result.output
    return out


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("source") / "model", **SIZES)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    generator = torch.Generator().manual_seed(3)
    lines = [torch.randint(97, (80,), generator=generator).tolist() for _ in range(30)]
    file.write_text("".join(json.dumps({"prompt_token_ids": ids}) + "\n" for ids in lines))
    return file


def logits(folder: Path, quantization: str | None = None) -> Tensor:
    options = LoadOptions(
        dtype=torch.float32,
        device=torch.device("cpu"),
        batch_invariant=False,
        page_size=16,
        quantization=quantization,
    )
    runner = Runner.load(folder, options, num_pages=4)
    layout = SpanLayout(start=0, num_tokens=len(IDS), page_table=[0, 1, 2, 3])
    return runner.forward([layout], [IDS], list(range(len(IDS)))).logits_RV


def matrices(folder: Path) -> dict[str, IntWeights | Tensor]:
    shape = ModelShape.from_config(folder)
    assert shape.stored is not None
    cpu, stored = torch.device("cpu"), format_of(shape.stored, folder)
    checkpoint = Checkpoint(folder, dtype=torch.float32, device=cpu, stored=stored)
    found: dict[str, IntWeights | Tensor] = {}
    for name in checkpoint.names():
        if name.endswith("weight_shape"):
            outputs, inputs = checkpoint.peek(name).tolist()
            module = name.removesuffix(".weight_shape")
            weights = checkpoint.matrix(module, (outputs, inputs))
            assert not isinstance(weights, BlockWeights), "no GGUF file"
            found[module] = weights
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words", "group", "zeros"),
    [
        (("--scheme", "int8"), "int8, per output", 0, False),
        (("--scheme", "int8", "--group-size", 64), "int8, groups of 64", 64, False),
        (("--scheme", "int4"), "int4, groups of 32", 32, False),
        (
            ("--scheme", "int4", "--asymmetric", "--group-size", 128),
            "int4, groups of 128, asymmetric",
            128,
            True,
        ),
    ],
)
@pytest.mark.parametrize("calibrated", [False, True])
def test_what_is_written_is_read(
    source: Path,
    text: Path,
    tmp_path: Path,
    options: tuple[object, ...],
    words: str,
    group: int,
    zeros: bool,
    calibrated: bool,
) -> None:
    more = (
        ("--calibrate", text, "--calibration-length", 40, "--calibration-sequences", 12)
        if calibrated
        else ()
    )
    written = write(source, tmp_path / "out", *options, *more)
    stored = ModelShape.from_config(written).stored
    assert stored is not None and stored.weights == words
    found = matrices(written)
    assert len(found) == 2 * 7
    for weights in found.values():
        assert isinstance(weights, IntWeights)
        assert weights.group == (group if weights.shape[1] > group else 0)
        assert (weights.zero_NG is not None) == zeros
    error = (logits(written, None) - logits(source, None)).std() / logits(source, None).std()
    assert error < (0.03 if words.startswith("int8") else 0.4)
    record = json.loads((written / "quantization.json").read_text())
    assert record["settings"]["scheme"] == words[:4]
    assert record["versions"]["foretoken"]
    assert (record["calibration"] is not None) == calibrated == bool(record["output_errors"])
    if calibrated:
        assert record["calibration"]["rows"] == [12, 40]
        for name, errors in record["output_errors"].items():
            assert 0 < errors["calibrated"] < errors["nearest"], name


def test_libraries_of_others_read_it(source: Path, tmp_path: Path) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from compressed_tensors.quantization import QuantizationConfig
    from safetensors.torch import load_file

    options = ("--scheme", "int4", "--asymmetric", "--group-size", 64)
    written = write(source, tmp_path / "out", *options)
    config = json.loads((written / "config.json").read_text())["quantization_config"]
    [group] = QuantizationConfig.model_validate(config).config_groups.values()
    assert (group.weights.num_bits, group.weights.group_size) == (4, 64)
    tensors = load_file(written / "model.safetensors")
    for module, weights in matrices(written).items():
        assert isinstance(weights, IntWeights) and weights.zero_NG is not None
        shape = torch.Size(tensors[f"{module}.weight_shape"].tolist())
        values = unpack_from_int32(tensors[f"{module}.weight_packed"], 4, shape)
        assert torch.equal(values + 8, weights.values_NK.to(torch.int8))
        packed, groups = tensors[f"{module}.weight_zero_point"], weights.scale_NG.shape
        zeros = unpack_from_int32(packed, 4, groups, packed_dim=0)
        assert torch.equal(zeros + 8.0, weights.zero_NG)


def read_by_transformers(written: Path) -> Tensor:
    """Its logits of IDS; every tensor that it looks for is there."""
    import transformers

    make: Any = transformers.AutoModelForCausalLM.from_pretrained
    model, report = make(written, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"], "transformers would make numbers up for these"
    with torch.no_grad():
        logits_TV: Tensor = model(torch.tensor([IDS])).logits[0]
    return logits_TV


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_logits_are_those_of_rounding_at_load_and_of_transformers(
    tmp_path: Path, scheme: str, tied: bool
) -> None:
    source = write_tiny_llama(tmp_path / "source", tie_word_embeddings=tied, **SIZES)
    written = write(source, tmp_path / "out", "--scheme", scheme)
    assert torch.equal(logits(written, scheme), logits(source, scheme))
    assert not torch.equal(logits(written, scheme), logits(source, None))
    expected = read_by_transformers(written)
    assert (logits(written, None) - expected).abs().max() < 2e-3 * expected.std()


FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Mistral": {},
    "Qwen2": {},
    "Qwen3": {},
    "Phi3": {"pad_token_id": 0},
    "Ministral3": {},
    "SmolLM3": {"num_hidden_layers": 4},
    "Olmo2": {},
    "Gemma": {},
    "Gemma2": {"query_pre_attn_scalar": 20},
    "Gemma3Text": {"query_pre_attn_scalar": 20},
}
"""What is quantized and what is not differs: biases, norms of heads, matrices stored as one."""
WHOLE_GROUPS = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "vocab_size": 97}


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_every_family_with_tied_embeddings(tmp_path: Path, family: str) -> None:
    changes = {**WHOLE_GROUPS, **FAMILIES[family], "tie_word_embeddings": True}
    write_checkpoint(tmp_path / "source", family, changes)
    written = write(tmp_path / "source", tmp_path / "out", "--scheme", "int4")
    expected = read_by_transformers(written)
    # Such wild weights amplify what our kernels round of activations, to 0.4 % at most.
    assert (logits(written, None) - expected).abs().max() < 2e-2 * expected.std()


@pytest.mark.slow
def test_same_tokens_with_any_draft(source: Path, text: Path, tmp_path: Path) -> None:
    written = write(
        source, tmp_path / "out", "--scheme", "int4", "--calibrate", text,
        "--calibration-sequences", 4,
    )  # fmt: skip
    prompts: list[Any] = [{"prompt_token_ids": IDS[:length]} for length in (5, 17, 38)]

    def tokens(model: Path, speculative: dict[str, Any] | None) -> list[tuple[int, ...]]:
        settings: Any = {"batch_invariant": True, "adaptive_speculation": False}
        llm = LLM(str(model), speculative_config=speculative, **settings)
        found = []
        for temperature in (0.0, 0.9):
            params = SamplingParams(temperature=temperature, seed=5, max_tokens=24, ignore_eos=True)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found += [output.outputs[0].token_ids for output in outputs]
        return found

    plain = tokens(written, None)
    for draft in (written, source):
        assert tokens(written, {"model": str(draft), "num_speculative_tokens": 4}) == plain
    drafted = tokens(source, {"model": str(written), "num_speculative_tokens": 4})
    assert drafted == tokens(source, None)


def test_all_else_is_copied(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "source")
    for name in ("tokenizer_config.json", "chat_template.jinja", "LICENSE"):
        (source / name).write_text("{}")
    (source / "pytorch_model.bin.index.json").write_text("{}")
    written = write(source, tmp_path / "out", "--scheme", "int8")
    names = {path.name for path in written.iterdir()}
    assert names == {
        *("config.json", "model.safetensors", "quantization.json"),
        *("tokenizer_config.json", "chat_template.jinja", "LICENSE"),
    }
    content = json.loads((written / "config.json").read_text())
    assert content.pop("quantization_config")["ignore"] == ["lm_head"]
    assert content == json.loads((source / "config.json").read_text())


def test_large_models_are_cut_into_files(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = write(source, tmp_path / "whole", "--scheme", "int4")
    monkeypatch.setattr(job, "SHARD_BYTES", 100_000)
    cut = write(source, tmp_path / "cut", "--scheme", "int4")
    files = sorted(path.name for path in cut.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert torch.equal(logits(cut, None), logits(whole, None))


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--scheme", "int3"), 2, "--scheme: got 'int3'; allowed: int8, int4"),
        (("--scheme", "int4", "--calibration-length", "64"), 2, "--calibrate: got None"),
        (("--scheme", "int4", "--calibrate", "nowhere.txt"), 2, "nowhere.txt"),
    ],
)
def test_mistakes(
    source: Path, tmp_path: Path, options: tuple[str, ...], code: int, said: str
) -> None:
    result = run(source, tmp_path / "out", *options)
    assert result.exit_code == code, result.output
    assert said in result.stderr and len(result.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_models_that_are_not_taken(source: Path, tmp_path: Path) -> None:
    written = write(source, tmp_path / "out", "--scheme", "int8")
    again = run(written, tmp_path / "again", "--scheme", "int4")
    assert again.exit_code == 3
    assert "quantized already: compressed-tensors: int8, per output" in again.stderr
    taken = run(source, written, "--scheme", "int4")
    assert taken.exit_code == 2
    assert "OUT" in taken.stderr and "an empty one" in taken.stderr
    (source / "model.safetensors").rename(source / "elsewhere")
    try:
        broken = run(source, tmp_path / "broken", "--scheme", "int8")
    finally:
        (source / "elsewhere").rename(source / "model.safetensors")
    assert broken.exit_code == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
