"""Models, one file per Hugging Face `model_type`, and the strict loader."""

from foretoken.models.base import LoadOptions, Model
from foretoken.models.registry import load_model

__all__ = ["LoadOptions", "Model", "load_model"]
