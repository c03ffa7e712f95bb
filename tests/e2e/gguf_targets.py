"""Tiny targets in GGUF files whose matrices are mixes of block types, as published ones are."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from foretoken.quant.blocks import _FLOATS
from foretoken.shape.block_kinds import BLOCK_KINDS
from tests.e2e.heads import VOCAB
from tests.golden.gguf_files import finish, ggml_rows
from tests.unit.kernels.test_blocks import blocks, by_package

WIDTH, HEADS, KEY_HEADS, HEAD = 256, 16, 2, 16
MIXES: dict[str, dict[str, str]] = {
    "Q4_K_M": {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K", "": "Q4_K"},
    "Q5_0": {"attn_v": "Q8_0", "ffn_down": "Q6_K", "token_embd": "Q8_0", "": "Q5_0"},
    "Q4_1": {"ffn_down": "Q5_1", "attn_v": "Q4_0", "token_embd": "F16", "": "Q4_1"},
    "Q3_K": {"attn_v": "Q5_K", "ffn_down": "Q5_K", "token_embd": "Q6_K", "attn_q": "Q2_K",
             "": "Q3_K"},
    "four bits": {"attn": "MXFP4", "ffn_down": "IQ4_XS", "output.": "Q8_0", "": "IQ4_NL"},
}  # fmt: skip
"""Part of a tensor's name -> its type; the first that fits."""


def random_rows(kind: str, rows: int, inputs: int, *, size: float, seed: int) -> Any:
    """Bytes of rows of any type, whose weights are about `size` large.

    Returns:
        uint8 [rows, bytes].
    """
    one = gguf.GGMLQuantizationType[kind]
    if kind not in BLOCK_KINDS or kind in ("Q4_1", "Q5_0", "Q5_1"):
        floats = np.random.default_rng(seed).normal(0, size, (rows, inputs)).astype(np.float32)
        return gguf.quants.quantize(floats, one)
    made = blocks(kind, rows, inputs, seed)
    made = made.reshape(-1, BLOCK_KINDS[kind].num_bytes)
    factor = size / float(by_package(kind, made.reshape(rows, -1)).std())
    if kind == "MXFP4":
        made[:, 0] += round(float(np.log2(factor)))
        return made.reshape(rows, -1).numpy()
    numbers = made.numpy()
    for at in _FLOATS.get(kind, (0,)):
        scale = np.ascontiguousarray(numbers[:, at : at + 2]).view(np.float16)
        numbers[:, at : at + 2] = (scale.astype(np.float32) * factor).astype(np.float16).view(
            np.uint8
        )  # fmt: skip
    return numbers.reshape(rows, -1)


def add_tokens(writer: gguf.GGUFWriter) -> None:
    """A tokenizer of VOCAB tokens."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([chr(33 + token) for token in range(VOCAB - 3)] + ["xa", "xb", "xc"])
    writer.add_token_merges(["x a", "x b", "x c"])


def write_target(path: Path, mix: str, *, layers: int = 2, sharp: float = 3.0) -> Path:
    """A Llama of this mix; one of fewer layers has the same weights in the layers that it has.

    Args:
        path: of the file.
        mix: one of MIXES.
        layers: decoder layers.
        sharp: how much larger than usual the output head's weights are.
    """
    kinds = MIXES[mix]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_block_count(layers)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_key_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    add_tokens(writer)
    shapes = {"token_embd": VOCAB, "output": VOCAB}
    for layer in range(layers):
        sizes = {"attn_q": HEADS * HEAD, "attn_k": KEY_HEADS * HEAD, "attn_v": KEY_HEADS * HEAD}
        sizes |= dict.fromkeys(("attn_output", "ffn_gate", "ffn_up", "ffn_down"), WIDTH)
        shapes |= {f"blk.{layer}.{name}": rows for name, rows in sizes.items()}
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(WIDTH, np.float32))
    for seed, (name, rows) in enumerate(shapes.items()):
        kind = next(kinds[part] for part in kinds if part in f"{name}.weight")
        size = (sharp if name == "output" else 1.0) / WIDTH**0.5
        stored = random_rows(kind, rows, WIDTH, size=size, seed=seed)
        for part, heads in (("attn_q", HEADS), ("attn_k", KEY_HEADS)):
            stored = ggml_rows(stored, heads) if part in name else stored
        writer.add_tensor(
            f"{name}.weight", stored, raw_dtype=gguf.GGMLQuantizationType[kind]
        )  # fmt: skip
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    finish(writer)
    return path
