"""GGUF files that lie, are cut short, or say things of the wrong kind. The guarded bugs: a length
of 2^60 that hangs, a traceback where a message belongs, bytes of one tensor read as another's."""

import random
import re
import struct
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from foretoken.errors import ForetokenError, MissingPackageError
from foretoken.quant.formats import GgufFile
from foretoken.shape.gguf import forget_gguf, gguf_config, gguf_scheme
from foretoken.shape.gguf_file import TYPES, Strings, read_gguf

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
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, theirs = read_gguf(tmp_path / "whole.gguf"), gguf.GGUFReader(tmp_path / "whole.gguf")
    assert list(ours.metadata["tokens"]) == ["a", "\u4f60", ""]
    assert ours.metadata["scores"].tolist() == [1.5, -2.0] and ours.metadata["yes"] is True
    assert list(ours.tensors) == [one.name for one in theirs.tensors]
    for one in theirs.tensors:
        own = ours.tensors[one.name]
        assert own.kind == one.tensor_type.name and own.num_elements == one.n_elements
        assert own.data.dtype == one.data.dtype and np.array_equal(own.data, one.data)
