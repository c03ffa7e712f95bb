"""Files that cannot be run: each face of the package says so in one line that names the file, the
field, what stands there and what is allowed. So is a weight that is no number.

The guarded bugs: a traceback, hours or memory without end, a shape shown of what cannot load."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from foretoken import LLM
from foretoken.checkpoint import packaged_model
from foretoken.cli.app import app
from foretoken.errors import CheckpointError, ForetokenError, PromptError
from foretoken.quant import IntWeights
from foretoken.quant.finite import check_finite
from foretoken.shape.gguf import forget_gguf
from foretoken.testing import write_tiny_llama
from tests.e2e.gguf_targets import WIDTH, write_target
from tests.e2e.heads import write_head
from tests.golden.gguf_files import finish, write_value
from tests.golden.gguf_heads import write_gguf_head

Kind = gguf.GGMLQuantizationType
Change = Callable[[gguf.GGUFWriter, dict[str, Any], dict[str, Any]], None]
"""(writer, metadata, tensors) of a file that is written anew."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("whole") / "model.gguf", "Q4_K_M")


def rewritten(path: Path, to: Path, change: Change, arch: str = "llama") -> Path:
    reader = gguf.GGUFReader(path)
    metadata = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith(("GGUF.", "general.architecture"))
    }
    tensors: dict[str, Any] = {
        one.name: [np.array(one.data), one.tensor_type] for one in reader.tensors
    }
    writer = gguf.GGUFWriter(to, arch)
    change(writer, metadata, tensors)
    for name, value in metadata.items():
        write_value(writer, name, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    finish(writer)
    return to


def metadata(**changes: Any) -> Change:
    """Values set, or left out where they are None; dots are written `__`."""

    def change(writer: gguf.GGUFWriter, found: dict[str, Any], tensors: dict[str, Any]) -> None:
        found |= {name.replace("__", "."): value for name, value in changes.items()}
        for name in [name for name, value in found.items() if value is None]:
            del found[name]

    return change


def without(name: str) -> Change:
    return lambda writer, found, tensors: tensors.pop(name)


KNOWN_BEFORE: dict[str, tuple[Change, str]] = {
    "a tokenizer of another kind": (
        metadata(tokenizer__ggml__model="bert"), "tokenizer.ggml.model: got 'bert'"),
    "words cut by a rule that is not known": (
        metadata(tokenizer__ggml__pre="default"), "tokenizer.ggml.pre: got 'default'"),
    "fewer tokens than rows": (
        metadata(tokenizer__ggml__tokens=["a", "b"]),
        "tokenizer.ggml.tokens: got '2 tokens'; allowed: 97, the rows of token_embd.weight"),
    "heads for each layer": (
        metadata(llama__attention__head_count=[16, 8]),
        "llama.attention.head_count: got '16, 8, ...'; allowed: the same in every layer"),
    "MLPs of two widths": (
        metadata(llama__feed_forward_length=[256, 128]),
        "llama.feed_forward_length: got '256, 128"),
    "a list of another length": (
        metadata(llama__attention__head_count=[16, 16, 16]),
        "llama.attention.head_count: got 'a list of 3'; allowed: an integer"),
    "layers without end": (
        metadata(llama__block_count=4_000_000_000), "llama.block_count: got 4000000000"),
    "no width": (metadata(llama__embedding_length=None), "embedding_length: got None; allowed"),
    "heads that share no keys": (
        metadata(llama__attention__head_count_kv=3), "attention.head_count_kv: got 3; allowed: a"),
    "mixture of experts": (metadata(llama__expert_count=8), "expert_count"),
    "one of several parts": (
        metadata(split__count=3), "split.count: got '3 in bad.gguf'; allowed: 1"),
}  # fmt: skip
AT_LOAD: dict[str, tuple[Change, str]] = {
    "a tensor too few": (
        without("blk.1.ffn_up.weight"), "missing tensor: got 'model.layers.1.mlp.up_proj.weight'"),
    "a layer too many": (
        metadata(llama__block_count=1), "unused tensors: got 'model.layers.1."),
    "another width": (
        metadata(llama__feed_forward_length=512),
        r"tensor shape: got .*allowed: \[.*\] from its metadata"),
}  # fmt: skip


def said_by_info(path: Path) -> str:
    found = CliRunner().invoke(app, ["info", str(path)])
    lines = found.stderr.strip().splitlines()
    assert found.exit_code in (2, 3) and len(lines) == 1, (found.output, found.exception)
    return lines[0]


@pytest.mark.parametrize("case", KNOWN_BEFORE)
def test_what_metadata_say(case: str, whole: Path, tmp_path: Path) -> None:
    change, said = KNOWN_BEFORE[case]
    path = rewritten(whole, tmp_path / "bad.gguf", change)
    with pytest.raises(ForetokenError) as error:
        LLM(str(path))
    message = str(error.value)
    assert "bad.gguf" in message and said in message and "; allowed: " in message, message
    assert said_by_info(path) == f"foretoken: {message}"


@pytest.mark.parametrize("case", AT_LOAD)
def test_what_tensors_say(case: str, whole: Path, tmp_path: Path) -> None:
    change, said = AT_LOAD[case]
    path = rewritten(whole, tmp_path / "bad.gguf", change)
    with pytest.raises(CheckpointError, match=said) as error:
        LLM(str(path))
    assert "bad.gguf" in str(error.value)


def test_a_missing_part(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "model-00001-of-00002.gguf"
    shutil.copy(whole, path)
    with pytest.raises(CheckpointError, match="missing part: got 'model-00002-of-00002.gguf'"):
        LLM(str(path))
    assert "model-00002-of-00002.gguf" in said_by_info(path)


@pytest.mark.parametrize("share", [0.02, 0.5, 0.999])
def test_cut_short(share: float, whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    content = whole.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    forget_gguf()
    with pytest.raises(CheckpointError, match="cut.gguf"):
        LLM(str(path))
    assert "cut.gguf" in said_by_info(path)


@pytest.mark.parametrize("number", [np.float16("nan"), np.float16("-inf")], ids=str)
@pytest.mark.parametrize(
    ("name", "at"), [("blk.0.attn_q", 0), ("blk.1.ffn_down", 208), ("token_embd", 208)]
)
def test_scales_that_are_no_numbers(
    name: str, at: int, number: np.float16, whole: Path, tmp_path: Path
) -> None:
    def change(writer: gguf.GGUFWriter, found: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors[f"{name}.weight"][0][3, at : at + 2] = np.array([number]).view(np.uint8)

    path = rewritten(whole, tmp_path / "scales.gguf", change)
    with pytest.raises(CheckpointError, match=r"scales.gguf.*(NaN|infinite)") as error:
        LLM(str(path))
    assert "allowed: " in str(error.value)


def test_scales_of_a_head(tmp_path: Path, whole: Path) -> None:
    head = write_head(tmp_path / "head", "eagle3", tmp_path, WIDTH)
    path = write_gguf_head(head, tmp_path / "good.gguf", Kind.Q8_0, target_hidden=WIDTH)

    def change(writer: gguf.GGUFWriter, found: dict[str, Any], tensors: dict[str, Any]) -> None:
        half = np.array([np.inf], np.float16)
        tensors["blk.0.ffn_up.weight"][0][1, :2] = half.view(np.uint8)

    bad = rewritten(path, tmp_path / "bad.gguf", change, "eagle3")
    with pytest.raises(CheckpointError, match=r"bad.gguf: .*up_proj.*"):
        LLM(str(whole), speculative_config={"model": str(bad)})


def test_a_head_with_other_tokens(tmp_path: Path, whole: Path) -> None:
    head = write_head(tmp_path / "head", "eagle3", tmp_path, WIDTH)
    path = write_gguf_head(head, tmp_path / "good.gguf", target_hidden=WIDTH)
    words = metadata(tokenizer__ggml__tokens=["a", "b", "c"])
    bad = rewritten(path, tmp_path / "bad.gguf", words, "eagle3")
    said = r"bad.gguf: .*got 'vocabulary 3'; allowed: a head of this target, whose .* is 97"
    with pytest.raises(ForetokenError, match=said):
        LLM(str(whole), speculative_config={"model": str(bad)})


TEMPLATES = {
    "no template": (None, "a model with a chat template"),
    "a loop": ("{% for i in range(10**9) %}{{ messages }}{% endfor %}", "chat_template|messages"),
    "attributes": ("{{ messages.__class__.__mro__ }}", "chat_template|messages"),
    "half of one": ("{% for m in messages %}", "chat_template|messages"),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_templates(case: str, whole: Path, tmp_path: Path) -> None:
    """Of files of strangers: a line in bounded time, and the engine goes on."""
    template, said = TEMPLATES[case]
    path = rewritten(whole, tmp_path / "chat.gguf", metadata(tokenizer__chat_template=template))
    with LLM(str(path)) as llm:
        with pytest.raises(PromptError, match=said):
            llm.chat([{"role": "user", "content": "ab"}], use_tqdm=False)
        [found] = llm.generate(["ab"], use_tqdm=False)
        assert found.outputs[0].token_ids


KV: dict[str, Any] = {"kv_cache_memory_bytes": 8 << 20, "max_model_len": 128}
BAD = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
TENSORS = [
    "model.embed_tokens.weight",
    "model.layers.1.mlp.down_proj.weight",
    "model.layers.0.input_layernorm.weight",
    "lm_head.weight",
]


def spoil(
    folder: Path, name: str, value: float, change: Callable[[Any], Any] = lambda t: t
) -> None:
    file = folder / "model.safetensors"
    tensors = {key: change(tensor) for key, tensor in load_file(str(file)).items()}
    tensors[name].view(-1)[-1] = value
    save_file(tensors, str(file))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("kind", BAD)
def test_floats(tmp_path: Path, dtype: str, quantization: str | None, kind: str) -> None:
    name = TENSORS[len(dtype + kind) % len(TENSORS)]
    folder = write_tiny_llama(tmp_path / "model")
    spoil(folder, name, BAD[kind])
    with pytest.raises(CheckpointError, match=name) as caught:
        LLM(str(folder), dtype=dtype, quantization=quantization, **KV)
    said = "1 NaN and 0 infinite" if kind == "nan" else "0 NaN and 1 infinite"
    assert said in str(caught.value)


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_every_tensor_of_any_stored_type(tmp_path: Path, name: str, stored: torch.dtype) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    spoil(folder, name, float("nan"), lambda tensor: tensor.to(stored))
    with pytest.raises(CheckpointError, match=name):
        LLM(str(folder), **KV)


def test_what_overflows_in_the_type_it_is_converted_to(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    spoil(folder, TENSORS[1], 1e6)
    LLM(str(folder), dtype="float32", **KV).close()
    with pytest.raises(CheckpointError, match="finite numbers as float16"):
        LLM(str(folder), dtype="float16", **KV)


def test_models_that_transformers_runs(tmp_path: Path) -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=96, max_position_embeddings=256,
    )  # fmt: skip
    GPTNeoXForCausalLM(config).save_pretrained(str(tmp_path))
    LLM(str(tmp_path), dtype="float32", **KV).close()
    spoil(tmp_path, "gpt_neox.layers.1.mlp.dense_h_to_4h.weight", float("nan"))
    with pytest.raises(CheckpointError, match="1 NaN"):
        LLM(str(tmp_path), dtype="float32", **KV)


def test_scales_of_stored_integers(tmp_path: Path) -> None:
    folder, out = write_tiny_llama(tmp_path / "model"), tmp_path / "int8"
    done = CliRunner().invoke(app, ["quantize", str(folder), str(out), "--scheme", "int8"])
    assert done.exit_code == 0, done.output
    names = load_file(str(out / "model.safetensors"))
    name = next(n for n in names if "down_proj" in n and "scale" in n)
    spoil(out, name, float("nan"))
    with pytest.raises(CheckpointError, match="scales"):
        LLM(str(out), dtype="float32", **KV)


def test_scales_and_zero_points() -> None:
    values = torch.zeros(4, 64, dtype=torch.uint8)
    for bad in BAD.values():
        scale, zero = torch.ones(4, 2), torch.full((4, 2), 8.0)
        good = IntWeights(bits=4, values_NK=values, scale_NG=scale, zero_NG=zero)
        check_finite("w", good)
        scale[3, 1] = bad
        with pytest.raises(CheckpointError, match="scales"):
            check_finite("w", good)
        scale[3, 1], zero[0, 0] = 1.0, bad
        with pytest.raises(CheckpointError, match="zero points"):
            check_finite("w", good)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_large_but_finite_numbers_are_fine(dtype: torch.dtype) -> None:
    """Their sum is not finite; they are."""
    check_finite("w", torch.full((64, 64), torch.finfo(dtype).max, dtype=dtype))


def test_heads(tmp_path: Path) -> None:
    source, folder = packaged_model("demo-eagle3"), tmp_path / "head"
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    name = next(n for n in load_file(str(folder / "model.safetensors")) if "norm" in n)
    spoil(folder, name, float("inf"))
    head = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 3}
    with pytest.raises(CheckpointError, match="infinite"):
        LLM("demo", speculative_config=head, **KV)
