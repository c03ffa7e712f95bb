"""Models: what a loaded one is, how a checkpoint is read, and how layers are built from it."""

from foretoken.models.base import LoadOptions, Model
from foretoken.models.load import load_model

__all__ = ["LoadOptions", "Model", "load_model"]
