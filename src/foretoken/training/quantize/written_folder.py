"""The folder that is written: weights in shards, a config that says how, all else copied.

Invariant: the folder appears under its name only when it is complete.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from safetensors.torch import save_file
from torch import Tensor

from foretoken.errors import ConfigError

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot")
_INDEX = "model.safetensors.index.json"
SHARD_BYTES = 2 << 30


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `out` if all goes well and disappears if not.

    Raises:
        ConfigError: there is something at `out` already, or it cannot be made.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError("OUT", str(out), "a folder that is not there yet, or an empty one")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise ConfigError("OUT", str(out), f"a folder that can be made ({error})") from error
    try:
        yield unfinished
        unfinished.chmod(0o755)
        unfinished.replace(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@final
class Shards:
    """Tensors, written to safetensors files whenever enough have come together."""

    def __init__(self, folder: Path) -> None:
        """Write into `folder`; a file holds SHARD_BYTES or little more."""
        self._folder = folder
        self._waiting: dict[str, Tensor] = {}
        self._files: list[list[str]] = []
        self.total = 0
        """Bytes of all tensors so far."""

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Take tensors that nobody else changes."""
        self._waiting.update(tensors)
        self.total += sum(tensor.nbytes for tensor in tensors.values())
        if sum(tensor.nbytes for tensor in self._waiting.values()) >= SHARD_BYTES:
            self._write()

    def finish(self) -> None:
        """Write what is left, and the index if there are several files."""
        if self._waiting:
            self._write()
        count = len(self._files)
        if count == 1:
            self._path(0).rename(self._folder / "model.safetensors")
            return
        places = {}
        for number, names in enumerate(self._files):
            name = f"model-{number + 1:05}-of-{count:05}.safetensors"
            self._path(number).rename(self._folder / name)
            places.update(dict.fromkeys(names, name))
        index = {"metadata": {"total_size": self.total}, "weight_map": places}
        (self._folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _write(self) -> None:
        path = self._path(len(self._files))
        save_file(self._waiting, path, metadata={"format": "pt"})
        path.chmod(0o644)
        self._files.append(list(self._waiting))
        self._waiting = {}

    def _path(self, number: int) -> Path:
        return self._folder / f"part-{number}.safetensors"


def copy_beside(source: Path, folder: Path, quantization: dict[str, Any]) -> None:
    """Copy all of a model's files but weights, and say in config.json how it is quantized."""
    for path in sorted(source.iterdir()):
        weights = path.suffix in _WEIGHTS or path.name.endswith(".index.json")
        if path.is_file() and not weights:
            shutil.copyfile(path, folder / path.name)
    config = json.loads((source / "config.json").read_text("utf-8"))
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
