"""From `model_type` to the file that builds it."""

from dataclasses import replace
from pathlib import Path

import torch

from foretoken.hardware import lean_heap
from foretoken.models import gemma2, gemma3, llama, mistral, phi3, qwen2, qwen3
from foretoken.models.base import LoadOptions, Model
from foretoken.models.loader import Checkpoint
from foretoken.models.parts import Builder, Storage
from foretoken.models.transformers_backend import load_foreign
from foretoken.models.weights import rounding_of
from foretoken.ops.linear import RowProbe
from foretoken.quant.formats import format_of
from foretoken.shape import OWN_MODEL_TYPES, ModelShape
from foretoken.shape.gguf import forget_gguf

_BUILDERS = {
    "gemma2": gemma2.build,
    "gemma3_text": gemma3.build,
    "llama": llama.build,
    "mistral": mistral.build,
    "phi3": phi3.build,
    "qwen2": qwen2.build,
    "qwen3": qwen3.build,
}
_STORAGE = {
    "gemma2": gemma2.STORAGE,
    "gemma3_text": gemma3.STORAGE,
    "phi3": phi3.STORAGE,
}
assert set(_BUILDERS) == set(OWN_MODEL_TYPES), (set(_BUILDERS), OWN_MODEL_TYPES)


@torch.inference_mode()
def load_model(folder: Path, options: LoadOptions) -> Model:
    """Load the checkpoint in `folder`: config.json and weights.

    Raises:
        UnsupportedModelError: the model type or a feature is not run.
        CheckpointError: tensors are missing, unused, misshapen or unreadable.
        ConfigError: options.quantization names another format than the checkpoint's.
    """
    shape = ModelShape.from_config(folder)
    options = replace(options, quantization=rounding_of(options.quantization, shape))
    with lean_heap():
        if not shape.is_own:
            return load_foreign(folder, shape, options)
        stored = None if shape.stored is None else format_of(shape.stored, folder)
        with Checkpoint(
            folder, dtype=options.dtype, device=options.device, stored=stored
        ) as checkpoint:
            forget_gguf()
            return _BUILDERS[shape.model_type](
                Builder(shape=shape, checkpoint=checkpoint, options=options, probe=RowProbe())
            )


def layer_builder(checkpoint: Checkpoint, shape: ModelShape, options: LoadOptions) -> Builder:
    """What `load_model` builds a model of our own with, for whoever takes its layers one by one."""
    storage = _STORAGE.get(shape.model_type, Storage())
    return Builder(
        shape=shape, checkpoint=checkpoint, options=options, probe=RowProbe(), storage=storage
    )
