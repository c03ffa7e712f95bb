"""Random heads in their published formats, and the same networks in float64 from the equations."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from foretoken.proposers.heads.base import DraftHead, TargetFacts
from foretoken.proposers.heads.dflash.network import DFlash
from foretoken.proposers.heads.dspark import DSpark
from foretoken.proposers.heads.eagle import Eagle
from foretoken.proposers.heads.eagle3.network import Eagle3
from foretoken.proposers.heads.folder import method_of, read_head
from foretoken.proposers.heads.medusa import Medusa
from foretoken.proposers.heads.mlp import MLPSpeculator

KINDS: dict[str, type[DraftHead]] = {
    "dflash": DFlash, "dspark": DSpark, "eagle": Eagle, "eagle3": Eagle3, "medusa": Medusa,
    "mlp": MLPSpeculator,
}  # fmt: skip
Array = NDArray[np.float64]
HIDDEN, INNER, HEADS, KV, SIZE, VOCAB = 32, 48, 4, 2, 8, 61
LAYER = {
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "head_dim": SIZE, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "num_hidden_layers": 1, "vocab_size": VOCAB,
}  # fmt: skip


def load_head(path: Path, target: TargetFacts) -> DraftHead:
    folder = read_head(path)
    return KINDS[method_of(folder)].read(folder, target)


class Weights:
    """Random tensors by name, written to a folder and read as float64."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, torch.Tensor] = {}

    def matrix(self, name: str, rows: int, columns: int) -> None:
        """Of about unit gain."""
        values = torch.randn(rows, columns, generator=self._generator)
        self.tensors[name] = values / columns**0.5

    def vector(self, name: str, size: int) -> None:
        """Around one."""
        self.tensors[name] = 1 + 0.2 * torch.randn(size, generator=self._generator)

    def layer(self, prefix: str, width: int) -> None:
        """Attention over `width` inputs and a gated MLP."""
        self.matrix(prefix + "self_attn.q_proj.weight", HEADS * SIZE, width)
        self.matrix(prefix + "self_attn.k_proj.weight", KV * SIZE, width)
        self.matrix(prefix + "self_attn.v_proj.weight", KV * SIZE, width)
        self.matrix(prefix + "self_attn.o_proj.weight", HIDDEN, HEADS * SIZE)
        self.matrix(prefix + "mlp.gate_proj.weight", INNER, HIDDEN)
        self.matrix(prefix + "mlp.up_proj.weight", INNER, HIDDEN)
        self.matrix(prefix + "mlp.down_proj.weight", HIDDEN, INNER)
        self.vector(prefix + "post_attention_layernorm.weight", HIDDEN)

    def write(self, folder: Path, config: dict[str, Any], name: str = "model.safetensors") -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        if name.endswith(".safetensors"):
            save_file(self.tensors, str(folder / name))
        else:
            torch.save(self.tensors, folder / name)
        return folder

    def __getitem__(self, name: str) -> Array:
        return self.tensors[name].double().numpy()


def rms(x: Array, weight: Array | float, eps: float = 1e-5) -> Array:
    normed: Array = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight
    return normed


def turned(x_THh: Array, positions: Array, theta: float = 10000.0) -> Array:
    """Rotary positions, half-split."""
    half = x_THh.shape[-1] // 2
    angles = positions[:, None, None] * theta ** (-np.arange(half) / half)
    left, right = x_THh[..., :half], x_THh[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    rotated: Array = np.concatenate((left * cos - right * sin, right * cos + left * sin), -1)
    return rotated


def silu(x: Array) -> Array:
    result: Array = x / (1 + np.exp(-x))
    return result


def layer(w: Weights, prefix: str, normed: Array, residual: Array, positions: Array) -> Array:
    count = len(normed)
    q = (normed @ w[prefix + "self_attn.q_proj.weight"].T).reshape(count, HEADS, SIZE)
    k = (normed @ w[prefix + "self_attn.k_proj.weight"].T).reshape(count, KV, SIZE)
    v = (normed @ w[prefix + "self_attn.v_proj.weight"].T).reshape(count, KV, SIZE)
    q, k = turned(q, positions), turned(k, positions)
    mixed = np.zeros((count, HEADS, SIZE))
    for head in range(HEADS):
        scores = q[:, head] @ k[:, head // (HEADS // KV)].T / SIZE**0.5
        scores = np.where(np.tril(np.ones((count, count))) > 0, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, head // (HEADS // KV)]
    x = residual + mixed.reshape(count, -1) @ w[prefix + "self_attn.o_proj.weight"].T
    normed = rms(x, w[prefix + "post_attention_layernorm.weight"])
    gate = silu(normed @ w[prefix + "mlp.gate_proj.weight"].T)
    inner = gate * (normed @ w[prefix + "mlp.up_proj.weight"].T)
    out: Array = x + inner @ w[prefix + "mlp.down_proj.weight"].T
    return out
