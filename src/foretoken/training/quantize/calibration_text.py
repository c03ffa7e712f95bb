"""The calibration text: from a file, or the packaged models' own, to rows of token ids.

A `.jsonl` file holds a document a line, in the forms that prompts have; any other file is one
document. Documents are laid end to end and cut; rows are spread evenly over all of it.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.text.packaged import packaged_texts
from foretoken.text.tokenizer import Tokenizer
from foretoken.training.data.prompts import forms, json_lines, token_ids
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
