"""From a folder to a Model, by the model_type in its config.json."""

from collections.abc import Callable
from pathlib import Path

import torch

from foretoken.errors import UnsupportedModelError
from foretoken.models import llama, qwen3
from foretoken.models.base import Model
from foretoken.models.checkpoint_files import CheckpointFiles
from foretoken.ops.linear import LinearFactory
from foretoken.shape import ModelShape

_BUILDERS: dict[str, Callable[[CheckpointFiles, ModelShape, LinearFactory], Model]] = {
    "llama": llama.build,
    "qwen3": qwen3.build,
}


def load_model(
    folder: Path, *, dtype: torch.dtype, device: torch.device, batch_invariant: bool
) -> Model:
    """Load the checkpoint in `folder`.

    Args:
        folder: config.json and safetensors.
        dtype: to compute in; float32, bfloat16 or float16.
        device: where.
        batch_invariant: whether logits of a row must be the same bits whatever else is in a step.

    Raises:
        ModelNotFoundError: no config.json.
        UnsupportedModelError: an architecture or feature that does not run.
        CheckpointError: a file or tensor is missing, unused, misshapen, truncated or corrupt.
    """
    shape = ModelShape.from_config(folder)
    if shape.model_type not in _BUILDERS:
        raise UnsupportedModelError("model_type", shape.model_type, ", ".join(_BUILDERS))
    factory = LinearFactory(device=device, dtype=dtype, batch_invariant=batch_invariant)
    with (
        torch.inference_mode(),
        CheckpointFiles(folder, dtype=dtype, device=device) as files,
    ):
        model = _BUILDERS[shape.model_type](files, shape, factory)
        files.check_all_taken()
    return model
