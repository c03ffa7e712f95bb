"""Tokenizers of published GGUF files, in the folder that FORETOKEN_REAL names, against llama.cpp
and transformers, and what the models write. The guarded bugs: what only a whole vocabulary shows.

`published_ids.json` has, for each file, the beginning of the SHA-256 of the ids that llama.cpp
(build 11549) finds for each of the hard texts.
"""

import hashlib
import json
import os
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from foretoken.shape.gguf import open_gguf
from foretoken.text.gguf_tokenizer import WORD_RULES
from foretoken.text.tokenizer import Tokenizer
from tests.unit.gguf_tokens import TEXTS

PUBLISHED: dict[str, str] = json.loads(
    (Path(__file__).parent / "published_ids.json").read_text("utf-8")
)
FOLDER = os.environ.get("FORETOKEN_REAL")
WRONG_IN_TRANSFORMERS = ("smollm",)
"""Pre-tokenizers that it takes for GPT-2's."""


def find(name: str) -> Path:
    if FOLDER is None:
        pytest.skip("FORETOKEN_REAL names no folder with published GGUF files")
    found = Path(FOLDER) / f"{name}.gguf"
    if not found.is_file():
        pytest.skip(f"{found.name} is not in FORETOKEN_REAL")
    return found


@pytest.fixture(params=PUBLISHED)
def path(request: pytest.FixtureRequest) -> Path:
    return find(request.param)


def is_normal(text: str, pre: str | None) -> bool:
    """Whether nothing is left to normalize, which the two others leave out."""
    rule = WORD_RULES.get(pre or "")
    return rule is None or not rule.nfc or unicodedata.is_normalized("NFC", text)


def test_ids_are_those_of_llama_cpp(path: Path) -> None:
    found, pre = Tokenizer(path), open_gguf(path).get("tokenizer.ggml.pre", str)
    for text, expected in zip(TEXTS, PUBLISHED[path.stem].split(), strict=True):
        if not is_normal(text, pre) or ("</s>" in text and pre == "qwen2"):
            continue  # Qwen has a word `</s>`, which llama.cpp takes for a control token
        ids = found.encode(text)
        assert hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:6] == expected, text


@pytest.mark.slow
def test_texts_come_back(path: Path) -> None:
    """All whose bytes the vocabulary has: SmolLM2's lacks some control characters."""
    found, pre = Tokenizer(path), open_gguf(path).get("tokenizer.ggml.pre", str)
    known = {found.token_bytes(token) for token in found.vocabulary().values()}
    for text in TEXTS:
        has_all = all(bytes([byte]) in known for byte in text.encode())
        if has_all and is_normal(text, pre) and "\u2581" not in text:
            ids = found.encode(text, add_special_tokens=False)
            assert found.decode(ids, skip_special_tokens=False) == text


@pytest.mark.slow
def test_ids_are_those_of_transformers(path: Path) -> None:
    from transformers import AutoTokenizer

    pre = open_gguf(path).get("tokenizer.ggml.pre", str)
    if pre in WRONG_IN_TRANSFORMERS:
        pytest.skip(f"transformers does not know {pre}")
    expected = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    found = Tokenizer(path)
    for text in TEXTS:
        if is_normal(text, pre) and not re.search("\u2581|( ){32,}", text):
            # Longer runs of spaces it merges, where SentencePiece takes the longest token first.
            assert found.encode(text) == expected(text)["input_ids"], text


READ_BY_TRANSFORMERS = ("smollm2-135m-instruct-q4_1", "qwen2.5-coder-0.5b-instruct-q4_k_m")
PROMPTS = ("def fibonacci(n):\n", "The capital of France is", "1, 2, 3, 4,", "Once upon a time")
NEAR = 0.05
"""Logits of the reference that lie no further apart may change places: its sums are in another
order than those of the kernels."""


def of_transformers(path: Path) -> Any:
    """Its own model with what it reads of a file; `from_pretrained` would want accelerate."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, modeling_gguf_pytorch_utils

    models: Any = AutoModelForCausalLM
    reader: Any = modeling_gguf_pytorch_utils
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = models.from_config(config, dtype=torch.float32).eval()
    read = reader.load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)[
        "tensors"
    ]
    found = {name: torch.as_tensor(tensor).float() for name, tensor in read.items()}
    missing, unused = model.load_state_dict(found, strict=False)
    assert not unused and set(missing) <= {"lm_head.weight"}, (missing, unused)
    model.tie_weights()
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    """64 tokens of each prompt by transformers, which multiplies the file out to float32: equal, or
    up to where the reference is undecided."""
    import torch

    from foretoken import LLM, SamplingParams

    path = find(name)
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    with LLM(str(path), dtype="float32", max_model_len=256) as llm:
        outputs = llm.generate(list(PROMPTS), params, use_tqdm=False)
    model = of_transformers(path)
    for output in outputs:
        prompt, ours = list(output.prompt_token_ids or ()), list(output.outputs[0].token_ids)
        ids = torch.tensor([prompt + ours])
        with torch.inference_mode():
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        assert len(ours) == 64 == logits.shape[0]
        for place, token in enumerate(ours):
            best, second = logits[place].topk(2).values.tolist()
            if int(logits[place].argmax()) != token:
                gap = best - float(logits[place, token])
                print(f"{name}, {output.prompt!r}: other at {place}, {best - second:.4f} apart")
                assert gap <= NEAR, (output.prompt, place, gap)
                break
