"""Prompts and text from files: text, JSON lines, data sets of the Hugging Face hub.

Knows the forms a line may have, not what it is for. A line that cannot be read is an error with its
number, or, if asked for, left out and counted. Text for stages that learn from it instead of
answers is kept in the run's folder: `text.npy`, all tokens end to end, and `text.json`, what they
were read from. Invariant: `text.json` is written last, so tokens that it describes are whole.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from foretoken.errors import ConfigError
from foretoken.extras import OptionalPackages
from foretoken.text.conversation import conversation_of
from foretoken.text.tokenizer import Tokenizer
from foretoken.training.run_folder import make, write_whole
from foretoken.training.settings import DataSettings

FORMS = (
    '{"prompt": TEXT}, {"text": TEXT}, {"prompt_token_ids": [ID, ...]} or '
    '{"messages": [{"role": ..., "content": ...}, ...]}'
)
HUB = "hf:"
SKIP = "; or leave broken lines out with data.skip_broken = true"
Ids = TypeVar("Ids")


def forms(tokenizer: Tokenizer | None) -> str:
    """What a line may be, for errors."""
    return FORMS if tokenizer is not None else "prompt_token_ids: the model has no tokenizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """Prompts as token ids, and what they were read from."""

    ids: tuple[tuple[int, ...], ...]
    skipped: int
    """Lines that were left out."""
    digest: str
    """SHA-256 of the ids, the first 16 hexadecimal digits."""


def read_prompt_set(settings: DataSettings, tokenizer: Tokenizer | None, limit: int) -> PromptSet:
    """All prompts that `settings` name, each cut to its last `limit` tokens.

    Raises:
        ConfigError: the file is not there, a line is broken (unless they are skipped), nothing is
            left, or a line is text and the target has no tokenizer.
        MissingPackageError: prompts of the hub without the extra `data`.
    """
    most = settings.most_prompts
    found, skipped = _read(settings, "prompts", most, tokenizer, lambda ids: tuple(ids[-limit:]))
    if len(found) <= settings.held_out:
        given = f"{settings.prompts} with {len(found)} prompts"
        allowed = f"more than the {settings.held_out} that are held out (data.held_out)"
        raise ConfigError("data.prompts", given, allowed)
    digest = hashlib.sha256(repr(found).encode()).hexdigest()[:16]
    return PromptSet(ids=tuple(found), skipped=skipped, digest=digest)


def records(source: str, field: str) -> Iterator[tuple[str, Any]]:
    """Where each record stands, and the record; a line that is no JSON comes as it is."""
    if source.startswith(HUB):
        yield from _hub_records(source, field)
        return
    path = Path(source).expanduser()
    if not path.is_file():
        raise ConfigError(field, source, "a file that is there, or hf:NAME:SPLIT")
    with path.open("rb") as file:
        yield from json_lines(file, is_json=path.suffix == ".jsonl")


def json_lines(file: Iterable[bytes], *, is_json: bool = True) -> Iterator[tuple[str, Any]]:
    """Where each line that is not empty stands, and its record; bytes if it is none.

    Args:
        file: the lines.
        is_json: else a line of text is a prompt.
    """
    for number, raw in enumerate(file, start=1):
        if not raw.strip():
            continue
        record: Any
        try:
            line = raw.decode("utf-8").rstrip("\r\n")
            record = json.loads(line) if is_json else {"prompt": line}
        except ValueError:
            record = raw[:120]
        yield f"line {number}", record


def _hub_records(source: str, field: str) -> Iterator[tuple[str, Any]]:
    name, _, split = source.removeprefix(HUB).partition(":")
    with OptionalPackages(f"{field} {source}"):
        from datasets import load_dataset
    try:
        rows = load_dataset(name, split=split or "train", streaming=True)
    except (OSError, ValueError) as error:
        allowed = f"a data set of the hub as hf:NAME or hf:NAME:SPLIT ({error})"
        raise ConfigError(field, source, allowed) from error
    for number, row in enumerate(rows, start=1):
        yield f"row {number}", row


def token_ids(record: Any, tokenizer: Tokenizer | None, *, whole: bool = False) -> list[int] | None:
    """The prompt of a record; None if it has none that can be used.

    Args:
        record: in one of FORMS.
        tokenizer: None: only token ids can be used.
        whole: of a conversation, keep the last answer too.
    """
    if not isinstance(record, Mapping):
        return None
    ids = record.get("prompt_token_ids")
    if ids is not None:
        fine = isinstance(ids, list) and bool(ids) and all(type(i) is int and i >= 0 for i in ids)
        return ids if fine else None
    if tokenizer is None:
        return None
    messages = record.get("messages")
    if messages is not None:
        if not _are_messages(messages):
            return None
        if whole:
            return tokenizer.apply_chat_template(
                conversation_of(messages), add_generation_prompt=False
            )
        asked = messages[:-1] if messages[-1]["role"] == "assistant" else messages
        return tokenizer.apply_chat_template(conversation_of(asked)) if asked else None
    text = record.get("prompt", record.get("text"))
    return tokenizer.encode(text) if isinstance(text, str) and text else None


def _are_messages(given: Any) -> bool:
    return (
        isinstance(given, list)
        and bool(given)
        and all(isinstance(m, Mapping) and {"role", "content"} <= set(m) for m in given)
    )


TEXT_FILE, ABOUT = "text.npy", "text.json"


def keep_text(
    settings: DataSettings, tokenizer: Tokenizer | None, folder: Path, report: Callable[[str], None]
) -> str:
    """Write the tokens of `settings.text`, unless they are there; their digest. Raises ConfigError:
    the file is not there, a line is broken (unless they are skipped), or there is no text."""
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
    write_whole(folder / TEXT_FILE, lambda part: _save(part, tokens))
    record = json.dumps({**about, "digest": digest, "tokens": len(tokens)}, indent=2)
    write_whole(folder / ABOUT, lambda part: part.write_text(record + "\n"))
    report(f"read {len(tokens)} tokens of {settings.text}")
    return digest


def text_tokens(
    settings: DataSettings, tokenizer: Tokenizer | None
) -> tuple[NDArray[np.int32], int]:
    """All tokens end to end, int32, and how many broken lines were left out."""
    assert settings.text is not None, "a run with text"

    def kept(ids: list[int]) -> NDArray[np.int32]:
        return np.asarray(ids, dtype=np.int32)

    found, skipped = _read(settings, "text", settings.most_texts, tokenizer, kept)
    if not found:
        raise ConfigError("data.text", settings.text, "a file or data set with some text")
    return np.concatenate(found), skipped


def _read(
    settings: DataSettings,
    key: Literal["prompts", "text"],
    most: int | None,
    tokenizer: Tokenizer | None,
    kept: Callable[[list[int]], Ids],
) -> tuple[list[Ids], int]:
    """What is `kept` of the first `most` records of `settings.prompts`, or of the whole ones of
    `settings.text`, and how many broken ones were left out."""
    source, found, skipped = getattr(settings, key), list[Ids](), 0
    for where, record in records(source, f"data.{key}"):
        ids = token_ids(record, tokenizer, whole=key == "text")
        if ids is not None:
            found.append(kept(ids))
        elif settings.skip_broken:
            skipped += 1
        else:
            raise ConfigError(f"{source} {where}", record, forms(tokenizer) + SKIP)
        if len(found) == most:
            break
    return found, skipped


def read_text(folder: Path) -> NDArray[np.int32]:
    """What `keep_text` wrote, mapped into memory."""
    tokens: NDArray[np.int32] = np.load(folder / TEXT_FILE, mmap_mode="r")
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
