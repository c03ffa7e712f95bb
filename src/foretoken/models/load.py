"""Loads a checkpoint as a model: by our own layers where its family has a record, else through
transformers."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from foretoken.backend import backend_for
from foretoken.config.quantization import QUANTIZATIONS
from foretoken.errors import ConfigError
from foretoken.hardware import lean_heap
from foretoken.kernels.linear import TYPES
from foretoken.models.base import LoadOptions, Model
from foretoken.models.builder import Builder
from foretoken.models.checkpoint import Checkpoint, weight_files
from foretoken.models.packed_file import PackedFile
from foretoken.models.through_transformers import load_with_transformers
from foretoken.models.weight_cache import (
    VARIABLE,
    CachedWeightSource,
    PackedLayers,
    PackedWriting,
    RecordingWeightSource,
    WeightCache,
    WeightSource,
    packed_folder,
)
from foretoken.ops.linear import RowProbe
from foretoken.quant.formats import format_of
from foretoken.shape import ModelShape
from foretoken.shape.families import find_family
from foretoken.shape.gguf import about_gguf, forget_gguf


@torch.inference_mode()
def load_model(folder: Path, options: LoadOptions) -> Model:
    """Load the checkpoint in `folder`: config.json and weights.

    Raises:
        UnsupportedModelError: the model type or a feature is not run.
        CheckpointError: tensors are missing, unused, misshapen or unreadable.
        ConfigError: options.quantization names another format than the checkpoint's.
    """
    shape = ModelShape.from_config(folder)
    options = replace(options, quantization=_rounding(options.quantization, shape))
    with lean_heap(), about_gguf(folder):
        if not shape.is_own:
            return load_with_transformers(folder, shape, options)
        cache = _weight_cache(folder, shape, options)
        file = None if cache is None else cache.find(stays_mapped=options.maps_experts)
        if file is None and options.maps_experts:
            file = _pack_first(folder, shape, options, cache)
        if file is not None:
            replayed = CachedWeightSource(file)
            return layer_builder(replayed, shape, options, replayed).model()
        return _load(folder, shape, options, None if cache is None else cache.begin())


@torch.inference_mode()
def write_packed(folder: Path, options: LoadOptions) -> Path | None:
    """Leave packed weights beside the checkpoint in `folder`, for loads with these options.

    Returns:
        The file; None: it is not packed here, too small to be worth it, or could not be written.

    Raises:
        ModelError: as for `load_model`.
        OSError: the folder cannot be written, or is full.
    """
    shape = ModelShape.from_config(folder)
    options = replace(options, quantization=_rounding(options.quantization, shape))
    cache = _weight_cache(folder, shape, options) if shape.is_own else None
    writing = None if cache is None else cache.begin_beside()
    if cache is None or writing is None:
        return None
    with lean_heap():
        _load(folder, shape, options, writing)
    writing.wait()
    path = cache.beside / cache.name
    return path if path.is_file() else None


def _pack_first(
    folder: Path, shape: ModelShape, options: LoadOptions, cache: WeightCache | None
) -> PackedFile:
    """The file of packed weights that memory has no room for, written layer by layer and mapped,
    by this process or by another that does it now. Raises ConfigError: it could not be written."""
    why, size = "", 0.0
    if cache is not None:
        size = cache.num_bytes / 2**30
        writing = cache.begin()
        if writing is None and cache.await_other():
            if (file := cache.find(stays_mapped=True)) is not None:
                return file
            writing = cache.begin()
        try:
            if writing is not None:
                _load(folder, shape, options, writing)
                writing.wait()
        except OSError as error:  # of the disk; what is wrong with the checkpoint has its own
            why = f" ({error})"
        if (file := cache.find(stays_mapped=True)) is not None:
            return file
    allowed = f"weights that memory has room for; or {size:.1f} GiB on the disk of "
    allowed += f"{packed_folder()}, and {VARIABLE} as large, for a packed file that is mapped{why}"
    raise ConfigError("model", str(folder), allowed)


def _load(
    folder: Path, shape: ModelShape, options: LoadOptions, writing: PackedWriting | None
) -> Model:
    """Load from the checkpoint, and write what it becomes."""
    with writing or nullcontext():
        stored = None if shape.stored is None else format_of(shape.stored, folder)
        family = find_family(shape.model_type)
        assert family is not None, f"{shape.model_type} has no record"
        count = 0 if shape.experts is None else shape.experts.count
        with Checkpoint(
            folder,
            dtype=options.dtype,
            device=options.device,
            stored=stored,
            around=shape.inside,
            names=replace(family.names, num_experts=count, hidden=shape.hidden_size),
        ) as checkpoint:
            forget_gguf()
            if writing is None:
                return layer_builder(checkpoint, shape, options).model()
            forgets = options.maps_experts
            recorded = RecordingWeightSource(checkpoint, writing.writer, forgets_experts=forgets)
            model = layer_builder(recorded, shape, options, recorded).model()
            if recorded.is_complete:
                writing.keep(recorded.about())
            return model


def _weight_cache(folder: Path, shape: ModelShape, options: LoadOptions) -> WeightCache | None:
    """Where packed weights of this load would be; None: they are not packed, or by others, or are a
    part of the model's."""
    library = backend_for(options.device).library
    if library is None or options.dtype not in TYPES or options.group is not None:
        return None
    return WeightCache.of(weight_files(folder), shape, options, library)


def layer_builder(
    checkpoint: WeightSource,
    shape: ModelShape,
    options: LoadOptions,
    packed: PackedLayers | None = None,
) -> Builder:
    """What `load_model` builds a model with, for whoever takes its layers one by one."""
    family = find_family(shape.model_type)
    assert family is not None, f"{shape.model_type} has no record"
    return Builder(
        shape=shape,
        family=family,
        checkpoint=checkpoint,
        options=options,
        backend=backend_for(options.device),
        probe=RowProbe() if options.batch_invariant else None,
        packed=packed,
    )


def _rounding(quantization: str | None, shape: ModelShape) -> str | None:
    """How to round matrices that are floats; the name of a ready-made format asks for none. Raises
    ConfigError: it names another format than the checkpoint's."""
    if quantization is None or quantization in QUANTIZATIONS:
        return quantization
    own = None if shape.stored is None else shape.stored.method
    if quantization.removesuffix("_marlin") != own:
        what = "the checkpoint is not quantized" if own is None else f"the checkpoint is {own}"
        allowed = f"int8 or int4, which round while loading ({what}; {quantization} is read where "
        allowed += "a checkpoint is stored so, and needs no setting)"
        raise ConfigError("quantization", quantization, allowed)
    return None
