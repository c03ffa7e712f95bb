"""Promise 1 where layers have experts: tiny random mixtures write the same tokens with and without
speculation, whatever drafts, in chunks, under preemption and from prefixes that were kept.

The guarded bug is an expert's result that depends on which other rows chose it: a draft changes the
company of every row. There is no tolerance. Each family compares 58,000 tokens, two of them in GGUF
files whose experts stay in blocks, which have kernels of their own.
"""

from pathlib import Path
from typing import Any

import gguf
import pytest

from foretoken import LLM
from foretoken.shape import ModelShape
from tests.drafters import TreeProposer
from tests.e2e.gguf_targets import add_tokens
from tests.e2e.heads import HEADS, HIDDEN, write_head
from tests.e2e.lossless import (
    METHODS,
    PARAMETERS,
    PRESSURES,
    VOCAB,
    Result,
    counted,
    generate,
    make_prompts,
    open_exact,
    with_model,
)
from tests.e2e.test_trees import CHOICES
from tests.golden.families import MIXTURES, write_checkpoint
from tests.golden.gguf_files import write_gguf
from tests.golden.test_mixtures import GGUF

FAMILIES = (
    "qwen3_moe", "gpt_oss", "olmoe", "mixtral", "glm4_moe", "granitemoe",
    "gemma4 experts, keys as values",
)  # fmt: skip
BLOCKS = {"qwen3moe": "Q4_1", "gpt-oss": "MXFP4"}
"""Architecture of a GGUF file -> type of its matrices."""
MANY = {"num_experts": 24, "num_local_experts": 24}
"""So that experts have two rows on average where a few requests draft, and some of them more."""
LEAST_TOKENS = 50_000
"""That a family compares."""
ASKED = ("greedy", "filters")
TREES = {"method": "draft_model", "num_speculative_tokens": 9, "choices": CHOICES}
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": METHODS["ngram"],
    "draft model": METHODS["draft auto"],
    "trees of a draft model": TREES,
    "eagle3": HEADS["eagle3"],
    "trees of eagle3": {**HEADS["eagle3"], "num_speculative_tokens": 9, "choices": CHOICES},
    "dflash": HEADS["dflash"],
}


def in_blocks(folder: Path, case: str) -> Path:
    """The checkpoint in a GGUF file, with a tokenizer."""
    _, arch, sizes = GGUF[case]

    def more(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
        sizes(writer, config)
        add_tokens(writer)

    return write_gguf(folder, arch, more, kind=gguf.GGMLQuantizationType[BLOCKS[case]])


class Family:
    """A target, who drafts for it, and what the target writes alone."""

    def __init__(self, case: str, folder: Path, count: int = 16, tokens: int = 48) -> None:
        self._count, self._tokens = count, tokens
        kind, changes = MIXTURES[GGUF[case][0] if case in BLOCKS else case]
        sizes: dict[str, Any] = {
            "vocab_size": VOCAB, "hidden_size": HIDDEN, "max_position_embeddings": 256,
        }  # fmt: skip
        if case in BLOCKS:
            sizes |= dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 64)
            sizes |= {name: many for name, many in MANY.items() if name in changes}
            sizes |= {"swiglu_limit": 7.0} if "swiglu_limit" in changes else {}
        self.target, self.draft = folder / "target", folder / "draft"
        write_checkpoint(self.target, kind, {**changes, **sizes})
        one = {"num_hidden_layers": 1, "layer_types": None, "first_k_dense_replace": 0}
        kept = {name: value for name, value in one.items() if name in changes or value == 1}
        write_checkpoint(self.draft, kind, {**changes, **sizes, **kept})
        if case in BLOCKS:
            self.target, self.draft = (in_blocks(one, case) for one in (self.target, self.draft))
        self._heads = {
            name: write_head(folder / name, name, folder / "none") for name in ("eagle3", "dflash")
        }
        with open_exact(self.target, None, **PRESSURES["one at a time"]) as llm:
            self.expected = {name: self.ask(llm, name) for name in ASKED}
        shape = ModelShape.from_config(self.target)
        each = sum(2 * heads.heads * heads.size * 4 for heads in shape.kv_sizes)
        # Room for half of what all requests need, and beside it for some of what drafters keep.
        self.shortage = {**PRESSURES["shortage"], "kv_cache_memory_bytes": 704 * each}

    def ask(self, llm: LLM, name: str) -> list[Result]:
        asked = {"max_tokens": self._tokens, **PARAMETERS[name]}
        return generate(llm, make_prompts(self._count, 3), asked)

    def config(self, drafter: str) -> dict[str, Any]:
        config = DRAFTERS[drafter]
        if config["method"] in self._heads:
            return {**config, "model": str(self._heads[config["method"]])}
        return with_model(config, self.draft)

    def compared(self, llm: LLM, what: str) -> tuple[int, float, int, int]:
        """How many tokens were compared, drafts accepted, and how often a request was preempted or
        began with pages at hand; a second time more do."""
        results: list[Result] = []
        for again in range(2):
            for name in ASKED:
                found = self.ask(llm, name)
                assert found == self.expected[name], (what, name, again)
                results += found
        assert counted(llm, "num_draft_tokens") > 0, what
        return (
            sum(len(one.token_ids) for one in results),
            counted(llm, "num_accepted_tokens"),
            sum(one.num_preemptions for one in results),
            sum(one.num_cached_tokens > 0 for one in results),
        )


def test_blocks_in_short(tmp_path: Path) -> None:
    """What of the next test the usual suite runs."""
    family = Family("qwen3moe", tmp_path, count=6, tokens=16)
    for drafter, name in (("ngram", "chunks"), ("trees of a draft model", "calm")):
        with open_exact(family.target, family.config(drafter), **PRESSURES[name]) as llm:
            compared, accepted, _, hits = family.compared(llm, drafter)
        assert compared == 2 * len(ASKED) * 6 * 16 and min(accepted, hits) > 0


@pytest.mark.slow
@pytest.mark.parametrize("case", (*FAMILIES, *BLOCKS))
def test_speculation_changes_nothing(case: str, tmp_path: Path) -> None:
    family = Family(case, tmp_path)
    pressures = {name: PRESSURES[name] for name in ("calm", "chunks")}
    runs: dict[str, tuple[int, float, int, int]] = {}
    for drafter in DRAFTERS:
        for name, pressure in (*pressures.items(), ("shortage", family.shortage)):
            with open_exact(family.target, family.config(drafter), **pressure) as llm:
                runs[f"{drafter}, {name}"] = family.compared(llm, f"{drafter}, {name}")
    known = {str(i): list(one.token_ids) for i, one in enumerate(family.expected["greedy"])}
    proposer = TreeProposer(VOCAB, outputs=known, seed=1)
    with open_exact(family.target, METHODS["ngram"], proposer=proposer, **family.shortage) as llm:
        runs["right branches, shortage"] = family.compared(llm, "right branches, shortage")
    # Layers with a window may have let go of what a second time would begin with.
    assert min(runs["right branches, shortage"][:3]) > 0
    tokens, accepted, preempted, hits = map(sum, zip(*runs.values(), strict=True))
    print(f"{case}: {tokens} tokens, {accepted:.0f} accepted, {preempted} preempted, {hits} hits")
    assert tokens >= LEAST_TOKENS and min(accepted, preempted, hits) > 0
