"""Which method a published drafter is of, and which drafters ship for which target.

Asks the table of methods how published heads name themselves. Reads no weights, only their names
where a config.json says nothing, and downloads nothing: for a hub id the method is the user's to
say.
"""

import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from foretoken.checkpoint import PACKAGED, local_gguf, packaged_model
from foretoken.config.method_registry import DraftingMethod, known_methods
from foretoken.errors import ModelError
from foretoken.shape.fields import read_json
from foretoken.shape.gguf import gguf_head_marks

_MOST_HEADER = 100_000_000
"""As safetensors itself allows."""


def method_of_config(config: Mapping[str, Any]) -> DraftingMethod | None:
    """The method that a config.json is made for; None where it does not say (EAGLE, models)."""
    return next((method for method in known_methods() if method.marks.are_in(config)), None)


def method_of_tensors(has: Callable[[str], bool]) -> DraftingMethod | None:
    """The method whose drafters have these tensors; None where they are a model's.

    Args:
        has: whether a tensor of exactly this name is there.
    """
    fitting = [
        (len(names), method)
        for method in known_methods()
        for names in method.marks.tensors
        if all(map(has, names))
    ]
    return max(fitting, key=lambda found: found[0])[1] if fitting else None


def head_method(model: str) -> str | None:
    """The method of a packaged or local head; None for everything else."""
    try:
        folder = packaged_model(model) if model in PACKAGED else Path(model).expanduser()
        file = local_gguf(folder)
        if file is not None:
            marked = method_of_config(gguf_head_marks(file))
            return None if marked is None else marked.name
        found = method_of_config(read_json(folder / "config.json"))
        files = (folder / name for name in ("model.safetensors", "pytorch_model.bin"))
        weights = next(filter(Path.is_file, files), None)
        if found is None and weights is not None:  # as heads of the EAGLE repository
            found = method_of_tensors(partial(_has, _stored_names(weights)))
    except ModelError:
        return None
    return None if found is None else found.name


def _stored_names(file: Path) -> bytes:
    """Where the names of a file's tensors stand: safetensors' header, or the pickle of a `.bin`,
    which is searched and not run; empty if it is of another kind."""
    try:
        if file.suffix == ".safetensors":
            with file.open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                return opened.read(min(size, _MOST_HEADER))
        with zipfile.ZipFile(file) as archive:
            listed = [name for name in archive.namelist() if name.endswith("data.pkl")]
            return archive.read(listed[0]) if listed else b""
    except (OSError, zipfile.BadZipFile):
        return b""


def _has(names: bytes, name: str) -> bool:
    """Whether a tensor of exactly this name is listed: quoted in JSON, after its length in a
    pickle."""
    pickled = len(name).to_bytes(4, "little") + name.encode()
    return f'"{name}"'.encode() in names or pickled in names


def packaged_drafter(
    method: DraftingMethod, target: str | None, *, in_parallel: bool
) -> str | None:
    """The drafter of this method that ships for `target`, if there is one.

    A packaged drafter that guesses all tokens in one pass is of one method, PARD (`parallel`) or
    P-EAGLE (`eagle3` with `parallel_drafting`), and never found under the other.
    """
    for drafter in method.packaged:
        if drafter.target == target and drafter.in_parallel in (None, in_parallel):
            return drafter.model if head_method(drafter.model) in (method.name, None) else None
    return None
