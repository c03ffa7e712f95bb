"""`model_type: gemma2`: norms on both sides, every other layer with a window, soft-capped scores.

Norm weights are stored less 1, embeddings are scaled by sqrt(hidden_size), logits are capped.
Source: Gemma Team 2024 (arXiv 2408.00118) and Hugging Face's checkpoint layout.
"""

from dataclasses import replace

from foretoken.models.decoder import Decoder
from foretoken.models.parts import Builder, Storage

STORAGE = Storage(norm_offset=1.0)


def build(builder: Builder) -> Decoder:
    """The model of `builder`'s checkpoint."""
    return replace(builder, storage=STORAGE).model()
