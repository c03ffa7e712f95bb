"""`model_type: gemma3_text`: Gemma 2 with norms over heads instead of soft caps.

Five of six layers have a window, and positions of their own. Source: Gemma Team 2025 (arXiv
2503.19786) and Hugging Face's checkpoint layout.
"""

from dataclasses import replace

from foretoken.models.decoder import Decoder
from foretoken.models.parts import Builder, Storage

STORAGE = Storage(norm_offset=1.0)


def build(builder: Builder) -> Decoder:
    """The model of `builder`'s checkpoint."""
    return replace(builder, storage=STORAGE).model()
