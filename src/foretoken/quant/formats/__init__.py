"""Checkpoints that are quantized already: one file per format, one interface, one registry."""

from foretoken.quant.formats.base import Format, RawTensors
from foretoken.quant.formats.gguf import GgufFile
from foretoken.quant.formats.registry import format_of

__all__ = ["Format", "GgufFile", "RawTensors", "format_of"]
