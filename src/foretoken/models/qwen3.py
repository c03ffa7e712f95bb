"""`model_type: qwen3`: Llama with an RMS norm over every query and key head.

Head size is free of hidden size. Source: Qwen Team 2025 and Hugging Face's checkpoint layout.
"""

from foretoken.models.decoder import Decoder
from foretoken.models.parts import Builder


def build(builder: Builder) -> Decoder:
    """The model of `builder`'s checkpoint."""
    return builder.model()
