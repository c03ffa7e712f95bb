"""An engine's fingerprint: what another engine has to share to write the same bits.

Says "different" where it does not know: another processor has another fingerprint although the
kernels may well give the same bits on both. Knows no engine that runs.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import foretoken
from foretoken.checkpoint import find_model
from foretoken.config import ResolvedConfig
from foretoken.hardware import Hardware
from foretoken.kernels import build
from foretoken.kernels.library import describe_kernels
from foretoken.types.fingerprint import Fingerprint

_WEIGHTS = (".safetensors", ".bin", ".gguf")
_SAMPLES, _SAMPLE_BYTES = 16, 4096


def fingerprint_of(config: ResolvedConfig) -> Fingerprint:
    """The fingerprint of an engine with these settings in this process."""
    user = config.user
    precision: list[Any] = [
        _identity(find_model(user.model, revision=user.revision)),
        config.dtype,
        user.quantization,
        user.activations,
        user.kv_cache_dtype,
    ]
    kernels: list[Any] = [
        config.device,
        describe_kernels(),
        torch.get_num_threads(),
        config.batch_invariant,
        _processor(config.device),
    ]
    return Fingerprint(
        build=_words([foretoken.__version__, torch.__version__, build.library_path().stem]),
        precision=_words(precision),
        kernels=_words(kernels),
    )


def _words(parts: list[Any]) -> str:
    return " ".join(str(part) for part in parts)


def _processor(device: str) -> str:
    """Libraries choose their code, and with it the order of their sums, by the processor."""
    if device == "cpu":
        return Hardware.detect().cpu_name
    return str(torch.cuda.get_device_name(device))


def _identity(model: Path) -> str:
    """A model by its configuration, and the names, sizes and samples of its files: whole
    checkpoints are too much to read."""
    found = hashlib.blake2b(digest_size=8)
    files = sorted(model.iterdir()) if model.is_dir() else [model]
    for file in files:
        if file.suffix in _WEIGHTS:
            found.update(f"{file.name} {file.stat().st_size};".encode())
            for sample in _samples(file):
                found.update(sample)
    if model.is_dir():
        found.update((model / "config.json").read_bytes())
    return found.hexdigest()


def _samples(file: Path) -> Iterator[bytes]:
    """A little from each stretch of a file, the last one from its end."""
    stretch = max(file.stat().st_size // _SAMPLES, 1)
    with file.open("rb") as content:
        for number in range(1, _SAMPLES + 1):
            content.seek(max(number * stretch - _SAMPLE_BYTES, 0))
            yield content.read(_SAMPLE_BYTES)
