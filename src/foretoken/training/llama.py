"""The dense Llama that training runs: transformers' layers, over a head tied to the embedding.

Owns its first weights, reading it from a folder, and the files that stand beside its weights there;
`foretoken.training.heads.export` writes it. Invariant: LlamaForCausalLM loads an exported folder
and gives this model's logits.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from foretoken.errors import CheckpointError, ConfigError
from foretoken.training import run_folder
from foretoken.training.settings import LlamaShape

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
SPECIAL = "special_ids.json"
PACKAGED_IDS = {"bos_token_id": 0, "eos_token_id": 1}
"""The ids that begin and end a text for the packaged models."""
ADDED = ("o_proj.weight", "down_proj.weight")
"""How the names of matrices end whose products are added to the residual stream."""
_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
}
"""The keys of config.json that hold the sizes of a shape."""


def llama_config(shape: LlamaShape) -> dict[str, Any]:
    """The contents of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{key: getattr(shape, name) for name, key in _KEYS.items()},
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


_Layers: Any = LlamaModel  # half of its methods have no types


class Llama(_Layers, nn.Module):  # type: ignore[misc]
    """A Llama decoder with tied embeddings, float32; see `LlamaShape` for the sizes."""

    embed_tokens: nn.Embedding
    layers: Any
    norm: Any
    rotary_emb: nn.Module
    set_attn_implementation: Any

    def __init__(self, shape: LlamaShape) -> None:
        """Draw first weights: smaller ones in what is added to the residual stream."""
        super().__init__(LlamaConfig(**llama_config(shape), pad_token_id=None))
        self.shape = shape
        residual = 0.5 / math.sqrt(2 * shape.layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            gain = residual if name.endswith(ADDED) else 1.0
            std = 0.02 if name.startswith("embed") else gain / math.sqrt(parameter.shape[1])
            nn.init.normal_(parameter, std=std)

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """Hidden states [B, T, D] after the last norm, for int64 tokens [B, T] from position 0."""
        found: Tensor = self(tokens_BT, use_cache=False).last_hidden_state
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits [..., V] of normed hidden states [..., D]."""
        return nn.functional.linear(hidden, self.embed_tokens.weight)


def read_checkpoint(folder: Path) -> Llama:
    """The newest model of a run's folder, in float32. Raises ConfigError: there is none, or it is
    of a release whose layers had other names."""
    state = run_folder.newest_state(folder, "model", "shape")
    model = Llama(LlamaShape(**state["shape"]))
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        allowed = "a checkpoint that this release wrote; an older one exports those of its own"
        raise ConfigError("RUN", str(folder), allowed) from error
    return model


def read_exported(folder: Path) -> Llama:
    """A model from an exported folder, in float32. Raises CheckpointError: the folder was not
    written by `export`, or is broken."""
    try:
        config = json.loads((folder / "config.json").read_text())
        model = Llama(LlamaShape(**{name: config[key] for name, key in _KEYS.items()}))
        tensors = load_file(folder / "model.safetensors")
        model.load_state_dict({name.removeprefix("model."): t for name, t in tensors.items()})
    except (OSError, ValueError, KeyError, TypeError, SafetensorError, RuntimeError) as error:
        allowed = f"a model that `foretoken train export` wrote ({error!r})"
        raise CheckpointError("model", str(folder), allowed) from error
    return model


def read_llama(folder: Path) -> Llama:
    """The model in `folder`, an exported one or a run's newest checkpoint, in float32."""
    if (folder / "config.json").exists():
        return read_exported(folder)
    return read_checkpoint(folder)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Put the tokenizer files that `source` has into `folder`, which may be the same."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        file = source / name
        if file.is_file() and file.resolve() != (folder / name).resolve():
            shutil.copyfile(file, folder / name)


def keep_special_ids(target: Path, folder: Path) -> None:
    """Note the ids that begin and end a text for the target in `target`, for `export`."""
    file = target / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    found = {name: config.get(name) for name in PACKAGED_IDS}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SPECIAL).write_text(json.dumps(found) + "\n")


def special_ids(run: Path) -> dict[str, Any]:
    """Those that were noted in a run's folder, or the packaged tokenizer's."""
    path = run / SPECIAL
    if path.is_file():
        known: dict[str, Any] = json.loads(path.read_text())
        return known
    return dict(PACKAGED_IDS)
