"""`model_type: phi3`: Llama with fused matrices on disk; Phi-4-mini turns part of each head.

Long-context versions have longrope positions. Source: Abdin et al. 2024 (arXiv 2404.14219) and
Hugging Face's checkpoint layout.
"""

from dataclasses import replace

from foretoken.models.decoder import Decoder
from foretoken.models.parts import Builder, Storage

STORAGE = Storage(fused=True)


def build(builder: Builder) -> Decoder:
    """The model of `builder`'s checkpoint."""
    return replace(builder, storage=STORAGE).model()
