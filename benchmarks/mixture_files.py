"""GGUF files of mixtures at their full width, with weights of no meaning and few layers.

    python benchmarks/mixture_files.py qwen3-30b-a3b FILE.gguf --vocabulary PUBLISHED.gguf

Sizes and types of tensors are those of the published files (Q4_K_M; MXFP4 with Q8_0 beside), the
vocabulary is that of a published file with a small one, so that the head has about the share of a
step that it has in the whole model. Blocks are random bytes with scales that keep a row's size from
layer to layer; norms are ones. `--skew` gives routers a bias that sends most rows to few experts;
where the format has none, embeddings have a mean that routers multiply. Needs the gguf package.
Written tensor by tensor.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from foretoken.shape.gguf import open_gguf
from foretoken.shape.gguf_file import TYPES, Strings

Bytes = npt.NDArray[np.uint8]
NUMBERS = {name: number for number, (name, _, _) in TYPES.items()}
MEAN = 0.3
"""Of embeddings, whose standard deviation is about 1, where that is how routers have a bias."""
POOL_BLOCKS = 1 << 16
"""Different blocks of a type; those of a tensor are drawn from them in runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Sizes of a published model."""

    architecture: str
    hidden: int
    inner: int
    experts: int
    used: int
    heads: int
    kv_heads: int
    head: int
    context: int
    theta: float
    layers: int
    """That are written."""
    matrices: str
    """Type of attention's matrices and of the embeddings."""
    output: str
    """Type of the head."""
    of_experts: str
    finer: str | None = None
    """Type of values and down projections in the layers that Q4_K_M takes to matter more."""
    biases: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)

    def is_fine(self, layer: int) -> bool:
        """Whether llama.cpp's quantizer gives the layer more bits."""
        eighth, last = self.layers // 8, 7 * self.layers // 8
        return layer < eighth or layer >= last or (layer - eighth) % 3 == 2


MIXTURES = {
    "qwen3-30b-a3b": Mixture(
        architecture="qwen3moe", hidden=2048, inner=768, experts=128, used=8, heads=32, kv_heads=4,
        head=128, context=40960, theta=1e6, layers=7, matrices="Q4_K", output="Q6_K",
        of_experts="Q4_K", finer="Q6_K",
    ),
    "gpt-oss-20b": Mixture(
        architecture="gpt-oss", hidden=2880, inner=2880, experts=32, used=4, heads=64, kv_heads=8,
        head=64, context=131072, theta=150000.0, layers=5, matrices="Q8_0", output="Q8_0",
        of_experts="MXFP4", biases=True,
        more={"attention.sliding_window": 128, "rope.scaling.type": "yarn",
              "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 4096},
    ),
}  # fmt: skip


def _halves(rng: np.random.Generator, count: int, middle: float) -> Bytes:
    """float16 around `middle`, two bytes each."""
    found = middle * rng.uniform(0.7, 1.3, count)
    return found.astype("<f2").view(np.uint8).reshape(count, 2)


def _blocks(
    rng: np.random.Generator, kind: str, count: int, spread: float, mean: float = 0.0
) -> Bytes:
    """Blocks whose numbers have about the standard deviation `spread` and this mean, which only
    Q4_K has here."""
    blocks = rng.integers(0, 256, (count, TYPES[NUMBERS[kind]][2]), np.uint8)
    if kind == "Q4_K":  # d sc q - dmin m, of 6, 4 and 6 bits
        blocks[:, :2] = _halves(rng, count, spread / 257)
        blocks[:, 2:4] = _halves(rng, count, (7.5 * spread - mean * 257 / 31.5) / 257)
    elif kind == "Q6_K":  # d sc (q - 32)
        blocks[:, 208:] = _halves(rng, count, spread / 1370)
    elif kind == "Q8_0":
        blocks[:, :2] = _halves(rng, count, spread / 74)
    else:  # MXFP4: a power of two, and numbers up to 6
        blocks[:, 0] = 127 + round(np.log2(spread / 2.9)) + rng.integers(-1, 2, count)
    return blocks


class Pool:
    """Blocks to make tensors of."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self._kept: dict[tuple[str, int], Bytes] = {}

    def rows(
        self, kind: str, rows: int, inputs: int, spread: float | None = None, mean: float = 0.0
    ) -> Bytes:
        """`rows` rows of blocks, [rows, bytes]."""
        per_row = inputs // TYPES[NUMBERS[kind]][1]
        key = (kind, 0 if spread else inputs)
        if key not in self._kept:
            each = spread or inputs**-0.5
            self._kept[key] = _blocks(self.rng, kind, POOL_BLOCKS, each, mean)
        pool = self._kept[key]
        starts = self.rng.integers(0, len(pool) - per_row, rows)
        return np.concatenate([pool[at : at + per_row].reshape(1, -1) for at in starts])

    def floats(self, *shape: int, spread: float = 1.0) -> npt.NDArray[np.float32]:
        return (spread * self.rng.standard_normal(shape)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Tensor:
    """One of the file: `make` gives what is stored."""

    name: str
    shape: tuple[int, ...]
    """The last one counts the numbers that lie side by side."""
    kind: str
    make: Callable[[], npt.NDArray[Any]]


def tensors_of(one: Mixture, vocabulary: int, pool: Pool, skew: float) -> Iterator[Tensor]:
    """All of them in order."""
    hidden, queries, keys = one.hidden, one.heads * one.head, one.kv_heads * one.head

    mean = MEAN if skew and not one.biases else 0.0

    def matrix(name: str, kind: str, *shape: int, spread: float | None = None) -> Tensor:
        rows, middle = int(np.prod(shape[:-1])), mean if spread else 0.0
        return Tensor(f"{name}.weight", shape, kind,
                      lambda: pool.rows(kind, rows, shape[-1], spread, middle))  # fmt: skip

    def router() -> npt.NDArray[np.float32]:
        made = pool.floats(one.experts, hidden, spread=1.5 * hidden**-0.5)
        return made + pool.floats(one.experts, 1, spread=skew) / (MEAN * hidden) * (mean > 0)

    def floats(name: str, *shape: int, spread: float = 0.0, middle: float = 0.0) -> Tensor:
        return Tensor(name, shape, "F32", lambda: middle + pool.floats(*shape, spread=spread))

    def norm(name: str, size: int) -> Tensor:
        return floats(f"{name}.weight", size, middle=1.0)

    yield matrix("token_embd", one.matrices, vocabulary, hidden, spread=1.0)
    yield norm("output_norm", hidden)
    yield matrix("output", one.output, vocabulary, hidden)
    for layer in range(one.layers):
        at = f"blk.{layer}."
        finer = one.finer if one.finer and one.is_fine(layer) else None
        yield norm(f"{at}attn_norm", hidden)
        yield norm(f"{at}{'post_attention_norm' if one.biases else 'ffn_norm'}", hidden)
        yield matrix(f"{at}attn_q", one.matrices, queries, hidden)
        yield matrix(f"{at}attn_k", one.matrices, keys, hidden)
        yield matrix(f"{at}attn_v", finer or one.matrices, keys, hidden)
        yield matrix(f"{at}attn_output", one.matrices, hidden, queries)
        if one.biases:
            for part, size in (("q", queries), ("k", keys), ("v", keys), ("output", hidden)):
                yield floats(f"{at}attn_{part}.bias", size, spread=0.1)
            yield floats(f"{at}attn_sinks.weight", one.heads, spread=1.0)
            yield floats(f"{at}ffn_gate_inp.bias", one.experts, spread=skew)
        else:
            yield norm(f"{at}attn_q_norm", one.head)
            yield norm(f"{at}attn_k_norm", one.head)
        yield Tensor(f"{at}ffn_gate_inp.weight", (one.experts, hidden), "F32", router)
        for part, rows, inputs in (
            ("gate", one.inner, hidden), ("up", one.inner, hidden), ("down", hidden, one.inner)
        ):  # fmt: skip
            kind = finer or one.of_experts if part == "down" else one.of_experts
            yield matrix(f"{at}ffn_{part}_exps", kind, one.experts, rows, inputs)
            if one.biases:
                yield floats(f"{at}ffn_{part}_exps.bias", one.experts, rows, spread=0.1)


def write_value(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    """One of the metadata."""
    if isinstance(value, Strings):
        writer.add_array(name, value.texts())
    elif isinstance(value, np.ndarray):
        writer.add_array(name, value.tolist())
    elif isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_uint32(name, value)


def write_mixture(name: str, path: Path, vocabulary: Path, *, skew: float, seed: int = 0) -> None:
    """Write one of MIXTURES.

    Args:
        name: which.
        path: of the file.
        vocabulary: a GGUF file whose tokenizer is taken.
        skew: standard deviation of routers' biases.
        seed: of all numbers.
    """
    one, table = MIXTURES[name], open_gguf(vocabulary)
    arch, words = one.architecture, table.metadata["tokenizer.ggml.tokens"]
    writer = gguf.GGUFWriter(path, arch)
    sizes = {
        "context_length": one.context, "embedding_length": one.hidden, "block_count": one.layers,
        "feed_forward_length": one.inner, "expert_feed_forward_length": one.inner,
        "expert_count": one.experts, "expert_used_count": one.used,
        "attention.head_count": one.heads, "attention.head_count_kv": one.kv_heads,
        "attention.key_length": one.head, "attention.value_length": one.head,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": one.theta, **one.more,
    }  # fmt: skip
    for key, value in sizes.items():
        write_value(writer, f"{arch}.{key}", value)
    for key, value in table.metadata.items():
        if key.startswith("tokenizer."):
            write_value(writer, key, value)
    tensors = list(tensors_of(one, words.size, Pool(seed), skew))
    for tensor in tensors:
        _, numbers, size = TYPES[NUMBERS[tensor.kind]]
        stored = (*tensor.shape[:-1], tensor.shape[-1] // numbers * size)
        raw = None if tensor.kind == "F32" else gguf.GGMLQuantizationType[tensor.kind]
        plain = np.dtype(np.float32 if raw is None else np.uint8)
        count = int(np.prod(stored[:-1])) * stored[-1]
        shape = tensor.shape if raw is None else stored
        writer.add_tensor_info(tensor.name, shape, plain, count, raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(tensor.make())
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=MIXTURES)
    parser.add_argument("path", type=Path)
    parser.add_argument("--vocabulary", type=Path, required=True)
    parser.add_argument("--skew", type=float, default=0.0)
    given = parser.parse_args()
    write_mixture(given.name, given.path, given.vocabulary, skew=given.skew)


if __name__ == "__main__":
    main()
