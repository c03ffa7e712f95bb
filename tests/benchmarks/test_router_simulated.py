"""The simulation behind "Routing by known prefixes", on a few seconds of the virtual clock."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.outside import module_outside

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    """The benchmark, as a module."""
    yield from module_outside("benchmarks", "router_simulated")


def test_a_conversation_finds_its_pages_again(bench: ModuleType) -> None:
    """One replica: all but the last page of what was said and answered before."""
    machine, user = bench.simulated_machine(), bench.User(bench.Talk(), 0, seed=0)
    replica, now = bench.SimulatedReplica("r", machine, bench.PAGES), 0.0
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
    assert hit == (known - 1) // bench.PAGE * bench.PAGE
    assert replica.view(now).queue_s == 0.0


def test_known_prefixes_are_found_and_nobody_waits_for_ever(bench: ModuleType) -> None:
    talk = bench.Talk(tenants=4, think_s=2.0)
    case = bench.Case(replicas=4, users=8, seconds=24.0, talk=talk)
    served = {policy: bench.play(case, policy, 0) for policy in bench.POLICIES}
    assert served["prefix"] == bench.play(case, "prefix", 0)
    for one in served.values():
        assert one.requests > 50 and one.unanswered == 0 and one.busiest < 2.0
    others = [one for policy, one in served.items() if policy != "prefix"]
    assert served["prefix"].found > max(one.found for one in others) + 0.1
    assert served["prefix"].ttft_p50 < min(one.ttft_p50 for one in others)


def test_the_command_ends_with_one_line_of_json() -> None:
    call = [sys.executable, "router_simulated.py", "--quick", "--policies", "least", "prefix"]
    done = subprocess.run(call, cwd=BENCHMARKS, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert document["benchmark"] == "router_simulated" and document["quick"]
    [case] = document["results"]["cases"]
    assert case["case"]["replicas"] == 2
    assert list(case["starts"]) == ["random", "least", "prefix"]
    assert "busy" not in done.stdout  # nothing is timed
