"""The losslessness kit: quiet about honest servers, loud about one that samples wrongly."""

import asyncio

import numpy as np
import pytest

from foretoken.lab.client import EndpointConfig, connect
from foretoken.lab.mock_engine import MockLaw
from foretoken.lab.mock_model import MockModel
from foretoken.lab.mock_run import mock_running
from foretoken.lab.mock_server import MockFaults, MockServer
from foretoken.lab.verify import Verified, VerifyPlan, compare_samples, verify

PROMPTS = [f"prompt {i}" for i in range(6)]
QUICK = VerifyPlan(
    max_tokens=12, samples=120, sample_tokens=1, sample_prompts=1, concurrency=32,
    parameters=({"temperature": 1.0},),
)  # fmt: skip
FAST = MockLaw(step_s=0.0005, prefill_s=0.0)


def kit(on: MockServer, plan: VerifyPlan = QUICK) -> Verified:
    """Verify a mock against an honest one."""

    async def main(urls: tuple[str, str]) -> Verified:
        clients = [await connect(EndpointConfig(url=url)) for url in urls]
        found = await verify(clients[0], clients[1], PROMPTS, plan)
        for client in clients:
            await client.close()
        return found

    with mock_running(MockServer(FAST)) as off, mock_running(on) as other:
        return asyncio.run(main((off, other)))


def test_an_honest_server_passes() -> None:
    found = kit(MockServer(MockLaw(step_s=0.0005, prefill_s=0.0, k=3)))
    assert found.lossless
    assert [check.equal for check in found.texts] == [6, 6]
    assert found.distributions[0].p_value > 0.001


def test_a_lossy_server_is_caught() -> None:
    found = kit(MockServer(FAST, MockModel(skew=0.9)))
    assert not found.lossless
    greedy, seeded = found.texts
    assert greedy.different > 0 and seeded.different > 0
    assert "no near-tie" in greedy.examples[0]
    assert not found.distributions[0].passed


def test_refused_parameters_are_told_apart_from_failures() -> None:
    plan = VerifyPlan(max_tokens=4, samples=2, parameters=({"temperature": 1.0, "min_p": 0.1},))
    found = kit(MockServer(FAST, faults=MockFaults(refuse=("min_p",))), plan)
    assert found.distributions[0].refused is not None
    assert "min_p is not supported" in found.distributions[0].refused
    assert found.lossless, "what is refused is no wrong output"


def test_the_permutation_test_keeps_its_level_and_has_power() -> None:
    rng = np.random.default_rng(0)

    def draw(chances: list[float]) -> list[str]:
        return [str(x) for x in rng.choice(4, 150, p=chances)]

    fair = [0.4, 0.3, 0.2, 0.1]
    alarms = sum(compare_samples([[draw(fair), draw(fair)]], seed=i)[2] < 0.05 for i in range(30))
    assert alarms <= 6
    distance, expected, p_value = compare_samples([[draw(fair), draw([0.1, 0.3, 0.2, 0.4])]])
    assert distance > 2 * expected
    assert p_value < 0.01


@pytest.mark.parametrize("same", [["a"] * 5, ["a", "b"]])
def test_equal_samples_are_no_evidence(same: list[str]) -> None:
    assert compare_samples([[same, same]])[2] == 1.0
