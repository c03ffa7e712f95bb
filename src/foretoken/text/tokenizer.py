"""Text to token ids and back: encoding and chat templates.

Knows nothing about models or sampling. The fast path reads tokenizer.json with `tokenizers`, and
builds a GGUF file's from its metadata; a tokenizer without either goes through `transformers`,
imported only then. All files are read when a tokenizer is made.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import models

from foretoken.errors import PromptError, TokenizerError
from foretoken.text.chat_template import ChatTemplate
from foretoken.text.detokenizer import Detokenizer, StopMatch, TextOptions
from foretoken.text.gguf_tokenizer import TokenizerParts, read_gguf_tokenizer
from foretoken.text.max_token_length import max_token_length, parts_of
from foretoken.text.renderers import always

__all__ = ["AddedToken", "Detokenizer", "StopMatch", "TextOptions", "Tokenizer"]

_PARTS = ("normalizer", "pre_tokenizer", "decoder")
_OF_BPE = ("byte_fallback", "unk_token", "fuse_unk")
_OF_ADDED = ("content", "special", "lstrip", "rstrip")
_LONG = 2000
"""Characters of a text, or tokens, beyond which others may run while they are translated."""
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def bytes_of_tokens(description: Mapping[str, Any]) -> Callable[[str], bytes] | None:
    """What makes bytes of a token as the vocabulary has it; None for decoders of other kinds.

    A character may be spread over several tokens, and the text of such a token alone is U+FFFD.

    Args:
        description: the content of tokenizer.json.
    """
    parts = list(parts_of(description.get("decoder"), "decoders"))
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        return _by_letters
    if not kinds or kinds - {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return None
    spaces = [part.get("replacement", "\u2581") for part in parts if part["type"] == "Metaspace"]
    pairs = [(space, " ") for space in spaces] + [
        (part["pattern"]["String"], part["content"])
        for part in parts
        if part["type"] == "Replace" and "String" in part["pattern"]
    ]
    fallback = "ByteFallback" in kinds

    def made(token: str) -> bytes:
        byte = _BYTE.fullmatch(token) if fallback else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        for old, new in pairs:
            token = token.replace(old, new)
        return token.encode("utf-8", "replace")

    return made


def _by_letters(token: str) -> bytes:
    letters = _letters()
    return b"".join(letters.get(letter) or letter.encode("utf-8", "replace") for letter in token)


@cache
def _letters() -> dict[str, bytes]:
    """The letter that GPT-2's byte-level BPE writes each byte as: printable ones as themselves, the
    others, in their order, as the characters from 256 on."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    letters = {chr(byte): bytes([byte]) for byte in kept}
    return letters | {chr(256 + place): bytes([byte]) for place, byte in enumerate(others)}


class AddedToken(NamedTuple):
    """A token that is found in a text before anything else is."""

    token_id: int
    special: bool
    """Whether `skip_special_tokens` leaves it out of texts."""


class Tokenizer:
    """One model's tokenizer."""

    def __init__(self, path: Path) -> None:
        """Read the tokenizer in folder `path`, or in a GGUF file.

        Raises:
            TokenizerError: there is none, or it cannot be read.
            CheckpointError: the GGUF file is broken, or a field of it is of the wrong kind.
        """
        self.path = path
        parts = read_gguf_tokenizer(path) if path.suffix == ".gguf" else _of_folder(path)
        self._tokenizer, self._chat = parts.tokenizer, parts.chat
        self.bos_token_id, self.eos_token_id = parts.bos_token_id, parts.eos_token_id
        self._longest = parts.longest
        self._tokenizer.no_truncation()  # some files carry what their training cut and padded to;
        self._tokenizer.no_padding()  # a prompt is neither cut nor padded, as in transformers

    @classmethod
    def of_folder(cls, folder: Path) -> "Tokenizer | None":
        """The tokenizer of a model's folder or GGUF file; None if there is none: ids in, ids out.
        Raises TokenizerError: it cannot be read."""
        if folder.suffix == ".gguf":
            return cls(folder)
        names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
        return cls(folder) if any((folder / name).is_file() for name in names) else None

    def __len__(self) -> int:
        """Token ids, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; other threads run meanwhile if it is long. Raises PromptError: it
        holds half of a surrogate pair, which is no character."""
        _check_text(text)
        if len(text) <= _LONG:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        # `encode` holds the interpreter until it is done, a batch does not.
        [found] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return found.ids

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens. Raises PromptError: as for `encode`."""
        for text in texts:
            _check_text(text)
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [one.ids for one in found]

    @cached_property
    def max_token_length(self) -> int | None:
        """Most characters that one token can cover; None if no bound is proven."""
        longest = self._longest or max(map(len, self.vocabulary()), default=0)
        return max_token_length(self.describe(), self._knows, longest)

    def vocabulary(self) -> dict[str, int]:
        """Every token as it is written in tokenizer.json, added tokens included, and its id."""
        return dict(self._tokenizer.get_vocab(with_added_tokens=True))

    @cached_property
    def added_tokens(self) -> dict[str, AddedToken]:
        """Added tokens by the text that each is written as."""
        known = self._tokenizer.get_added_tokens_decoder()
        return {one.content: AddedToken(i, one.special) for i, one in known.items()}

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for, which may be part of a character; nothing for an unknown id."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._bytes_of is None or token in self.added_tokens:
            return self.decode([token_id], skip_special_tokens=False).encode("utf-8", "replace")
        return self._bytes_of(token)

    @cached_property
    def _bytes_of(self) -> Callable[[str], bytes] | None:
        return bytes_of_tokens(self.describe())

    def _knows(self, token: str) -> bool:
        return self._tokenizer.token_to_id(token) is not None

    def describe(self) -> dict[str, Any]:
        """The content of tokenizer.json; of a BPE without its vocabulary, since to write 150,000
        tokens down and read them again takes half a second of a start."""
        raw = self._tokenizer
        if not isinstance(raw.model, models.BPE):
            content: dict[str, Any] = json.loads(raw.to_str())
            return content
        return {
            **{name: _content_of(getattr(raw, name)) for name in _PARTS},
            "truncation": raw.truncation,
            "added_tokens": [
                {"id": token, **{name: getattr(one, name) for name in _OF_ADDED}}
                for token, one in raw.get_added_tokens_decoder().items()
            ],
            "model": {"type": "BPE", **{name: getattr(raw.model, name) for name in _OF_BPE}},
        }

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; other threads run meanwhile if they are many."""
        if len(ids) <= _LONG:
            return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        [text] = self._tokenizer.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return text

    def to_json(self) -> str:
        """The tokenizer as the text of a tokenizer.json."""
        return self._tokenizer.to_str()

    def stream(self, params: TextOptions) -> Detokenizer:
        """Incremental decoding of one output."""
        return Detokenizer(self._tokenizer, params)

    def bad_words_ids(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences that spell each word at the start of a text and after a space."""
        texts = [start + word.lstrip() for word in words for start in ("", " ")]
        return tuple(dict.fromkeys(tuple(ids) for ids in self.encode_many(texts) if ids))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation; what becomes of `tools`, and of `variables` such as
        `enable_thinking`, is the template's affair.

        Raises:
            PromptError: the model has no chat template, or it rejects the messages.
        """
        text = self.chat_text(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables
        )
        return self.encode(text, add_special_tokens=False)

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        wanted: Callable[[], bool] = always,
    ) -> str:
        """The text of a conversation, as `apply_chat_template` encodes it; ended early once
        `wanted` says no.

        Raises:
            PromptError: the model has no chat template, or it rejects the messages, or it takes
                more time or memory than it may.
            ForetokenError: there is no process to fill templates in, or the text is not wanted.
        """
        if self._chat is None:
            raise PromptError("messages", messages, "a model with a chat template")
        return self._chat.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            variables=variables or {},
            wanted=wanted,
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be written down at all."""
        return self._chat is not None

    def prepare_chat(self) -> None:
        """Have the first conversation find ready what fills the chat template, if there is one.
        Raises ForetokenError: there is no process to fill templates in."""
        if self._chat is not None:
            self._chat.renderers.warm_up()


def _content_of(part: Any) -> Any:
    """What tokenizer.json says of a part; None if the tokenizer has none."""
    return None if part is None else json.loads(part.__getstate__())


def _check_text(text: str) -> None:
    """Refuse what has no UTF-8: the library would raise an error of its own."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise PromptError("text", half, "characters: half of a surrogate pair is none") from None


def _of_folder(path: Path) -> TokenizerParts:
    config = _read_json(path / "tokenizer_config.json")
    tokenizer, chat = _load(path, config)
    bos, eos = (_special(tokenizer, config.get(name)) for name in ("bos_token", "eos_token"))
    return TokenizerParts(tokenizer, chat, bos, eos)


def _special(tokenizer: tokenizers.Tokenizer, token: Any) -> int | None:
    if isinstance(token, Mapping):
        token = token.get("content")
    return None if token is None else tokenizer.token_to_id(str(token))


def _load(
    path: Path, config: Mapping[str, Any]
) -> tuple[tokenizers.Tokenizer, ChatTemplate | None]:
    """The tokenizer and its chat template; through transformers only what needs it."""
    file = path / "tokenizer.json"
    try:
        if not file.is_file():
            whole = _transformers_tokenizer(path)
            chat = ChatTemplate.of_transformers(whole) or ChatTemplate.of_folder(path, config)
            return whole.backend_tokenizer, chat
        chat = ChatTemplate.of_folder(path, config)
        if chat is not None and chat.unknown_tokens(config):
            chat = chat.with_specials_of(_transformers_tokenizer(path))
        return tokenizers.Tokenizer.from_file(str(file)), chat
    except Exception as error:
        raise TokenizerError(
            "tokenizer", str(path), f"a readable tokenizer.json ({error})"
        ) from error


def _transformers_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError("tokenizer", str(file), f"valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise TokenizerError("tokenizer", str(file), "a JSON object")
    return content
