"""The memory formula against what is there, refusals, and what planner and engine must agree on.

The guarded bugs: a term that is forgotten, a refusal whose advice does not work, a drafter whose
keys and values cost nothing in the books, two formulas.
"""

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from foretoken import LLM
from foretoken.checkpoint import packaged_model
from foretoken.config import EngineConfig, SpeculativeConfig, resolve
from foretoken.config.memory import Budget, Drafting, HeadMemory, MemoryFacts, ModelMemory, need_of
from foretoken.config.refusal import budget_of
from foretoken.config.resolve import ResolvedConfig
from foretoken.errors import ConfigError
from foretoken.hardware import Gpus, Hardware
from foretoken.kernels.library import find_library
from foretoken.kernels.linear import Packed
from foretoken.lab.plan.memory_plan import kv_per_token, weight_bytes
from foretoken.lab.plan.planner import SpeculationPlan, build_plan
from foretoken.lab.plan.setup import PlanSettings
from foretoken.lab.plan.sizes import find_quantization, load_plan_model
from foretoken.layers.attention import AttentionBlock
from foretoken.layers.mlp import GatedMLP
from foretoken.models import LoadOptions, load_model
from foretoken.models.decoder import Decoder
from foretoken.ops.linear import KernelLinear
from foretoken.proposers.choose.drafters import Drafters
from foretoken.proposers.drafter_factory import find_drafters
from foretoken.proposers.heads.base import DraftHead
from foretoken.proposers.heads.eagle3.network import Eagle3
from foretoken.proposers.kv_proposer import KVProposer
from foretoken.proposers.method import Target
from foretoken.quant import round_weights, scheme_of
from foretoken.quant.pieces import pack_integers, pack_rounded
from foretoken.shape import ModelShape
from foretoken.shape.memory_formula import (
    RANK_BYTES,
    RUNTIME_BYTES,
    KVPerToken,
    Packs,
    WeightCounts,
)
from tests.golden.heads import load_head
from tests.guards.sources import ROOT
from tests.unit.test_published_mixtures import QWEN3

MIB = 1 << 20
DEMO, DRAFT = (ModelShape.from_config(packaged_model(n)) for n in ("demo", "demo-draft"))


def facts(**changes: object) -> MemoryFacts:
    """A roomy machine with the packaged pair."""
    found = MemoryFacts(
        target=ModelMemory(shape=DEMO),
        drafting=Drafting(models=(ModelMemory(shape=DRAFT),), lookahead=4),
        dtype_bytes=2,
        packs=Packs.ALL,
        free=2048 * MIB,
        kv_share=0.25,
        kv_bytes=None,
        page_size=32,
        max_model_len=1024,
        max_model_len_given=True,
        max_num_seqs=8,
        max_num_batched_tokens=512,
    )
    return replace(found, **changes)  # type: ignore[arg-type]


@pytest.mark.skipif(find_library() is None, reason="only kernels pack weights")
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_weights_are_the_bytes_that_are_packed(quantization: str | None) -> None:
    options = LoadOptions(
        dtype=torch.bfloat16, device=torch.device("cpu"), batch_invariant=True, page_size=32,
        quantization=quantization, max_model_len=64,
    )  # fmt: skip
    model = load_model(Path(packaged_model("demo")), options)
    assert isinstance(model, Decoder)
    linears = [model.top]
    for layer in model.layers:
        block, mlp = layer.attention, layer.mlp
        assert isinstance(mlp, GatedMLP) and isinstance(block, AttentionBlock)
        linears += [block.qkv, block.out, mlp.gate_up, mlp.down]
    packed = sum(one.packed.num_bytes for one in linears if isinstance(one, KernelLinear))
    table = 0 if model.embedding.is_packed else model.embedding.num_bytes
    assert model.embedding.is_packed == (quantization is None), "tied floats are one matrix"
    predicted = ModelMemory(shape=DEMO, quantization=quantization).weight_bytes(2)
    assert predicted == pytest.approx(packed + table, rel=0.01)


@pytest.mark.parametrize("borrowed", [False, True])
def test_ranks_have_some_things_each(borrowed: bool) -> None:
    """Embeddings, norms, activations, a process; a tied head in parts beside the embedding, and
    rank 0 a whole one where a drafter wants it."""
    counts, head = DEMO.weight_counts(), HeadMemory(counts=WeightCounts(0, 0, 0, 0))
    drafting = Drafting(heads=(replace(head, borrows_head=borrowed),))
    one, three = (
        need_of(facts(target=ModelMemory(shape=DEMO, ranks=ranks), drafting=drafting))
        for ranks in (1, 3)
    )
    more = 2 * (counts.table + counts.rest) + counts.head * (2 if borrowed else 1)
    assert three.weights - one.weights == 2 * more
    assert three.activations == 3 * one.activations
    assert three.workspace - one.workspace >= 2 * RANK_BYTES
    assert three.per_token == one.per_token


def test_ranks_may_have_the_same_key_heads() -> None:
    """Two key heads on six ranks: keys, values and what computes them are there three times."""
    one, two, six = (need_of(facts(target=ModelMemory(shape=DEMO, ranks=n))) for n in (1, 2, 6))
    assert six.kv_per_token == 3 * one.kv_per_token == 3 * two.kv_per_token
    counts, again = DEMO.weight_counts(), DEMO.num_hidden_layers * 2 * DEMO.kv_size
    more = 5 * (counts.table + counts.rest) + counts.head + 2 * again * DEMO.hidden_size
    assert six.weights - one.weights == 2 * more


def test_kept_tensors_do_not_hold_the_file() -> None:
    """A view of the mapped file would keep all of it mapped."""
    options = LoadOptions(
        dtype=torch.bfloat16, device=torch.device("cpu"), batch_invariant=True, page_size=32
    )
    kept = load_model(Path(packaged_model("demo")), options)
    assert Path("/proc/self/maps").is_file()
    mapped = str(packaged_model("demo") / "model.safetensors")
    assert mapped not in Path("/proc/self/maps").read_text("utf-8")
    assert kept.embedding.shape[0] == DEMO.vocab_size


@pytest.mark.skipif(find_library() is None, reason="only kernels pack weights")
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_packing_in_pieces_is_packing(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight_NK = torch.randn(200, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    monkeypatch.setattr("foretoken.quant.pieces._PIECE", 64 * 48)
    library = find_library()
    assert library is not None
    pieces = pack_rounded(library, weight_NK, scheme_of(scheme))
    whole = pack_integers(library, round_weights(weight_NK, scheme_of(scheme)))
    same_packed(pieces, whole)


def same_packed(found: Packed, expected: Packed) -> None:
    assert (found.outputs, found.inputs) == (expected.outputs, expected.inputs)
    assert torch.equal(found.weight, expected.weight)
    assert found.scale is not None and expected.scale is not None
    assert torch.equal(found.scale, expected.scale)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("name", ["demo", "demo-draft"])
def test_the_planner_uses_the_same_formula(name: str, quantization: str) -> None:
    model, shape = load_plan_model(name, "t"), ModelShape.from_config(packaged_model(name))
    scheme = None if quantization == "bf16" else quantization
    expected = ModelMemory(shape=shape, quantization=scheme).weight_bytes(2)
    found = weight_bytes(model, find_quantization(quantization, "q"), "foretoken")
    assert found == pytest.approx(expected, rel=0.005)
    assert kv_per_token(model, 2, 4096, lets_go=False) == shape.kv_bytes_per_token(2)


KEPT = [("auto", "auto"), ("int8", "auto"), ("auto", "int8"), ("int8", "int8")]


def planned(**settings: object) -> SpeculationPlan:
    given = {"target": "demo", "draft": "demo-draft", "engine": "foretoken", "device": "epyc-9755"}
    return build_plan(PlanSettings.from_mapping({**given, **settings}))


@pytest.mark.parametrize(("own", "drafts"), KEPT)
def test_the_planner_knows_int8_keys_and_values(own: str, drafts: str) -> None:
    plan = planned(kv_cache_dtype=own, draft_kv_cache_dtype=drafts)
    draft = ModelMemory(shape=DRAFT, kv_cache_dtype=drafts)
    target = ModelMemory(shape=DEMO, kv_cache_dtype=own)
    need = budget_of(facts(target=target, drafting=Drafting(models=(draft,), lookahead=5))).need
    found = plan.speculating
    assert found.kv_bytes_per_token == need.kv_per_token
    assert found.draft_kv_bytes_per_token == need.draft_kv_per_token
    assert found.lookahead == need.lookahead
    command = plan.commands["foretoken"]
    assert ("--kv-cache-dtype int8" in command) == (own == "int8")
    assert ('"kv_cache_dtype": "int8"' in command) == (drafts == "int8")


def test_the_planner_counts_a_full_step_as_the_engine_does() -> None:
    plan = planned(max_num_batched_tokens=512, peak_concurrency=8, num_speculative_tokens=4)
    need = budget_of(facts()).need
    assert plan.overhead_bytes == need.activations + RUNTIME_BYTES


@pytest.mark.slow
def test_the_planner_knows_what_look_up_holds_and_heads_read() -> None:
    assert planned(method="ngram", num_speculative_tokens=7).speculating.lookahead == 7
    layer = 2 * DEMO.num_key_value_heads * DEMO.head_dim * 2
    head = planned(method="eagle3").speculating
    assert head.draft_kv_bytes_per_token == layer + 3 * DEMO.hidden_size * 2
    rounded = planned(method="eagle3", draft_kv_cache_dtype="int8").speculating
    saved = 2 * DEMO.num_key_value_heads * (DEMO.head_dim - 4)
    assert head.draft_kv_bytes_per_token - rounded.draft_kv_bytes_per_token == saved


@pytest.mark.parametrize(
    ("engine", "kind", "said"),
    [("foretoken", "fp8", "int8"), ("foretoken", "int3", "int8"), ("vllm", "int8", "fp8")],
)
def test_the_planner_refuses_keys_that_an_engine_does_not_have(
    engine: str, kind: str, said: str
) -> None:
    for name in ("kv_cache_dtype", "draft_kv_cache_dtype"):
        with pytest.raises(ConfigError, match=said) as caught:
            planned(engine=engine, **{name: kind})
        assert caught.value.field == f"plan.{name}"


@pytest.mark.slow
def test_commands_round_what_was_planned() -> None:
    command = planned(quantization="int8", draft_quantization="int4").commands["foretoken"]
    assert "--quantization int8" in command and '"quantization": "int4"' in command
    assert "quantization" not in planned().commands["foretoken"]
    assert planned(quantization="q8_0").commands["foretoken"].startswith("# name a checkpoint")
    assert "does not read" in planned(quantization="mxfp4").commands["foretoken"]


def test_a_drafter_costs_the_pages_that_are_lost() -> None:
    asked = facts(kv_bytes=64 * MIB, max_model_len=4096)
    both, plain = budget_of(asked), budget_of(replace(asked, drafting=Drafting()))
    assert both.need.draft_weights > 0
    assert both.need.draft_kv_per_token == DRAFT.kv_bytes_per_token(2)
    assert both.lost_tokens == plain.num_tokens - both.num_tokens > 0
    assert (plain.lost_tokens, plain.plain_tokens) == (0, plain.num_tokens)
    assert budget_of(facts()).lost_tokens == 0  # enough for all requests either way


def context(budget: Budget, asked: MemoryFacts) -> int:
    return min(asked.max_model_len, budget.num_tokens)


DRAFTING = {
    "look-up": Drafting(lookahead=7),
    "draft": Drafting(models=(ModelMemory(shape=DRAFT),), lookahead=4),
    "twin": Drafting(models=(ModelMemory(shape=DEMO),), lookahead=4),
    "head": Drafting(
        heads=(
            HeadMemory(counts=WeightCounts(0, 0, 1_000_000, 0), kept=KVPerToken(512, 64, "auto")),
        ),
        features_per_token=576,
        lookahead=3,
    ),
}


@pytest.mark.parametrize("name", DRAFTING)
@pytest.mark.parametrize("given", [False, True])
def test_speculation_never_shortens_the_context(name: str, given: bool) -> None:
    """In any memory: the same context on and off, or a refusal whose advice works."""
    outcomes = set()
    page = 32 * DEMO.kv_bytes_per_token(2)
    fixed = budget_of(facts(drafting=DRAFTING[name])).need.fixed
    sizes: list[dict[str, object]] = [{"kv_bytes": page * n} for n in (1, 2, 13, 27, 32, 60, 300)]
    sizes += [{"free": fixed + page * n, "kv_share": 0.25} for n in (1, 3, 27, 33, 60, 200)]
    for size in sizes:
        asked = facts(drafting=DRAFTING[name], max_model_len_given=given, **size)
        plain = replace(asked, drafting=Drafting())
        try:
            found = budget_of(asked)
        except ConfigError as error:
            outcomes.add("refused")
            assert "tokens would fit" in str(error)
            works = str(error).split("What would work: ")[1].split("; ")
            longest = [w.split("=")[1] for w in works if w.startswith("max_model_len=")]
            for fits in longest:
                shorter = replace(asked, max_model_len=int(fits), max_model_len_given=True)
                assert context(accepted(shorter), shorter) == int(fits)
                assert context(budget_of(replace(shorter, drafting=Drafting())), shorter) == int(
                    fits
                )
            assert works != ["a smaller model"]
        else:
            outcomes.add("same")
            assert context(found, asked) == context(budget_of(plain), asked)
    assert outcomes == {"refused", "same"} or (name, given) == ("look-up", False), outcomes


def test_a_refusal_of_a_drafter_shows_both_contexts() -> None:
    asked = facts(
        drafting=DRAFTING["twin"], kv_bytes=27 * 32 * DEMO.kv_bytes_per_token(2),
        max_model_len_given=False,
    )  # fmt: skip
    error = refused(asked)
    assert error.field == "speculative_config"
    assert "416 tokens would fit (864 without speculation" in str(error)
    assert "max_model_len=416" in str(error)


@pytest.mark.parametrize("given", [False, True])
def test_an_endless_context_is_told_what_fits(given: bool) -> None:
    """Tables of positions alone would take more than there is."""
    endless = replace(DEMO, max_position_embeddings=10**12)
    asked = facts(
        target=ModelMemory(shape=endless), max_model_len=10**12, max_model_len_given=given
    )
    error = refused(asked)
    assert (error.field, error.given) == ("max_model_len", 10**12)
    fits = int(str(error).split("max_model_len=")[1].split(";")[0])
    accepted(replace(asked, max_model_len=fits, max_model_len_given=True))
    with pytest.raises(ConfigError):
        budget_of(replace(asked, max_model_len=fits + 1, max_model_len_given=True))


def test_int8_keys_and_values_make_room_for_more() -> None:
    rounded = replace(ModelMemory(shape=DEMO), kv_cache_dtype="int8")
    draft = replace(ModelMemory(shape=DRAFT), kv_cache_dtype="int8")
    open_end = {"kv_bytes": 8 * MIB, "max_model_len_given": False, "max_num_seqs": 64}
    wide = budget_of(facts(**open_end))
    target = budget_of(facts(**open_end, target=rounded))
    both = budget_of(
        facts(**open_end, target=rounded, drafting=Drafting(models=(draft,), lookahead=4))
    )
    heads = 2 * DEMO.num_hidden_layers * DEMO.num_key_value_heads
    assert target.need.kv_per_token == heads * (DEMO.head_dim + 4)
    assert target.need.draft_kv_per_token == wide.need.draft_kv_per_token
    assert both.need.draft_kv_per_token < target.need.draft_kv_per_token
    assert both.num_tokens > target.num_tokens > 1.6 * wide.num_tokens


def test_int8_of_a_head_counts_its_scales() -> None:
    kept = KVPerToken(2 * 4 * 64, 64, "int8")
    assert (kept.bytes(2), replace(kept, kv_cache_dtype="auto").bytes(2)) == (8 * 68, 8 * 128)
    head = HeadMemory(counts=WeightCounts(0, 0, 1000, 0), kept=kept)
    drafting = Drafting(heads=(head,), features_per_token=192)
    assert budget_of(facts(drafting=drafting)).need.draft_kv_per_token == 8 * 68 + 2 * 192


def test_a_shortage_names_int8_keys_and_values_where_they_help() -> None:
    plain = facts(drafting=Drafting(), max_model_len=2048, max_num_seqs=1, kv_share=1.0)
    need = budget_of(plain).need
    page = plain.page_size * need.per_token
    asked = replace(plain, free=need.fixed + 40 * page)
    assert 'kv_cache_dtype="int8"' in str(refused(asked))
    accepted(replace(asked, target=replace(asked.target, kv_cache_dtype="int8")))


def test_pages_end_where_all_sequences_are_full() -> None:
    assert budget_of(facts()).num_tokens == 8 * 1024


def refused(asked: MemoryFacts) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        budget_of(asked)
    return caught.value


def accepted(asked: MemoryFacts) -> Budget:
    found = budget_of(asked)
    assert found.total <= asked.free
    return found


def test_a_context_that_does_not_fit_names_one_that_does() -> None:
    asked = facts(kv_bytes=4 * MIB)
    error = refused(asked)
    assert (error.field, error.given) == ("max_model_len", 1024)
    fits = int(str(error).split("max_model_len=")[1].split(";")[0])
    assert 0 < fits < 1024
    accepted(replace(asked, max_model_len=fits))
    more = int(str(error).split("kv_cache_memory_bytes=")[1].split(";")[0])
    accepted(replace(asked, kv_bytes=more))


def test_what_was_not_asked_for_only_becomes_shorter() -> None:
    asked = facts(kv_bytes=4 * MIB, max_model_len_given=False, drafting=Drafting(lookahead=4))
    found = budget_of(asked)
    assert 0 < found.num_tokens < 1024


def test_weights_that_do_not_fit_show_the_arithmetic() -> None:
    roomy = budget_of(facts())
    asked = facts(free=roomy.need.fixed - MIB)
    error = refused(asked)
    assert error.field == "model"
    for part in ("weights", "draft weights", "activations", "no speculative_config"):
        assert part in str(error)
    accepted(replace(asked, drafting=Drafting(), max_model_len_given=False))


def test_experts_that_do_not_fit_stay_mapped() -> None:
    """The rest has to fit, since every step reads it. A dense model, or one whose weights are not
    packed, is refused as ever."""
    target = ModelMemory(shape=ModelShape.from_fields(QWEN3))
    asked = facts(target=target, drafting=Drafting(), free=20 << 30, may_map=True)
    budget = budget_of(asked)
    assert budget.mapped == target.expert_bytes(2) > 50 << 30
    assert budget.need.weights == target.weight_bytes(2) - budget.mapped
    assert budget.total <= asked.free and budget.num_tokens >= 1024
    roomy = budget_of(replace(asked, free=100 << 30))
    assert roomy.mapped == 0
    near = replace(asked, free=roomy.need.fixed + (1 << 30))
    assert budget_of(near).mapped == 0
    for more in (Drafting(models=(target,), lookahead=4), None):
        step = near.max_num_batched_tokens if more else 1 << 20
        other = replace(near, drafting=more or Drafting(), max_num_batched_tokens=step)
        assert "no speculative_config" in str(refused(other)) or more is None
    for spare in (-1, 0, MIB):
        assert budget_of(replace(asked, free=roomy.need.fixed + spare)).mapped > 0
    for other in (replace(asked, may_map=False), replace(asked, free=budget.need.fixed - MIB)):
        assert refused(other).field == "model"
    hardware = Hardware(
        cpu_name="any", num_cores=2, free_memory=20 << 30, cpu_flags=frozenset[str]()
    )
    config = EngineConfig.from_kwargs(model="m", max_model_len=512)
    assert resolve(config, hardware, target.shape).budget.mapped > 0
    with pytest.raises(ConfigError, match="its weights"):
        resolve(config, hardware, target.shape, packs=())
    with pytest.raises(ConfigError, match="its weights"):
        resolve(config, replace(hardware, free_memory=50 * MIB), DEMO)


ADVICE: dict[str, dict[str, object]] = {
    "max_num_batched_tokens=512": {"max_num_batched_tokens": 512},
    "max_num_seqs=4": {"max_num_seqs": 4},
}


@pytest.mark.parametrize("advice", ADVICE)
def test_advice_is_given_where_it_helps_and_only_there(advice: str) -> None:
    """A machine on which just this change is enough, and one on which it is not."""
    asked = facts(max_num_batched_tokens=8192, max_model_len_given=False, kv_bytes=MIB)
    least = budget_of(replace(asked, **ADVICE[advice])).total  # type: ignore[arg-type]
    assert least < budget_of(asked).total
    parts = str(refused(replace(asked, free=least))).split("What would work: ")[1].split("; ")
    assert advice in parts
    worse = str(refused(replace(asked, free=least - MIB))).split("What would work: ")[1].split("; ")
    assert advice not in worse


def test_keys_and_values_beyond_the_memory_are_refused() -> None:
    asked = facts(kv_bytes=4000 * MIB, max_model_len=400_000, max_model_len_given=False)
    error = refused(asked)
    assert (error.field, error.given) == ("kv_cache_memory_bytes", 4000 * MIB)
    assert "are free" in str(error)


# The budget as it is printed at start, and the lines that docs/running.md shows of it. The
# guarded bugs: a part that is not printed, lines that do not add up, a cost of speculation that
# is not the one that is planned with, a document that shows the lines of an older version.
GPU = Gpus(count=1, free_memory=2**33, has_nccl=True)
UNITS = {"MiB": 1.0, "GiB": 1024.0}


def amounts(lines: list[str]) -> dict[str, float]:
    """Name -> MiB of the lines that have an amount."""
    found = (re.match(r"memory: (.+?)\s+([\d.]+) (MiB|GiB)", line) for line in lines)
    return {m[1]: float(m[2]) * UNITS[m[3]] for m in found if m is not None}


@pytest.mark.parametrize("method", [None, "ngram", "draft_model"])
def test_the_engine_says_where_memory_goes(
    method: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("foretoken"), "propagate", True)
    config = None if method is None else {"method": method, "num_speculative_tokens": 4}
    if method == "draft_model":
        config = {**(config or {}), "model": "demo-draft", "kv_cache_dtype": "int8"}
    with (
        caplog.at_level(logging.INFO, logger="foretoken"),
        LLM("demo", speculative_config=config, max_num_seqs=4, max_model_len=512) as llm,
    ):
        budget = llm._engine.parts.config.budget
    lines = [line for line in caplog.messages if line.startswith("memory: ")]
    found = amounts(lines)
    drafts = {"draft weights", "draft KV cache"} if method == "draft_model" else set()
    assert (
        set(found) == {"weights", "KV cache", "activations", "workspace", "all together"} | drafts
    )
    total = found.pop("all together")
    assert sum(found.values()) == pytest.approx(total, abs=0.3)
    assert total == pytest.approx(budget.total / 2**20, abs=0.06)
    said = re.search(r"costs (\d+) tokens of KV \(([\d.]+)% of the (\d+) without it", lines[-1])
    if method is None:
        assert said is None
        return
    assert said is not None
    assert int(said[1]) == budget.lost_tokens == int(said[3]) - budget.num_tokens
    assert float(said[2]) == pytest.approx(100 * budget.lost_tokens / int(said[3]), abs=0.06)
    assert lines[-1].endswith("hold up to 16")


def resolved(free_gib: float, *, drafts: int = 0, **settings: object) -> ResolvedConfig:
    hardware = Hardware(
        cpu_name="any",
        num_cores=2,
        free_memory=int(free_gib * 2**30),
        cpu_flags=frozenset({"avx512_bf16"}),
    )
    drafting = Drafting(models=(ModelMemory(shape=DRAFT),), lookahead=drafts) if drafts else None
    config = EngineConfig.from_kwargs(model="demo", **settings)
    return resolve(config, hardware, DEMO, drafting=drafting)


@pytest.mark.parametrize("kv_bytes", [3 << 20, 8 << 20, 1 << 30, None])
def test_drafters_take_no_token_where_memory_is_given_back(kv_bytes: int | None) -> None:
    settings = {"max_model_len": 256, "max_num_seqs": 16, "kv_cache_memory_bytes": kv_bytes}
    plain, both = (resolved(4, drafts=drafts, **settings) for drafts in (0, 5))
    assert both.num_kv_tokens == plain.num_kv_tokens and both.budget.lost_tokens == 0
    budget = both.budget
    assert budget.is_shared and not plain.budget.is_shared
    assert budget.page_bytes <= (kv_bytes or budget.page_bytes)
    found = amounts(both.describe_memory())
    assert found["draft KV cache"] == pytest.approx(budget.draft_bytes / 2**20, abs=0.06)
    total = found.pop("all together")
    assert sum(found.values()) == pytest.approx(total, abs=0.3)
    tight = kv_bytes is not None and kv_bytes < 1 << 30
    assert ("beside a full KV cache" in "".join(both.describe_memory())) == tight


def test_a_device_that_gives_nothing_back_says_so() -> None:
    hardware = Hardware(cpu_name="any", num_cores=2, free_memory=2**33, cpu_flags=frozenset())
    drafting = Drafting(models=(ModelMemory(shape=DRAFT),), lookahead=4)
    config = EngineConfig(model="demo", device="cuda", kv_cache_memory_bytes=64 << 20)
    found = resolve(config, hardware, DEMO, drafting=drafting, gpus=GPU)
    assert not found.budget.is_shared and found.budget.lost_tokens > 0
    assert found.describe_memory()[-1].endswith("cuda gives no memory back")


GEMMA_4_31B = ModelShape.from_fields({
    "model_type": "gemma4_text", "vocab_size": 262144, "hidden_size": 5376,
    "intermediate_size": 21504, "num_hidden_layers": 60, "num_attention_heads": 32,
    "num_key_value_heads": 16, "num_global_key_value_heads": 4, "head_dim": 256,
    "global_head_dim": 512, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262144, "sliding_window": 1024, "enable_moe_block": False,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 10,
})  # fmt: skip


def test_layers_with_a_window_are_counted_with_what_they_keep() -> None:
    """Of Gemma 4 31B a token takes 880 KiB, and 80 where it has left the window."""
    roomy = {
        "target": ModelMemory(shape=GEMMA_4_31B, quantization="int4"), "drafting": Drafting(),
        "free": 64 << 30, "max_model_len": 65536, "kv_bytes": 16 << 30,
    }  # fmt: skip
    all_kept, let_go = (facts(**roomy, gives_back=given) for given in (False, True))
    assert need_of(all_kept).window is None
    need = need_of(let_go)
    assert (need.window, need.kv_per_token, need.window_kv_per_token) == (
        1024,
        880 << 10,
        800 << 10,
    )
    assert 1024 + 512 <= need.window_tokens <= 1024 + 512 + 64, "the window and a step"
    assert need.kept(65536) == 65536 * (80 << 10) + need.window_tokens * (800 << 10)
    with pytest.raises(ConfigError, match="19040 tokens would fit"):
        budget_of(all_kept)
    budget = budget_of(let_go)
    assert budget.num_tokens > 10 * 19040 - 100
    assert budget.kept_bytes <= 16 << 30
    assert budget.requests_of(65536) == (16 << 30) / need.kept(65536)
    # One sequence that fits the window has no less room than before, and no more.
    few = replace(let_go, kv_bytes=1 << 30, max_model_len=1100)
    assert budget_of(few).num_pages == budget_of(replace(few, gives_back=False)).num_pages


def test_a_context_within_the_window_lets_nothing_go() -> None:
    target = ModelMemory(shape=GEMMA_4_31B, quantization="int4")
    found = need_of(facts(target=target, gives_back=True, max_model_len=1024))
    assert found.window is None and found.kept(1000) == 1000 * found.kv_per_token


def shown(first: str) -> str:
    """The block of docs/running.md that begins so."""
    blocks = re.findall(r"```\n(.*?)```", (ROOT / "docs/running.md").read_text("utf-8"), re.DOTALL)
    [found] = [str(block) for block in blocks if block.startswith(first)]
    return found


def test_the_document_shows_these_lines() -> None:
    block = shown("memory: ")
    free = re.search(r"of ([\d.]+) GiB free", block)
    assert free is not None
    assert block.splitlines() == resolved(float(free[1]), drafts=5).describe_memory()


def test_the_document_shows_this_refusal() -> None:
    block = " ".join(shown("max_model_len: ").split())
    free = re.search(r"([\d.]+) GiB are free", block)
    assert free is not None
    with pytest.raises(ConfigError) as caught:
        resolved(float(free[1]), max_model_len=500, kv_cache_memory_bytes=1_000_000)
    assert str(caught.value) == block


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_on_a_gpu_only_integers_are_packed(quantization: str | None) -> None:
    """The head is the embedding's floats, packed or not, and a copy only where it is rounded."""
    hardware = Hardware(
        cpu_name="any", num_cores=2, free_memory=2**33, cpu_flags=frozenset({"avx512_bf16"})
    )

    def weights(device: str, packs: tuple[str, ...]) -> int:
        config = EngineConfig(model="demo", device=device, quantization=quantization)
        found = resolve(config, hardware, DEMO, packs=packs, gpus=GPU)
        assert found.device == device
        return found.budget.need.weights

    assert DEMO.tie_word_embeddings
    packed, plain = weights("cpu", ("cpu", "cuda")), weights("cuda", ("cpu",))
    assert plain == weights("cpu", ("cuda",)) == weights("cpu", ())
    if quantization is None:
        assert weights("cuda", ("cpu", "cuda")) == plain == packed
    else:
        assert weights("cuda", ("cpu", "cuda")) == packed < plain


# What heads keep in memory, as counted and as built. The guarded bugs: matrices that stay beside
# their packed copies, a head read as float32, a file that stays mapped, rounded heads that are
# planned as 16 bit.
HEADS = {"eagle3": "demo-eagle3", "mlp": "demo-mlp", "medusa": "demo-medusa"}


def head_memory(method: str, quantization: str | None = None) -> HeadMemory:
    given = {"method": method, "model": HEADS[method], "quantization": quantization}
    config = SpeculativeConfig.from_dict(given)
    target = Target(shape=ModelShape.from_config(packaged_model("demo")), tokenizer=None)
    [found] = find_drafters(config, target).values()
    assert found.head is not None and found.model is None
    return found.head


@pytest.mark.parametrize("method", HEADS)
def test_weights_are_counted_as_they_lie_in_the_file(method: str) -> None:
    net: DraftHead = load_head(
        packaged_model(HEADS[method]), ModelShape.from_config(packaged_model("demo"))
    )
    numbers = sum(one.numel() for one in net.parameters())
    assert head_memory(method).weight_bytes(2) == 2 * numbers
    assert {one.dtype for one in net.parameters()} == {torch.bfloat16}
    assert not any(one.is_meta for one in (*net.parameters(), *net.buffers()))


@pytest.mark.parametrize("method", HEADS)
def test_rounded_heads_are_planned_rounded(method: str) -> None:
    plain, rounded = (head_memory(method, kind) for kind in (None, "int8"))
    counts = rounded.counts
    saved = counts.matrices + plain.counts.head - 4 * (counts.outputs + plain.counts.head_outputs)
    borrowed = (counts.head - plain.counts.head) + 4 * (
        counts.head_outputs - plain.counts.head_outputs
    )
    assert plain.weight_bytes(2) - rounded.weight_bytes(2) == saved - borrowed
    assert (borrowed > 0) == (method == "medusa"), "a rounded copy of the target's head"
    assert rounded.weight_bytes(2, packs=Packs.NONE) >= plain.weight_bytes(2)
    assert Drafting(heads=(plain,)).has_weights


@pytest.mark.skipif(find_library() is None, reason="without kernels nothing is packed")
@pytest.mark.parametrize("model", ["demo-eagle3", "demo-parallel"])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_matrices_are_there_once(model: str, quantization: str | None) -> None:
    config = {"method": "eagle3", "model": model, "quantization": quantization}
    with LLM("demo", max_num_seqs=2, speculative_config=config) as llm:
        drafters = llm._engine.parts.proposer
        assert isinstance(drafters, Drafters)
        proposer = drafters.members["eagle3"].proposer
        assert isinstance(proposer, KVProposer)
        steps: Any = proposer.make_steps([])
        net = steps.runner.net
        assert isinstance(net, Eagle3)
        assert not [one for one in net.modules() if isinstance(one, nn.Linear)]
        mapped = Path("/proc/self/maps")
        if mapped.is_file():
            assert f"{model}/model.safetensors" not in mapped.read_text("utf-8")
