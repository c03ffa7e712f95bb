"""Heads beside tensor_parallel_size: the same tokens and drafts as with one process.

The guarded bugs: a head that calls the target's shared output layer alone, which waits for ranks
that know of nothing; hidden states of one rank's share; a whole head that nobody budgeted.
"""

from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM
from foretoken.v1.metrics.reader import Counter
from tests.e2e.heads import HEADS, write_head
from tests.e2e.lossless import PARAMETERS, PRESSURES, Result, generate, make_prompts
from tests.marks import needs_kernels

CHOICES = [[0], [0, 0], [0, 0, 0], [0, 0, 1], [0, 1], [1], [1, 0], [2]]
TREES: dict[str, dict[str, Any]] = {
    "eagle tree": {"method": "eagle", "choices": CHOICES},
    "eagle3 grown": {"method": "eagle3", "tree_top_k": 3, "tree_depth": 3},
    "medusa tree": {"method": "medusa", "choices": CHOICES},
}
CHAINS = (
    "eagle",
    "eagle3",
    "peagle",
    "anchored",
    "dflash",
    "dflash reduced",
    "dspark",
    "mlp",
    "medusa",
)
WRITTEN = {"eagle3 grown": "eagle3", "eagle tree": "eagle", "medusa tree": "medusa"}
COUNT, TOKENS = 5, 20

pytestmark = needs_kernels


def drafters(root: Path, draft: Path) -> list[dict[str, Any]]:
    """All heads, chains and trees, each under its name."""
    found = []
    for name, keys in {**{name: HEADS[name] for name in CHAINS}, **TREES}.items():
        written = WRITTEN.get(name, name)
        folder = write_head(root / written, written, draft)
        found.append({"name": name, "model": str(folder), **keys})
    return found


def open_heads(model: Path, ranks: int, heads: list[dict[str, Any]], **settings: Any) -> LLM:
    return LLM(
        str(model),
        tensor_parallel_size=ranks,
        batch_invariant=True,
        adaptive_speculation=False,
        speculative_config={"drafters": heads} if heads else None,
        **{"dtype": "float32", **PRESSURES["calm"], **settings},
    )


def drafted(llm: LLM) -> tuple[float, float]:
    """Drafts that were checked so far, and those that were accepted."""
    metrics = {one.name: one for one in llm.get_metrics()}
    names = ("draft", "accepted")
    found = [metrics[f"vllm:spec_decode_num_{name}_tokens"] for name in names]
    values = [one.value for one in found if isinstance(one, Counter)]
    return values[0], values[1]


def run(llm: LLM, drafter: str | None, parameters: str) -> list[Result]:
    chosen = {"max_tokens": TOKENS, **PARAMETERS[parameters]}
    policy = {"enabled": False} if drafter is None else {"drafter": drafter}
    return generate(llm, make_prompts(COUNT, 3), {**chosen, "speculation": policy})


@pytest.mark.slow
def test_heads_draft_and_write_what_they_do_with_one_process(
    model: Path, draft: Path, tmp_path: Path
) -> None:
    heads = drafters(tmp_path, draft)
    with open_heads(model, 1, heads) as alone, open_heads(model, 2, heads) as shared:
        for parameters in ("greedy", "filters"):
            plain = run(alone, None, parameters)
            assert run(shared, None, parameters) == plain
            for head in heads:
                assert run(alone, head["name"], parameters) == plain, head["name"]
                assert run(shared, head["name"], parameters) == plain, head["name"]
                assert drafted(shared) == drafted(alone), head["name"]
        assert drafted(shared)[0] > 1000


@pytest.mark.slow
def test_a_packaged_head_over_rounded_weights_just_works() -> None:
    """With the head's own vocabulary, in bfloat16 and integers."""
    settings: dict[str, Any] = {
        "quantization": "int4",
        "kv_cache_memory_bytes": 32 << 20,
        "adaptive_speculation": False,
    }
    head = {"model": "demo-eagle3"}
    with LLM("demo", **settings) as plain:
        wanted = run(plain, None, "greedy")
    with LLM("demo", tensor_parallel_size=2, speculative_config=head, **settings) as shared:
        params = {"max_tokens": TOKENS, **PARAMETERS["greedy"]}
        assert generate(shared, make_prompts(COUNT, 3), params) == wanted
        assert drafted(shared)[0] > 0
        assert shared._engine.parts.runner.model.head is None, "this head has a top of its own"
