"""One quantization, from a checkpoint's folder to a new one, layer by layer.

Owns the order, the folder that is written (weights in shards, a config that says how, all else
copied), and the calibration text on its way through the model. A `.jsonl` file holds a document a
line, in the forms that prompts have; any other file is one document. Documents are laid end to end
and cut; rows are spread evenly over all of it. Layers are those that serve: after a layer has been
quantized, the rows go on from what the quantized layer gives, so later layers make up for earlier
ones. In memory at a time: one layer, the tensors of a file not yet written, and, if calibrated, the
hidden states of the text. Invariant: the folder appears under its name only when it is complete.
"""

import hashlib
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from foretoken.checkpoint import find_model
from foretoken.errors import ConfigError
from foretoken.kv.store import KVStore
from foretoken.layers.attention import StepState
from foretoken.layers.decoder_layer import Layer, LayerKind
from foretoken.layers.mlp import GatedMLP
from foretoken.models.base import LoadOptions
from foretoken.models.builder import group_major
from foretoken.models.checkpoint import Checkpoint
from foretoken.models.load import layer_builder
from foretoken.ops.attention.base import SpanWindow
from foretoken.ops.linear import Linear
from foretoken.quant import IntWeights, round_weights
from foretoken.quant.formats import Format, RawTensors
from foretoken.quant.formats.packing import packed_config, packed_tensors
from foretoken.shape import ModelShape
from foretoken.text.packaged import packaged_texts
from foretoken.text.tokenizer import Tokenizer
from foretoken.training.data.prompts import forms, json_lines, token_ids
from foretoken.training.quantize.gptq import Moments, SeenInputs, gptq, output_error
from foretoken.training.quantize.settings import (
    PYTHON_TEXT,
    CalibrationSettings,
    QuantizeSettings,
    check_fits,
)
from foretoken.training.run_folder import versions

_OPTION = "--calibrate"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationText:
    """What is read, and what it was cut from."""

    rows_ST: Tensor
    """int64."""
    tokens: int
    """How many the whole text has."""
    digest: str
    """SHA-256 of the rows, the first 16 hexadecimal digits."""


def read_text_rows(
    settings: CalibrationSettings, tokenizer: Tokenizer | None, *, vocab_size: int, longest: int
) -> CalibrationText:
    """Cut the text into rows of `settings.length` tokens, or of `longest` if that is less.

    Raises:
        ConfigError: no such file, a broken line, nothing in it, ids that the model does not have,
            or text for a model without a tokenizer.
    """
    ids = torch.tensor(_all_ids(settings.source, tokenizer), dtype=torch.int64)
    if ids.numel() < 2:
        raise ConfigError(_OPTION, settings.source, "a file with text in it")
    if int(ids.max()) >= vocab_size:
        allowed = f"token ids below {vocab_size}"
        raise ConfigError(_OPTION, f"{settings.source}: token id {int(ids.max())}", allowed)
    length = min(settings.length, longest, ids.numel())
    whole = ids.numel() // length
    count = min(settings.sequences, whole)
    picked = (torch.arange(count) * whole) // count
    rows_ST = ids[: whole * length].view(whole, length)[picked]
    digest = hashlib.sha256(repr(rows_ST.tolist()).encode()).hexdigest()[:16]
    return CalibrationText(rows_ST=rows_ST, tokens=ids.numel(), digest=digest)


def _all_ids(source: str, tokenizer: Tokenizer | None) -> list[int]:
    path = Path(source).expanduser()
    if path.suffix == ".jsonl" and path.is_file():
        return _json_ids(path, tokenizer)
    if tokenizer is None:
        allowed = "JSON lines with prompt_token_ids: the model has no tokenizer"
        raise ConfigError(_OPTION, source, allowed)
    if path.is_file():
        try:
            return tokenizer.encode(path.read_text("utf-8"))
        except UnicodeDecodeError as error:
            raise ConfigError(_OPTION, source, f"a file in UTF-8 ({error})") from error
    if source != PYTHON_TEXT:
        allowed = f"a file that is there, or {PYTHON_TEXT}: some that the packaged models know"
        raise ConfigError(_OPTION, source, allowed)
    return [token for one in packaged_texts("text") for token in tokenizer.encode(one.text)]


def _json_ids(path: Path, tokenizer: Tokenizer | None) -> list[int]:
    found: list[int] = []
    with path.open("rb") as file:
        for where, record in json_lines(file):
            ids = token_ids(record, tokenizer, whole=True)
            if ids is None:
                raise ConfigError(f"{_OPTION} {path} {where}", record, forms(tokenizer))
            found += ids
    return found


_PAGE = 16
_READS = {
    "qkv": ("q_proj", "k_proj", "v_proj", "qkv_proj"),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj", "gate_up_proj"),
    "down": ("down_proj",),
}
"""Which stored matrices read the same inputs."""


@final
class _Known(Format):
    """Matrices that have been quantized in this run; the others are floats."""

    def __init__(self) -> None:
        self.matrices: Mapping[str, IntWeights] = {}

    def matrix(self, tensors: RawTensors, module: str, inputs: int) -> IntWeights | None:
        return self.matrices.get(module)


@final
class _Watched(Linear):
    """Notes what it is given."""

    def __init__(self, inner: Linear, moments: Moments) -> None:
        self._inner, self._moments = inner, moments

    def __call__(self, x_TK: Tensor, residual_TN: Tensor | None = None) -> Tensor:
        self._moments.add(x_TK)
        return self._inner(x_TK, residual_TN)


@final
class Calibration:
    """All rows, as they stand before the next layer."""

    def __init__(self, folder: Path, shape: ModelShape, rows_ST: Tensor) -> None:
        """Look up the embeddings of the rows.

        Args:
            folder: of the floating checkpoint.
            shape: its shape, of a family of our own.
            rows_ST: int64 token ids, S rows of T tokens.

        Raises:
            CheckpointError: tensors are missing or misshapen.
        """
        dtype = torch.bfloat16 if shape.dtype == "bfloat16" else torch.float32
        cpu, length = torch.device("cpu"), rows_ST.shape[1]
        options = LoadOptions(
            dtype=dtype, device=cpu, batch_invariant=False, page_size=_PAGE, max_model_len=length
        )
        self._known, self._shape = _Known(), shape
        checkpoint = Checkpoint(folder, dtype=dtype, device=cpu, stored=self._known)
        self._builder = layer_builder(checkpoint, shape, options)
        table = (shape.vocab_size, shape.hidden_size)
        embedding_VD = checkpoint.take("model.embed_tokens.weight", table)
        self._x_STD = F.embedding(rows_ST, embedding_VD)
        if shape.embedding_scale != 1.0:
            self._x_STD *= embedding_VD.new_tensor(shape.embedding_scale)
        views = [shape.view(layer) for layer in range(shape.num_hidden_layers)]
        different = list(dict.fromkeys(views))
        self._kind_of = [different.index(view) for view in views]
        kinds = [self._builder.kind(view, embedding_VD) for view in different]
        self._steps = [_step(kind, length) for kind in kinds]
        [self._layer_SKh] = KVStore(
            replace(shape, num_hidden_layers=1),
            num_pages=-(-length // _PAGE),
            page_size=_PAGE,
            dtype=dtype,
            device=cpu,
        ).layers

    @torch.inference_mode()
    def moments(self, index: int) -> dict[str, Tensor]:
        """Mean x x^T of the inputs of each matrix of a layer, by the last part of its name.

        Matrices that read the same inputs share a tensor; inputs are in the order of the file.

        Raises:
            CheckpointError: hidden states are not finite.
        """
        layer, shape = self._layer(index), self._shape
        hidden, inner = shape.hidden_size, shape.intermediate_size
        widths = {"qkv": hidden, "out": shape.query_size, "gate_up": hidden, "down": inner}
        seen = {name: Moments(width) for name, width in widths.items()}
        assert layer.attention.keeps, "layers that share keys are refused"
        attention = replace(
            layer.attention,
            qkv=_Watched(layer.attention.qkv, seen["qkv"]),
            out=_Watched(layer.attention.out, seen["out"]),
        )
        assert isinstance(layer.mlp, GatedMLP), "experts are refused"
        mlp = replace(
            layer.mlp,
            gate_up=_Watched(layer.mlp.gate_up, seen["gate_up"]),
            down=_Watched(layer.mlp.down, seen["down"]),
        )
        watched = replace(layer, attention=attention, mlp=mlp)
        for x_TD in self._x_STD:
            watched(x_TD, self._layer_SKh, self._steps[layer.kind])
        means = {name: moments.mean(f"layer {index}, {name}") for name, moments in seen.items()}
        means["out"] = self._in_file_order(means["out"])
        return {module: means[name] for name, modules in _READS.items() for module in modules}

    @torch.inference_mode()
    def advance(self, index: int, quantized: Mapping[str, IntWeights]) -> None:
        """Run all rows through a layer with these matrices, by their full names."""
        self._known.matrices = quantized
        layer = self._layer(index)
        self._known.matrices = {}
        for x_TD in self._x_STD:
            x_TD.copy_(layer(x_TD, self._layer_SKh, self._steps[layer.kind]))

    def _layer(self, index: int) -> Layer:
        return self._builder.layer(index, self._kind_of[index])

    def _in_file_order(self, moments_KK: Tensor) -> Tensor:
        """Attention has its heads in another order than the file."""
        key_heads = self._shape.num_key_value_heads
        queries = self._shape.num_attention_heads // key_heads
        file_K = group_major(torch.arange(self._shape.query_size), key_heads, queries)
        place_K = torch.argsort(file_K)
        return moments_KK[place_K][:, place_K]


def _step(kind: LayerKind, length: int) -> StepState:
    """One row from its first token on, in the store's first pages."""
    pages = list(range(-(-length // _PAGE)))
    return StepState(
        rotation=kind.rotary.at(torch.arange(length)),
        slots_T=slice(0, length),
        attend=kind.attention.plan([SpanWindow(0, length, pages)]),
    )


_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot")
_INDEX = "model.safetensors.index.json"
SHARD_BYTES = 2 << 30
PROVENANCE = "quantization.json"
_MATRIX = re.compile(r"(model\.layers\.(\d+)\..*_proj)\.weight")
Report = Callable[[int, int], None]
"""Called with the layers done and all layers."""


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `out` if all goes well and disappears if not. Raises
    ConfigError: there is something at `out` already, or it cannot be made."""
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
        made = {
            id(shared_KK): SeenInputs(shared_KK)
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
