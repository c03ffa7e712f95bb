"""Multiply a GGUF file out to a Hugging Face folder in bfloat16, for engines that read no GGUF.

    python benchmarks/from_gguf.py FILE.gguf FOLDER

The weights are those that the file's integers stand for, rounded to bfloat16, so an engine that
serves the folder answers as one that serves the file does, but for rounding. The folder has one
safetensors file, the tokenizer and its chat template. Dense models of Llama's and Qwen2's layout.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from foretoken.models.checkpoint import open_files
from foretoken.shape.gguf import gguf_config, open_gguf
from foretoken.text.gguf_tokenizer import read_gguf_tokenizer

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}


def multiply_out(file: Path, folder: Path) -> None:
    """Write the folder.

    Raises:
        SystemExit: the model is of another layout.
        CheckpointError, TokenizerError: the file is broken, or has types that are not read.
    """
    config = gguf_config(file)
    architecture = ARCHITECTURES.get(config["model_type"])
    if architecture is None:
        raise SystemExit(
            f"{file.name}: {config['model_type']}; allowed: {', '.join(ARCHITECTURES)}"
        )
    folder.mkdir(parents=True)
    weights = open_files(file, torch.bfloat16)[file]
    tensors = {name: weights.get_tensor(name).bfloat16().contiguous() for name in weights.keys()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", config | {"architectures": [architecture]})
    parts = read_gguf_tokenizer(file)
    parts.tokenizer.save(str(folder / "tokenizer.json"))
    ends = {"bos_token_id": parts.bos_token_id, "eos_token_id": config["eos_token_id"]}
    write_json(folder / "generation_config.json", ends)
    names = {"bos_token": parts.bos_token_id, "eos_token": parts.eos_token_id}
    texts = {name: parts.tokenizer.id_to_token(own) for name, own in names.items()
             if own is not None}  # fmt: skip
    template = open_gguf(file).get("tokenizer.chat_template", str)
    write_json(
        folder / "tokenizer_config.json",
        texts | {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template},
    )


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    multiply_out(Path(sys.argv[1]), Path(sys.argv[2]))
