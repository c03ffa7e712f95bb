"""The shape of a model, read from its config.json, and the arithmetic that follows from it.

Plain data and formulas, no torch: what the engine, `foretoken info` and the lab agree on. A
feature that Foretoken does not run is an error here, before any weight is read.
"""

from foretoken.shape.families import ModelFamily
from foretoken.shape.fields import DTYPES
from foretoken.shape.model import ModelShape, token_flops
from foretoken.shape.rope_config import RopeShape
from foretoken.shape.stored import CheckpointQuantization

__all__ = [
    "DTYPES",
    "ModelFamily",
    "ModelShape",
    "RopeShape",
    "CheckpointQuantization",
    "token_flops",
]
