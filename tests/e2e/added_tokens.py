"""A tiny random model that knows the packaged model's tokens and some added ones."""

import json
from pathlib import Path

from foretoken.checkpoint import packaged_model
from foretoken.testing import write_tiny_llama

SIZE = 8016
"""Ids of the model: more than there are tokens, as in many checkpoints."""
BOS, EOS = "<s>", "</s>"
ENDS = (EOS, "<|im_end|>", "[END]")
"""What ends an output; the last is no special token."""
MARKS = ("<tool_call>", "</tool_call>")
SPECIAL = {"<|im_end|>": 8000, "<|im_start|>": 8001, "[INST]": 8004}
ORDINARY = {"<think>": 8005, "[END]": 8006}
TEXT = {"[NAME]": 8007, "  ": 8008, "\n\n": 8009}
"""Added tokens that are text like any other: neither special nor in angle brackets."""
IDS = {BOS: 0, EOS: 1, **SPECIAL, MARKS[0]: 8002, MARKS[1]: 8003, **ORDINARY, **TEXT}
NEVER_TEXT = frozenset(IDS.values()) - frozenset(TEXT.values())
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def write_model_with_added_tokens(folder: Path, *, special_marks: bool = False) -> Path:
    """The model; `special_marks`: whether the marks of tool calls are special tokens."""
    write_tiny_llama(folder, vocab_size=SIZE, seed=1, max_position_embeddings=1024)
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [IDS[end] for end in ENDS]})
    )
    source = packaged_model("demo")
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    like = tokenizer["added_tokens"][0]
    special = {*SPECIAL, *(MARKS if special_marks else ())}
    for text, token_id in sorted(IDS.items(), key=lambda one: one[1]):
        if token_id > 1:
            own = {"id": token_id, "content": text, "special": text in special}
            tokenizer["added_tokens"].append({**like, **own, "normalized": text not in special})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((source / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return folder
