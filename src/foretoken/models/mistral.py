"""`model_type: mistral`: Llama, in its first versions with a sliding window in every layer.

Source: Jiang et al. 2023 (arXiv 2310.06825) and Hugging Face's checkpoint layout.
"""

from foretoken.models.decoder import Decoder
from foretoken.models.parts import Builder


def build(builder: Builder) -> Decoder:
    """The model of `builder`'s checkpoint."""
    return builder.model()
