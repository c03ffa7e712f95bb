"""GGUF files: their metadata as the config.json that Hugging Face would have. Torch-free.

What depends on the architecture is in `gguf_architectures`; biases and tied heads follow from which
tensors there are. A model in several files is read as one.
"""

import functools
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from foretoken.errors import (
    CheckpointError,
    ConfigError,
    ModelError,
    UnsupportedModelError,
    about_file,
)
from foretoken.shape.block_kinds import BLOCK_KINDS
from foretoken.shape.gguf_architectures import architecture_of, head_names, head_of, stored_field
from foretoken.shape.gguf_ends import ends_of_text
from foretoken.shape.gguf_file import GgufTable, GgufTensor, Strings, read_gguf
from foretoken.shape.memory_formula import Held
from foretoken.shape.stored import FLOATS, CheckpointQuantization

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_MATRICES = ("token_embd.weight", "output.weight")
_HELD = {
    "Q8_0": Held(1.0, 8, 32),
    "Q4_0": Held(1.0, 4, 32),
    **{name: Held(1.0, 8, bytes_each=kind.bytes_each) for name, kind in BLOCK_KINDS.items()},
}
"""What kernels make of ggml's types; all others are multiplied out (quant/formats/gguf)."""


def open_gguf(path: Path) -> GgufTable:
    """The table of a file, or of all parts of a model; tensors are mapped, not read.

    Args:
        path: of the file, or of the first part.

    Raises:
        CheckpointError: no GGUF file, one that is broken or cut short, or a part is missing.
    """
    try:
        parts = gguf_parts(path)
        return _open(parts, tuple(part.stat().st_mtime_ns for part in parts))
    except OSError as error:
        raise CheckpointError(path.name, str(path), f"a complete GGUF file ({error})") from error


@contextmanager
def about_gguf(path: Path) -> Iterator[None]:
    """Within, errors name the file at `path`, if it is a GGUF file, and its fields as they stand
    there: readers of a config.json know them under other names."""
    if path.suffix != ".gguf":
        yield
        return
    with about_file(path.name):
        try:
            yield
        except (ModelError, ConfigError) as error:
            field = error.field.removeprefix("config.json ")
            plain = error.allowed.replace("from config.json", "from its metadata")
            if (field, plain) == (error.field, error.allowed):
                raise
            field = field if field == error.field else stored_field(field)
            raise type(error)(field, error.given, plain) from error


def gguf_parts(path: Path) -> tuple[Path, ...]:
    """The files of the model whose first file is `path`. Raises CheckpointError: it is another part
    than the first, or one is missing."""
    named = _PART.fullmatch(path.name)
    if named is None:
        return (path,)
    stem, number, count = named[1], int(named[2]), int(named[3])
    parts = tuple(path.with_name(f"{stem}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1))
    if number != 1:
        raise CheckpointError(
            "model", path.name, f"the first part, {stem}-00001-of-{named[3]}.gguf"
        )
    for part in parts:
        if not part.is_file():
            raise CheckpointError("missing part", part.name, f"all {count} parts in one folder")
    return parts


def forget_gguf() -> None:
    """Let go of files."""
    _open.cache_clear()


@functools.lru_cache(maxsize=2)
def _open(parts: tuple[Path, ...], changed: tuple[int, ...]) -> GgufTable:
    tables = [read_gguf(part) for part in parts]
    first = tables[0]
    for number, table in enumerate(tables):
        count = table.get("split.count", int, 1) or 1
        if count != len(parts):
            allowed = (
                f"{len(parts)}, as the file's name says; parts are NAME-00001-of-{count:05}.gguf"
            )
            raise CheckpointError("split.count", f"{count} in {table.path.name}", allowed)
        if table.get("split.no", int, 0) != number:
            given = f"{table.get('split.no', int)} in {table.path.name}"
            raise CheckpointError("split.no", given, f"{number}, as the file's name says")
    tensors: dict[str, GgufTensor] = {}
    for table in tables:
        twice = sorted(tensors.keys() & table.tensors.keys())
        if twice:
            raise CheckpointError(twice[0], f"again in {table.path.name}", "each tensor once")
        tensors |= table.tensors
    wanted = first.get("split.tensors.count", int, len(tensors))
    if wanted != len(tensors):
        given = f"{len(tensors)} tensors in {len(parts)} files"
        raise CheckpointError("split.tensors.count", given, str(wanted))
    return replace(first, tensors=tensors)


def gguf_config(path: Path) -> dict[str, Any]:
    """What config.json would say of the model in this file. Raises UnsupportedModelError: another
    architecture, or positions that are not recognized; CheckpointError: metadata are missing."""
    table = open_gguf(path)
    with about_gguf(path):
        return _model_config(table)


def _model_config(table: GgufTable) -> dict[str, Any]:
    found = architecture_of(table).config(table)
    tensors = table.tensors
    if "token_embd.weight" not in tensors:
        raise CheckpointError("missing tensor", "token_embd.weight", "a language model's tensors")
    for name, tensor in tensors.items():
        if len(tensor.shape) == 3 and is_of_experts(name):
            check_experts(tensor, found.get("num_experts") or 0)
        elif len(tensor.shape) > 2 or (len(tensor.shape) == 1 and name in _MATRICES):
            raise CheckpointError(name, f"shape {list(tensor.shape)}", "a matrix")
    return {
        **found,
        "vocab_size": tensors["token_embd.weight"].shape[1],
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "eos_token_id": list(ends_of_text(table)),
        "torch_dtype": "bfloat16",
    }


def is_of_experts(name: str) -> bool:
    """Whether a tensor holds the matrices of all experts of a layer, or their biases."""
    return "_exps." in name and not name.endswith(".scale")


def check_experts(tensor: GgufTensor, count: int) -> None:
    """Raise CheckpointError unless a tensor is of so many experts."""
    if tensor.shape[-1] != count:
        given, allowed = f"shape {list(tensor.shape)}", f"[..., {count}], one for each expert"
        raise CheckpointError(tensor.name, given, allowed)


def gguf_head_marks(path: Path) -> dict[str, Any]:
    """What config.json would say the drafting head in this file is; empty: it holds none. Raises
    CheckpointError: no GGUF file, one that is broken or cut short, or a part is missing."""
    table = open_gguf(path)
    row = head_of(table)
    return {} if row is None else row.marks(table)


def gguf_head_config(path: Path) -> dict[str, Any]:
    """What config.json would say of the drafting head in this file.

    Raises:
        UnsupportedModelError: no head, or one with positions or features that are not run.
        CheckpointError: metadata or tensors are missing or of another kind.
    """
    table = open_gguf(path)
    with about_gguf(path):
        return _head_config(table)


def _head_config(table: GgufTable) -> dict[str, Any]:
    row = head_of(table)
    if row is None:
        given = table.get("general.architecture", str)
        raise UnsupportedModelError("general.architecture", given, f"a head: {head_names()}")
    config = {**row.config(table), **row.marks(table)}
    layers = config["num_hidden_layers"]
    for name in row.needed:
        _, in_layer, plain = name.rpartition("blk.")
        for layer in range(layers if in_layer else 1):
            wanted = f"blk.{layer}.{plain}.weight" if in_layer else f"{name}.weight"
            if wanted not in table.tensors:
                allowed = f"all that a {row.name} head of {layers} layers has"
                raise CheckpointError("missing tensor", wanted, allowed)
    words = table.metadata.get("tokenizer.ggml.tokens")
    if isinstance(words, Strings):
        config["vocab_size"] = words.size
    return config


def gguf_scheme(path: Path) -> CheckpointQuantization:
    """The types of the file's matrices, the most frequent first, and what kernels make of them."""
    tensors = [one for one in open_gguf(path).tensors.values() if len(one.shape) > 1]
    kinds = Counter(tensor.kind for tensor in tensors)
    top = {tensor.name: tensor.kind for tensor in tensors}
    in_layers = [tensor for tensor in tensors if tensor.name.startswith("blk.")]
    table = top.get("token_embd.weight", "")
    head = top.get("output.weight", table)
    return CheckpointQuantization(
        method="gguf",
        weights=", ".join(name for name, _ in kinds.most_common()),
        held=_shares(in_layers),
        of_experts=_shares([tensor for tensor in in_layers if is_of_experts(tensor.name)]),
        head=_HELD.get(head, FLOATS),
        table=_HELD.get(table, FLOATS),
    )


def _shares(tensors: list[GgufTensor]) -> tuple[Held, ...]:
    """What kernels make of these matrices, with the share of each kind."""
    numbers = Counter[Held]()
    for tensor in tensors:
        numbers[_HELD.get(tensor.kind, FLOATS)] += tensor.num_elements
    return tuple(one._replace(share=n / numbers.total()) for one, n in numbers.items())
