"""Promise 1 for every family: windows, soft caps, biases and other positions keep each row's bits.

The guarded bug: something of a family that depends on which rows are computed together.
"""

from pathlib import Path

import pytest

from foretoken import LLM
from tests.drafters import TreeProposer
from tests.e2e.lossless import PRESSURES, VOCAB, generate, make_prompts, open_llm
from tests.golden.families import BY_TRANSFORMERS, MIXTURES, OWN, write_checkpoint

CASES = (
    "mistral window",
    "qwen2 upper window tied",
    "phi3 partial rotary",
    "gemma2",
    "gemma3 two kinds of positions",
    "ministral3",
    "smollm3 some layers with a window",
    "gpt2",
    "starcoder2",
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in ("llama biases", "llama yarn rope", "gemma", "gpt_neox", "olmo3", "cohere")
    ),
    "qwen3_moe",
    *(pytest.param(case, marks=pytest.mark.slow) for case in ("gpt_oss", "glm4_moe", "afmoe")),
)
PARAMETERS = ({"temperature": 0.0}, {"temperature": 0.9, "seed": 5, "logprobs": 2})
TOKENS = 16


@pytest.mark.parametrize("case", CASES)
def test_speculation_changes_nothing(case: str, tmp_path: Path) -> None:
    """n-grams, junk and trees, in calm and in chunks, against plain decoding one at a time."""
    kind, changes = {**OWN, **BY_TRANSFORMERS, **MIXTURES}[case]
    write_checkpoint(tmp_path, kind, {**changes, "vocab_size": VOCAB})
    prompts = make_prompts(6, 3)
    with open_llm(tmp_path, None, "plain", **PRESSURES["one at a time"]) as llm:
        expected = [generate(llm, prompts, {"max_tokens": TOKENS, **p}) for p in PARAMETERS]
    assert len({result.token_ids for result in expected[0]}) > 3, "a model that says one thing"
    for method, pressure in (("ngram", "calm"), ("junk", "chunks")):
        with open_llm(tmp_path, None, method, **PRESSURES[pressure]) as llm:
            found = [generate(llm, prompts, {"max_tokens": TOKENS, **p}) for p in PARAMETERS]
        assert found == expected, (method, pressure)
    every = [result for results in expected for result in results]
    known = {str(i): list(result.token_ids) for i, result in enumerate(every)}
    trees = TreeProposer(VOCAB, outputs=known, seed=2)
    with LLM(str(tmp_path), proposer=trees, dtype="float32", batch_invariant=True) as llm:
        found = [generate(llm, prompts, {"max_tokens": TOKENS, **p}) for p in PARAMETERS]
    assert found == expected, "trees"
