"""Control on a virtual clock: never slower than off, near the best fixed length, on any machine.

The cases of `benchmarks/never_slower.py`, simulated: the real scheduler and the real control, on
the curve of a small CPU and on those of data sheets. Bars are lower than in the benchmark: runs
here are short, so that what is learnt at the start counts for more.
"""

import statistics
from dataclasses import replace

import pytest

from benchmarks.simulate.arms import ControlArm, FixedArm, SimulatedArm
from benchmarks.simulate.compare import compare, ratio_after, window_ratios
from benchmarks.simulate.machine import (
    LineCost,
    SimulatedDrafter,
    SimulatedMachine,
    TableCost,
    planned_machine,
)
from benchmarks.simulate.serving import ServingLimits, SimulatedRun, simulate
from benchmarks.simulate.traffic import DraftChance, RequestClass, Traffic
from foretoken.lab.plan.setup import PlanSettings

pytestmark = pytest.mark.slow

CPU = SimulatedMachine(
    target=TableCost(
        ((1, 0.030), (4, 0.033), (6, 0.036), (8, 0.042), (16, 0.066), (64, 0.200), (2048, 5.9)),
        key_s=2e-7,
    ),
    drafters=(
        SimulatedDrafter(
            name="draft",
            passes=TableCost(
                ((1, 0.0022), (4, 0.0025), (8, 0.003), (16, 0.0045), (64, 0.0135), (2048, 0.4)),
                key_s=3e-8,
            ),
            call_s=3e-4,
        ),
    ),
    host_s=5e-4,
)
"""About a billion weights in int8 on two cores, and a draft model of a tenth: rows cost from the
eighth on."""
LIMITS = ServingLimits(noise=0.03)


def h100(count: int, target: str = "meta-llama/Llama-3.3-70B-Instruct") -> SimulatedMachine:
    """A target and a draft model on so many devices."""
    draft = "Qwen/Qwen3-0.6B" if "Qwen" in target else "meta-llama/Llama-3.2-1B-Instruct"
    settings = PlanSettings(
        target=target, draft=draft, count=count, draft_tensor_parallel_size=1, engine="foretoken",
        num_speculative_tokens=5,
    )  # fmt: skip
    return planned_machine(settings)


def requests(chance: float, **changes: object) -> RequestClass:
    """Chats whose drafts are right so often, some more and some less."""
    law = DraftChance(chance=chance, spread=0.4)
    kind = RequestClass(prompt=100, output=160, chances={"draft": law})
    return replace(kind, **changes)  # type: ignore[arg-type]


def runs(
    machine: SimulatedMachine,
    traffic: Traffic,
    *fixed: int,
    tokens: int = 0,
    limits: ServingLimits = LIMITS,
) -> tuple[SimulatedRun, SimulatedRun, SimulatedRun]:
    """Off, the best of these fixed lengths, and control; all end after so many tokens."""
    limits = replace(limits, most_tokens=tokens)
    arms: list[SimulatedArm] = [FixedArm(0), *(FixedArm(k) for k in fixed), ControlArm()]
    off, *others, control = (simulate(machine, arm, traffic, limits) for arm in arms)
    return off, max([off, *others], key=lambda run: run.tokens_per_s), control


@pytest.mark.parametrize("clients", [1, 2, 4, 8, 16, 32, 64])
def test_steady_load_is_near_the_better_of_off_and_the_best_length(clients: int) -> None:
    traffic = Traffic(classes=(requests(0.75),), requests=40 * clients, clients=clients)
    off, best, control = runs(CPU, traffic, 1, 2, 5, tokens=max(3000, 240 * clients))
    started = max(500, 80 * clients)
    assert ratio_after(control, off, started) > 0.965
    assert ratio_after(control, best, started) > 0.94


def test_beyond_saturation_nobody_waits_longer() -> None:
    traffic = Traffic(classes=(requests(0.75),), requests=140, clients=90)
    off, _, control = runs(CPU, traffic, limits=replace(LIMITS, max_num_seqs=32))
    found = compare(control, off, skip=90)
    assert found.throughput > 0.98
    assert found.ttft_p50 > 0.97


@pytest.mark.parametrize("clients", [1, 16, 64])
def test_70b_on_four_gpus(clients: int) -> None:
    traffic = Traffic(classes=(requests(0.7),), requests=40 * clients, clients=clients)
    off, best, control = runs(h100(4), traffic, 2, 5, tokens=max(1500, 60 * clients))
    assert compare(control, off).throughput > 1.15
    assert compare(control, best).throughput > 0.95


def test_a_fixed_length_slows_a_busy_gpu_down_and_control_does_not() -> None:
    """The slowdown of 1.4 times and more that is published for fixed lengths at high load."""
    limits = ServingLimits(
        noise=0.03, max_num_seqs=256, max_num_batched_tokens=8192, num_pages=16384
    )
    traffic = Traffic(classes=(requests(0.6),), requests=2000, clients=256)
    off, _, control = runs(h100(4), traffic, tokens=30_000, limits=limits)
    fixed = simulate(h100(4), FixedArm(5), traffic, replace(limits, most_tokens=30_000))
    assert compare(fixed, off).throughput < 1 / 1.4
    assert ratio_after(control, off, 15_000) > 0.96


@pytest.mark.parametrize("clients", [1, 8, 48])
def test_a_mixture_of_experts_whose_verification_is_not_flat(clients: int) -> None:
    traffic = Traffic(classes=(requests(0.7),), requests=40 * clients, clients=clients)
    machine = h100(2, "Qwen/Qwen3-30B-A3B")
    off, best, control = runs(machine, traffic, 1, 2, 3, tokens=max(1500, 100 * clients))
    assert compare(control, off).throughput > 1.0
    assert compare(control, best).throughput > 0.94


@pytest.mark.parametrize("clients", [1, 4, 16])
def test_short_answers_after_long_prompts(clients: int) -> None:
    """To read 2,000 tokens does not pay for a draft model that has 32 to save."""
    kind = RequestClass(prompt=2000, output=32, chances={"draft": DraftChance(chance=0.8)})
    traffic = Traffic(classes=(kind,), requests=24 + clients, clients=clients)
    off, _, control = runs(CPU, traffic)
    found = compare(control, off, skip=clients)
    assert found.throughput > 0.98
    assert found.ttft_p50 > 0.97


@pytest.mark.parametrize("clients", [1, 8, 64])
def test_a_useless_drafter_costs_next_to_nothing(clients: int) -> None:
    traffic = Traffic(classes=(requests(0.02),), requests=20 * clients, clients=clients)
    off, _, control = runs(CPU, traffic, tokens=max(2500, 80 * clients))
    assert compare(control, off).throughput > 0.97


@pytest.mark.parametrize("clients", [2, 8])
def test_two_classes_and_neither_loses(clients: int) -> None:
    good = requests(0.95, name="code", salt="a")
    bad = requests(0.2, name="prose", salt="b")
    traffic = Traffic(classes=(good, bad), requests=14 * clients, clients=clients)
    off, _, control = runs(CPU, traffic)
    assert compare(control, off).throughput > 0.98
    for kind in ("code", "prose"):
        assert compare(control, off, kind, skip=clients).tpot_p50 > 0.94


def test_two_kinds_of_requests_that_nobody_can_tell_apart() -> None:
    """Of one class, on a machine where rows cost from the second on: whoever is new may be of the
    kind that loses by drafts, and each that does shows it at the cost of a step."""
    rows = ((1, 0.0016), (8, 0.0067), (16, 0.0093), (40, 0.016), (128, 0.045), (2048, 0.7))
    cheap = SimulatedDrafter(name="draft", passes=TableCost(((1, 1e-4), (2048, 1e-3))), call_s=1e-4)
    machine = SimulatedMachine(target=TableCost(rows), drafters=(cheap,), host_s=2e-4)
    law = {"good": DraftChance(chance=0.95), "poor": DraftChance(chance=0.2)}
    kinds = tuple(
        requests(0.0, name=name, prompt=64, output=64, chances={"draft": chance})
        for name, chance in law.items()
    )
    traffic = Traffic(classes=kinds, requests=400, clients=8)
    off, _, control = runs(machine, traffic, limits=replace(LIMITS, noise=0.05))
    poor, good = (compare(control, off, name, skip=60) for name in ("poor", "good"))
    assert poor.tpot_p99 > 0.93
    assert good.tpot_p50 > 1.0


@pytest.mark.parametrize("clients", [1, 4])
def test_acceptance_that_collapses_and_comes_back(clients: int) -> None:
    law = DraftChance(chance=0.9, later=((400, 0.0), (800, 0.9)))
    kind = RequestClass(prompt=50, output=1200, varied=False, chances={"draft": law})
    traffic = Traffic(classes=(kind,), requests=clients, clients=clients)
    off, _, control = runs(CPU, traffic)
    ratios = window_ratios(control, off, 100 * clients)
    # A trial of all sequences now and then falls into one of the three windows.
    before, during, after = ratios[2], statistics.mean(ratios[5:8]), ratios[10]
    assert before > 1.2
    assert during > 0.96
    assert after > 0.9 * before


@pytest.mark.parametrize("clients", [1, 16, 64])
def test_all_json(clients: int) -> None:
    traffic = Traffic(
        classes=(requests(0.6, forced=0.4),), requests=12 + 6 * clients, clients=clients
    )
    off, _, control = runs(CPU, traffic, tokens=max(1500, 160 * clients))
    assert ratio_after(control, off, 50 * clients) > 0.92


def test_clients_that_all_come_at_once_and_go() -> None:
    def clients(now: float) -> int:
        return 64 if 20.0 < now < 80.0 else 1

    def written(run: SimulatedRun, begin: float, end: float) -> int:
        return sum(step.tokens for step in run.steps if begin < step.at <= end)

    traffic = Traffic(classes=(requests(0.8),), requests=400, clients=clients)
    off, _, control = runs(CPU, traffic, tokens=12_000)
    for begin, end, least in ((0.0, 20.0, 1.5), (20.0, 80.0, 0.91)):
        assert written(control, begin, end) > least * written(off, begin, end)


@pytest.mark.parametrize("clients", [1, 4])
def test_long_contexts(clients: int) -> None:
    kind = requests(0.8, prompt=8000, output=300, varied=False)
    traffic = Traffic(classes=(kind,), requests=2 * clients, clients=clients)
    off, _, control = runs(CPU, traffic)
    assert compare(control, off).throughput > 0.98


def test_several_drafters_are_near_the_best_of_them() -> None:
    head = SimulatedDrafter(name="head", passes=LineCost(8e-4, 2e-5), max_drafts=3, reads=False)
    look = SimulatedDrafter(name="look", looks_up=True, reads=False, max_drafts=8, call_s=2e-4)
    chances = {
        "draft": DraftChance(chance=0.8),
        "head": DraftChance(chance=0.6),
        "look": DraftChance(chance=0.95, found=0.5),
    }
    machine = replace(CPU, drafters=(*CPU.drafters, head, look))
    kind = RequestClass(prompt=100, output=160, chances=chances)
    traffic = Traffic(classes=(kind,), requests=60, clients=2)
    all_three = simulate(machine, ControlArm(), traffic, LIMITS)
    for one in machine.drafters:
        alone = simulate(replace(CPU, drafters=(one,)), ControlArm(), traffic, LIMITS)
        assert compare(all_three, alone).throughput > 0.85


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_a_wrong_idea_of_the_machine_is_put_right(factor: float) -> None:
    traffic = Traffic(classes=(requests(0.75),), requests=200, clients=16)
    off = simulate(CPU, FixedArm(0), traffic, LIMITS)
    wrong = simulate(CPU, ControlArm(error=0.4, factor=factor), traffic, LIMITS)
    assert compare(wrong, off).throughput > 0.97
