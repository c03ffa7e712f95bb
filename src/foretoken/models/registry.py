"""From `model_type` to the file that builds it."""

from pathlib import Path

import torch

from foretoken.errors import UnsupportedModelError
from foretoken.models import llama, qwen3
from foretoken.models.base import Model
from foretoken.models.loader import Checkpoint
from foretoken.models.parts import Builder
from foretoken.ops.attention import Geometry
from foretoken.ops.linear import RowProbe
from foretoken.shape import ModelShape

_BUILDERS = {"llama": llama.build, "qwen3": qwen3.build}


@torch.inference_mode()
def load_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool,
    page_size: int,
) -> Model:
    """Load the checkpoint in `folder`.

    Args:
        folder: config.json and safetensors.
        dtype: weights and activations are converted to it.
        device: where they go.
        batch_invariant: keep each row's bits independent of the other rows; what that takes on
            this machine is measured here.
        page_size: of the KV store that it will run over.

    Raises:
        UnsupportedModelError: the model type or a feature is not run.
        CheckpointError: tensors are missing, unused, misshapen or unreadable.
    """
    shape = ModelShape.from_config(folder)
    build = _BUILDERS.get(shape.model_type)
    if build is None:
        raise UnsupportedModelError("model_type", shape.model_type, ", ".join(_BUILDERS))
    geometry = Geometry(
        num_heads=shape.num_attention_heads,
        num_kv_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        page_size=page_size,
        dtype=dtype,
        device=device,
    )
    with Checkpoint(folder, dtype=dtype, device=device) as checkpoint:
        return build(
            Builder(
                shape=shape,
                checkpoint=checkpoint,
                geometry=geometry,
                batch_invariant=batch_invariant,
                probe=RowProbe(),
            )
        )
