"""GGUF files: tensors under Hugging Face's names, matrices as the kernels hold them.

llama.cpp reorders the rows of Llama's query and key heads, pairs of turned dimensions side by side;
they are put back. It adds 1 to norms that are stored less 1; it is taken off.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from foretoken.errors import CheckpointError
from foretoken.extras import OptionalPackages
from foretoken.quant.arrange import Weights, halve_heads
from foretoken.quant.blocks import BlockWeights
from foretoken.quant.formats.base import Format, RawTensors
from foretoken.quant.weights import IntWeights
from foretoken.shape.block_kinds import BLOCK_KINDS
from foretoken.shape.gguf import (
    check_experts,
    gguf_config,
    gguf_head_config,
    is_of_experts,
    open_gguf,
)
from foretoken.shape.gguf_architectures import architecture_of, head_of, norm_offset
from foretoken.shape.gguf_file import GgufTensor
from foretoken.shape.gguf_positions import POSITION_TENSORS

_PIECE = 1 << 20
"""Numbers that are multiplied out at once."""
_PLAIN = ("F32", "F16", "BF16", "F64")
_WHOLE = ("I8", "I16", "I32", "I64")


def decode(kind: str, rows_NB: Tensor) -> IntWeights | BlockWeights | None:
    """The matrix in rows of blocks: integers in groups, or the blocks as they are.

    Layouts are ggml's: a block starts with its scales; the low halves of its bytes come first.

    Args:
        kind: ggml's name of the type.
        rows_NB: uint8, the bytes of each row; blocks that are kept as they are refer to them.

    Returns:
        None: no kernel holds this type.
    """
    if kind in BLOCK_KINDS:
        return BlockWeights.as_stored(kind, rows_NB)
    if kind not in _DECODERS:
        return None
    size, decoder = _DECODERS[kind]
    return decoder(rows_NB.unflatten(1, (-1, size)))


def _halves(blocks: Tensor) -> Tensor:
    """The 16-bit float that each block begins with, as float32 [N, blocks]."""
    return blocks[..., :2].contiguous().view(torch.float16)[..., 0].float()


def _q8_0(blocks: Tensor) -> IntWeights:
    values = blocks[..., 2:].contiguous().view(torch.int8)
    return IntWeights(bits=8, values_NK=values.flatten(1), scale_NG=_halves(blocks))


def _q4_0(blocks: Tensor) -> IntWeights:
    values = torch.cat([blocks[..., 2:] & 15, blocks[..., 2:] >> 4], -1)
    return IntWeights(bits=4, values_NK=values.flatten(1), scale_NG=_halves(blocks))


_DECODERS: dict[str, tuple[int, Callable[[Tensor], IntWeights]]] = {
    "Q8_0": (34, _q8_0),
    "Q4_0": (18, _q4_0),
}
"""Bytes of a block, and how it is read. Weights are the file's, exactly."""


@final
class GgufFile:
    """A weight file as `models.checkpoint` wants it."""

    def __init__(
        self, path: Path, dtype: torch.dtype = torch.float32, *, head: bool = False
    ) -> None:
        """Map the file; what is multiplied out is so in float32, and given in `dtype`.

        Args:
            path: of the file, or of the first part.
            dtype: of matrices.
            head: whether it holds a drafting head, whose floats stay as they are stored.

        Raises:
            ConfigError, CheckpointError, UnsupportedModelError: as for `gguf_config`, or
                `gguf_head_config`.
        """
        self._dtype, self._keeps_floats = dtype, head
        config = gguf_head_config(path) if head else gguf_config(path)
        table = open_gguf(path)
        row = (head_of(table) if head else None) or architecture_of(table)
        self._tensors: dict[str, GgufTensor] = {}
        last = "num_nextn_predict_layers" in config and config["num_hidden_layers"]
        for stored, tensor in table.tensors.items():
            name = row.tensor_name(stored)
            if stored in POSITION_TENSORS or (last and _block(stored) >= last):
                continue
            if not is_of_experts(stored):
                self._tensors[name] = tensor
                continue
            check_experts(tensor, config.get("num_experts") or 0)
            for expert in range(tensor.shape[-1]):
                own, part = name.format(expert), tensor.of_expert(expert)
                parts = {own: part}
                if ".gate_up_proj." in own:
                    halves = enumerate(("gate", "up"))
                    parts = {own.replace("gate_up", one): part.half(at) for at, one in halves}
                if twice := parts.keys() & self._tensors.keys():
                    given = f"{min(twice)} in {stored} too"
                    raise CheckpointError("tensor stored twice", given, "each once")
                self._tensors |= parts
        self._norm_offset = norm_offset(config["model_type"])
        self._heads: dict[str, int] = {}
        if row.turns_heads:
            heads = config["num_attention_heads"]
            keys = config.get("num_key_value_heads", heads)
            self._heads = {"q_proj": heads, "k_proj": keys}

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def block_kinds(self, names: Iterable[str]) -> set[str]:
        """ggml's names of the types of those of these tensors that are in blocks."""
        found = {self._tensors[name].kind for name in names}
        return found - {*_PLAIN, *_WHOLE}

    def get_tensor(self, name: str) -> Tensor:
        """One of them; matrices in pieces of rows, so that no float32 copy is ever there."""
        if self._tensors[name].kind in _WHOLE:
            return torch.from_numpy(self._tensors[name].data).long()
        floats = self._floats(self._tensors[name])
        if self._norm_offset and name.endswith("norm.weight"):
            floats = floats - self._norm_offset
        found = self._in_order(name, floats)
        assert isinstance(found, Tensor), type(found)
        return found

    def get_slice(self, name: str) -> Tensor:
        """The same: experts have names of their own here."""
        return self.get_tensor(name)

    def _floats(self, tensor: GgufTensor) -> Tensor:
        rows = torch.from_numpy(tensor.data)
        if tensor.kind in _PLAIN:
            floats = rows.view(torch.bfloat16) if tensor.kind == "BF16" else rows
            if floats.ndim == 1 or ".ffn_gate_inp." in tensor.name:
                return floats.float()
            return floats if self._keeps_floats else floats.to(self._dtype)
        found = decode(tensor.kind, rows)
        if found is None:
            return self._multiplied_out(tensor)
        assert not isinstance(found, Tensor), type(found)
        return found.dequantized(self._dtype)

    def _multiplied_out(self, tensor: GgufTensor) -> Tensor:
        """By the `gguf` package: types that are rare."""
        with OptionalPackages(f"{tensor.kind}, the type of {tensor.name},"):
            from gguf import GGMLQuantizationType
            from gguf.quants import dequantize
        rows, kind = tensor.data, GGMLQuantizationType[tensor.kind]
        floats = torch.empty(rows.shape[0], tensor.shape[0], dtype=self._dtype)
        count = max(1, _PIECE // tensor.shape[0])
        try:
            for at in range(0, rows.shape[0], count):
                floats[at : at + count] = torch.tensor(dequantize(rows[at : at + count], kind))
        except NotImplementedError as error:
            given = f"{tensor.name}: {tensor.kind}"
            raise CheckpointError("tensor type", given, "one that gguf multiplies out") from error
        return floats

    def integers(self, name: str) -> Weights | None:
        """A matrix as kernels hold it, which may lie where the file is mapped; None: they do not
        hold its type."""
        tensor = self._tensors[name]
        if tensor.data.dtype.name != "uint8":
            return None
        found = decode(tensor.kind, torch.from_numpy(tensor.data))
        return None if found is None else self._in_order(name, found)

    def _in_order(self, name: str, weights: Weights) -> Weights:
        heads = self._heads.get(name.rpartition(".")[0].rpartition(".")[2])
        return weights if heads is None else halve_heads(weights, heads)


def _block(name: str) -> int:
    """The number of the layer that a tensor is of; -1: of none."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blk" and parts[1].isdigit() else -1


@final
class GgufFormat(Format):
    """Matrices of a GGUF file."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file

    def matrix(self, tensors: RawTensors, module: str, inputs: int) -> Weights | None:
        name = f"{module}.weight"
        if not tensors.has(name):
            return None
        found = self._file.integers(name)
        if found is not None:
            tensors.ignore(name)
        return found
