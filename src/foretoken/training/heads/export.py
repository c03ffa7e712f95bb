"""Trained heads as folders in their published formats, which our loaders and vLLM read.

EAGLE, MLP speculators and Medusa as their authors publish them (a low-rank Medusa with shared head
under our own names), EAGLE-3 in the `speculators` format, parallel drafts as Llama folders with
PARD's extra keys.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from foretoken.checkpoint import find_model
from foretoken.config.heads import ANCHORED
from foretoken.errors import CheckpointError, ConfigError
from foretoken.models.files import open_files
from foretoken.training import checkpoints
from foretoken.training.export import export, read_checkpoint

SPECULATORS_VERSION = "0.3.0"
EMBEDDING = "embed_tokens.weight"
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def export_run(run: Path, folder: Path, *, verifier: str, embedding: bool = False) -> None:
    """Write the newest checkpoint of any kind of run to `folder`, in bfloat16.

    Raises:
        ConfigError: there is no checkpoint.
    """
    state = checkpoints.load_newest(run)
    if state is not None and state.get("head") is not None:
        export_head(run, folder, verifier=verifier, embedding=embedding)
    else:
        export(read_checkpoint(run), run, folder)


def export_head(
    run: Path,
    folder: Path,
    *,
    verifier: str,
    dtype: torch.dtype = torch.bfloat16,
    embedding: bool = False,
) -> None:
    """Write the newest checkpoint of `run` to `folder`.

    Args:
        run: a head's run folder.
        folder: made if it is not there.
        verifier: name or path of the target, for the file's own record.
        dtype: of the weights.
        embedding: of EAGLE-3 and P-EAGLE, put the target's token embedding into the file.

    Raises:
        ConfigError: no checkpoint, or not one of a head; an embedding for another kind.
        ModelError: the verifier, whose embedding is wanted, cannot be read.
    """
    state = checkpoints.newest_state(run)
    kind, shape, tensors = state.get("kind"), state["shape"], state["model"]
    if kind == "parallel":
        export(read_checkpoint(run), run, folder, dtype)
        _mark_parallel(folder, state["head"]["mask_token_id"])
        return
    writers: dict[str, Callable[[dict[str, Any], str], dict[str, Any]]] = {
        "eagle": _eagle_config,
        "eagle3": _eagle3_config,
        "peagle": partial(_peagle_config, state["head"]),
        "mlp": _mlp_config,
        "medusa": _medusa_config,
    }
    if kind not in writers:
        raise ConfigError("run folder", kind, f"a run of {', '.join(writers)} or parallel")
    if embedding:
        if kind not in ("eagle3", "peagle"):
            raise ConfigError("embedding", True, f"False: {kind} heads always use the target's")
        tensors = {**tensors, EMBEDDING: _embedding_of(verifier)}
    if kind == "mlp":
        tensors = {"speculator." + name: tensor for name, tensor in tensors.items()}
    elif "d2t" in tensors:
        tensors = _with_both_ways(tensors, shape["layer"]["vocab_size"])
    _write(folder, tensors, writers[kind](shape, verifier), dtype)


def _write(
    folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], dtype: torch.dtype
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    converted = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in tensors.items()
    }
    part = folder / "model.safetensors.part"
    save_file(converted, part, metadata={"format": "pt"})
    part.chmod(0o644)
    part.replace(folder / "model.safetensors")
    config = {**config, "torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _embedding_of(verifier: str) -> Tensor:
    name = f"model.{EMBEDDING}"
    for file in open_files(find_model(verifier)).values():
        if name in file.keys():
            return file.get_tensor(name)
    raise CheckpointError("missing tensors", name, f"the embedding of {verifier}")


def _with_both_ways(tensors: dict[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """`t2d`, which target ids can be drafted, beside `d2t`; neither where all can be.

    The `speculators` package does not load a reduced vocabulary without both.
    """
    offsets = tensors["d2t"]
    if len(offsets) == vocab_size:
        return {name: tensor for name, tensor in tensors.items() if name != "d2t"}
    drafted_V = torch.zeros(vocab_size, dtype=torch.bool)
    drafted_V[offsets + torch.arange(len(offsets))] = True
    return {**tensors, "t2d": drafted_V}


def _mark_parallel(folder: Path, mask_token_id: int) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config.update(pard_token=mask_token_id, spd_type="pard")
    file.write_text(json.dumps(config, indent=2) + "\n")


def _mlp_config(shape: dict[str, Any], _: str) -> dict[str, Any]:
    return {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "n_candidates": 1,
        "top_k_tokens_per_head": [1] * shape["n_predict"],
        **shape,
    }


def _medusa_config(shape: dict[str, Any], verifier: str) -> dict[str, Any]:
    return {
        "base_model_name_or_path": verifier,
        "medusa_num_heads": shape["medusa_num_heads"],
        "medusa_num_layers": shape["medusa_num_layers"],
        "medusa_share_head": shape["share_head"],
        "hidden_size": shape["hidden_size"],
        "vocab_size": shape["vocab_size"],
    }


def _eagle_config(shape: dict[str, Any], _: str) -> dict[str, Any]:
    layer = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    return {**layer, **shape, "bias": True}


def _peagle_config(head: dict[str, Any], shape: dict[str, Any], verifier: str) -> dict[str, Any]:
    config = _eagle3_config(shape, verifier)
    if shape["anchored"]:
        config["speculators_config"]["algorithm"] = ANCHORED
        return {**config, "architectures": ["PEagleAnchored"], "speculators_model_type": ANCHORED}
    config["speculators_config"]["algorithm"] = "peagle"
    return {
        **config,
        "architectures": ["PEagleSpeculator"],
        "speculators_model_type": "peagle",
        "mask_token_id": head["mask_token_id"],
    }


def _eagle3_config(shape: dict[str, Any], verifier: str) -> dict[str, Any]:
    layer = shape["layer"]
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "draft_vocab_size": shape["draft_vocab_size"],
        "target_hidden_size": shape["target_hidden_size"],
        **{name: shape[name] for name in NORMS},
        "transformer_layer_config": {"model_type": "llama", "hidden_act": "silu", **layer},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 5,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": verifier, "architectures": ["LlamaForCausalLM"]},
        },
    }
