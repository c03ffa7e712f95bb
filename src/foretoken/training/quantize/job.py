"""One quantization, from a checkpoint's folder to a new one, layer by layer.

Owns the order, and the folder that is written: weights in shards, a config that says how, all else
copied. In memory at a time: one layer, the tensors of a file not yet written, and, if calibrated,
the hidden states of the calibration text. Invariant: the folder appears under its name only when it
is complete.
"""

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

import torch
from safetensors.torch import save_file
from torch import Tensor

from foretoken.checkpoint import find_model
from foretoken.errors import ConfigError
from foretoken.models.checkpoint import Checkpoint
from foretoken.quant import IntWeights, round_weights
from foretoken.quant.formats.packing import packed_config, packed_tensors
from foretoken.shape import ModelShape
from foretoken.text.tokenizer import Tokenizer
from foretoken.training.quantize.calibration import Calibration, CalibrationText, read_text_rows
from foretoken.training.quantize.gptq import SeenInputs, gptq, output_error
from foretoken.training.quantize.settings import QuantizeSettings, check_fits
from foretoken.training.run_folder import versions

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot")
_INDEX = "model.safetensors.index.json"
SHARD_BYTES = 2 << 30
PROVENANCE = "quantization.json"
_MATRIX = re.compile(r"(model\.layers\.(\d+)\..*_proj)\.weight")
Report = Callable[[int, int], None]
"""Called with the layers done and all layers."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleError:
    """What rounding changes of a matrix's outputs on the calibration text.

    Root mean square of the change over that of the outputs.
    """

    calibrated: float
    nearest: float
    """Had it been rounded to nearest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """What has been written."""

    folder: Path
    weight_bytes: int
    weight_bytes_before: int
    errors: dict[str, ModuleError]
    """What rounding changed, by the matrix's name; empty unless calibrated."""
    text: CalibrationText | None


def quantize_model(
    model: str, out: Path, settings: QuantizeSettings, report: Report = lambda done, total: None
) -> Quantized:
    """Write `model` to the folder `out`, its matrices quantized as `settings` say.

    Raises:
        ConfigError: `out` is taken, groups do not fit, or as `read_text_rows`.
        UnsupportedModelError: quantized already, or not of a family of our own.
        ModelError: the model is missing or broken.
    """
    source = find_model(model)
    shape = ModelShape.from_config(source)
    check_fits(shape, settings.as_scheme)
    wanted, text = settings.calibration, None
    if wanted is not None:
        text = read_text_rows(
            wanted,
            Tokenizer.of_folder(source),
            vocab_size=shape.vocab_size,
            longest=shape.max_position_embeddings,
        )
    with new_folder(out) as folder, Checkpoint(source, dtype=torch.float32, device=_CPU) as stored:
        job = _Job(stored, settings, Shards(folder))
        calibration = None if text is None else Calibration(source, shape, text.rows_ST)
        job.run(shape.num_hidden_layers, calibration, report)
        # Where it is the embedding too: others have a linear layer there, and look for integers.
        copy_beside(source, folder, packed_config(settings.as_scheme, ["lm_head"]))
        done = Quantized(
            folder=out,
            weight_bytes=job.shards.total,
            weight_bytes_before=job.bytes_before,
            errors=job.errors,
            text=text,
        )
        record = _provenance(model, settings, done)
        (folder / PROVENANCE).write_text(json.dumps(record, indent=2) + "\n")
    return done


_CPU = torch.device("cpu")


class _Job:
    """The state of a run: what is read, what is written, what was measured."""

    def __init__(self, stored: Checkpoint, settings: QuantizeSettings, shards: Shards) -> None:
        self._stored, self._settings, self.shards = stored, settings, shards
        self.errors: dict[str, ModuleError] = {}
        self.bytes_before = 0

    def run(self, layers: int, calibration: Calibration | None, report: Report) -> None:
        modules: list[list[str]] = [[] for _ in range(layers)]
        for name in self._stored.names():
            found = _MATRIX.fullmatch(name)
            if found is None:
                self.shards.add({name: self._take(name).clone()})
            elif int(found[2]) < layers:
                modules[int(found[2])].append(found[1])
        for index, names in enumerate(modules):
            seen = None if calibration is None else self._seen(calibration.moments(index))
            made = {}
            for name in sorted(names):
                weight_NK = self._take(f"{name}.weight")
                read = None if seen is None else seen[name.rpartition(".")[2]]
                made[name] = self._rounded(name, weight_NK, read)
                self.shards.add(packed_tensors(name, made[name]))
            if calibration is not None:
                calibration.advance(index, made)
            report(index + 1, layers)
        self.shards.finish()

    def _take(self, name: str) -> Tensor:
        tensor = self._stored.raw(name)
        self.bytes_before += tensor.nbytes
        return tensor

    def _seen(self, moments: dict[str, Tensor]) -> dict[str, SeenInputs]:
        """What each matrix reads, by the last part of its name; a shared tensor is one object."""
        wanted = self._settings.calibration
        assert wanted is not None, "moments are taken for a calibration"
        made = {
            id(shared_KK): SeenInputs(
                shared_KK, damping=wanted.damping, activation_order=wanted.activation_order
            )
            for shared_KK in {id(one_KK): one_KK for one_KK in moments.values()}.values()
        }
        return {module: made[id(moments_KK)] for module, moments_KK in moments.items()}

    def _rounded(self, name: str, weight_NK: Tensor, seen: SeenInputs | None) -> IntWeights:
        """`weight_NK` in integers, fitted to its inputs if they were seen."""
        scheme = self._settings.as_scheme
        nearest = round_weights(weight_NK, scheme)
        if seen is None:
            return nearest
        calibrated = gptq(weight_NK, seen, scheme)
        self.errors[name] = ModuleError(
            calibrated=output_error(calibrated, weight_NK, seen.moments_KK),
            nearest=output_error(nearest, weight_NK, seen.moments_KK),
        )
        return calibrated


def _provenance(model: str, settings: QuantizeSettings, done: Quantized) -> dict[str, Any]:
    text = done.text
    return {
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "versions": versions(),
        "model": model,
        "settings": asdict(settings),
        "calibration": None
        if text is None
        else {
            "text_tokens": text.tokens,
            "rows": list(text.rows_ST.shape),
            "rows_digest": text.digest,
        },
        "output_errors": {name: asdict(error) for name, error in done.errors.items()},
    }
