"""Checkpoints that are quantized already: one file per format, one interface."""

from pathlib import Path

from foretoken.quant.formats.awq import AwqFormat
from foretoken.quant.formats.base import Format, RawTensors
from foretoken.quant.formats.compressed import CompressedFormat
from foretoken.quant.formats.fp8 import Fp8Format
from foretoken.quant.formats.gguf import GgufFile, GgufFormat
from foretoken.quant.formats.gptq import GptqFormat
from foretoken.quant.formats.mxfp4 import Mxfp4Format
from foretoken.shape import CheckpointQuantization

__all__ = ["Format", "GgufFile", "RawTensors", "format_of"]


def format_of(stored: CheckpointQuantization, path: Path) -> Format:
    """The reader of the checkpoint at `path`, which is quantized so."""
    if stored.method == "gguf":
        return GgufFormat(GgufFile(path))
    if stored.method == "gptq":
        return GptqFormat(zeros_less_one=stored.zeros_less_one)
    if stored.method == "awq":
        return AwqFormat()
    if stored.method == "fp8":
        return Fp8Format(stored.block)
    if stored.method == "mxfp4":
        return Mxfp4Format()
    assert stored.method == "compressed-tensors", stored.method
    return CompressedFormat(stored.block)
