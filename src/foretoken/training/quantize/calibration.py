"""The calibration text, from a file or the packaged models' own, on its way through a model.

A `.jsonl` file holds a document a line, in the forms that prompts have; any other file is one
document. Documents are laid end to end and cut; rows are spread evenly over all of it. Layers are
those that serve, one in memory at a time: after a layer has been quantized, the rows go on from
what the quantized layer gives, so later layers make up for earlier ones.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.kv.store import KVStore
from foretoken.layers.attention import StepState
from foretoken.layers.decoder_layer import Layer, LayerKind
from foretoken.models.base import LoadOptions
from foretoken.models.builder import group_major
from foretoken.models.checkpoint import Checkpoint
from foretoken.models.load import layer_builder
from foretoken.ops.attention.base import SpanWindow
from foretoken.ops.linear import Linear
from foretoken.quant import IntWeights
from foretoken.quant.formats import Format, RawTensors
from foretoken.shape import ModelShape
from foretoken.text.packaged import packaged_texts
from foretoken.text.tokenizer import Tokenizer
from foretoken.training.data.prompts import forms, json_lines, token_ids
from foretoken.training.quantize.gptq import Moments
from foretoken.training.quantize.settings import PYTHON_TEXT, CalibrationSettings

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
        """The integers of `module`, where this run has made them."""
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
        attention = replace(
            layer.attention,
            qkv=_Watched(layer.attention.qkv, seen["qkv"]),
            out=_Watched(layer.attention.out, seen["out"]),
        )
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
