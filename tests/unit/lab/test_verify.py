"""The losslessness kit: quiet about honest servers, loud about one that samples wrongly."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from foretoken.cli.app import app
from foretoken.lab.http.client import EndpointConfig, connect
from foretoken.lab.measure.lossless import Verified, VerifyPlan, verify
from foretoken.lab.stats.permutation import compare_samples, holm_rejects
from tests.mock_server.faults import MockFaults
from tests.mock_server.generator import MockLaw, MockModel
from tests.mock_server.server import MockServer, mock_running

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
        found = await verify((clients[0], clients[1]), PROMPTS, plan)
        for client in clients:
            await client.close()
        return found

    with mock_running(MockServer(FAST)) as off, mock_running(on) as other:
        return asyncio.run(main((off, other)))


@pytest.mark.slow
def test_an_honest_server_passes() -> None:
    found = kit(MockServer(MockLaw(step_s=0.0005, prefill_s=0.0, k=3)))
    assert found.lossless
    assert [check.equal for check in found.texts] == [6, 6]
    check = found.distributions[0]
    assert check.p_value > 0.001
    assert check.distance > 0.3 * check.expected, "not the same draws in both arms"


@pytest.mark.slow
def test_a_lossy_server_is_caught() -> None:
    found = kit(MockServer(FAST, MockModel(skew=0.9)))
    assert not found.lossless
    greedy, seeded = found.texts
    assert greedy.different > 0 and seeded.different > 0
    assert "no near-tie" in greedy.examples[0]
    assert not found.distributions[0].passed


@pytest.mark.slow
def test_the_width_of_a_near_tie_is_the_servers_own() -> None:
    """A server whose numbers scatter is not accused of what they turn; one of other texts is."""
    scattered = [MockServer(FAST, MockModel(rounding=0.1)) for _ in range(2)]
    plan = VerifyPlan(max_tokens=40, samples=2, sample_tokens=1, parameters=())

    async def main(urls: tuple[str, str]) -> Verified:
        clients = [await connect(EndpointConfig(url=url)) for url in urls]
        # A mock rounds by the number of a request: one arm is a request ahead.
        body = json.dumps({"model": clients[1].info.model, "prompt": "x", "max_tokens": 1}).encode()
        await clients[1].pool.send("POST", "/v1/completions", body, timeout_s=60.0)
        found = await verify((clients[0], clients[1]), [f"text {i}" for i in range(20)], plan)
        for client in clients:
            await client.close()
        return found

    with mock_running(scattered[0]) as off, mock_running(scattered[1]) as on:
        greedy = asyncio.run(main((off, on))).texts[0]
    assert greedy.equal < greedy.compared and greedy.near_tie > 0.02
    assert greedy.excused >= 0.8 * (greedy.compared - greedy.equal), greedy.examples
    assert f"rounding explains {greedy.near_tie:.4f}" in greedy.examples[0]
    with mock_running(MockServer(FAST)) as off:
        with mock_running(MockServer(FAST, MockModel(skew=0.9))) as on:
            greedy = asyncio.run(main((off, on))).texts[0]
    assert greedy.near_tie == 0.02 and greedy.different > 0


@pytest.mark.parametrize("command", ["verify", "audit"])
def test_a_dry_run_writes_nothing(command: str, tmp_path: Path) -> None:
    servers = ["--baseline", "http://off", "--candidate", "http://on"]
    arguments = {"verify": servers, "audit": ["http://on"]}[command]
    out = tmp_path / "out"
    found = CliRunner().invoke(app, ["lab", command, *arguments, "--dry-run", "--out", str(out)])
    assert found.exit_code == 0, found.output
    assert list(tmp_path.iterdir()) == []


def test_refused_parameters_are_told_apart_from_failures() -> None:
    plan = VerifyPlan(max_tokens=4, samples=2, parameters=({"temperature": 1.0, "min_p": 0.1},))
    found = kit(MockServer(FAST, faults=MockFaults(refuse=("min_p",))), plan)
    assert found.distributions[0].refused is not None
    assert "min_p is not supported" in found.distributions[0].refused
    assert found.lossless, "what is refused is no wrong output"


@pytest.mark.slow
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


@given(st.lists(st.floats(0.0001, 1.0), min_size=1, max_size=8), st.floats(0.01, 0.2))
def test_holm_is_between_bonferroni_and_none(p_values: list[float], error: float) -> None:
    rejected = holm_rejects(p_values, error)
    for p_value, no in zip(p_values, rejected, strict=True):
        assert not (no and p_value > error)
        assert no or p_value > error / len(p_values)
    assert sorted(p_values)[: sum(rejected)] == sorted(
        p for p, no in zip(p_values, rejected, strict=True) if no
    ), "the smallest ones"


def run(*options: str) -> Result:
    """`foretoken lab verify`."""
    return CliRunner().invoke(app, ["lab", "verify", *options])


@pytest.mark.slow
def test_the_command_saves_every_check_and_goes_on(tmp_path: Path) -> None:
    prompts, file = tmp_path / "prompts.txt", tmp_path / "verify.yaml"
    prompts.write_text("one\ntwo\nthree\n")
    out = ["--out", str(tmp_path / "out"), "--json"]
    with mock_running(MockServer(FAST)) as off, mock_running(MockServer(FAST)) as on:
        file.write_text(
            f"baseline: {{name: off, url: '{off}'}}\ncandidate: {{name: on, url: '{on}'}}\n"
            f"workload: {{file: '{prompts}', max_tokens: 5}}\n"
            "plan: {prompts: 3, samples: 4, parameters: [{temperature: 1.0}, {temperature: 0.5}]}\n"
        )
        planned = json.loads(run(str(file), "--dry-run", *out).stdout)["checks"]
        assert not (tmp_path / "out").exists()
        first = run(str(file), *out)
    assert first.exit_code == 0, first.output
    assert [(c["check"], c["answers"]) for c in planned] == [
        ("greedy", 6), ("seeded", 6), ("temperature 1.0", 16), ("temperature 0.5", 16),
    ]  # fmt: skip
    assert "lossless as far as tested" in first.stderr
    path = tmp_path / "out" / "verify.json"
    saved = json.loads(path.read_text())
    assert saved["found"] == {k: v for k, v in json.loads(first.stdout).items() if k != "lossless"}
    assert run(str(file), *out).exit_code == 2, "there is a result already"
    # Both servers are gone: what is whole is read.
    assert run(str(file), *out, "--resume").stdout == first.stdout
    other = run(str(file), *out, "--resume", "--samples", "9")
    assert other.exit_code == 2 and "--resume: plan" in other.output
    del saved["found"]["distributions"][1]
    path.write_text(json.dumps(saved))
    assert run(str(file), *out, "--resume").exit_code == 5, "one check is missing, and no server"


@pytest.mark.slow
def test_nothing_compared_is_not_called_different(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n")
    broken = MockServer(FAST, faults=MockFaults(error_every=1))
    with mock_running(MockServer(FAST)) as off, mock_running(broken) as on:
        found = run("--baseline", off, "--candidate", on, "--workload", str(prompts),
                    "--samples", "2", "--out", str(tmp_path / "out"))  # fmt: skip
    assert found.exit_code == 1 and "nothing could be compared" in found.stderr
    assert "the mock broke" in found.stderr
