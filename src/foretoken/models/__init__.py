"""Models: from a folder on disk to logits."""

from foretoken.models.base import Model
from foretoken.models.load import load_model

__all__ = ["Model", "load_model"]
