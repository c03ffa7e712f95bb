"""A tokenizer for whoever spells a text that must stay as it is, token by token.

Tokenizers are made for prompts: they normalise a text, and let an added token take the spaces
beside it or look at the letters around it. All of that is left out here, and nothing else.
"""

import json
from collections.abc import Iterable
from typing import Any

import tokenizers

_NOTHING_BESIDE = {"single_word": False, "lstrip": False, "rstrip": False}
"""Of an added token: which text around it is part of it, or keeps it from being found."""
_KEPT = ("Prepend", "Replace", "ByteLevel")
"""Normalizers that write a text in the letters of the vocabulary."""


def spelling_json(tokenizer_json: str, special: Iterable[int]) -> str:
    """The text of a tokenizer.json that spells texts as they are.

    Args:
        tokenizer_json: the model's own.
        special: ids that are no text whatever it says of them, such as those that end an output.
    """
    content = json.loads(tokenizer_json)
    added = {one["id"]: {**one, **_NOTHING_BESIDE} for one in content["added_tokens"]}
    unknown = [token_id for token_id in special if token_id not in added]
    if unknown:
        tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
        texts = {token_id: tokenizer.id_to_token(token_id) for token_id in unknown}
        for token_id, text in texts.items():
            if text is not None:
                added[token_id] = {"id": token_id, "content": text, "normalized": False}
                added[token_id] |= _NOTHING_BESIDE
    for token_id in special:
        if token_id in added:
            added[token_id]["special"] = True
    content["added_tokens"] = [added[token_id] for token_id in sorted(added)]
    content["normalizer"] = _without_rewriting(content.get("normalizer"))
    return json.dumps(content)


def _without_rewriting(normalizer: Any) -> Any:
    if normalizer is None or normalizer["type"] in _KEPT:
        return normalizer
    if normalizer["type"] != "Sequence":
        return None
    kept = (_without_rewriting(one) for one in normalizer["normalizers"])
    return {**normalizer, "normalizers": [one for one in kept if one is not None]}
