"""Plans of Foretoken's processes that share a model on CPUs: what each holds, and what to type. The
guarded bug: a plan that counts other bytes than the engine, which would refuse to start then."""

from dataclasses import replace
from typing import Any

import pytest

from foretoken.checkpoint import packaged_model
from foretoken.config.memory import ModelMemory
from foretoken.errors import ConfigError
from foretoken.lab.launch.sources import read_source
from foretoken.lab.lint.fit import Machine, check_pair
from foretoken.lab.plan.memory_plan import draft_load, overhead_bytes, plan_memory
from foretoken.lab.plan.page import what_fits
from foretoken.lab.plan.planner import SpeculationPlan, build_plan
from foretoken.lab.plan.ready_commands import ready_commands
from foretoken.lab.plan.setup import PlanSettings, Setup, resolve_setup
from foretoken.shape import ModelShape

ASKED = PlanSettings(target="llama-3.1-8b", draft="llama-3.2-1b", engine="foretoken",
                     device="epyc-9755")  # fmt: skip
PACKAGED = replace(ASKED, target="demo", draft="demo-draft", context=256, output_tokens=64)


def setup(settings: PlanSettings, **changes: Any) -> Setup:
    return resolve_setup(replace(settings, **changes))


def errors(plan: SpeculationPlan) -> list[str]:
    return [one.check for one in plan.findings if one.level == "error"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("draft_ranks", [1, 2])
def test_the_plan_counts_as_the_engine_does(ranks: int, draft_ranks: int) -> None:
    draft_ranks = min(ranks, draft_ranks)
    asked = setup(PACKAGED, tensor_parallel_size=ranks, draft_tensor_parallel_size=draft_ranks)
    found = plan_memory(asked, draft_load(asked))
    counted = []
    for name, count in (("demo", ranks), ("demo-draft", draft_ranks)):
        shape = ModelShape.from_config(packaged_model(name))
        model = ModelMemory(shape=shape, ranks=count)
        counted.append((model.weight_bytes(2) + model.copied_bytes(2), model.kv_per_token(2)))
    [(target, kv), (draft, draft_kv)] = counted
    assert found.weight_bytes == pytest.approx(target, rel=0.01)
    assert found.draft_weight_bytes == pytest.approx(draft, rel=0.01)
    assert found.kv_bytes_per_token == kv and found.draft_kv_bytes_per_token == draft_kv
    together = found.fullest_rank_bytes + (ranks - 1) * found.emptiest_rank_bytes
    assert together == pytest.approx(found.weight_bytes + found.draft_weight_bytes)
    uneven = ranks > draft_ranks
    assert (found.fullest_rank_bytes > found.emptiest_rank_bytes) == uneven


def test_processes_of_one_machine_share_its_memory_and_its_speed() -> None:
    """Each has embeddings and activations of its own; a second socket brings what it has."""
    alone, shared = build_plan(ASKED), build_plan(replace(ASKED, tensor_parallel_size=2))
    both = build_plan(replace(ASKED, count=2))
    assert (shared.setup.tp, shared.setup.devices, both.setup.devices) == (2, 1, 2)
    assert shared.plain.usable_bytes < alone.plain.usable_bytes < both.plain.usable_bytes
    assert alone.plain.weight_bytes < shared.plain.weight_bytes < 1.2 * alone.plain.weight_bytes
    assert shared.plain.tokens < alone.plain.tokens < both.plain.tokens
    steps = [one.prediction.at(1).plain_step_s for one in (both, alone, shared)]
    assert steps == sorted(steps), "exchanges cost time, and bring none back on one socket"
    assert overhead_bytes(shared.setup) > overhead_bytes(alone.setup)
    assert {row.count for row in what_fits(shared.setup)} == {1}


def test_drafts_are_made_on_one_rank_unless_a_draft_model_is_split() -> None:
    own = setup(ASKED, tensor_parallel_size=4)
    split = setup(ASKED, tensor_parallel_size=4, draft_tensor_parallel_size=4)
    head = setup(ASKED, tensor_parallel_size=4, method="eagle3", draft=None)
    assert [one.draft_ranks for one in (own, split, head)] == [1, 4, 1]
    for wrong in ({"draft_tensor_parallel_size": 2}, {"method": "eagle3",
                  "draft": None, "draft_tensor_parallel_size": 4}):  # fmt: skip
        with pytest.raises(ConfigError, match="draft_tensor_parallel_size"):
            setup(ASKED, tensor_parallel_size=4, **wrong)


def test_a_head_that_ends_in_the_target_s_own_takes_all_of_it() -> None:
    def more(method: str) -> float:
        asked = setup(ASKED, tensor_parallel_size=2, method=method, draft=None)
        load = draft_load(asked)
        return plan_memory(asked, load).draft_weight_bytes - load.weight_bytes

    assert more("eagle") == 2 * 128256 * 4096 and more("eagle3") == 0


@pytest.mark.parametrize(("given", "told"), [(0, None), (1, None), (2, 2)])
def test_the_command_says_the_ranks(given: int, told: int | None) -> None:
    plan = build_plan(replace(ASKED, tensor_parallel_size=2, draft_tensor_parallel_size=given))
    assert "--tensor-parallel-size 2" in plan.commands["foretoken"]
    commands = ready_commands(plan.setup, plan.schedule, speculates=True)
    said = f'"draft_tensor_parallel_size": {told}'
    assert (said in commands["foretoken"]) == (told is not None)
    assert f'"draft_tensor_parallel_size": {given or 2}' in commands["vllm"]
    alone = build_plan(ASKED).commands["foretoken"]
    assert "tensor" not in alone


@pytest.mark.parametrize(
    ("ranks", "ok"), [(3, True), (8, True), (16, True), (12, False), (64, False)]
)
def test_ranks_share_key_heads_or_have_equal_shares_of_them(ranks: int, ok: bool) -> None:
    """Of 8 key heads and 32 query heads."""
    plan = build_plan(replace(ASKED, draft=None, method="ngram", tensor_parallel_size=ranks))
    assert ("ranks_divide" in errors(plan)) == (not ok)
    launch = f"foretoken serve llama-3.1-8b --tensor-parallel-size {ranks} --spec-method ngram"
    [found] = read_source(launch).launches
    wrong = [one.check for one in check_pair(found, Machine()) if one.level == "error"]
    assert wrong == ([] if ok else ["ranks_divide"])


def test_only_cpus_have_more_ranks_than_devices() -> None:
    for wrong in ({"device": "h100"}, {"engine": "vllm"}):
        with pytest.raises(ConfigError, match="1 to plan.count"):
            setup(ASKED, tensor_parallel_size=2, **wrong)


def test_gpus_have_a_rank_each_with_memory_of_its_own() -> None:
    """The first has all of the draft beside its share; and nobody has tried it."""
    asked = replace(ASKED, device="h100")
    one, two = (build_plan(replace(asked, count=count)) for count in (1, 2))
    assert not errors(two) and "--tensor-parallel-size 2" in two.commands["foretoken"]
    assert "several_gpus" in [one.check for one in two.findings if one.level == "warning"]
    assert "several_gpus" not in [found.check for found in one.findings]
    found, alone = two.speculating, one.speculating
    assert found.fullest_rank_bytes < alone.fullest_rank_bytes
    more = found.fullest_rank_bytes - found.emptiest_rank_bytes
    assert more == pytest.approx(found.draft_weight_bytes) and more > 0
    table = 2 * setup(asked).target.head_params
    assert found.weight_bytes == pytest.approx(alone.weight_bytes + table)
    assert errors(build_plan(replace(asked, count=3)))[0] == "ranks_divide"
