"""GGUF files with little more than a tokenizer, and the texts that tokenizers are tried on."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from tests.golden.gguf_files import finish, write_value

TEXTS: list[str] = [
    text
    for texts in json.loads((Path(__file__).parent.parent / "hard_texts.json").read_text()).values()
    for text in texts
]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
ENDS = ("<|begin|>", "<|close|>")
"""Control tokens at the end of every vocabulary that is trained here."""


def write_gguf(path: Path, fields: Mapping[str, Any], rows: int | None = None) -> Path:
    """A file of these metadata, and of an embedding of so many rows."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    add_fields(writer, fields)
    if rows is not None:
        writer.add_tensor("token_embd.weight", np.zeros((rows, 8), np.float32))
    finish(writer)
    return path


def add_fields(writer: gguf.GGUFWriter, fields: Mapping[str, Any]) -> None:
    """Metadata of a tokenizer; a None is left out."""
    for name, value in fields.items():
        key = f"tokenizer.{'' if 'chat' in name else 'ggml.'}{name}"
        if value is not None:
            write_value(writer, key, value)


def train(pre_tokenizer: Mapping[str, Any], *, nfc: bool = False, whole: bool = False) -> Tokenizer:
    """A byte-level tokenizer that cuts texts as this part of a tokenizer.json says."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([])
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=16,
    )
    content = json.loads(tokenizer.to_str())
    content["pre_tokenizer"] = pre_tokenizer
    content["normalizer"] = {"type": "NFC"} if nfc else None
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.train_from_iterator(TEXTS * 2, trainer)
    content = json.loads(tokenizer.to_str())
    content["model"]["ignore_merges"] = whole
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_special_tokens(list(ENDS))
    return tokenizer


def fields_of(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    """What a converter writes of a byte-level tokenizer."""
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [CONTROL if token in ENDS else NORMAL for token in tokens],
        "merges": [" ".join(pair) for pair in merges],
        "bos_token_id": vocabulary[ENDS[0]],
        "eos_token_id": vocabulary[ENDS[1]],
    }


def sentencepiece_fields(
    words: Sequence[str], extra: Sequence[tuple[str, int]] = ()
) -> dict[str, Any]:
    """A SentencePiece vocabulary: what `words` were merged to, best first, then characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False, max_token_length=12)
    tokenizer.train_from_iterator(words, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merged = ["".join(pair) for pair in model["merges"]]
    letters = [token for token in model["vocab"] if len(token) == 1]
    tokens = [("<unk>", UNKNOWN, 0.0), ("<s>", CONTROL, 0.0), ("</s>", CONTROL, 0.0)]
    tokens += [(f"<0x{byte:02X}>", BYTE, 0.0) for byte in range(256)]
    tokens += [(text, kind, 0.0) for text, kind in extra]
    known = dict.fromkeys(text for text in [*merged, *letters] if (text, USER_DEFINED) not in extra)
    tokens += [(text, NORMAL, -float(rank)) for rank, text in enumerate(known)]
    return {
        "model": "llama",
        "pre": "default",
        "tokens": [text for text, _, _ in tokens],
        "token_type": [kind for _, kind, _ in tokens],
        "scores": [score for _, _, score in tokens],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
