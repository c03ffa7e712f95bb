"""Write a Llama checkpoint in bfloat16 as GGUF, for llama.cpp's server. Needs gguf and numpy.

    python benchmarks/to_gguf.py CHECKPOINT FILE.gguf [F16|Q8_0|Q4_0]

Matrices stay in bfloat16 or become float16, Q8_0 or Q4_0: 8 or 4 bits and a scale for every 32.

Only what make_models.py writes: one safetensors file, a byte-level BPE tokenizer, plain rotary
positions. llama.cpp pairs rotary dimensions that stand side by side, Hugging Face's format the
halves of a head, so the rows of queries and keys change places.
"""

import json
import sys
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Name -> 16-bit words of the shape, mapped from the file."""
    raw = np.memmap(path, np.uint8, "r")
    size = int(raw[:8].view(np.uint64)[0])
    header = json.loads(bytes(raw[8 : 8 + size]))
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        assert entry["dtype"] == "BF16", (name, entry["dtype"])
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        found[name] = np.frombuffer(raw[begin:end], np.uint16).reshape(entry["shape"])
    return found


def new_name(name: str) -> str:
    if name in OUTER:
        return OUTER[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{LAYER[rest.removesuffix('.weight')]}.weight"


def side_by_side(words: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head's two halves, taken in turn."""
    rows, columns = words.shape
    halves = words.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, columns)


def add_tokenizer(writer: GGUFWriter, checkpoint: Path, config: dict) -> None:
    """Tokens and merges of tokenizer.json."""
    found = json.loads((checkpoint / "tokenizer.json").read_text("utf-8"))
    vocab = found["model"]["vocab"]
    special = {entry["id"]: entry["content"] for entry in found["added_tokens"]}
    tokens = {index: token for token, index in vocab.items()} | special
    merges = found["model"]["merges"]
    size = config["vocab_size"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokens.get(i, f"[unused{i}]") for i in range(size)])
    kinds = [TokenType.CONTROL if i in special else TokenType.NORMAL for i in range(size)]
    writer.add_token_types([k if i in tokens else TokenType.UNUSED for i, k in enumerate(kinds)])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def add_matrix(
    writer: GGUFWriter, name: str, words: np.ndarray, kind: GGMLQuantizationType
) -> None:
    """A matrix of 16-bit words as `kind`."""
    if kind == GGMLQuantizationType.BF16:
        writer.add_tensor(name, words.view(np.uint8), raw_dtype=kind)
        return
    wide = (words.astype(np.uint32) << 16).view(np.float32)
    writer.add_tensor(name, quantize(wide, kind), raw_dtype=kind)


def convert(checkpoint: Path, file: Path, scheme: str = "BF16") -> None:
    """The whole checkpoint, its matrices in `scheme`."""
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["model_type"] == "llama", config["model_type"]
    writer = GGUFWriter(file, "llama")
    writer.add_name(checkpoint.name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    add_tokenizer(writer, checkpoint, config)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, words in read_tensors(checkpoint / "model.safetensors").items():
        kind = name.split(".")[-2]
        if words.ndim == 1:
            wide = (words.astype(np.uint32) << 16).view(np.float32)
            writer.add_tensor(new_name(name), wide)
            continue
        own = side_by_side(words, heads[kind]) if kind in heads else words
        add_matrix(writer, new_name(name), own, GGMLQuantizationType[scheme])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
