"""The simulations behind tables of benchmarks/LOG.md, on a few steps: "Costs that are never tried"
and "Routing by known prefixes"."""

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.simulate.drafting import SimulatedDrafting
from foretoken.control.cost import StepShape
from tests.outside import module_outside

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    yield from module_outside("benchmarks", "control_simulated")


@pytest.fixture(scope="module")
def routing() -> Iterator[ModuleType]:
    yield from module_outside("benchmarks", "router_simulated")


def told(bench: ModuleType, spread: float, seed: int, rows: int) -> float:
    """Seconds that control expects of such a step before the first one."""
    arm = bench.MistimedControl(spread=spread, seed=seed)
    control = arm.build(bench.MACHINE, SimulatedDrafting(bench.MACHINE).missing)
    [found] = [one for one in control.step_by_rows() if one["rows"] == rows]
    return float(found["seconds"])


def test_starts_are_wrong_by_the_spread(bench: ModuleType) -> None:
    true = bench.PASSES.seconds(StepShape(64))
    right = [told(bench, 0.0, seed, 64) / true for seed in range(6)]
    wrong = [told(bench, 0.8, seed, 64) / true for seed in range(6)]
    assert max(right) / min(right) < 1.3
    assert max(wrong) / min(wrong) > 2.0


def test_a_start_is_the_same_each_time_and_control_is_one_of_its_arms(bench: ModuleType) -> None:
    case = bench.Case(in_flight=2, steps=80)
    start = bench.play(case, 3)
    assert start == bench.play(case, 3) != bench.play(case, 4)
    assert start.best >= 1.0 and 0.5 < start.of_best < 1.5
    assert start.of_best == pytest.approx(start.control / start.best)


def test_clients_are_busy_to_the_end(bench: ModuleType) -> None:
    """There are more requests than the tokens that are counted."""
    for case in bench.CASES:
        lengths = [one.output for one in case.traffic(0).recorded]
        assert sum(lengths) > case.steps * case.in_flight + case.in_flight * bench.LONGEST
        assert min(lengths) >= bench.SHORTEST and max(lengths) <= bench.LONGEST


def test_the_documents_rows_are_the_benchmarks(bench: ModuleType) -> None:
    written = (BENCHMARKS / "LOG.md").read_text("utf-8")
    lost = [case for case in bench.CASES if bench.named(case) not in written]
    assert not lost, "put the table of benchmarks/control_simulated.py in benchmarks/LOG.md"


def test_a_conversation_finds_its_pages_again(routing: ModuleType) -> None:
    """One replica: all but the last page of what was said and answered before."""
    machine, user = routing.simulated_machine(), routing.User(routing.Talk(), 0, seed=0)
    replica, now = routing.SimulatedReplica("r", machine, routing.PAGES), 0.0
    first = user.turn()
    second = first._replace(prompt=first.prompt + first.answer + (1, 2, 3), answer=(7, 8))
    for number, turn in enumerate((first, second)):
        replica.add(str(number), turn, now)
        tokens = 0
        while (ends := replica.begin(now)) is not None:
            view = replica.view(now)
            assert ends > now and view.queue_s > 0.0 and view.queued + view.running == 1
            now = ends
            tokens += sum(one.tokens for one in replica.end(now))
        assert tokens == len(turn.answer)
    hit, asked = replica.prompt_tokens
    assert asked == len(first.prompt) + len(second.prompt)
    known = len(first.prompt) + len(first.answer)
    # The last token of an answer is never computed.
    assert hit == (known - 1) // routing.PAGE * routing.PAGE
    assert replica.view(now).queue_s == 0.0


def test_users_say_the_same_whatever_happens(routing: ModuleType) -> None:
    talk = routing.Talk(tenants=3, turns=3.0)
    turns, same, other = (
        [user.turn() for _ in range(12)]
        for user in (routing.User(talk, number, seed=1) for number in (4, 4, 5))
    )
    assert turns == same != other
    later = [(a, b) for a, b in pairwise(turns) if b.prompt[: len(a.prompt)] == a.prompt]
    assert 0 < len(later) < 11
    for before, after in later:
        assert after.prompt[len(before.prompt) :][: len(before.answer)] == before.answer
    assert len({turn.prompt[:200] for turn in turns}) == 1  # the tenant's instructions


def test_one_replica_is_the_same_by_any_policy(routing: ModuleType) -> None:
    case = routing.Case(replicas=1, users=6, seconds=15.0)
    assert len({routing.play(case, policy, 1) for policy in routing.POLICIES}) == 1


def test_known_prefixes_are_found_and_nobody_waits_for_ever(routing: ModuleType) -> None:
    talk = routing.Talk(tenants=4, think_s=2.0)
    case = routing.Case(replicas=4, users=8, seconds=24.0, talk=talk)
    served = {policy: routing.play(case, policy, 0) for policy in routing.POLICIES}
    assert served["prefix"] == routing.play(case, "prefix", 0)
    for one in served.values():
        assert one.requests > 50 and one.unanswered == 0 and one.busiest < 2.0
    others = [one for policy, one in served.items() if policy != "prefix"]
    assert served["prefix"].found > max(one.found for one in others) + 0.1
    assert served["prefix"].ttft_p50 < min(one.ttft_p50 for one in others)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("control_simulated", ["--in-flight", "2", "4"]),
        ("router_simulated", ["--policies", "least", "prefix"]),
    ],
)
def test_the_command_ends_with_one_line_of_json(name: str, options: list[str]) -> None:
    call = [sys.executable, f"{name}.py", "--quick", *options]
    done = subprocess.run(call, cwd=BENCHMARKS, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert document["benchmark"] == name and document["quick"]
    assert "busy" not in done.stdout  # nothing is timed
    cases = document["results"]["cases"]
    if name == "control_simulated":
        assert [one["case"]["in_flight"] for one in cases] == [2, 4]
        assert all(one["starts"][0]["best"] >= 1.0 for one in cases)
    else:
        [case] = cases
        assert case["case"]["replicas"] == 2
        assert list(case["starts"]) == ["random", "least", "prefix"]
