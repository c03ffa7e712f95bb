"""Trained heads and drafts as folders in published formats, which our loaders and vLLM read.

Owns the writing. What stands in a folder is the affair of each kind's module: its `layout`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from foretoken.checkpoint import find_model
from foretoken.errors import CheckpointError, ConfigError
from foretoken.models.checkpoint import open_files
from foretoken.training import run_folder
from foretoken.training.heads.kind import find_kind, require_form
from foretoken.training.llama import (
    Llama,
    copy_tokenizer,
    llama_config,
    read_checkpoint,
    special_ids,
)
from foretoken.training.trained_kinds import trained_kinds

EMBEDDING = "embed_tokens.weight"


def export_run(
    run: Path,
    folder: Path,
    *,
    verifier: str,
    dtype: torch.dtype = torch.bfloat16,
    embedding: bool = False,
    form: str | None = None,
) -> None:
    """Write the newest checkpoint of any kind of run to `folder`.

    Args:
        run: its folder.
        folder: made if it is not there.
        verifier: name or path of the target, for the file's own record.
        dtype: of the weights.
        embedding: of EAGLE-3 and P-EAGLE, put the target's token embedding into the file.
        form: a published format by name, one of the kind's `formats`; None or "own": the kind's
            own. With `speculators` the embedding is in the file too, where that package needs it.

    Raises:
        ConfigError: no checkpoint, or no such format of it; an embedding for another kind.
        ModelError: the verifier, whose embedding is wanted, cannot be read.
    """
    state = run_folder.newest_state(run, "model", "kind", "shape")
    word, head = str(state["kind"]), state.get("head")
    require_form(word, form)
    if head is None:
        export_llama(read_checkpoint(run), run, folder, dtype)
        return
    if word not in trained_kinds():
        allowed = f"a run of a head, one of {', '.join(trained_kinds())}"
        raise ConfigError("RUN", f"{run}, a run of {word}", allowed)
    kind = find_kind(word)
    if kind.layout is None:
        export_llama(read_checkpoint(run), run, folder, dtype, kind.llama_keys(head))
        return
    tensors, config = kind.layout(state, verifier, form)
    if embedding and not kind.may_embed:
        allowed = f"left out: {word} heads always use the target's"
        raise ConfigError("--embedding", True, allowed)
    if kind.may_embed and (embedding or form == "speculators"):
        tensors = {**tensors, EMBEDDING: _embedding_of(verifier)}
    _write(folder, tensors, config, dtype)


def export_llama(
    model: Llama,
    tokenizer_from: Path,
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Write `model` and the tokenizer found in `tokenizer_from` to `folder`.

    `more` are keys of config.json beside Llama's own.
    """
    tensors = {f"model.{name}": tensor.cpu() for name, tensor in model.state_dict().items()}
    special = special_ids(tokenizer_from)
    _write(folder, tensors, {**llama_config(model.shape), **special, **(more or {})}, dtype)
    generation = {**special, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    copy_tokenizer(tokenizer_from, folder)


def _write(
    folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], dtype: torch.dtype
) -> None:
    run_folder.make(folder, "TO")
    converted = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in tensors.items()
    }
    run_folder.write_whole(
        folder / "model.safetensors",
        lambda part: save_file(converted, part, metadata={"format": "pt"}),
    )
    config = {**config, "torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _embedding_of(verifier: str) -> Tensor:
    name = f"model.{EMBEDDING}"
    for file in open_files(find_model(verifier)).values():
        if name in file.keys():
            return file.get_tensor(name)
    allowed = f"a target whose files hold {name}: --verifier names it"
    raise CheckpointError("--verifier", verifier, allowed)
