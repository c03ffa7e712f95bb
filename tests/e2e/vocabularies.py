"""Tiny models that speak text, and drafts of them that speak it in other tokens."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from foretoken.testing import write_tiny_llama

WORDS = {
    1: "the cat sat on a mat and then the other cat that sat there ran to the tent at ten",
    2: "some more common moments seem so remote to me then some stone rose on a moor sat ran",
}


def write_tokenizer(folder: Path, *, size: int, corpus: int) -> None:
    """Train a byte-level BPE on one of two corpora over the same letters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = "abcdefghijklmnopqrstuvwxyz \u00c3\u00a9"
    alphabet = [
        pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(c) for c in letters
    ]
    known = sorted({letter for pieces in alphabet for piece, _ in pieces for letter in piece})
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<s>", "</s>"], initial_alphabet=known, show_progress=False
    )
    draw = random.Random(corpus)
    lines = [" ".join(draw.choices(WORDS[corpus].split(), k=12)) for _ in range(200)]
    tokenizer.train_from_iterator(lines, trainer)
    assert tokenizer.get_vocab_size() == size, tokenizer.get_vocab_size()
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))


def write_text_model(folder: Path, *, size: int = 72, corpus: int = 1, **changes: Any) -> Path:
    write_tiny_llama(folder, vocab_size=size, **changes)
    write_tokenizer(folder, size=size, corpus=corpus)
    return folder


def write_permuted(source: Path, folder: Path, *, seed: int = 0) -> Path:
    """The same model and the same tokens under other ids."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    described = json.loads((source / "tokenizer.json").read_text())
    size = config["vocab_size"]
    new_of_old = list(range(size))
    random.Random(seed).shuffle(new_of_old)
    vocabulary = described["model"]["vocab"]
    described["model"]["vocab"] = {token: new_of_old[i] for token, i in vocabulary.items()}
    for added in described["added_tokens"]:
        added["id"] = new_of_old[added["id"]]
    (folder / "tokenizer.json").write_text(json.dumps(described))
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_text((source / name).read_text())
    tensors = load_file(str(source / "model.safetensors"))
    old_of_new = torch.tensor(new_of_old).argsort()
    for name in tensors.keys() & {"model.embed_tokens.weight", "lm_head.weight"}:
        tensors[name] = tensors[name][old_of_new].contiguous()
    save_file(tensors, str(folder / "model.safetensors"))
    return folder
