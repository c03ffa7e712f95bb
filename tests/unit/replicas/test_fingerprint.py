"""Engines that write the same bits have one fingerprint; no others may."""

from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.assembly import build_engine
from foretoken.config import EngineConfig
from foretoken.server.routed.fingerprint import fingerprint_of
from foretoken.testing import write_tiny_llama
from foretoken.types.fingerprint import Fingerprint


def fingerprint(folder: Path, **given: Any) -> Fingerprint:
    config = EngineConfig.from_kwargs(
        model=str(folder), **{"kv_cache_memory_bytes": 1 << 20, **given}
    )
    return fingerprint_of(build_engine(config).parts.config)


def test_what_changes_bits_changes_the_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, same, other = (tmp_path / name for name in ("one", "same", "other"))
    for folder, seed in ((one, 1), (same, 1), (other, 2)):
        folder.mkdir()
        write_tiny_llama(folder, seed=seed)
    here = fingerprint(one)
    assert here == fingerprint(same), "its place on disk changes nothing"
    assert here == fingerprint(one, max_num_seqs=2, max_model_len=64, seed=5)
    assert fingerprint(other).precision != here.precision, "other weights of the same shape"
    assert fingerprint(one, kv_cache_dtype="int8").precision != here.precision
    assert fingerprint(one, dtype="bfloat16").precision != here.precision
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert fingerprint(one).kernels != here.kernels
