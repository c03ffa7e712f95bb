"""Promise 1 on published GGUF files, in the folder that FORETOKEN_REAL names: 20,000 tokens in all,
with look-up and draft models, of all sizes and types that lie there. There is no tolerance.

Takes a quarter of an hour or so on two cores.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM
from foretoken.shape.gguf import forget_gguf
from tests.e2e.lossless import PARAMETERS, Result, generate

FOLDER = os.environ.get("FORETOKEN_REAL")
SMOLLM2, GEMMA = "smollm2-135m-instruct-q4_1", "gemma-3-270m-q4_k_m"
SMALL, LARGE = (f"qwen2.5-coder-{size}-instruct-q4_k_m" for size in ("0.5b", "1.5b"))
CODE = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()
"""
TEXTS = (
    CODE + "\n\nclass Queue:\n",
    "def fibonacci(n):\n",
    "The lighthouse keeper climbed the stairs every evening. He",
    "List of the months: January, February, March,",
    '{"name": "Ada", "born": 1815}\n{"name": "Alan", "born": 1912}\n{"name":',
    CODE + "\n# The same class with type hints:\nclass Stack:\n",
    "Q: What is the capital of France?\nA: Paris.\nQ: What is the capital of Italy?\nA:",
    "for i in range(10):\n    print(i)\n\nfor i in range(20):\n",
)
LOOK_UP = {"method": "suffix", "num_speculative_tokens": 8}
SHORT = {"kv_cache_memory_bytes": 34 << 20, "max_num_batched_tokens": 48}
"""Pages for a third of the requests of SmolLM2, and prompts in chunks."""
CASES: dict[str, dict[str, Any]] = {
    "SmolLM2, look-up": {"model": SMOLLM2, "tokens": 400, "drafter": LOOK_UP},
    "SmolLM2, look-up, short of pages": {
        "model": SMOLLM2, "tokens": 400, "drafter": LOOK_UP,
        "settings": SHORT,
    },
    "SmolLM2, itself": {"model": SMOLLM2, "tokens": 400, "drafter": SMOLLM2},
    "Gemma 3, look-up": {"model": GEMMA, "tokens": 100, "drafter": LOOK_UP},
    "Qwen2.5 0.5B, look-up": {"model": SMALL, "tokens": 60, "drafter": LOOK_UP},
    "Qwen2.5 1.5B, 0.5B": {"model": LARGE, "tokens": 24, "drafter": SMALL},
}  # fmt: skip
LEAST = {name: 2 * len(TEXTS) * case["tokens"] for name, case in CASES.items()}
Expected = dict[str, list[Result]]


def test_the_cases_are_twenty_thousand_tokens() -> None:
    assert sum(LEAST.values()) >= 20_000


@pytest.fixture(scope="module")
def known() -> dict[tuple[str, int], Expected]:
    """What each model writes without drafts, by the number of tokens."""
    return {}


def find(name: str) -> str:
    if FOLDER is None:
        pytest.skip("FORETOKEN_REAL names no folder with published GGUF files")
    found = Path(FOLDER) / f"{name}.gguf"
    if not found.is_file():
        pytest.skip(f"{found.name} is not in FORETOKEN_REAL")
    return str(found)


def run(llm: LLM, parameters: str, tokens: int) -> list[Result]:
    """All texts at once, none ended before so many tokens."""
    chosen = {"max_tokens": tokens, "ignore_eos": True, **PARAMETERS[parameters]}
    return generate(llm, list(TEXTS), chosen)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CASES)
def test_published_files_lose_nothing(name: str, known: dict[tuple[str, int], Expected]) -> None:
    """Greedy and seeded, all requests in one batch, against one request at a time."""
    case = CASES[name]
    model, drafter, tokens = find(case["model"]), case["drafter"], case["tokens"]
    if isinstance(drafter, str):
        drafter = {"method": "draft_model", "model": find(drafter), "num_speculative_tokens": 4}
    settings: dict[str, Any] = {
        "batch_invariant": True,
        "adaptive_speculation": False,
        "max_model_len": 1024,
    }
    if (model, tokens) not in known:
        with LLM(model, **settings, max_num_seqs=1, enable_prefix_caching=False) as llm:
            both = {one: run(llm, one, tokens) for one in ("greedy", "seeded")}
        known[model, tokens] = both
        forget_gguf()
    settings |= {"max_num_seqs": 8, **case.get("settings", {})}
    compared = preempted = 0
    with LLM(model, **settings, speculative_config=drafter) as llm:
        for parameters, wanted in known[model, tokens].items():
            found = run(llm, parameters, tokens)
            assert found == wanted, parameters
            compared += sum(len(result.token_ids) for result in found)
            preempted += sum(result.num_preemptions for result in found)
        counts = {
            one.name.rsplit("num_")[-1]: getattr(one, "value", 0) for one in llm.get_metrics()
        }
    right, drafted = counts["accepted_tokens"], counts["draft_tokens"]
    print(f"\n{name}: {compared} equal, {right} of {drafted} drafts kept, {preempted} preempted")
    assert compared == LEAST[name] and drafted > 0
    assert preempted > 0 or "short" not in name
