"""Kept packed weights through everything that can happen to a file.

The guarded bugs: weights of another model or of other options, half a file, a start that fails or
waits where it could do without.
"""

import errno
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from foretoken import LLM, SamplingParams
from foretoken.cli.app import app
from foretoken.errors import ConfigError
from foretoken.kernels.library import find_library
from foretoken.models import load, packed_file, weight_cache
from foretoken.models.packed_file import Lease
from foretoken.testing import write_tiny_llama
from tests.packed import begin_behind, keep_packed, settle

pytestmark = pytest.mark.skipif(find_library() is None, reason="packed for kernels only")

KV: dict[str, Any] = {"kv_cache_memory_bytes": 8 << 20, "max_model_len": 128}
PROMPT = {"prompt_token_ids": list(range(3, 30))}
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return keep_packed(tmp_path, monkeypatch)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "model")


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="foretoken")
    return caplog


def tokens(model: Path, **settings: Any) -> tuple[int, ...]:
    with LLM(str(model), **KV, **settings) as llm:
        [output] = llm.generate(PROMPT, PARAMS, use_tqdm=False)
        return tuple(output.outputs[0].token_ids)


def lines(said: pytest.LogCaptureFixture) -> list[str]:
    """What was said about packed weights since the last call."""
    found = [one.getMessage() for one in said.records if "packed weights" in one.getMessage()]
    said.clear()
    return found


def only_file(kept: Path) -> Path:
    [file] = kept.iterdir()
    return file


def test_a_second_start_says_the_same(
    model: Path, kept: Path, said: pytest.LogCaptureFixture
) -> None:
    first = tokens(model)
    [line] = lines(said)
    assert "kept for the next start" in line
    assert only_file(kept).stat().st_mode & 0o077 == 0, "others may not read a gated model"
    assert tokens(model) == first
    [line] = lines(said)
    assert "mapped" in line


def test_nobody_waits_for_the_file(
    model: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens come while it is still written, and it is found once it is whole."""
    go = threading.Event()
    finish = packed_file.PackedWriter.finish
    monkeypatch.setattr(weight_cache, "_begin_behind", begin_behind)

    def held(writer: packed_file.PackedWriter, about: Any) -> int:
        assert go.wait(60)
        return finish(writer, about)

    monkeypatch.setattr(packed_file.PackedWriter, "finish", held)
    first = tokens(model)
    assert not list(kept.glob("*.packed"))
    go.set()
    settle()
    assert only_file(kept).suffix == ".packed"
    assert tokens(model) == first


def test_without_huge_pages_it_is_copied(
    model: Path, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tokens(model)
    lines(said)
    monkeypatch.setattr(packed_file, "comes_in_huge_pages", lambda _: False)
    assert tokens(model) == first
    assert "copied" in lines(said)[0]


def test_a_process_of_one_numa_node_has_its_own(
    model: Path, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the pages of whoever read the file first, which another replica may be."""
    first = tokens(model)
    lines(said)
    monkeypatch.setattr(packed_file, "keeps_to_one_node", lambda: True)
    assert tokens(model) == first
    assert "copied: it may lie on another NUMA node" in lines(said)[0]


@pytest.mark.parametrize("harm", ["overwritten", "cut"])
@pytest.mark.parametrize("held", [True, False], ids=["held", "not held"])
def test_a_file_that_is_changed_while_it_serves(
    model: Path,
    kept: Path,
    said: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    held: bool,
    harm: str,
) -> None:
    """Overwritten in place it was served without a word, truncated it ended the process."""
    first = tokens(model)
    settle()
    lines(said)
    monkeypatch.setattr(packed_file, "_LOOK_S", 0.001)
    if not held:
        monkeypatch.setattr(Lease, "take", lambda _: None)
    with LLM(str(model), **KV) as llm:
        [line] = lines(said)
        assert "mapped" in line or "copied: it cannot be held against changes" in line
        assert held or "copied" in line
        if harm == "cut":
            os.truncate(only_file(kept), 0)
        else:
            with only_file(kept).open("r+b") as opened:
                opened.seek(4096)
                opened.write(bytes(only_file(kept).stat().st_size - 4096))
        [output] = llm.generate(PROMPT, PARAMS, use_tqdm=False)
        assert tuple(output.outputs[0].token_ids) == first
    lines(said)
    assert tokens(model) == first
    assert "made anew" in lines(said)[0]


def test_bytes_that_were_overwritten_are_found_at_the_next_start(
    model: Path, kept: Path, said: pytest.LogCaptureFixture
) -> None:
    first = tokens(model)
    settle()
    spoil(only_file(kept), 4096 + 17)
    lines(said)
    assert tokens(model) == first
    assert "1 of " in (line := lines(said)[0]) and "made anew" in line


def test_a_file_that_was_only_touched_is_compared_once(
    model: Path, kept: Path, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tokens(model)
    settle()
    os.utime(only_file(kept))
    lines(said)
    assert tokens(model) == first
    assert "mapped" in lines(said)[0]
    monkeypatch.setattr(packed_file, "_is_whole", None)
    assert tokens(model) == first


def test_a_file_that_changes_while_it_is_copied_is_not_believed(
    model: Path, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tokens(model)
    settle()
    lines(said)
    read = packed_file._read_into

    def disturbed(memory: torch.Tensor, fd: int) -> None:
        read(memory, fd)
        os.utime(fd, ns=(1, 1))

    monkeypatch.setattr(packed_file, "_read_into", disturbed)
    monkeypatch.setattr(Lease, "take", lambda _: None)
    assert tokens(model) == first
    assert "changed while it was read" in lines(said)[0]


def test_a_file_that_is_marked_while_it_is_copied_is_believed(
    model: Path, kept: Path, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that wrote it may note that it is on the disk as late as that."""
    monkeypatch.setattr(weight_cache, "_settle_later", lambda _: None)
    first = tokens(model)
    lines(said)
    read = packed_file._read_into

    def marked(memory: torch.Tensor, fd: int) -> None:
        read(memory, fd)
        packed_file.mark_on_disk(only_file(kept))

    monkeypatch.setattr(packed_file, "_read_into", marked)
    monkeypatch.setattr(Lease, "take", lambda _: None)
    assert tokens(model) == first
    assert "copied" in lines(said)[0]


@pytest.mark.parametrize(
    "settings", [{"dtype": "float32"}, {"quantization": "int8"}, {"quantization": "int4"}]
)
def test_other_options_have_another_file(model: Path, kept: Path, settings: Any) -> None:
    tokens(model, dtype="bfloat16")
    tokens(model, **{"dtype": "bfloat16", **settings})
    assert len(list(kept.iterdir())) == 2


def test_another_checkpoint_has_another_file(model: Path, kept: Path) -> None:
    """Also one of the same size, by its time."""
    before = tokens(model, dtype="float32")
    file = model / "model.safetensors"
    tensors = load_file(str(file))
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    size = file.stat().st_size
    save_file(tensors, str(file))
    assert file.stat().st_size == size
    after = tokens(model, dtype="float32")
    assert len(list(kept.iterdir())) == 2
    shutil.rmtree(kept)
    assert tokens(model, dtype="float32") == after
    assert after != before


def spoil(file: Path, at: int, byte: bytes = b"\xa5") -> None:
    with file.open("r+b") as opened:
        opened.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        opened.write(byte)


@pytest.mark.parametrize("harm", ["empty", "half", "start", "contents", "other"])
def test_a_broken_file_is_made_anew(
    model: Path, kept: Path, said: pytest.LogCaptureFixture, harm: str
) -> None:
    first = tokens(model)
    file = only_file(kept)
    whole = file.read_bytes()
    if harm == "other":
        file.write_bytes(os.urandom(10_000))
    elif harm in ("empty", "half"):
        os.truncate(file, 0 if harm == "empty" else len(whole) // 2)
    else:
        spoil(file, 3 if harm == "start" else -5)
    lines(said)
    assert tokens(model) == first
    anew, _ = lines(said)
    assert "made anew" in anew
    assert len(only_file(kept).read_bytes()) == len(whole)


def test_after_another_boot_every_byte_is_compared_once(
    model: Path, kept: Path, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_cache, "mark_on_disk", lambda _: None)
    first = tokens(model)
    lines(said)
    monkeypatch.setattr(packed_file, "_boot", lambda: b"another")
    spoil(only_file(kept), 4096 + 17)
    assert tokens(model) == first
    assert "not as written" in lines(said)[0]
    monkeypatch.setattr(packed_file, "_boot", lambda: b"a third")
    assert tokens(model) == first
    assert "mapped" in lines(said)[0]

    def never(*_: object) -> None:
        raise AssertionError("compared twice")

    monkeypatch.setattr(hashlib, "sha256", guarded(never))
    assert tokens(model) == first


def guarded(never: Any) -> Any:
    """SHA-256 of small things only."""
    real = hashlib.sha256

    def sha256(data: Any = b"") -> Any:
        if isinstance(data, memoryview):
            never()
        return real(data)

    return sha256


SECOND = """
import sys
from foretoken import LLM, SamplingParams
from foretoken.models import load, weight_cache
weight_cache._LEAST_BYTES = 0
load.Checkpoint = None
llm = LLM(sys.argv[1], kv_cache_memory_bytes=8 << 20, max_model_len=128)
llm.generate({"prompt_token_ids": [1, 2]}, SamplingParams(max_tokens=2), use_tqdm=False)
print(*(name for name in ("torch._dynamo", "sympy") if name in sys.modules))
"""


@pytest.mark.slow
def test_a_second_start_imports_no_compiler(model: Path) -> None:
    """Some operations on tensors without contents import seconds of Python."""
    tokens(model)
    done = subprocess.run(
        [sys.executable, "-c", SECOND, str(model)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stdout.strip(), done.stdout


KILLED = """
import os, shutil, signal, sys, types
from foretoken import LLM
from foretoken.models import load, packed_file, weight_cache
weight_cache._LEAST_BYTES = 0
shutil.disk_usage = lambda _: types.SimpleNamespace(total=1 << 40, free=1 << 40)
packed_file.PackedWriter.finish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
LLM(sys.argv[1], kv_cache_memory_bytes=8 << 20, max_model_len=128)
"""


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_nothing_to_find(
    model: Path, kept: Path, said: pytest.LogCaptureFixture
) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(model)], check=False)
    assert done.returncode == -9
    assert [path.suffix for path in kept.iterdir()] == [".tmp"]
    (kept / "another.tmp").touch()
    first = tokens(model)
    assert "kept for the next start" in lines(said)[0]
    assert only_file(kept).suffix == ".packed"
    assert tokens(model) == first


def test_while_another_process_writes_one_goes_without(
    model: Path, kept: Path, said: pytest.LogCaptureFixture
) -> None:
    first = tokens(model)
    file = only_file(kept)
    temporary = file.with_suffix(".tmp")
    file.rename(temporary)
    lines(said)
    with temporary.open("r+b") as writing:
        fcntl.flock(writing, fcntl.LOCK_EX)
        assert tokens(model) == first
        assert "another process" in lines(said)[0]
        assert only_file(kept) == temporary
    assert tokens(model) == first
    assert only_file(kept) == file


def no_room(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("trouble", ["folder", "disk", "writing", "limit"])
def test_without_a_place_it_does_without(
    model: Path,
    kept: Path,
    said: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    trouble: str,
) -> None:
    first = tokens(model)
    shutil.rmtree(kept)
    lines(said)
    if trouble == "folder":
        kept.write_text("a file where the folder would be")
    elif trouble == "disk":
        little = SimpleNamespace(free=99 << 20, total=1 << 30)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: little)
    elif trouble == "limit":
        monkeypatch.setenv(weight_cache.VARIABLE, "0.00001")
    else:
        monkeypatch.setattr(os, "pwrite", no_room)
    assert tokens(model) == first
    [line] = lines(said)
    assert "are not kept" in line
    assert not list(kept.parent.rglob("*.packed")) and not list(kept.parent.rglob("*.tmp"))


def test_a_disk_is_not_filled(
    model: Path, tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of it stays free: the least recently used go for that, too."""
    tokens(model)
    first = only_file(kept)
    second = write_tiny_llama(tmp_path / "second", vocab_size=70)
    room = max(first.stat().st_size, (second / "model.safetensors").stat().st_size)

    def usage(folder: Path) -> SimpleNamespace:
        taken = sum(path.stat().st_size for path in Path(folder).glob("*.packed"))
        return SimpleNamespace(total=1 << 40, free=(5 << 30) + room - taken)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    tokens(second)
    assert only_file(kept) != first


def test_the_limit(
    model: Path, tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens(model)
    first = only_file(kept)
    os.utime(first, (1, 1))
    second = write_tiny_llama(tmp_path / "second", vocab_size=70)
    size = sum(path.stat().st_size for path in (first, second / "model.safetensors"))
    monkeypatch.setenv(weight_cache.VARIABLE, str((size + 1000) / (1 << 30)))
    tokens(second)
    assert len(list(kept.iterdir())) == 2, "both fit"
    third = write_tiny_llama(tmp_path / "third", vocab_size=71)
    tokens(third)
    assert first not in kept.iterdir(), "the least recently used went"
    assert len(list(kept.iterdir())) == 2
    monkeypatch.setenv(weight_cache.VARIABLE, "0")
    tokens(write_tiny_llama(tmp_path / "fourth", vocab_size=72))
    assert len(list(kept.iterdir())) == 2
    monkeypatch.setenv(weight_cache.VARIABLE, "much")
    with pytest.raises(ConfigError, match=weight_cache.VARIABLE):
        tokens(model)


def test_quantize_leaves_them_beside_the_checkpoint(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_tiny_llama(tmp_path / "source", hidden_size=64)
    for out, more in ((tmp_path / "plain", []), (tmp_path / "out", ["--packed"])):
        shown = CliRunner().invoke(
            app, ["quantize", str(source), str(out), "--scheme", "int8", *more]
        )
        assert shown.exit_code == 0, shown.output
    assert f"wrote {tmp_path / 'out' / 'packed'}" in shown.output
    expected = tokens(tmp_path / "plain")
    shutil.rmtree(kept)
    monkeypatch.setattr(load, "Checkpoint", None)
    assert tokens(tmp_path / "out") == expected
    assert not kept.exists(), "what lies beside the checkpoint is found first"


def test_a_spoilt_checkpoint_leaves_no_file(model: Path, kept: Path) -> None:
    file = model / "model.safetensors"
    tensors = load_file(str(file))
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, str(file))
    with pytest.raises(Exception, match="1 NaN"):
        tokens(model)
    assert not list(kept.iterdir())


def test_small_models_are_not_worth_a_file(
    model: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept.parents[1]))
    tokens(model)
    assert not kept.exists()
