"""Whether Triton kernels can run here. Imports no triton: a CUDA build of PyTorch brings it.

What it needs beside the package: a GPU with bfloat16 tensor cores (compute capability 8.0), and a
C compiler, with which it builds its launcher. FORETOKEN_KERNELS=off is heeded.
"""

import functools
import importlib.util
import logging
import os

import torch
from torch import Tensor

from foretoken.kernels import build
from foretoken.kernels.library import VARIABLE, wants_twins

logger = logging.getLogger("foretoken")

_LEAST_CAPABILITY = (8, 0)


@functools.cache
def has_triton() -> bool:
    """Whether there is a CUDA device and it runs Triton kernels."""
    return torch.cuda.is_available() and _missing() is None


def is_on_gpu(x: Tensor) -> bool:
    """Whether it lies on a GPU, or on a CPU that takes its place."""
    return x.device.type == "cuda" or wants_twins()


@functools.cache
def say_which() -> None:
    """Log, the first time, how a GPU applies integer weights."""
    missing = _missing()
    if missing is None:
        words = "On the GPU quantized weights are applied as integers by Triton kernels, which save"
        logger.info("%s memory and no time; %s=off multiplies them out", words, VARIABLE)
    else:
        logger.info("On the GPU quantized weights are multiplied out: %s", missing)


def _missing() -> str | None:
    if os.environ.get(VARIABLE, "auto").lower() == "off":
        return f"{VARIABLE} is off"
    if importlib.util.find_spec("triton") is None:
        return "there is no triton package"
    if torch.cuda.get_device_capability() < _LEAST_CAPABILITY:
        return "Triton kernels are for compute capability 8.0 and above"
    try:
        build.compiler()
    except build.BuildError as error:
        return f"Triton needs a C compiler: {error}"
    return None
