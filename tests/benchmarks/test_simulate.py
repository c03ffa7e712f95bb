"""The simulator: known costs give known times, and all arms write the same answers."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from benchmarks.simulate import __main__
from benchmarks.simulate.arms import ControlArm, FixedArm
from benchmarks.simulate.compare import compare, window_ratios
from benchmarks.simulate.machine import (
    LineCost,
    MachineNoise,
    MixtureCost,
    ServerCost,
    SimulatedDrafter,
    SimulatedMachine,
    TableCost,
    WatchedRound,
    machine_of_costs,
    measured_server_cost,
    planned_machine,
)
from benchmarks.simulate.serving import ServingLimits, SimulatedServing, simulate
from benchmarks.simulate.traffic import (
    DraftChance,
    RecordedRequest,
    RequestClass,
    Traffic,
    recorded_requests,
)
from benchmarks.simulate.tune_answers import SimulatedAnswers
from benchmarks.simulate.tune_rehearsal import Rehearsed, play, rehearsed_cases, summarize
from foretoken.control.acceptance import ConstantAcceptance
from foretoken.control.cost import StepShape
from foretoken.control.learned.drafter_cost import DrafterCost, DraftShape
from foretoken.control.learned.experts_read import ExpertsRead
from foretoken.control.learned.target_step_time import TargetStepTimeModel
from foretoken.errors import ConfigError, ForetokenError
from foretoken.lab.plan.setup import PlanSettings

command = typer.Typer()
command.command()(__main__.simulate)

QUIET = ServingLimits(noise=0.0)
DRAFTER = SimulatedDrafter(name="draft", passes=LineCost(0.001, 0.0001))
MACHINE = SimulatedMachine(target=LineCost(0.010, 0.0005), drafters=(DRAFTER,))


def chat(chance: float = 0.8, **changes: object) -> RequestClass:
    kind = RequestClass(prompt=64, output=80, chances={"draft": DraftChance(chance=chance)})
    return replace(kind, **changes)  # type: ignore[arg-type]


def test_plain_decoding_takes_what_the_costs_say() -> None:
    traffic = Traffic(classes=(chat(varied=False),), requests=3)
    run = simulate(MACHINE, FixedArm(0), traffic, QUIET)
    prompt_s, step_s = 0.010 + 63 * 0.0005, 0.010
    assert run.seconds == pytest.approx(3 * (prompt_s + 79 * step_s))
    assert [one.tokens for one in run.requests] == [80] * 3
    assert run.requests[0].ttft == pytest.approx(prompt_s)
    assert run.requests[0].tpot == pytest.approx(step_s)
    assert run.drafting == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("law", "length"),
    [
        (DraftChance(chance=0.7), ConstantAcceptance(0.7).length(4)),
        (DraftChance(chance=0.5, by_depth=(0.5, 0.8, 0.9)), 1 + 0.5 + 0.4 + 0.36 + 0.324),
    ],
)
def test_fixed_drafts_give_the_acceptance_length_of_their_chance(
    law: DraftChance, length: float
) -> None:
    free = replace(MACHINE, target=LineCost(0.01), drafters=(SimulatedDrafter(name="draft"),))
    kind = chat(output=4000, varied=False, chances={"draft": law})
    traffic = Traffic(classes=(kind,), requests=3)
    off, drafted = (simulate(free, FixedArm(k), traffic, QUIET) for k in (0, 4))
    assert compare(drafted, off).tpot_p50 == pytest.approx(length, rel=0.05)


@pytest.mark.parametrize("arm", [FixedArm(0), FixedArm(3), ControlArm()])
def test_all_arms_write_the_same_answers(arm: FixedArm | ControlArm) -> None:
    traffic = Traffic(classes=(chat(share=2), chat(name="b", output=20)), requests=30, clients=6)
    run = simulate(MACHINE, arm, traffic)
    wanted = {one.index: one.length for one in traffic.draw()}
    assert {one.number: one.tokens for one in run.requests} == wanted
    assert sum(step.tokens for step in run.steps) == sum(wanted.values())
    assert sum(one.kind == "b" for one in run.requests) == 10
    assert simulate(MACHINE, arm, traffic).steps == run.steps


def test_clients_come_and_go() -> None:
    def clients(now: float) -> int:
        return 8 if 5.0 < now < 15.0 else 1

    traffic = Traffic(classes=(chat(),), requests=80, clients=clients)
    steps = simulate(MACHINE, FixedArm(0), traffic).steps
    assert max(step.sequences for step in steps if step.at < 5.0) == 1
    assert max(step.sequences for step in steps if 6.0 < step.at < 15.0) == 8


def test_forced_tokens_are_drafted_for_nothing() -> None:
    traffic = Traffic(classes=(chat(0.0, forced=0.5, chances={}),), requests=12)
    off, run = (simulate(MACHINE, FixedArm(k), traffic) for k in (0, 1))
    assert compare(run, off).throughput > 1.2


def test_windows_compare_equal_stretches() -> None:
    traffic = Traffic(classes=(chat(varied=False),), requests=10)
    off, fast = (simulate(MACHINE, FixedArm(k), traffic, QUIET) for k in (0, 4))
    ratios = window_ratios(fast, off, 200)
    assert len(ratios) == 4 and min(ratios) > 1.3


def test_a_drafter_reads_a_prompt_once() -> None:
    """The first draft pays for the prompt, the later ones for their own tokens."""
    costly = replace(DRAFTER, passes=LineCost(0.001, 0.01))
    traffic = Traffic(classes=(chat(1.0, varied=False, prompt=500, output=60),), requests=1)
    machine = replace(MACHINE, drafters=(costly,))
    steps = simulate(machine, FixedArm(5), traffic, QUIET).steps
    assert steps[1].seconds > 500 * 0.01 - 0.1
    assert max(step.seconds for step in steps[2:]) < 0.2


def test_too_few_pages_preempt_and_all_are_answered() -> None:
    traffic = Traffic(classes=(chat(output=200),), requests=16, clients=8)
    run = simulate(MACHINE, FixedArm(4), traffic, ServingLimits(num_pages=40, page_size=16))
    assert len(run.requests) == 16


def test_a_workload_is_served_as_it_was_recorded(tmp_path: Path) -> None:
    path = tmp_path / "recorded.jsonl"
    rows: list[dict[str, object]] = [
        {"prompt": "a b c", "max_tokens": 7 + i, "arrival_s": 100.0 + 5.0 * i} for i in range(2)
    ]
    said = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
    rows.append({"messages": said, "max_tokens": 9, "arrival_s": 110.0})
    path.write_text("\n".join(json.dumps(row) for row in rows), "utf-8")
    recorded = recorded_requests(path)
    assert [one.prompt for one in recorded] == [3, 3, 3]
    traffic = Traffic(classes=(chat(),), requests=len(recorded), recorded=recorded)
    served = simulate(MACHINE, FixedArm(0), traffic).requests
    assert [one.arrival for one in served] == pytest.approx([0.0, 5.0, 10.0])
    assert [one.tokens for one in served] == [7, 8, 9]


@pytest.mark.slow
def test_requests_arrive_at_their_rate() -> None:
    traffic = Traffic(classes=(chat(),), requests=400, rate=2.0)
    run = simulate(MACHINE, FixedArm(0), traffic)
    assert max(one.arrival for one in run.requests) == pytest.approx(200, rel=0.15)
    assert all(one.ttft > 0.0 for one in run.requests)


def test_noise_lasts_and_has_spikes() -> None:
    noise = MachineNoise(0.2, seed=1)
    factors = [noise.factor(0.01) for _ in range(4000)]
    usual = sorted(factors)[2000]
    assert usual == pytest.approx(1.0, abs=0.05)
    assert 0.005 < sum(factor > 2.5 for factor in factors) / 4000 < 0.02
    assert MachineNoise(0.0, seed=1).factor(0.01) == 1.0


def test_a_speed_that_wanders_stays_away_for_long() -> None:
    """Beside the noise of steps, which is over after some; `wander` is the spread of the speed."""
    noise = MachineNoise(1e-6, seed=1, wander=0.1)
    factors = [noise.factor(0.01) for _ in range(40_000)]
    logs = np.log([factor for factor in factors if factor < 2.0])
    assert np.std(logs) == pytest.approx(0.1, rel=0.2)
    far = np.mean(logs[:-50] * logs[50:]) / np.var(logs)
    assert far == pytest.approx(MachineNoise.WANDER_MEMORY**50, abs=0.15)


def test_drafts_after_a_plain_step_are_slow() -> None:
    """Each answer begins with a step that drafts nothing, so that its first draft is cold."""
    kind = chat(1.0, varied=False, output=13)
    traffic = Traffic(classes=(kind,), requests=4)
    cold = replace(MACHINE, cold_drafting=3.0, cold_target=2.0)
    warm, slow = (
        simulate(machine, FixedArm(3), traffic, QUIET).steps for machine in (MACHINE, cold)
    )
    for number, (before, after) in enumerate(zip(warm, slow, strict=True)):
        first = number % 4 == 1
        assert before.drafted == after.drafted == (0 if number % 4 == 0 else 3)
        target_s = 0.010 + 3 * 0.0005 if before.drafted else before.seconds
        times = (3.0, 2.0) if first else (1.0, 1.0)
        wanted = times[0] * (before.seconds - target_s) + times[1] * target_s
        assert after.seconds == pytest.approx(wanted)


def test_each_sequence_that_drafts_may_cost() -> None:
    costly = replace(DRAFTER, call_s=0.003, sequence_s=0.002)
    assert costly.drafting_s([2, 1], 0.0) - DRAFTER.drafting_s([2, 1], 0.0) == pytest.approx(0.007)
    assert costly.drafting_s([], 0.0) == 0.0


def test_tables_and_data_sheets_say_what_steps_take() -> None:
    table = TableCost(((1, 1.0), (3, 2.0), (5, 6.0)), key_s=0.01)
    assert table.seconds(StepShape(2, 1, 0.0)) == pytest.approx(1.5)
    assert table.seconds(StepShape(6, 2, 10.0)) == pytest.approx(8.2)
    settings = PlanSettings(target="meta-llama/Llama-3.3-70B-Instruct", method="eagle3", count=4)
    machine = planned_machine(settings)
    one, many = (machine.target.seconds(StepShape(n, n, 500.0)) for n in (1, 1024))
    assert 0.008 < one < 0.03
    assert many > 3 * one  # beyond the knee
    assert machine.drafters[0].drafting_s([3], 500.0) < one / 3


def test_costs_that_an_engine_kept_are_a_machine(tmp_path: Path) -> None:
    target = TargetStepTimeModel([(StepShape(r, r), 0.01 + 0.001 * r) for r in (1, 8, 64)], sd=0.1)
    drafts = [
        (DraftShape(n, 1, n, 0.0, fed), 0.002 + 1e-4 * (n + fed)) for n in (1, 8) for fed in (0, 64)
    ]
    known = {"target": target.to_dict(), "drafters": {"d": DrafterCost(drafts, sd=0.1).to_dict()}}
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(known), "utf-8")
    machine = machine_of_costs(path)
    assert machine.target_s(StepShape(8, 8), 8) == pytest.approx(0.018, rel=0.1)
    assert machine.drafters[0].drafting_s([1], 10.0) == pytest.approx(0.0021, rel=0.1)
    assert machine.drafters[0].drafting_s([1] * 8, 10.0) == pytest.approx(0.0028, rel=0.05)
    assert machine.drafters[0].reading_s(64, 10.0) == pytest.approx(0.0064, rel=0.2)
    path.write_text("[]", "utf-8")
    with pytest.raises(ConfigError, match="info --costs"):
        machine_of_costs(path)


@pytest.mark.slow
def test_the_command_compares_lengths_and_control() -> None:
    call = ["demo", "--clients", "1,2", "--output", "20", "--json"]
    done = CliRunner().invoke(command, call)
    assert done.exit_code == 0
    rows = json.loads(done.stdout)["runs"]
    arms = ["off", "k=1", "k=2", "k=5", "control"]
    assert [(row["clients"], row["arm"]) for row in rows] == [
        (n, arm) for n in (1, 2) for arm in arms
    ]
    assert rows[0]["throughput"] == 1.0
    assert rows[3]["throughput"] > 1.5


@pytest.mark.slow
def test_the_command_takes_lengths_by_load() -> None:
    call = ["demo", "--clients", "1,3", "--output", "20", "--json"]
    done = CliRunner().invoke(command, [*call, "--schedule", "[[1,2,2],[3,4096,0]]"])
    assert done.exit_code == 0
    runs = {(row["clients"], row["arm"]): row for row in json.loads(done.stdout)["runs"]}
    assert runs[1, "schedule"]["throughput"] == runs[1, "k=2"]["throughput"] > 1
    # Only while the first or the last are alone is there a draft.
    assert runs[3, "schedule"]["drafting"] < 0.5 < runs[3, "k=2"]["drafting"]


@pytest.mark.slow
def test_the_command_says_what_it_needs() -> None:
    for call, said in (
        ([], "the model to serve"),
        (["demo", "--method", "draft_model"], "plan.draft"),
        (["demo", "--costs", "x"], "no target or device beside it"),
        (["--costs", "x"], "info --costs"),
        (["demo", "--clients", "0"], "whole numbers above 0"),
        (["demo", "--schedule", "16"], "[[first, last, drafts], ...]"),
        (["demo", "--schedule", "[]"], "sizes from 1 upwards"),
        (["demo", "--schedule", "5 to 16"], "JSON: [[first, last, drafts], ...]"),
    ):
        done = CliRunner().invoke(command, call)
        assert isinstance(done.exception, ForetokenError)
        assert said in str(done.exception), call


def test_a_server_adds_its_own_time_to_that_of_steps() -> None:
    traffic = Traffic(classes=(chat(varied=False),), requests=3)
    cost = ServerCost(step_s=0.001, token_s=0.0001, request_s=0.02)
    run = simulate(replace(MACHINE, server=cost), FixedArm(0), traffic, QUIET)
    prompt_s, step_s = 0.010 + 63 * 0.0005, 0.010
    assert run.requests[0].ttft == pytest.approx(0.02 + prompt_s)
    assert run.requests[0].tpot == pytest.approx(step_s + 0.0011)
    each_s = 0.02 + prompt_s + 79 * step_s + 80 * 0.0011
    assert run.seconds == pytest.approx(3 * each_s - 0.0011)
    assert run.full_tokens_per_s == pytest.approx(240 / run.seconds)


def test_what_a_server_adds_is_found_in_what_it_served() -> None:
    """Clients alone and many at once tell steps, tokens and requests apart."""
    cost = ServerCost(step_s=0.0008, token_s=0.00005, request_s=0.004)
    machine = replace(MACHINE, server=cost)
    rounds = []
    for clients, output in ((1, 4), (1, 60), (8, 40), (32, 40)):
        kind = chat(varied=False, output=output)
        run = simulate(
            machine,
            FixedArm(0),
            Traffic(classes=(kind,), requests=6 * clients, clients=clients),
            QUIET,
        )
        alone = len(run.requests) if clients == 1 else 0
        tokens = sum(step.tokens for step in run.steps)
        seconds = sum(step.seconds for step in run.steps)
        rounds.append(WatchedRound(run.seconds, seconds, len(run.steps), tokens, alone))
    found = measured_server_cost(rounds)
    assert found.step_s == pytest.approx(cost.step_s, rel=0.1)
    assert found.token_s == pytest.approx(cost.token_s, rel=0.1)
    assert found.request_s == pytest.approx(cost.request_s, rel=0.1)
    silly = measured_server_cost([WatchedRound(1.0, 1.1, 10, 10, 1)])
    assert silly == ServerCost()


@pytest.mark.slow
def test_drafts_of_a_mixture_are_long_for_one_and_short_for_some() -> None:
    """128 experts, 8 of a row: beside one sequence a draft adds little to what every step reads;
    beside eight each adds experts that nobody reads, and all of them wait for it."""
    cost = MixtureCost(read=ExpertsRead(128, 8), step_s=0.012, row_s=0.0001, expert_s=0.00025)
    machine = replace(MACHINE, target=cost, drafters=(replace(DRAFTER, passes=LineCost(0.0004)),))
    lengths, gains = {}, {}
    for clients in (1, 8):
        traffic = Traffic(classes=(chat(0.5, output=120),), requests=24 * clients, clients=clients)
        off, run = (simulate(machine, arm, traffic) for arm in (FixedArm(0), ControlArm()))
        steps = [one for one in run.steps[len(run.steps) // 3 :] if one.sequences == clients]
        lengths[clients] = sum(one.drafted for one in steps) / (clients * len(steps))
        gains[clients] = run.tokens_per_s / off.tokens_per_s
    assert lengths[1] > 1.4 * lengths[8], lengths
    assert gains[1] > 1.2 and gains[8] > 0.98, gains


def test_a_mixture_tells_what_its_steps_read() -> None:
    read = ExpertsRead(128, 8, (1.0, 0.25, 1.0))
    cost = MixtureCost(read=read, step_s=1.0, row_s=0.1, expert_s=0.01)
    draft, many = StepShape(5, 1), StepShape(5, 5)
    assert cost.with_experts(draft).experts == read.expected(draft) < read.expected(many)
    assert cost.seconds(draft) == pytest.approx(1.5 + 0.01 * read.expected(draft))
    assert cost.seconds(draft._replace(experts=8.0)) == pytest.approx(1.58)


def test_recorded_answers_are_as_long_as_they_may_be() -> None:
    """Whoever decides is told the limit of the request that was recorded."""
    kind, recorded = chat(output=30), RecordedRequest(None, 9, 500)
    traffic = Traffic(classes=(kind,), requests=1, recorded=(recorded,))
    [request] = [one.request(0.0) for one in traffic.draw()]
    assert request.max_tokens == 500 and len(request.prompt_token_ids) == 9
    [drawn] = [one.request(0.0) for one in replace(traffic, recorded=()).draw()]
    assert drawn.max_tokens >= 16 * 30


def test_a_server_goes_on_with_what_it_learnt() -> None:
    """The second run begins at the clock of the first, and is told of from its own beginning."""
    recorded = tuple(RecordedRequest(None, 30, 20 + i) for i in range(12))
    traffic = Traffic(classes=(chat(),), requests=12, recorded=recorded, clients=3)
    serving = SimulatedServing(MACHINE, ControlArm(), QUIET)
    first, second = serving.run(traffic), serving.run(traffic)
    assert {one.number: one.tokens for one in second.requests} == {i: 20 + i for i in range(12)}
    assert min(one.arrival for one in second.requests) == pytest.approx(0.0)
    assert second.steps[0].at < first.seconds
    assert serving.clock == pytest.approx(first.seconds + second.seconds)


def test_what_does_not_load_is_not_simulated() -> None:
    call = ["llama-3.1-70b", "--clients", "1", "--output", "4"]
    result = CliRunner().invoke(command, call)
    assert isinstance(result.exception, ConfigError) and "does not load" in str(result.exception)


SEEDS = 20


@pytest.mark.slow
def test_the_search_is_as_good_as_is_promised() -> None:
    found: list[Rehearsed] = []
    for case in rehearsed_cases():
        answers = SimulatedAnswers(case.case)
        found += [play(case, answers, seed) for seed in range(SEEDS)]
    said = summarize(found)
    assert said.median_share >= 0.97
    assert said.near >= 0.95
    assert said.slower <= 0.01
    assert said.most_minutes <= 60.0
    assert said.as_asked(60.0)
