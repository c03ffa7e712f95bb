"""`model_type: qwen2`: Llama with biases on query, key and value; upper layers may have a window.

Source: Qwen Team 2024 (arXiv 2407.10671) and Hugging Face's checkpoint layout.
"""

from foretoken.models.decoder import Decoder
from foretoken.models.parts import Builder


def build(builder: Builder) -> Decoder:
    """The model of `builder`'s checkpoint."""
    return builder.model()
