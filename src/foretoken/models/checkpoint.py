"""Reads a checkpoint strictly: every tensor wanted is there, every one there is used.

Files are safetensors, GGUF, or PyTorch's pickled ones, which are read without running code. Knows
names, shapes and files. What the tensors mean is the builder's affair, and how quantized matrices
are stored that of `quant.formats`.
"""

import json
import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foretoken.backend import backend_for
from foretoken.errors import CheckpointError
from foretoken.hardware import map_file
from foretoken.quant import Weights
from foretoken.quant.arrange import change_rows, for_kernels
from foretoken.quant.finite import check_finite
from foretoken.quant.formats import Format, GgufFile
from foretoken.shape.families import PLAIN_NAMES, StoredNames, StoredView
from foretoken.shape.fields import read_json
from foretoken.shape.gguf import gguf_parts
from foretoken.shape.multimodal import DRAFT_HEADS, find_multimodal

_SAFETENSORS, _PICKLED = "model.safetensors", "pytorch_model.bin"
_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
}
_DERIVED = (".rotary_emb.inv_freq",)
"""Buffers that old checkpoints carry and that follow from the config."""


class WeightFile(Protocol):
    """Tensors by name."""

    def keys(self) -> Iterable[str]:
        """Names."""

    def get_tensor(self, name: str) -> Tensor:
        """One of them."""

    def get_slice(self, name: str) -> Any:
        """One of them, of which indexing reads a part."""


class _Pickled:
    """A .bin file: loaded with PyTorch's restricted unpickler, mapped where the format allows."""

    def __init__(self, path: Path) -> None:
        try:
            content = _unpickle(path)
        except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
            reason = str(error).partition("\n")[0]
            allowed = f"tensors only, in a complete file ({reason or type(error).__name__})"
            raise CheckpointError(path.name, str(path), allowed) from error
        others = [n for n, value in content.items() if not isinstance(value, Tensor)]
        if others:
            raise CheckpointError(path.name, others[0], "tensors only")
        self._tensors: dict[str, Tensor] = content

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def get_slice(self, name: str) -> Tensor:
        return self._tensors[name]


class _Mapped:
    """A safetensors file that PyTorch does not map, since it is larger than the memory."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            self._entries: dict[str, Any] = json.loads(file.read(length))
            self._bytes = torch.frombuffer(map_file(file.fileno()), dtype=torch.uint8)[8 + length :]
        self._entries.pop("__metadata__", None)

    def keys(self) -> Iterable[str]:
        return self._entries.keys()

    def get_tensor(self, name: str) -> Tensor:
        entry = self._entries[name]
        start, stop = entry["data_offsets"]
        part = self._bytes[start:stop]
        part = part.clone() if part.storage_offset() % 8 else part
        return part.view(_TYPES[entry["dtype"]]).view(entry["shape"])

    def get_slice(self, name: str) -> Tensor:
        return self.get_tensor(name)


def _unpickle(path: Path) -> dict[str, Tensor]:
    with path.open("rb") as file:
        zipped = file.read(2) == b"PK"
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    if not isinstance(content, dict):
        raise CheckpointError(path.name, type(content).__name__, "a dict of tensors")
    return content


def open_files(folder: Path, dtype: torch.dtype = torch.float32) -> dict[Path, WeightFile]:
    """The files that hold the folder's weights; safetensors where there are both kinds.

    Args:
        folder: of the files, or a GGUF file.
        dtype: of matrices that are multiplied out of a GGUF file; others stay as they are stored.

    Raises:
        CheckpointError: no weights, a missing shard, a truncated or corrupt file, or a pickle
            that holds more than tensors.
    """
    if folder.suffix == ".gguf":
        return {folder: GgufFile(folder, dtype)}
    return {path: _open(path) for path in weight_files(folder)}


def weight_files(folder: Path) -> list[Path]:
    """The paths of those files. Raises CheckpointError: there are none, or a shard is missing."""
    if folder.suffix == ".gguf":
        return list(gguf_parts(folder))
    for name in (_SAFETENSORS, _PICKLED):
        paths = _shards(folder, name)
        if paths:
            return paths
    allowed = f"{_SAFETENSORS} or {_PICKLED}, whole or with an index of shards; or a GGUF file"
    raise CheckpointError("weights", str(folder), allowed)


def _index(folder: Path, name: str) -> dict[str, str] | None:
    """The shard of each tensor, by the index beside them; None: there is no index."""
    index = folder / f"{name}.index.json"
    if not index.is_file():
        return None
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(shard, str) for shard in files.values()):
        raise CheckpointError(index.name, files, "a weight_map from tensors to files")
    return files


def _shards(folder: Path, name: str) -> list[Path]:
    files = _index(folder, name)
    if files is None:
        return [folder / name] if (folder / name).is_file() else []
    paths = [folder / shard for shard in sorted(set(files.values()))]
    for path in paths:
        if not path.is_file():
            allowed = f"the files that {name}.index.json names"
            raise CheckpointError("missing shard", path.name, allowed)
    return paths


def _open(path: Path) -> WeightFile:
    if path.suffix == ".bin":
        return _Pickled(path)
    try:
        try:
            opened: WeightFile = safe_open(str(path), framework="pt")
        except RuntimeError:  # It was read as far as its header, and not mapped.
            opened = _Mapped(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(path.name, str(path), f"a complete safetensors ({error})") from error
    return opened


def _add(files: dict[str, Path], name: str, path: Path, indexed: str | None = None) -> None:
    """Note where a tensor lies; of two places that which the index names. Raises CheckpointError:
    it names neither."""
    other = files.get(name)
    if other is not None and indexed not in (other.name, path.name):
        given = f"{name} in {other.name} and in {path.name}"
        raise CheckpointError("tensor stored twice", given, "one tensor of each name")
    if other is None or indexed == path.name:
        files[name] = path


class Checkpoint:
    """The tensors of one folder. Use it in a `with` block and call `finish` at the end."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        stored: Format | None = None,
        around: str | None = None,
        names: StoredNames = PLAIN_NAMES,
    ) -> None:
        """Open the files; tensors are converted to `dtype` on `device` as they are taken.

        Args:
            folder: of the files.
            dtype: of floating tensors.
            device: of all.
            stored: how matrices are quantized; None: they are floats.
            around: model type of a checkpoint that holds more than the model; None: it is alone.
            names: how tensors are called that the model knows by other names.

        Raises:
            CheckpointError: no weights, a missing shard, a truncated or corrupt file, or a tensor
                that is stored twice.
        """
        self._dtype, self.device, self._stored = dtype, device, stored
        self._library = backend_for(device).library
        self._files: dict[str, Path] = {}
        self._open = open_files(folder, dtype)
        index = _index(folder, _SAFETENSORS) or {}
        for path, handle in self._open.items():
            for name in handle.keys():
                if not name.endswith(_DERIVED):
                    _add(self._files, name, path, index.get(name))
        outer = find_multimodal(around)
        self._stored_as = {} if outer is None else outer.names(self._files)
        if outer is not None:
            self._files = {name: self._files[old] for name, old in self._stored_as.items()}
        self._views: dict[str, StoredView] = {}
        self._names = names
        self._piece: tuple[str, int | None] | None = None
        self._parts: dict[int, Tensor] = {}
        """Of the fused piece that was read last, those that were not asked for yet."""
        if folder.suffix != ".gguf":
            self._take_apart()
        self._unused = {name for name in self._files if not name.startswith(DRAFT_HEADS)}
        self._folder = folder

    def _take_apart(self) -> None:
        """Know tensors by our names, those of each expert alone, however they are stored."""
        files: dict[str, Path] = {}
        stored_as: dict[str, str] = {}
        for name, path in self._files.items():
            views = self._names.views(name)
            self._views |= views
            for part in views or (self._names.plain(name),):
                _add(files, part, path)
                stored_as[part] = self._stored_as.get(name, name)
        self._files, self._stored_as = files, stored_as

    def __enter__(self) -> Self:
        """The checkpoint itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the files."""
        self._open.clear()
        self._parts.clear()

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        """The tensor `name`, which must have this shape.

        Raises:
            CheckpointError: it is missing, misshapen, not of a floating type, unreadable, or not
                finite in the type that it is converted to.
        """
        return self._checked(name, self.raw(name), shape)

    def matrix(self, module: str, shape: tuple[int, int]) -> Weights:
        """The weights of the linear layer `module`, quantized as they are stored. Raises
        CheckpointError: as for `take`, or its tensors do not fit each other."""
        found = self._as_stored(module, shape)
        return self.take(f"{module}.weight", shape) if found is None else found

    def table(self, module: str, shape: tuple[int, int]) -> Weights:
        """The embedding table of `module`, in fewer bits where it is stored so and kernels hold
        them; else as `keep` gives it. Raises CheckpointError: as for `matrix`."""
        found = self._as_stored(module, shape)
        if found is None:
            return self.keep(f"{module}.weight", shape)
        if isinstance(found, Tensor) or for_kernels(found) is not None:
            return found
        return found.dequantized(self._dtype)

    def _as_stored(self, module: str, shape: tuple[int, int]) -> Weights | None:
        """A matrix that a format stores, checked; None: it is stored as plain floats."""
        found = None
        if self._stored is not None:
            found = self._stored.matrix(self, module, shape[1])
        if found is None:
            return None
        if isinstance(found, Tensor):
            return self._checked(module, found, shape)
        if tuple(found.shape) != shape:
            given = f"{module} {list(found.shape)}"
            raise CheckpointError("tensor shape", given, f"{list(shape)} from config.json")
        check_finite(module, found, self._library)
        return change_rows(found, lambda rows: rows.to(self.device))

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self._files

    def raw(self, name: str) -> Tensor:
        """The tensor as it is stored, on the device; it counts as used. Raises CheckpointError: it
        is missing or unreadable."""
        tensor = self.peek(name)
        self._unused.discard(name)
        return tensor

    def peek(self, name: str) -> Tensor:
        """The tensor as it is stored, on the device, without counting it as used."""
        return self._read(name).to(self.device)

    def _read(self, name: str) -> Tensor:
        """The tensor as it lies in its file, on the CPU."""
        path = self._files.get(name)
        if path is None:
            allowed = f"a checkpoint with this tensor; {self._folder} has {len(self._files)}"
            raise CheckpointError("missing tensor", name, allowed)
        stored, view = self._stored_as.get(name, name), self._views.get(name)
        try:
            if view is not None:
                return self._part(self._open[path], stored, view)
            return self._open[path].get_tensor(stored)
        except SafetensorError as error:
            raise CheckpointError(path.name, name, f"a readable tensor ({error})") from error

    def _part(self, file: WeightFile, stored: str, view: StoredView) -> Tensor:
        """What a fused tensor holds there, as if it were stored alone. Parts that lie together are
        asked for one after the other, and are read together."""
        piece = stored, view.expert
        if piece != self._piece or view.part not in self._parts:
            self._parts = dict(enumerate(self._take_piece(file, stored, view).unbind()))
            self._piece = piece
        return self._parts.pop(view.part)

    def _take_piece(self, file: WeightFile, stored: str, view: StoredView) -> Tensor:
        """All parts of a fused tensor, of one expert if it has several, [parts, ...]."""
        if view.expert is None:
            whole = file.get_tensor(stored)
        else:
            fused = file.get_slice(stored)
            sizes = list(fused.shape if isinstance(fused, Tensor) else fused.get_shape())
            if len(sizes) < 2 or sizes[0] != self._names.num_experts:
                allowed = f"[{self._names.num_experts}, ...], one for each expert of config.json"
                raise CheckpointError("tensor shape", f"{stored} {sizes}", allowed)
            whole = fused[view.expert]
        parts, turned = len(view.fused.parts), view.fused.inputs_first
        if turned is None and whole.ndim == 2:
            # The model's width is that of the outputs of down, and of the inputs of gate and up.
            turned = whole.shape[0 if parts == 1 else 1] != self._names.hidden
        if turned and whole.ndim > 1:
            whole = whole.transpose(0, 1)
        if whole.ndim == 0 or whole.shape[0] % parts:
            allowed = f"a multiple of {parts} outputs"
            raise CheckpointError("tensor shape", f"{stored} {list(whole.shape)}", allowed)
        whole = whole.flatten() if view.fused.flat else whole
        each, alternating = whole.shape[0] // parts, view.fused.alternating
        found: Tensor = whole.unflatten(0, (each, parts) if alternating else (parts, each))
        return (found.transpose(0, 1) if alternating else found).contiguous()

    def _checked(
        self, name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None
    ) -> Tensor:
        if tuple(tensor.shape) != tuple(shape):
            given = f"{name} {list(tensor.shape)}"
            raise CheckpointError("tensor shape", given, f"{list(shape)} from config.json")
        if not tensor.is_floating_point():
            given = f"{name} {tensor.dtype}"
            allowed = "a floating type, or a quantization_config that says what it is"
            raise CheckpointError("tensor type", given, allowed)
        converted = tensor.to(dtype or self._dtype)
        check_finite(name, converted)
        return converted

    def keep(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """The tensor `name` in memory of its own, for those that stay as they are, in `dtype` if it
        is given.

        What `take` gives may lie in the mapped file, all of which would stay mapped with it.
        """
        stored = self._read(name)
        self._unused.discard(name)
        tensor = self._checked(name, stored.to(self.device), shape, dtype)
        return tensor.clone() if tensor.data_ptr() == stored.data_ptr() else tensor

    def names(self) -> list[str]:
        """Every tensor that is there."""
        return list(self._files)

    def ignore(self, name: str) -> None:
        """Allow a tensor that is there and not used (a tied head), or all tensors of a module."""
        module = f"{name}."
        self._unused = {n for n in self._unused if n != name and not n.startswith(module)}

    def finish(self) -> None:
        """All wanted tensors have been taken. Raises CheckpointError: some are left over."""
        if self._unused:
            names = sorted(self._unused)
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
            raise CheckpointError("unused tensors", shown, "only tensors that the model uses")
