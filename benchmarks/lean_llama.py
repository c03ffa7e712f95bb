"""A Llama for one sequence in as few PyTorch operations as rows that keep their bits allow.

Owns a peer to measure against, not a part of the product: weights of a Hugging Face folder, a
buffer of keys and values, and a loop over layers. Rows keep their bits alone and among others:
oneDNN's packed matrices are given at most 32 rows at a time, and attention always sees tiles of 8
query rows over a multiple of 64 keys, with a mask.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

import foretoken

MOST_ROWS = 32
TILE, KEYS = 8, 64


def multiple(count: int, of: int) -> int:
    """`count` rounded up."""
    return -(-count // of) * of


class PackedMatrix:
    """y = x W^T by oneDNN, W in the order that it likes best."""

    def __init__(self, *weights_NK: Tensor) -> None:
        """Pack the matrices over each other."""
        self.packed = torch.ops.mkldnn._reorder_linear_weight(torch.cat(weights_NK), None)

    def __call__(self, x_TK: Tensor) -> Tensor:
        """[T, K] -> [T, N]."""
        if x_TK.shape[0] > MOST_ROWS:
            return torch.cat([self(rows) for rows in x_TK.split(MOST_ROWS)])
        y_TN: Tensor = torch.ops.mkldnn._linear_pointwise(x_TK, self.packed, None, "none", [], "")
        return y_TN


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of a Llama, from its config.json."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    eps: float
    theta: float

    @classmethod
    def read(cls, folder: Path) -> "Sizes":
        """Of the model in `folder`."""
        config = json.loads((folder / "config.json").read_text())
        return cls(
            hidden=config["hidden_size"],
            inner=config["intermediate_size"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            layers=config["num_hidden_layers"],
            eps=config["rms_norm_eps"],
            theta=config["rope_theta"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeanLayer:
    """Matrices and norms of a layer, and the keys and values of its one sequence."""

    qkv: PackedMatrix
    output: PackedMatrix
    gate_up: PackedMatrix
    down: PackedMatrix
    before_attention: Tensor
    before_mlp: Tensor
    keys: Tensor
    """[K, capacity, h]."""
    values: Tensor

    @classmethod
    def make(cls, tensors: dict[str, Tensor], prefix: str, sizes: Sizes, room: int) -> "LeanLayer":
        """From the tensors of a checkpoint."""

        def named(name: str) -> Tensor:
            return tensors[f"{prefix}.{name}.weight"]

        attention = [named(f"self_attn.{part}_proj") for part in "qkv"]
        kept = torch.zeros(2, sizes.kv_heads, room, sizes.head_dim, dtype=torch.bfloat16)
        return cls(
            qkv=PackedMatrix(*attention),
            output=PackedMatrix(named("self_attn.o_proj")),
            gate_up=PackedMatrix(named("mlp.gate_proj"), named("mlp.up_proj")),
            down=PackedMatrix(named("mlp.down_proj")),
            before_attention=named("input_layernorm"),
            before_mlp=named("post_attention_layernorm"),
            keys=kept[0],
            values=kept[1],
        )


class LeanLlama:
    """The model; one sequence of at most `capacity` tokens."""

    def __init__(self, sizes: Sizes, tensors: dict[str, Tensor], capacity: int) -> None:
        """Pack the weights and make tables of rotary positions."""
        self.sizes, room = sizes, multiple(capacity, KEYS)
        self.embedding = tensors["model.embed_tokens.weight"]
        self.head = PackedMatrix(tensors.get("lm_head.weight", self.embedding))
        self.last_norm = tensors["model.norm.weight"]
        names = [f"model.layers.{i}" for i in range(sizes.layers)]
        self.layers = [LeanLayer.make(tensors, name, sizes, room) for name in names]
        rates = sizes.theta ** (-torch.arange(0, sizes.head_dim, 2) / sizes.head_dim)
        angles = torch.outer(torch.arange(room).float(), rates)[:, None]
        self.cos = torch.cat([angles.cos(), angles.cos()], dim=-1).bfloat16()
        self.sin = torch.cat([-angles.sin(), angles.sin()], dim=-1).bfloat16()

    @classmethod
    def load(cls, model: str, capacity: int) -> "LeanLlama":
        """A packaged model by its name, or a folder."""
        packaged = Path(foretoken.__file__).parent / "packaged" / model
        folder = packaged if packaged.is_dir() else Path(model)
        tensors = load_file(folder / "model.safetensors")
        weights = {name: tensor.bfloat16() for name, tensor in tensors.items()}
        return cls(Sizes.read(folder), weights, capacity)

    def forward(self, ids_T: Tensor, start: int) -> Tensor:
        """Logits [1, V] of the last of the tokens at positions from `start` on."""
        end, eps = start + ids_T.shape[0], self.sizes.eps
        width = (self.sizes.hidden,)
        mask = self._mask(start, end)
        x = self.embedding[ids_T]
        for layer in self.layers:
            qkv = layer.qkv(F.rms_norm(x, width, layer.before_attention, eps))
            x = x + layer.output(self._attend(layer, qkv, mask, start, end))
            both = layer.gate_up(F.rms_norm(x, width, layer.before_mlp, eps))
            gate, up = both.split(self.sizes.inner, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
        return self.head(F.rms_norm(x[-1:], width, self.last_norm, eps))

    def _mask(self, start: int, end: int) -> Tensor:
        """Which keys the rows of each tile see: [tiles, 1, group * 8, keys]."""
        rows = torch.arange(start, start + multiple(end - start, TILE)).clamp(max=end - 1)
        seen = torch.arange(multiple(end, KEYS)) <= rows[:, None]
        group = self.sizes.heads // self.sizes.kv_heads
        tiles = seen.unflatten(0, (-1, 1, TILE))
        return tiles.repeat(1, 1, group, 1)

    def _attend(self, layer: LeanLayer, qkv: Tensor, mask: Tensor, start: int, end: int) -> Tensor:
        """Keep the new keys and values; the rows' weighted values [T, H * h]."""
        sizes, count = self.sizes, end - start
        all_heads = qkv.view(count, -1, sizes.head_dim)
        turned = all_heads[:, : sizes.heads + sizes.kv_heads]
        swapped = turned.roll(sizes.head_dim // 2, dims=-1)
        turned = turned * self.cos[start:end] + swapped * self.sin[start:end]
        layer.keys[:, start:end] = turned[:, sizes.heads :].transpose(0, 1)
        layer.values[:, start:end] = all_heads[:, sizes.heads + sizes.kv_heads :].transpose(0, 1)
        tiles, _, rows, keys = mask.shape
        q = F.pad(turned[:, : sizes.heads], (0, 0, 0, 0, 0, tiles * TILE - count))
        q = q.view(tiles, TILE, sizes.kv_heads, -1, sizes.head_dim).permute(0, 2, 3, 1, 4)
        kv = [kept[None, :, :keys].expand(tiles, -1, -1, -1) for kept in (layer.keys, layer.values)]
        found = F.scaled_dot_product_attention(q.flatten(2, 3), *kv, attn_mask=mask)
        found = found.unflatten(2, (-1, TILE)).permute(0, 3, 1, 2, 4)
        return found.reshape(tiles * TILE, -1)[:count]
