"""What the metadata of a GGUF file say. The guarded bugs: a part of a model, or positions of
another kind, run as if they were whole and plain."""

import random
import re
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from typer.testing import CliRunner

from foretoken.checkpoint import _choose, _hub_id, _HubId, _type_of, find_model
from foretoken.cli.app import app
from foretoken.errors import (
    CheckpointError,
    ForetokenError,
    MissingPackageError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from foretoken.quant.formats import GgufFile
from foretoken.shape import gguf_architectures
from foretoken.shape.families import find_family
from foretoken.shape.gguf import forget_gguf, gguf_config, gguf_parts, gguf_scheme, open_gguf
from foretoken.shape.gguf_ends import ends_of_text
from foretoken.shape.gguf_file import TYPES, Strings, read_gguf
from tests.golden.gguf_files import finish
from tests.unit.gguf_tokens import CONTROL, NORMAL, UNUSED, USER_DEFINED, write_gguf

Change = Callable[[gguf.GGUFWriter], None]


def write(
    path: Path,
    *changes: Change,
    embeddings: str = "token_embd.weight",
    arch: str = "llama",
    blocks: int = 1,
) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(blocks)
    writer.add_embedding_length(8)
    for change in changes:
        change(writer)
    writer.add_tensor(embeddings, np.zeros((5, 8), np.float32))
    finish(writer)
    return path


def scaled(kind: gguf.RopeScalingType) -> Change:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(4.0)

    return change


def test_plain_and_linear_positions(tmp_path: Path) -> None:
    plain = gguf_config(write(tmp_path / "plain.gguf"))
    assert "rope_scaling" not in plain and plain["vocab_size"] == 5
    assert plain["tie_word_embeddings"] and not plain["attention_bias"]
    linear = write(tmp_path / "linear.gguf", scaled(gguf.RopeScalingType.LINEAR))
    assert gguf_config(linear)["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_a_window_makes_it_a_mistral(tmp_path: Path) -> None:
    found = gguf_config(write(tmp_path / "m.gguf", lambda writer: writer.add_sliding_window(64)))
    assert (found["model_type"], found["sliding_window"]) == ("mistral", 64)


def test_positions_that_are_not_recognized(tmp_path: Path) -> None:
    longrope = write(tmp_path / "longrope.gguf", scaled(gguf.RopeScalingType.LONGROPE))
    with pytest.raises(UnsupportedModelError, match="longrope"):
        gguf_config(longrope)
    odd = np.array([1.0, 3.0, 5.0, 7.0], np.float32)
    freqs = write(
        tmp_path / "freqs.gguf", lambda writer: writer.add_tensor("rope_freqs.weight", odd)
    )
    with pytest.raises(UnsupportedModelError, match=r"Llama 3's factors"):
        gguf_config(freqs)
    half = write(
        tmp_path / "half.gguf", lambda writer: writer.add_tensor("rope_factors_long.weight", odd)
    )
    with pytest.raises(CheckpointError, match=r"rope_factors_short"):
        gguf_config(half)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda w: w.add_uint16("split.count", 2), CheckpointError, "NAME-00001-of-00002.gguf"),
        (lambda w: w.add_expert_count(8), CheckpointError, "expert_count: got 8; allowed: none"),
        (lambda w: w.add_logit_scale(0.5), UnsupportedModelError, "llama.logit_scale: got 0.5"),
        (lambda w: w.add_causal_attention(False), UnsupportedModelError, "attention.causal"),
        (lambda w: w.add_value_length(16), UnsupportedModelError, "value_length: got 16"),
    ],
)
def test_files_that_are_no_whole_dense_language_model(
    change: Change, error: type[Exception], said: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "model.gguf", lambda w: w.add_head_count(1), change)
    with pytest.raises(error, match=said):
        gguf_config(path)


def test_projectors_and_unknown_architectures(tmp_path: Path) -> None:
    projector = write(tmp_path / "mmproj.gguf", arch="clip", embeddings="v.patch_embd.weight")
    with pytest.raises(UnsupportedModelError, match="the file of the language model"):
        gguf_config(projector)
    with pytest.raises(UnsupportedModelError, match="got 'mamba'; allowed: llama, qwen3moe"):
        gguf_config(write(tmp_path / "other.gguf", arch="mamba"))
    other = write(tmp_path / "words.gguf", embeddings="v.patch_embd.weight")
    with pytest.raises(CheckpointError, match="a language model's tensors"):
        gguf_config(other)


def test_families_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their records name the architecture, whose tensors have Llama's names."""
    llama = find_family("llama")
    assert llama is not None
    other = replace(llama, model_type="other", gguf="others", gguf_turns_heads=True)
    monkeypatch.setattr(gguf_architectures, "families", lambda: (other,))
    path = write(tmp_path / "other.gguf", arch="others")
    assert gguf_config(path)["model_type"] == "other"
    assert gguf_architectures.architecture_of(open_gguf(path)).turns_heads


def test_lists_with_a_number_for_each_layer(tmp_path: Path) -> None:
    def layers(*heads: int) -> Change:
        def change(writer: gguf.GGUFWriter) -> None:
            writer.add_head_count(list(heads))
            writer.add_feed_forward_length([16])

        return change

    found = gguf_config(write(tmp_path / "same.gguf", layers(2)))
    assert (found["num_attention_heads"], found["intermediate_size"]) == (2, 16)
    many = write(tmp_path / "many.gguf", layers(2, 4), blocks=2)
    with pytest.raises(CheckpointError, match=r"head_count: got '2, 4, ...'; allowed: the same"):
        gguf_config(many)


def gemma(arch: str, layers: int, *changes: Change) -> Callable[[Path], dict[str, Any]]:
    def read(folder: Path) -> dict[str, Any]:
        path = folder / f"{arch}.gguf"
        fixed: list[Change] = [lambda w: w.add_head_count(2), lambda w: w.add_key_length(16)]
        return gguf_config(write(path, *fixed, *changes, arch=arch, blocks=layers))

    return read


def test_what_no_gemma_file_says(tmp_path: Path) -> None:
    """llama.cpp has it in its code: scales of the largest models, patterns, theta, caps."""
    assert gemma("gemma2", 2)(tmp_path) | {
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    } == gemma("gemma2", 2)(tmp_path)
    assert gemma("gemma2", 46)(tmp_path)["query_pre_attn_scalar"] == 4
    assert gemma("gemma3", 62)(tmp_path)["query_pre_attn_scalar"] == 4
    small = gemma("gemma3", 7, lambda w: w.add_sliding_window(5))(tmp_path)
    assert (small["query_pre_attn_scalar"], small["rope_local_base_freq"]) == (16, 1e4)
    assert small["layer_types"].index("full_attention") == 5
    assert set(gemma("gemma3", 7)(tmp_path)["layer_types"]) == {"full_attention"}


def parts(folder: Path, *numbers: int, of: int = 3) -> Path:
    """Parts of a model: the first has the metadata, each a tensor of its own."""
    for number in numbers:
        writer = gguf.GGUFWriter(folder / f"m-{number:05}-of-{of:05}.gguf", "llama")
        writer.add_uint16("split.no", number - 1)
        writer.add_uint16("split.count", of)
        writer.add_int32("split.tensors.count", of)
        if number == 1:
            writer.add_block_count(1)
            writer.add_embedding_length(8)
        name = "token_embd.weight" if number == 2 else f"blk.{number}.attn_norm.weight"
        writer.add_tensor(name, np.zeros((5, 8), np.float32))
        finish(writer)
    return folder / f"m-00001-of-{of:05}.gguf"


def test_parts_are_read_as_one(tmp_path: Path) -> None:
    first = parts(tmp_path, 1, 2, 3)
    assert gguf_config(first)["vocab_size"] == 5
    assert find_model(str(tmp_path)) == first
    assert [path.name[2:7] for path in gguf_parts(first)] == ["00001", "00002", "00003"]


@pytest.mark.parametrize(
    ("numbers", "given", "said"),
    [
        ((1, 3), 1, "missing part: got 'm-00002-of-00003.gguf'"),
        ((1, 2, 3), 2, "the first part, m-00001-of-00003.gguf"),
    ],
)
def test_parts_that_are_not_all(
    numbers: tuple[int, ...], given: int, said: str, tmp_path: Path
) -> None:
    parts(tmp_path, *numbers)
    with pytest.raises(CheckpointError, match=said):
        gguf_config(tmp_path / f"m-{given:05}-of-00003.gguf")


def test_parts_of_other_models(tmp_path: Path) -> None:
    parts(tmp_path, 1, 2, 3)
    third = tmp_path / "m-00003-of-00003.gguf"
    (tmp_path / "m-00002-of-00003.gguf").write_bytes(third.read_bytes())
    forget_gguf()
    with pytest.raises(CheckpointError, match=r"split.no: got '2 in m-00002"):
        gguf_config(tmp_path / "m-00001-of-00003.gguf")


# Which tokens of a GGUF file end a text. The guarded bug: a Qwen that runs past the end of a
# document, since the file names only the end of an answer.
def ends(folder: Path, tokens: dict[str, int], **fields: Any) -> dict[int, str]:
    given = {"tokens": list(tokens), "token_type": list(tokens.values()), **fields}
    return ends_of_text(open_gguf(write_gguf(folder / "model.gguf", given)))


def test_ids_and_names(tmp_path: Path) -> None:
    tokens = {
        "a": NORMAL, "<|im_end|>": CONTROL, "<|endoftext|>": CONTROL, "<|eom_id|>": USER_DEFINED,
        "</s>": NORMAL, "<|eot_id|>": NORMAL, "<EOT>": UNUSED, "<|end|>x": CONTROL, "b": NORMAL,
    }  # fmt: skip
    found = ends(tmp_path, tokens, eos_token_id=1, eot_token_id=8)
    assert found == {1: "<|im_end|>", 2: "<|endoftext|>", 3: "<|eom_id|>", 8: "b"}
    assert gguf_config(write_gguf(tmp_path / "none.gguf", {}, rows=3))["eos_token_id"] == []
    ids = write_gguf(tmp_path / "ids.gguf", {"eos_token_id": 2, "eom_token_id": 1}, rows=3)
    assert gguf_config(ids)["eos_token_id"] == [1, 2]


def test_a_struck_out_text_has_its_own_end(tmp_path: Path) -> None:
    assert ends(tmp_path, {"a": NORMAL, "</s>": USER_DEFINED}) == {}
    assert ends(tmp_path, {"a": NORMAL, "</s>": CONTROL}) == {1: "</s>"}


def test_parts_of_an_answer(tmp_path: Path) -> None:
    tokens = {"<|end|>": CONTROL, "<|return|>": CONTROL, "<|call|>": CONTROL}
    assert ends(tmp_path, tokens, eos_token_id=1) == {1: "<|return|>"}
    assert ends(tmp_path, {"<|end|>": CONTROL, "<|call|>": CONTROL}) == {0: "<|end|>"}


def test_a_file_without_types(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"tokens": ["<|im_end|>", "x"], "eos_token_id": 1})
    assert ends_of_text(open_gguf(path)) == {1: "x"}


@pytest.mark.parametrize("field", ["eos", "eot", "eom"])
def test_ids_out_of_range(tmp_path: Path, field: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{field}_token_id: got 2; allowed: 0 to 1"):
        ends(tmp_path, {"a": NORMAL, "b": NORMAL}, **{f"{field}_token_id": 2})


def test_finding_in_a_list(tmp_path: Path) -> None:
    """Bytes that look like an entry, but begin within another, are none."""
    entry = "\x01\0\0\0\0\0\0\0b"
    path = write_gguf(tmp_path / "m.gguf", {"tokens": [f"x{entry}", "b", "", "c\0d", "b"]})
    tokens = open_gguf(path).get("tokenizer.ggml.tokens", Strings)
    assert tokens.find(["b", "", "d", "c\0d"]) == {"b": 1, "": 2, "c\0d": 3}
    assert tokens.texts() == list(tokens) == [f"x{entry}", "b", "", "c\0d", "b"]
    assert [tokens.at(i) for i in range(5)] == tokens.texts()


def test_info_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    tokens = {"a": NORMAL, "<|im_end|>": CONTROL, "<|endoftext|>": CONTROL}
    fields = {"tokens": list(tokens), "token_type": list(tokens.values()), "eos_token_id": 1}
    fields |= {"model": "gpt2", "pre": "gpt-2"}
    path = write_gguf(tmp_path / "model.gguf", fields, rows=3)
    answer = CliRunner().invoke(app, ["info", str(path)])
    assert answer.exit_code == 0, answer.output
    assert "<|im_end|> (1), <|endoftext|> (2)" in answer.output


QWEN = [f"qwen2.5-coder-0.5b-instruct-{kind}.gguf" for kind in ("q2_k", "q4_k_m", "q8_0")]
DYNAMIC = ["m-IQ4_XS.gguf", "m-Q4_K_M.gguf", "m-UD-Q4_K_XL.gguf", "m-UD-Q4_K_M.gguf"]
SPLIT = [f"Q8_0/m-Q8_0-{i:05}-of-00003.gguf" for i in range(1, 4)]


@pytest.mark.parametrize(
    ("files", "wanted", "found"),
    [
        (QWEN, "Q4_K_M", QWEN[1]),
        (QWEN, None, QWEN[1]),
        (QWEN, QWEN[2], QWEN[2]),
        (DYNAMIC, "q4_k_m", "m-Q4_K_M.gguf"),
        (DYNAMIC, "ud-Q4_K_M", "m-UD-Q4_K_M.gguf"),
        (DYNAMIC, "Q4_K_XL", "m-UD-Q4_K_XL.gguf"),
        (SPLIT, "Q8_0", SPLIT[0]),
        (["m.Q6_K.gguf", "mmproj-m-Q6_K.gguf"], "Q6_K", "m.Q6_K.gguf"),
        (["only.gguf", "m.imatrix.gguf"], None, "only.gguf"),
    ],
)
def test_the_file_that_is_meant(files: list[str], wanted: str | None, found: str) -> None:
    assert _choose(_HubId("org/repo", wanted), files) == found


@pytest.mark.parametrize(
    ("files", "wanted", "said"),
    [
        (QWEN, "Q4_K", "org/repo:Q4_K'.*org/repo:TYPE.*: Q2_K, Q4_K_M, Q8_0"),
        (DYNAMIC, "Q4_XS", "IQ4_XS, Q4_K_M, UD-Q4_K_XL, UD-Q4_K_M"),
        (["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0", "one of its files: org/repo/a-Q8_0.gguf, org"),
        (["a-Q8_0.gguf", "b-Q6_K.gguf"], None, "'org/repo'; .*: Q8_0, Q6_K"),
        (SPLIT, SPLIT[1], f"'org/repo/{SPLIT[1]}'; allowed: org/repo:TYPE.*: Q8_0"),
        ([], "Q8_0", "GGUF files; org/repo has none"),
        ([], None, "safetensors, .bin or GGUF files; org/repo has none"),
    ],
)
def test_none_or_several(files: list[str], wanted: str | None, said: str) -> None:
    with pytest.raises(ModelNotFoundError, match=f"(?i){said}"):
        _choose(_HubId("org/repo", wanted), files)


def test_types_that_names_say() -> None:
    named = {"m-UD-IQ2_XXS.gguf": "UD-IQ2_XXS", "m_f16.gguf": "f16", "x/BF16/m.gguf": "BF16"}
    assert {name: _type_of(name) for name in named} == named
    assert _type_of("qwen3-8b.gguf") is None


def test_what_a_name_asks_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert _hub_id("org/repo") == ("org/repo", None)
    assert _hub_id("org/repo:Q8_0") == ("org/repo", "Q8_0")
    assert _hub_id("org/repo/sub/m.gguf") == ("org/repo", "sub/m.gguf")
    for name in ("m.gguf", "models/m.gguf", "org/repo/folder", "org/repo:"):
        assert _hub_id(name) is None
        with pytest.raises(ModelNotFoundError, match="a GGUF file that is there|config.json"):
            find_model(name)


# GGUF files that lie, are cut short, or say things of the wrong kind. The guarded bugs: a length
# of 2^60 that hangs, a traceback where a message belongs, bytes of one tensor read as another's.
U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10
IQ2_XXS = 16


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def number(name: str, value: int) -> bytes:
    return entry(name, U32, struct.pack("<I", value))


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, at: int = 0) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dimensions + struct.pack("<IQ", kind, at)


KINDS = [
    entry("general.architecture", STRING, text("llama")), number("llama.block_count", 1),
    number("llama.embedding_length", 8), number("llama.attention.head_count", 2),
]  # fmt: skip
TENSORS = [tensor("token_embd.weight", (8, 5))]


def file(
    folder: Path,
    kinds: list[bytes] = KINDS,
    tensors: list[bytes] = TENSORS,
    *,
    body: int = 160,
    counts: tuple[int, int] | None = None,
    start: bytes = b"GGUF\x03\0\0\0",
) -> Path:
    path = folder / "model.gguf"
    head = start + struct.pack("<QQ", *(counts or (len(tensors), len(kinds))))
    head += b"".join(kinds) + b"".join(tensors)
    path.write_bytes(head + bytes(-len(head) % 32) + bytes(body))
    forget_gguf()
    return path


def test_a_whole_one_is_read(tmp_path: Path) -> None:
    found = gguf_config(file(tmp_path))
    assert (found["vocab_size"], found["hidden_size"], found["num_hidden_layers"]) == (5, 8, 1)


def test_a_rare_type_needs_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    rare = tensor("blk.0.ffn_up.weight", (256, 2), kind=IQ2_XXS, at=160)
    found = GgufFile(file(tmp_path, tensors=[*TENSORS, rare], body=4096))
    assert found.get_tensor("model.embed_tokens.weight").shape == (5, 8)
    with pytest.raises(MissingPackageError, match=r"IQ2_XXS.*foretoken\[gguf\]"):
        found.get_tensor("model.layers.0.mlp.up_proj.weight")


def more(kind: int, value: bytes, name: str = "llama.rope.freq_base") -> dict[str, Any]:
    return {"kinds": [*KINDS, entry(name, kind, value)]}


def array(kind: int, count: int, rest: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + rest


def beside(*others: bytes, body: int = 4096) -> dict[str, Any]:
    return {"tensors": [*TENSORS, *others], "body": body}


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "another file": ({"start": b"PK\x03\x04\x03\0\0\0"}, "allowed: a GGUF file"),
    "another version": ({"start": b"GGUF\x01\0\0\0"}, "version 1; allowed: 2 or 3"),
    "another machine's": ({"start": b"GGUF\0\0\0\x03"}, "big-endian"),
    "metadata without end": ({"counts": (1, 1 << 60)}, "metadata count"),
    "tensors without end": ({"counts": (1 << 60, 4)}, "tensor count"),
    "more metadata than there are": ({"counts": (1, 9)}, "model.gguf: "),
    "a name without end": (
        {"kinds": [struct.pack("<Q", 1 << 60) + b"x" * 40]}, "name of a metadata field"),
    "a text without end": (
        {"kinds": [entry("a", STRING, struct.pack("<Q", 1 << 60))]}, "a: got .* bytes"),
    "a list without end": (more(ARRAY, array(F32, 1 << 60)), "freq_base: got 1152"),
    "texts without end": (more(ARRAY, array(STRING, 1 << 60)), "freq_base: got 1152"),
    "texts beyond the file": (
        more(ARRAY, array(STRING, 2, struct.pack("<Q", 1 << 59))), "freq_base: got 2 texts"),
    "lists of lists": (more(ARRAY, array(ARRAY, 1, array(U32, 1, bytes(4)))), "a list of lists"),
    "a list of nothing known": (more(ARRAY, array(77, 1)), "a list of type 77"),
    "a kind that is not known": (more(77, bytes(8)), "type 77; allowed: one of GGUF"),
    "no UTF-8": (more(STRING, text(b"\xff\xfe")), "freq_base: .*UTF-8"),
    "a name that is no UTF-8": (
        {"kinds": [entry("a", U32, bytes(4)).replace(b"a", b"\xff")]}, "UTF-8"),
    "the same name twice": ({"kinds": [*KINDS, KINDS[1]]}, "each name once"),
    "a text for a number": (more(STRING, text("much")), "freq_base: got much; allowed: a number"),
    "a list for a number": (
        {"kinds": [*KINDS, entry("llama.feed_forward_length", ARRAY,
                                 array(U32, 2, bytes(8)))]}, "a list of 2; allowed: an integer"),
    "texts for a number": (
        more(ARRAY, array(STRING, 1, text("x"))), "a list of 1; allowed: a number"),
    "a truth for a number": (
        {"kinds": [*KINDS, entry("llama.context_length", BOOL, b"\1")]}, "allowed: an integer"),
    "no number": (more(F32, struct.pack("<f", float("nan"))), "got nan; allowed: a number"),
    "a number for an architecture": (
        {"kinds": [number("general.architecture", 5)]}, "general.architecture: got 5"),
    "an unknown architecture": (
        {"kinds": [entry("general.architecture", STRING, text("clip"))]}, "clip"),
    "alignment of 7": (
        {"kinds": [*KINDS, number("general.alignment", 7)]}, "alignment: got 7"),
    "no tensor of tokens": ({"tensors": [tensor("a", (8, 5))]}, "token_embd.weight"),
    "tokens in a row": ({"tensors": [tensor("token_embd.weight", (40,))]}, "allowed: a matrix"),
    "five dimensions": (beside(tensor("a", (1, 1, 1, 1, 1))), "5 dimensions"),
    "no dimensions": (beside(tensor("a", ())), "0 dimensions"),
    "three dimensions": (beside(tensor("a", (2, 2, 2), at=160)), "allowed: a matrix"),
    "a type that is not known": (beside(tensor("a", (8,), kind=4)), "type 4; allowed: one of ggml"),
    "half a block": (beside(tensor("a", (40,), kind=8, at=160)), "blocks of 32 for Q8_0"),
    "nothing of it": (beside(tensor("a", (0, 4), at=160)), "shape"),
    "more than can be": (beside(tensor("a", (1 << 40, 1 << 40), at=160)), "complete GGUF file"),
    "beyond the file": (beside(tensor("a", (8, 8), at=1 << 50)), "complete GGUF file"),
    "between places": (beside(tensor("a", (8,), at=33)), "complete GGUF file"),
    "bytes of another": (beside(tensor("a", (8, 8), at=128)), "a: got bytes of token_embd.weight"),
    "frequencies of zero": (
        beside(tensor("rope_freqs.weight", (4,), at=160)), "rope_freqs.weight: got .*above 0"),
    "frequencies in halves": (
        beside(tensor("rope_freqs.weight", (4,), kind=1, at=160)), "rope_freqs.weight: got F16"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_explained(name: str, tmp_path: Path) -> None:
    given, said = BROKEN[name]
    path = file(tmp_path, **given)
    with pytest.raises(ForetokenError) as error:
        gguf_config(path)
    message = str(error.value).replace("'", "").replace('"', "")
    assert re.search(said, message), message


def test_any_bytes_are_a_table_or_an_error(tmp_path: Path) -> None:
    """A valid file with bytes changed, cut and doubled, 1,500 times."""
    names = entry("tokenizer.ggml.tokens", ARRAY, array(STRING, 3, text("a") + text("b") * 2))
    whole = file(tmp_path, [*KINDS, names], [*TENSORS, tensor("b", (32,), kind=8, at=160)],
                 body=400).read_bytes()  # fmt: skip
    draw, path = random.Random(7), tmp_path / "changed.gguf"
    read = 0
    for _ in range(1500):
        changed = bytearray(whole)
        for _ in range(draw.choice((1, 1, 2, 8))):
            place = draw.randrange(len(changed) - 560)
            changed[place] = draw.choice((0, 1, 255, 128, draw.randrange(256)))
        if draw.random() < 0.2:
            del changed[draw.randrange(len(changed)) :]
        path.write_bytes(changed)
        forget_gguf()
        try:
            gguf_config(path)
            gguf_scheme(path)
            for one in read_gguf(path).metadata.values():
                if isinstance(one, Strings):
                    list(one)
            read += 1
        except ForetokenError:
            pass
    assert read > 100, "some changes do no harm"


@pytest.mark.parametrize("number", TYPES)
def test_types_are_ggmls(number: int) -> None:
    name, block, size = TYPES[number]
    kind = gguf.GGMLQuantizationType(number)
    assert kind.name == name and gguf.GGML_QUANT_SIZES[kind] == (block, size)


def test_the_table_is_what_the_package_reads(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "whole.gguf", "llama")
    writer.add_array("tokens", ["a", "\u4f60", ""])
    writer.add_array("scores", [1.5, -2.0])
    writer.add_bool("yes", True)
    weights = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    writer.add_tensor("plain", weights)
    writer.add_tensor("half", weights.astype(np.float16))
    for name in ("Q8_0", "Q5_1", "BF16"):
        kind = gguf.GGMLQuantizationType[name]
        writer.add_tensor(name, gguf.quants.quantize(weights, kind), raw_dtype=kind)
    finish(writer)
    ours, theirs = read_gguf(tmp_path / "whole.gguf"), gguf.GGUFReader(tmp_path / "whole.gguf")
    assert list(ours.metadata["tokens"]) == ["a", "\u4f60", ""]
    assert ours.metadata["scores"].tolist() == [1.5, -2.0] and ours.metadata["yes"] is True
    assert list(ours.tensors) == [one.name for one in theirs.tensors]
    for one in theirs.tensors:
        own = ours.tensors[one.name]
        assert own.kind == one.tensor_type.name and own.num_elements == one.n_elements
        assert own.data.dtype == one.data.dtype and np.array_equal(own.data, one.data)
