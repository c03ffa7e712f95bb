"""Decoders whose family has no record: transformers' modules over our attention and linears."""

from foretoken.models.through_transformers.model import load_with_transformers

__all__ = ["load_with_transformers"]
