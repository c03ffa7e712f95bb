"""Text for stages that learn from it instead of answers: its tokens, kept in the run's folder.

Owns `text.npy`, all tokens end to end, and `text.json`, what they were read from. Invariant:
`text.json` is written last, so tokens that it describes are whole.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretoken.errors import ConfigError
from foretoken.text.tokenizer import Tokenizer
from foretoken.training.data.prompts import SKIP, forms, records, token_ids
from foretoken.training.data.shards import write_whole
from foretoken.training.run_folder import make
from foretoken.training.settings import DataSettings

FILE, ABOUT = "text.npy", "text.json"


def keep_text(
    settings: DataSettings,
    tokenizer: Tokenizer | None,
    folder: Path,
    report: Callable[[str], None],
) -> str:
    """Write the tokens of `settings.text`, unless they are there; their digest.

    Raises:
        ConfigError: the file is not there, a line is broken (unless they are skipped), or there
            is no text.
    """
    assert settings.text is not None, "a run with text"
    about = {
        "text": settings.text,
        "most_texts": settings.most_texts,
        "skip_broken": settings.skip_broken,
        "bytes": _size(settings.text),
    }
    known = _read_about(folder)
    if known is not None and {name: known.get(name) for name in about} == about:
        return str(known["digest"])
    tokens, skipped = text_tokens(settings, tokenizer)
    if skipped:
        report(f"left out {skipped} broken lines of {settings.text}")
    digest = hashlib.sha256(tokens.tobytes()).hexdigest()[:16]
    make(folder)
    write_whole(folder / FILE, lambda part: _save(part, tokens))
    record = json.dumps({**about, "digest": digest, "tokens": len(tokens)}, indent=2)
    write_whole(folder / ABOUT, lambda part: part.write_text(record + "\n"))
    report(f"read {len(tokens)} tokens of {settings.text}")
    return digest


def text_tokens(
    settings: DataSettings, tokenizer: Tokenizer | None
) -> tuple[NDArray[np.int32], int]:
    """All tokens end to end, int32, and how many broken lines were left out."""
    assert settings.text is not None, "a run with text"
    found: list[NDArray[np.int32]] = []
    skipped = 0
    for where, record in records(settings.text, "data.text"):
        ids = token_ids(record, tokenizer, whole=True)
        if ids is None and not settings.skip_broken:
            raise ConfigError(f"{settings.text} {where}", record, forms(tokenizer) + SKIP)
        if ids is None:
            skipped += 1
            continue
        found.append(np.asarray(ids, dtype=np.int32))
        if len(found) == settings.most_texts:
            break
    if not found:
        raise ConfigError("data.text", settings.text, "a file or data set with some text")
    return np.concatenate(found), skipped


def read_text(folder: Path) -> NDArray[np.int32]:
    """What `keep_text` wrote, mapped into memory."""
    tokens: NDArray[np.int32] = np.load(folder / FILE, mmap_mode="r")
    return tokens


def _save(part: Path, tokens: NDArray[np.int32]) -> None:
    with part.open("wb") as file:
        np.save(file, tokens)


def _size(source: str) -> int | None:
    """The bytes of a file; None for a data set of the hub."""
    path = Path(source).expanduser()
    return path.stat().st_size if path.is_file() else None


def _read_about(folder: Path) -> dict[str, Any] | None:
    path = folder / ABOUT
    if not path.is_file():
        return None
    try:
        record: dict[str, Any] = json.loads(path.read_text())
    except ValueError:
        return None
    return record
