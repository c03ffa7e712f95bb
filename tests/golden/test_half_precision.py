"""Models in float16, which no kernel of ours takes: PyTorch's operations run them, layer by layer.

The guarded bugs: norms over heads, gates or positions that only the kernels apply, rows whose bits
depend on their neighbours.
"""

import random
from pathlib import Path

import pytest
import torch

from foretoken import LLM, SamplingParams
from tests.golden.families import OWN, VOCAB, write_checkpoint
from tests.golden.scenario import forward, in_pieces, open_runner
from tests.marks import slow

CASES = (
    "llama biases",
    "qwen3 wide heads",
    "gemma2",
    "gemma3 usual layers",
    slow("ministral3"),
    slow("olmo3"),
)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_float32(case: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, *OWN[case])
    draw = random.Random(case)
    ids = [draw.randrange(VOCAB) for _ in range(40)]
    pages = list(range(20))
    expected = forward(open_runner(tmp_path), [(ids, 0, 40, pages)])
    runner = open_runner(tmp_path, dtype=torch.float16, batch_invariant=True)
    found = forward(runner, [(ids, 0, 40, pages)])
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 0.06 * expected.std()
    assert torch.equal(in_pieces(runner, ids, pages, [1] * 20 + [7, 13]), found)


def test_speculation_changes_nothing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, *OWN["qwen3 wide heads"])
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=30, detokenize=False)
    prompts = [{"prompt_token_ids": [1, 2, 3, 1, 2]}, {"prompt_token_ids": [9, 8]}]
    written = []
    for speculative in (None, {"method": "ngram", "prompt_lookup_min": 1}):
        with LLM(str(tmp_path), dtype="float16", speculative_config=speculative) as llm:
            found = llm.generate(prompts, params, use_tqdm=False)
        written.append([one.outputs[0].token_ids for one in found])
    assert written[0] == written[1]
