"""Writes the same tiny model twice: quantized in a format, and as the floats that it stands for.

The packers are NumPy, written from the formats' descriptions and not from the readers.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretoken.models.checkpoint import Checkpoint
from foretoken.quant.formats import format_of
from foretoken.shape import ModelShape
from foretoken.testing import write_tiny_llama

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """A matrix [N, K] as (value - zero) * scale, values unsigned."""

    values: Array
    scale: Array
    """float16 [N, G]."""
    zero: Array
    """[N, G]."""
    group_of: Array
    """[K]: the group of each input."""

    def floats(self) -> Array:
        scale = self.scale.astype(np.float32)[:, self.group_of]
        zero = self.zero.astype(np.float32)[:, self.group_of]
        product: Array = (self.values.astype(np.float32) - zero) * scale
        return product


def quantize(
    weight: Array, *, bits: int, group: int, symmetric: bool = True, order: Array | None = None
) -> Quantized:
    """Round; `group` 0: one scale per output. `order`: inputs in the order of groups."""
    outputs, inputs = weight.shape
    group = group or inputs
    sequence = np.arange(inputs) if order is None else order
    groups = weight[:, sequence].reshape(outputs, inputs // group, group)
    top = 2**bits - 1
    if symmetric:
        scale = (np.abs(groups).max(2) / (2 ** (bits - 1) - 1)).astype(np.float16)
        zero = np.full_like(scale, 2 ** (bits - 1))
    else:
        low, high = np.minimum(groups.min(2), 0), np.maximum(groups.max(2), 0)
        scale = ((high - low) / top).astype(np.float16)
        zero = np.clip(np.rint(-low / scale.astype(np.float32)), 1, top)
    group_of = np.empty(inputs, np.int32)
    group_of[sequence] = np.arange(inputs) // group
    wide_scale, wide_zero = scale.astype(np.float32)[:, group_of], zero[:, group_of]
    values = np.clip(np.rint(weight / wide_scale + wide_zero), 0, top).astype(np.uint8)
    return Quantized(values=values, scale=scale, zero=zero.astype(np.uint8), group_of=group_of)


def pack(values: Array, bits: int, axis: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Into int32 words along `axis`; `order`: which value of a word lies at each place."""
    per = 32 // bits
    moved = np.moveaxis(values, axis, -1).astype(np.uint32)
    missing = -moved.shape[-1] % per
    moved = np.pad(moved, ((0, 0), (0, missing)))
    words = np.zeros((moved.shape[0], moved.shape[1] // per), np.uint32)
    for place, which in enumerate(order or range(per)):
        words |= moved[:, which::per] << np.uint32(bits * place)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32))


Writer = Callable[[str, Array, dict[str, Tensor]], Array]
"""From a module's name and weights: adds its tensors, returns the floats they stand for."""


def gptq(
    *,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    v2: bool = False,
    shuffled: bool = False,
    index: bool = True,
) -> Writer:
    def write(name: str, weight: Array, tensors: dict[str, Tensor]) -> Array:
        order = np.random.default_rng(1).permutation(weight.shape[1]) if shuffled else None
        q = quantize(weight, bits=bits, group=group, symmetric=symmetric, order=order)
        zero = q.zero if v2 else q.zero - 1
        tensors[f"{name}.qweight"] = pack(q.values.T, bits, 0)
        tensors[f"{name}.qzeros"] = pack(zero.T, bits, 1)
        tensors[f"{name}.scales"] = torch.from_numpy(q.scale.T.copy())
        if index:
            tensors[f"{name}.g_idx"] = torch.from_numpy(q.group_of)
        return q.floats()

    return write


def awq(*, group: int = 32) -> Writer:
    def write(name: str, weight: Array, tensors: dict[str, Tensor]) -> Array:
        q = quantize(weight, bits=4, group=group, symmetric=False)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        tensors[f"{name}.qweight"] = pack(q.values.T, 4, 1, order)
        tensors[f"{name}.qzeros"] = pack(q.zero.T, 4, 1, order)
        tensors[f"{name}.scales"] = torch.from_numpy(q.scale.T.copy())
        return q.floats()

    return write


def packed(
    *, bits: int = 4, group: int = 32, symmetric: bool = True, shuffled: bool = False
) -> Writer:
    def write(name: str, weight: Array, tensors: dict[str, Tensor]) -> Array:
        order = np.random.default_rng(2).permutation(weight.shape[1]) if shuffled else None
        q = quantize(weight, bits=bits, group=group, symmetric=symmetric, order=order)
        tensors[f"{name}.weight_packed"] = pack(q.values, bits, 1)
        tensors[f"{name}.weight_scale"] = torch.from_numpy(q.scale)
        tensors[f"{name}.weight_shape"] = torch.tensor(weight.shape)
        if not symmetric:
            tensors[f"{name}.weight_zero_point"] = pack(q.zero, bits, 0)
        if shuffled:
            tensors[f"{name}.weight_g_idx"] = torch.from_numpy(q.group_of)
        return q.floats()

    return write


def plain_int8(*, group: int = 0, symmetric: bool = True) -> Writer:
    def write(name: str, weight: Array, tensors: dict[str, Tensor]) -> Array:
        q = quantize(weight, bits=8, group=group, symmetric=symmetric)
        signed = (q.values.astype(np.int16) - 128).astype(np.int8)
        tensors[f"{name}.weight"] = torch.from_numpy(signed)
        tensors[f"{name}.weight_scale"] = torch.from_numpy(q.scale)
        if not symmetric:
            zero = (q.zero.astype(np.int16) - 128).astype(np.int8)
            tensors[f"{name}.weight_zero_point"] = torch.from_numpy(zero)
        return q.floats()

    return write


def fp8(*, per: str, suffix: str = "weight_scale", inputs: str | None = None) -> Writer:
    """`per`: matrix, output or block (of 48 x 64); `inputs`: name of a scale of activations."""

    def write(name: str, weight: Array, tensors: dict[str, Tensor]) -> Array:
        rows, columns = {"matrix": weight.shape, "output": (1, weight.shape[1])}.get(per, (48, 64))
        scale = np.array(
            [
                [
                    np.abs(weight[i : i + rows, j : j + columns]).max() / 448
                    for j in range(0, weight.shape[1], columns)
                ]
                for i in range(0, weight.shape[0], rows)
            ],
            np.float32,
        )
        wide = scale.repeat(rows, 0).repeat(columns, 1)[: weight.shape[0], : weight.shape[1]]
        small = torch.from_numpy(weight / wide).to(torch.float8_e4m3fn)
        tensors[f"{name}.weight"] = small
        flat = torch.from_numpy(scale)
        tensors[f"{name}.{suffix}"] = flat.reshape(1) if per == "matrix" else flat
        if inputs is not None:
            tensors[f"{name}.{inputs}"] = torch.tensor(0.1)
        floats: Array = small.float().numpy() * wide
        return floats

    return write


def _write_llama(folder: Path, **sizes: Any) -> Path:
    return write_tiny_llama(folder, **{**SIZES, **sizes})


def write_both(
    folder: Path,
    config: dict[str, Any],
    writer: Writer,
    *,
    head: bool = False,
    write: Callable[..., Path] = _write_llama,
    **sizes: Any,
) -> tuple[Path, Path]:
    """The folders of the quantized checkpoint and of its floats; `write`: what is quantized."""
    source = write(folder / "source", **sizes)
    quantized: dict[str, Tensor] = {}
    floats: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(("_proj", ".w1", ".w2", ".w3")) or (head and module == "lm_head"):
            meant = writer(module, tensor.numpy(), quantized)
            floats[name] = torch.from_numpy(np.ascontiguousarray(meant))
        else:
            quantized[name] = floats[name] = tensor
    shutil.copytree(source, folder / "floats")
    save_file(floats, folder / "floats" / "model.safetensors")
    target = folder / "quantized"
    shutil.copytree(source, target)
    content = json.loads((source / "config.json").read_text())
    content["quantization_config"] = config
    (target / "config.json").write_text(json.dumps(content))
    save_file({name: t.contiguous() for name, t in quantized.items()}, target / "model.safetensors")
    return target, folder / "floats"


def open_both(both: tuple[Path, Path]) -> tuple[Checkpoint, Checkpoint]:
    """A model that is quantized already, read in its format, and the floats that it stands for."""
    stored = ModelShape.from_config(both[0]).stored
    assert stored is not None
    cpu = torch.device("cpu")
    found = Checkpoint(both[0], dtype=torch.float32, device=cpu, stored=format_of(stored, both[0]))
    return found, Checkpoint(both[1], dtype=torch.float32, device=cpu)
