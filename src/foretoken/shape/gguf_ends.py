"""Which tokens of a GGUF file end a text. Torch-free.

Files name one end, or two. A chat model has others that it gives of its own accord: a Qwen says
`<|im_end|>` after an answer and `<|endoftext|>` after a document. Other readers find those by
their text, so they are found here.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from foretoken.errors import CheckpointError
from foretoken.shape.gguf_file import GgufTable, Strings

Types = npt.NDArray[np.integer[Any]]

TOKENS: Final = "tokenizer.ggml.tokens"
TOKEN_TYPES: Final = "tokenizer.ggml.token_type"
UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6
"""Types of tokens; all others are normal."""
_FIELDS: Final = ("eos", "eot", "eom")
_NAMES: Final = (
    "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>",
    "<end_of_turn>", "<EOT>", "_<EOT>", "[EOT]", "<\uff5cend\u2581of\u2581sentence\uff5c>",
)  # fmt: skip
"""Texts of tokens that llama.cpp takes for ends wherever they are."""
_CONTROL_ONLY: Final = "</s>"
"""Also the end of a struck-out text: Qwen and Gemma have it as a word."""
_CHANNELS: Final = (("<|return|>", "<|call|>"), ("<|flush|>", "<|calls|>"))
"""Where one of these pairs is there, `<|end|>` ends a part of an answer only."""


def ends_of_text(table: GgufTable) -> dict[int, str]:
    """Ids that end a text, ascending, and the token's text (empty if the file has no tokens).

    A token found by its text counts if the file marks it as something else than a normal word.

    Raises:
        CheckpointError: an id is out of range, or a list is of another kind or length.
    """
    tokens = table.get(TOKENS, Strings)
    found = {}
    for field in _FIELDS:
        token = id_of(table, field)
        if token is not None:
            found[token] = "" if tokens is None else tokens.at(token)
    if tokens is not None:
        found |= {token: text for text, token in _named(tokens, types_of(table)).items()}
    return dict(sorted(found.items()))


def id_of(table: GgufTable, field: str, default: int | None = None) -> int | None:
    """The id that the file gives as `field` (`eos`, `bos`, ...); `default` if it gives none. Raises
    CheckpointError: there is no such token."""
    name = f"tokenizer.ggml.{field}_token_id"
    found = table.get(name, int)
    if found is None:
        return default
    tokens = table.get(TOKENS, Strings)
    if found < 0 or (tokens is not None and found >= tokens.size):
        allowed = "0 or more" if tokens is None else f"0 to {tokens.size - 1}"
        raise CheckpointError(name, found, allowed)
    return int(found)


def types_of(table: GgufTable) -> Types | None:
    """The type of each token; None if the file has none, and all are normal. Raises
    CheckpointError: no list of integers, or not as many as tokens."""
    found: Types | None = table.get(TOKEN_TYPES, np.ndarray)
    tokens = table.get(TOKENS, Strings)
    if found is None or tokens is None:
        return None
    if found.dtype.kind not in "iu" or len(found) != tokens.size:
        given = f"a list of {len(found)} of {found.dtype}"
        raise CheckpointError(TOKEN_TYPES, given, f"{tokens.size} integers, one for each token")
    return found


def _named(tokens: Strings, types: Types | None) -> Mapping[str, int]:
    """The ends that are found by their text."""
    if types is None:
        return {}
    others = [text for pair in _CHANNELS for text in pair]
    found = tokens.find([*_NAMES, _CONTROL_ONLY, *others])
    marked = {
        text: token
        for text, token in found.items()
        if types[token] == CONTROL
        or (text != _CONTROL_ONLY and types[token] in (UNKNOWN, USER_DEFINED))
    }
    if any(all(text in marked for text in pair) for pair in _CHANNELS):
        marked.pop("<|end|>", None)
    return {text: token for text, token in marked.items() if text not in others}
