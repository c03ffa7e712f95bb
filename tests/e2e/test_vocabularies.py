"""Draft models: their KV is never stale, and with another tokenizer they change no token."""

import itertools
import random
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.control.plan import DraftPlan
from foretoken.errors import ConfigError
from foretoken.testing import write_tiny_llama
from tests.e2e.lossless import (
    EXACT,
    PARAMETERS,
    PRESSURES,
    Result,
    audit,
    counted,
    drawn,
    generate,
    make_prompts,
    open_exact,
)
from tests.e2e.vocabularies import write_permuted, write_text_model, write_tokenizer
from tests.marks import slow_but
from tests.property.exact import assert_alike

WAYS = ("use_heterogeneous_vocab", "use_string_matching")
SIZE = 72


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("target"), size=SIZE, seed=1)


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    """One layer of the target, under the target's own ids."""
    folder = tmp_path_factory.mktemp("near")
    write_tiny_llama(folder, seed=1, num_hidden_layers=1, vocab_size=SIZE)
    write_tokenizer(folder, size=SIZE, corpus=1)
    return folder


@pytest.fixture(scope="module")
def permuted(tmp_path_factory: pytest.TempPathFactory, near: Path) -> Path:
    return write_permuted(near, tmp_path_factory.mktemp("permuted"))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model with other, fewer tokens."""
    return write_text_model(tmp_path_factory.mktemp("foreign"), size=60, corpus=2, seed=2)


def open_llm(target: Path, draft: Path | None, way: str | None = None, **others: Any) -> LLM:
    config: dict[str, Any] | None = None
    if draft is not None:
        config = {"model": str(draft), "num_speculative_tokens": 4}
        if way is not None:
            config[way] = True
        config.update(others.pop("config", {}))
    return LLM(str(target), speculative_config=config, **EXACT, **others)


def prompts(count: int) -> list[dict[str, list[int]]]:
    draw = random.Random(9)
    return [
        {"prompt_token_ids": [draw.randrange(2, SIZE) for _ in range(draw.randint(1, 60))]}
        for _ in range(count)
    ]


def run(llm: LLM, name: str) -> list[Result]:
    return generate(llm, prompts(7), {"max_tokens": 24, **PARAMETERS[name]})


@pytest.fixture(scope="module")
def plain(target: Path) -> Callable[[str], list[Result]]:
    return cache(partial(run, open_llm(target, None, **PRESSURES["one at a time"])))


@pytest.mark.parametrize("way", slow_but(WAYS, *list(WAYS)[:1]))
@pytest.mark.parametrize("drafts", slow_but(["permuted", "foreign"], "foreign"))
def test_identical_tokens(
    way: str, drafts: str, target: Path, permuted: Path, foreign: Path, plain: Any
) -> None:
    """Every parameter set in one batch, then page shortage with preemption: no token changes."""
    draft = permuted if drafts == "permuted" else foreign
    with open_llm(target, draft, way, **PRESSURES["calm"]) as llm:
        for name in PARAMETERS:
            assert run(llm, name) == plain(name), name
    with open_llm(target, draft, way, **PRESSURES["shortage"]) as llm:
        for name in ("greedy", "seeded"):
            assert run(llm, name) == plain(name), f"{name}, short of pages"


def accepted(llm: LLM, **params: Any) -> list[tuple[int, ...]]:
    chosen = SamplingParams(max_tokens=48, detokenize=False, **params)
    found = llm.generate(prompts(6), chosen, use_tqdm=False)
    metrics = [request.outputs[0].metrics for request in found]
    return [m.accepted_per_step for m in metrics if m is not None]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_renamed_tokens_draft_as_well_as_before(
    temperature: float, target: Path, near: Path, permuted: Path
) -> None:
    """Through shared tokens a permuted draft gives the very drafts of the one it was made from."""
    params = {"temperature": temperature, "seed": 3}
    with open_llm(target, near) as llm:
        expected = accepted(llm, **params)
    with open_llm(target, permuted, WAYS[0]) as llm:
        assert accepted(llm, **params) == expected
    assert sum(map(sum, expected)) > 0


def test_a_perfect_draft_in_other_ids_is_accepted_through_text(
    target: Path, tmp_path: Path
) -> None:
    """The target itself under other ids; only where its text is no plain cutting of tokens, or a
    cutting ends inside a word, may it disagree."""
    draft = write_permuted(target, tmp_path)
    with open_llm(target, draft, WAYS[1]) as llm:
        counts = [n for one in accepted(llm, temperature=0.0) for n in one]
    assert sum(counts) / len(counts) > 1.0


def test_shadow_kv_equals_kv_computed_anew(target: Path, foreign: Path) -> None:
    """Text cut anew at its end never leaves stale KV: a proposer without memory agrees."""
    with open_llm(target, foreign, WAYS[1]) as llm:
        drafters: Any = llm._engine.parts.proposer
        [proposer] = [member.proposer for member in drafters.members.values()]
        propose, inner = proposer.propose, proposer._inner
        compared = []

        def audited(context: Any) -> Any:
            found = propose(context)
            for shadow in proposer._shadows.values():
                inner.progress.rewind(shadow.sequence, 0)
            again = propose(context)
            compared.append(sum(map(len, found.ids)))
            assert again.ids == found.ids
            return found

        proposer.propose = audited
        accepted(llm, temperature=0.7, seed=2)
        assert sum(compared) > 100


@pytest.mark.slow
def test_drawn_tokens_have_the_plain_distribution(target: Path, tmp_path: Path) -> None:
    """Shared tokens only, drawn, checked by rejection: a two-sample chi-square."""
    near = write_text_model(tmp_path / "near", size=SIZE, seed=1, scale=2.4)
    draft = write_permuted(near, tmp_path / "permuted")
    with open_llm(target, None, seed=3) as plain:
        expected = drawn(plain, 4)
    with open_llm(target, draft, WAYS[0], seed=3) as llm:
        assert_alike(drawn(llm, 4), expected, least_freedom=2)
        assert counted(llm, "num_accepted_tokens") > 200


def test_without_a_way_the_error_names_both(target: Path, foreign: Path) -> None:
    with pytest.raises(ConfigError, match="tokens shared with the target") as caught:
        open_llm(target, foreign)
    assert caught.value.field == "speculative_config.model"
    assert all(way in caught.value.allowed for way in WAYS)


def test_padding_needs_no_setting(target: Path, tmp_path: Path) -> None:
    """The target's tokenizer over a larger embedding: as many families publish their models."""
    write_tiny_llama(tmp_path, seed=1, vocab_size=SIZE + 8)
    write_tokenizer(tmp_path, size=SIZE, corpus=1)
    with open_llm(target, tmp_path) as llm, open_llm(target, None) as plain:
        chosen = {"max_tokens": 24, "temperature": 0.0}
        assert generate(llm, prompts(5), chosen) == generate(plain, prompts(5), chosen)


@pytest.mark.parametrize("pressure", ["calm", "chunks", "shortage"])
def test_kept_kv_equals_kv_computed_anew(pressure: str, model: Path, draft: Path) -> None:
    """Partial and full acceptance, pauses, chunked prefill, preemption and prefix hits: at every
    step the drafts are those of a draft model that sees the whole sequence for the first time."""
    config = {"model": str(draft), "num_speculative_tokens": 6}
    # The drafter pauses and catches up.
    budgets = itertools.cycle((5, 0, 0, 1, 3, 6, 0))
    settings = {**PRESSURES[pressure], "block_size": 8}
    if pressure == "shortage":
        settings["kv_cache_memory_bytes"] = 240_000  # the draft's pages are of it
    with open_exact(model, config, **settings) as llm:
        parts = llm._engine.parts
        [member] = parts.proposer.members.values()  # type: ignore[attr-defined]
        compared = audit(member.proposer)
        parts.scheduler._plan_drafts = lambda requests, load: DraftPlan(
            load=load, budgets=tuple(next(budgets) for _ in requests)
        )
        for name in ("greedy", "seeded"):
            generate(llm, make_prompts(9, 5), {"max_tokens": 32, **PARAMETERS[name]})
        assert (parts.scheduler.num_preemptions > 0) == (pressure == "shortage")
    assert sum(compared) > 200


@pytest.mark.parametrize("k", [1, 3, 6])
def test_a_draft_equal_to_the_target_is_always_accepted(k: int, model: Path) -> None:
    """After full acceptance the last draft has no KV yet; forgetting it would show here."""
    config = {"model": str(model), "num_speculative_tokens": k}
    params = SamplingParams(max_tokens=1 + 6 * (k + 1), temperature=0.0, detokenize=False)
    with open_exact(model, config) as llm:
        outputs = llm.generate(make_prompts(5, 6), params, use_tqdm=False)
        assert counted(llm, "foretoken:draft_acceptance_rate") == 1.0
    for request in outputs:
        metrics = request.outputs[0].metrics
        assert metrics is not None and metrics.accepted_per_step == metrics.drafted_per_step


def test_a_draft_with_another_vocabulary_is_refused(model: Path, tmp_path: Path) -> None:
    other = write_tiny_llama(tmp_path / "other", vocab_size=101)
    with pytest.raises(ConfigError, match="101 tokens") as caught:
        LLM(str(model), speculative_config={"model": str(other)})
    assert caught.value.field == "speculative_config.model"
    assert "97" in caught.value.allowed


def test_mixed_rules_in_one_batch(model: Path, draft: Path) -> None:
    """Drawn and matched drafts of unequal length side by side: seeded requests stay identical."""
    config = {"model": str(draft), "num_speculative_tokens": 4}
    drawn = SamplingParams(max_tokens=9, temperature=0.9, detokenize=False)
    seeded = SamplingParams(max_tokens=24, temperature=0.9, seed=5, detokenize=False)
    prompts = make_prompts(8, 7)
    mixed = [drawn, seeded] * 4
    with open_exact(model, None) as plain:
        expected = plain.generate(prompts, seeded, use_tqdm=False)
    with open_exact(model, config) as llm:
        found = llm.generate(prompts, mixed, use_tqdm=False)
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert len(one.outputs[0].token_ids) == mixed[i].max_tokens
        if i % 2:
            assert one.outputs[0].token_ids == other.outputs[0].token_ids
