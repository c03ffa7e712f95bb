"""The cycle target with int8 weights in the format that vLLM reads, activations int8 by token.

Owns the copy of a checkpoint in `compressed-tensors`' words. Symmetric, one scale for each output;
embeddings and head stay in 16 bits, as the tools that make such checkpoints leave them.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

MATRICES = ("_proj.weight",)
SCHEME = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel",
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token",
                "dynamic": True,
            },
        }
    },
}  # fmt: skip


def rounded(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """int8 weights [O, I] and their scales [O, 1], float32."""
    wide = weight_OI.float()
    scale_O1 = wide.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
    return (wide / scale_O1).round().clamp(-127, 127).to(torch.int8), scale_O1


def write_int8(model: Path) -> Path:
    """The copy beside `model`, made once."""
    folder = model.with_name(f"{model.name}-vllm-int8")
    file = folder / "model.safetensors"
    if file.is_file():
        return folder
    print(f"converting {folder.name} for vLLM (once)", flush=True)
    folder.mkdir(exist_ok=True)
    tensors: dict[str, Tensor] = {}
    with safe_open(str(model / file.name), framework="pt") as stored:
        for name in stored.keys():
            tensor = stored.get_tensor(name)
            if name.endswith(MATRICES):
                tensors[name], scale_O1 = rounded(tensor)
                tensors[f"{name}_scale"] = scale_O1.to(tensor.dtype)
            else:
                tensors[name] = tensor
    for other in model.glob("*.json"):
        shutil.copy(other, folder / other.name)
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = SCHEME
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    whole = file.with_suffix(".part")
    save_file(tensors, str(whole), metadata={"format": "pt"})
    whole.replace(file)
    return folder
