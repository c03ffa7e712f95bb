"""`model_type: llama`: pre-norm layers, grouped-query attention, rotary positions, gated MLP.

Source: Touvron et al. 2023 and Hugging Face's checkpoint layout.
"""

from foretoken.models.decoder import Decoder
from foretoken.models.parts import Builder


def build(builder: Builder) -> Decoder:
    """The model of `builder`'s checkpoint."""
    return builder.model()
