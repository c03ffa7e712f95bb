"""The audit finds every seeded fault, and leaves right servers alone."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from foretoken.lab.audit.asking import Asker, OneAtATime, Reply, cases_of
from foretoken.lab.audit.checks import CHECKS, misses
from foretoken.lab.audit.judging import CheckResult
from foretoken.lab.audit.rounding import divergence, measure_near_tie, same
from foretoken.lab.audit.run import AuditPlan, Findings, Hooks, audit
from foretoken.lab.http.timed import Answer
from tests.marks import slow_but
from tests.mock_server.faults import SHARES, MockFaults, faults_of
from tests.mock_server.generator import MockLaw, MockModel
from tests.mock_server.server import MockServer
from tests.unit.lab.in_process import InProcess

TEXTS = [f"prompt {i}: write about what number {i} is good for" for i in range(60)]
AT_ONCE = MockLaw(step_s=0.0, prefill_s=0.0, k=3, seed=0)
FINDS = {
    "skip_verification": "greedy",
    "leak_placeholder": "placeholders",
    "drop_grammar": "grammars",
    "lose_prefix": "prefixes",
    "miss_stop": "stops",
    "wrong_logprobs": "logprobs",
    "unscored_drafts": "logprobs",
    "ignore_seed": "seeds",
    "tear_stream": "streams",
    "break_tools": "tools",
    "miscount": "usage",
    "alter_copy": "copies",
}
UNDER_PRESSURE = {
    "leak_page", "garble_loaded", "wrong_depth", "stuck_acceptance", "sure_acceptance",
}  # fmt: skip
"""Faults that test_audit_pressure.py and test_audit_drafts.py find."""
USUAL = tuple(check.name for check in CHECKS)

QUICK = AuditPlan(samples=8, parameters=({"temperature": 1.0},), only=USUAL)
"""The usual one, with few draws."""


def run(
    faults: MockFaults | None = None,
    plan: AuditPlan = QUICK,
    *,
    model: MockModel | None = None,
    other: MockModel | None = None,
    ids: bool = True,
) -> dict[str, CheckResult]:
    """Audit a mock with faults, or of an `other` model, against one without."""
    model = model or MockModel(rounding=0.004)
    own = {"return_token_ids": ids}

    async def main() -> tuple[CheckResult, ...]:
        on, off = MockServer(AT_ONCE, other or model, faults), MockServer(AT_ONCE, model)
        off.count = 1 << 20  # luck of its own
        arm = Asker(InProcess(on), "mock", extra_body=own)
        plain = Asker(InProcess(off), "mock", extra_body=own)
        return (await audit(arm, plain, TEXTS, plan)).checks

    return {result.name: result for result in asyncio.run(main())}


def test_every_fault_has_its_check() -> None:
    assert FINDS.keys() | UNDER_PRESSURE == set(SHARES)
    others = {"verification", "sampling", "drawn-copies"}
    assert set(FINDS.values()) | others == {check.name for check in CHECKS}


@pytest.mark.parametrize("share", slow_but([1.0, 0.3, 0.1], 1.0))
@pytest.mark.parametrize("fault", slow_but(FINDS, "miscount"))
def test_a_fault_is_caught(fault: str, share: float) -> None:
    found = run(faults_of([f"{fault}={share}"]), plan_for(fault, share))
    assert found[FINDS[fault]].status == "fault", found[FINDS[fault]]


def plan_for(fault: str, share: float) -> AuditPlan:
    """The usual plan; enough prompts of one check for a fault of one answer in ten: 32 answers
    miss it with a chance of 0.9**32 = 3 %. What every answer is read for needs no more."""
    if share > 0.1 or FINDS[fault] in ("placeholders", "usage"):
        return QUICK
    return AuditPlan(prompts=128, only=(FINDS[fault],))


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 0.5, 0.3])
def test_unverified_draws_are_caught(share: float) -> None:
    found = run(MockFaults(skip_verification=share), AuditPlan(only=("verification",)))
    assert found["verification"].status == "fault", found["verification"]
    assert re.search(
        r"scores are -.* plain decoding's own .*: '.*' has a log-probability \d",
        found["verification"].why,
    )


@pytest.mark.slow
@pytest.mark.parametrize("skew", [0.0, 0.9])
def test_draws_of_another_model_are_caught(skew: float) -> None:
    """And those of the same model are no evidence, whatever was drawn."""
    plan = AuditPlan(samples=100, only=("sampling",))
    found = run(plan=plan, model=MockModel(), other=MockModel(skew=skew))["sampling"]
    assert (found.status, found.answers) == ("fault" if skew else "ok", 5), found
    assert not skew or re.search(r"temperature 1.0: distance 0.\d+ \(chance", found.examples[0])


def test_sampling_that_a_server_refuses_is_told_apart_from_a_fault() -> None:
    sets = ({"temperature": 1.0}, {"temperature": 1.0, "min_p": 0.1})
    plan = AuditPlan(samples=4, parameters=sets, only=("sampling",))
    found = run(MockFaults(refuse=("min_p",)), plan)["sampling"]
    assert found.status == "ok" and "min_p is not supported" in found.untested[0]


def test_a_server_without_log_probabilities_is_compared_by_text() -> None:
    """Texts are what is promised; that logprobs are refused is no reason not to look at them."""
    mute = MockFaults(refuse=("logprobs",))
    found = run(mute, AuditPlan(prompts=8, only=("greedy", "logprobs")))
    assert (found["greedy"].status, found["greedy"].answers) == ("ok", 8)
    assert found["logprobs"].status == "unasked"
    other = run(mute, AuditPlan(only=("greedy",)), other=MockModel(skew=0.9))
    assert other["greedy"].status == "fault"


def test_what_a_stream_misses_is_told_apart() -> None:
    whole = Reply(body={}, text="a b c", tokens=("a", " b", " c"), finish_reasons=("length",))
    assert misses(whole, whole) is None
    assert misses(whole, replace(whole, tokens=("a",))) is None, "rows left out count nothing"
    ids = replace(whole, token_ids=(1, 2, 3))
    untold = misses(ids, replace(ids, token_ids=(1,)))
    assert untold is not None and "the stream tells 1 of 3 tokens" in untold.why
    torn = misses(whole, replace(whole, text="a c", tokens=("a", " c")))
    assert torn is not None and torn.why == "2 tokens in the stream, 3 in the whole answer"
    assert misses(whole, replace(whole, tokens=("a",), finish_reasons=("stop",))) is None


@pytest.mark.slow
def test_unscored_drafts_are_no_lost_tokens() -> None:
    """A server without token ids that scores no draft: its texts, streams and counts are right."""
    found = run(faults_of(["unscored_drafts"]), replace(QUICK, prompts=8), ids=False)
    assert {name for name, one in found.items() if one.status == "fault"} == {"logprobs"}, found
    assert "without the likeliest tokens: 0.000" in found["logprobs"].why
    assert found["streams"].status == found["usage"].status == "ok"


def test_texts_without_tokens_part_at_the_likeliest_tokens() -> None:
    first = Reply(
        body={},
        text="a b c",
        tokens=("a", " b", " c"),
        logprobs=(0.0, -0.7, -0.1),
        tops=({"a": 0.0}, {" b": -0.7, " d": -0.71}, {" c": -0.1, " e": -3.0}),
    )
    near = divergence(first, Reply(body={}, text="a d c"))
    assert near is not None and near[0] == pytest.approx(0.01)
    far = divergence(first, Reply(body={}, text="a b e", tokens=("a",)))
    assert far is not None and far[0] == pytest.approx(2.9)
    unknown = divergence(first, Reply(body={}, text="a x"))
    assert unknown is not None and unknown[0] is None


class _Rounded:
    """A server whose logits stand on a grid; `turned` has the other of two next to each other."""

    def __init__(self, step: float, *, turned: bool) -> None:
        self._step, self._turned = step, turned

    async def send(self, method: str, path: str, body: bytes = b"", *, timeout_s: float) -> Answer:
        rng = np.random.default_rng(len(json.loads(body)["prompt"]))
        tokens, tops = [], []
        for place in range(8):
            logits = 20.0 - np.sort(rng.uniform(0.3, 6.0, 5))
            logits = np.round(logits / self._step) * self._step if self._step else logits
            words = [f" w{place}.{rank}" for rank in range(5)]
            if place == 7:
                logits[1] = logits[0] - 0.125
                words[:2] = words[:2][::-1] if self._turned else words[:2]
            logs = logits - np.log(np.exp(logits).sum())
            told = [float(np.float32(value)) for value in logs]
            tops.append(dict(zip(words, told, strict=True)))
            tokens.append(words[0])
        own = [top[token] for token, top in zip(tokens, tops, strict=True)]
        logprobs = {"tokens": tokens, "token_logprobs": own, "top_logprobs": tops}
        choice = {"text": "".join(tokens), "logprobs": logprobs, "finish_reason": "length"}
        whole = json.dumps({"choices": [choice]}).encode()
        return Answer(200, (), ((0.0, whole),), 0.0, 0.0)


@pytest.mark.parametrize(("step", "width", "sort"), [(0.125, 0.25, "fine"), (0.0, 0.02, "differs")])
def test_what_a_grid_of_logits_explains_is_a_near_tie(step: float, width: float, sort: str) -> None:
    """Both servers answer the same whenever they are asked, so only the grid tells the width."""
    cases = cases_of(TEXTS, 8, 8)

    async def main() -> tuple[float, Reply, Reply]:
        arm, plain = (Asker(_Rounded(step, turned=turned), "m") for turned in (True, False))
        tie = await measure_near_tie(arm, plain, cases)
        return tie, await plain.greedy(cases[0]), await arm.greedy(cases[0])

    tie, expected, given = asyncio.run(main())
    assert expected.text != given.text
    assert tie == pytest.approx(width)
    assert same(expected, given, tie).sort == sort


def test_servers_of_one_machine_are_asked_in_turns() -> None:
    running: set[str] = set()
    most: list[int] = []

    async def request(turns: OneAtATime, who: str) -> None:
        async with turns.of(who):
            running.add(who)
            most.append(len(running))
            await asyncio.sleep(0.001)
            running.discard(who)

    async def main() -> None:
        turns = OneAtATime()
        gone = asyncio.create_task(request(turns, "a"))
        asking = [request(turns, "ab"[i % 2]) for i in range(20)]
        asyncio.get_running_loop().call_later(0.0005, gone.cancel)
        await asyncio.wait_for(asyncio.gather(*asking), timeout=5)

    asyncio.run(main())
    assert len(most) >= 20
    assert set(most) == {1}


@pytest.mark.slow
def test_consequences_are_told_from_faults() -> None:
    found = run(MockFaults(skip_verification=0.3, break_tools=1.0))
    faulty = {name for name, result in found.items() if result.status == "fault"}
    assert faulty == {"greedy", "verification", "tools"}, found["verification"]
    assert "consequence of greedy" in found["streams"].why


@pytest.mark.parametrize("rounding", slow_but([0.0, 0.004, 0.02]))
def test_a_right_server_passes(rounding: float) -> None:
    found = run(model=MockModel(rounding=rounding))
    assert {result.status for result in found.values()} == {"ok"}, found


def test_prompts_that_go_on_are_as_long_for_both_sides() -> None:
    """A different length is a different share in the cache, which many looks would show."""
    found = run(plan=AuditPlan(only=("prefixes",)))["prefixes"]
    assert found.p_value == 1.0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_false_alarms_are_rare() -> None:
    """300 right servers, each with a language, rounding and weakness of its own; one of them may be
    accused. Every check is made, those under load and at each depth too."""
    accused = []
    for seed in range(300):
        found = clean_run(seed)
        accused += [one for one in found.checks if one.status == "fault"]
    assert len(accused) <= 1, accused


def clean_run(seed: int) -> Findings:
    """An audit of a right server, compared with one of other luck."""
    model = MockModel(seed, rounding=0.01 * (seed % 4), weak=0.004 * (seed % 3))
    on, off = MockServer(AT_ONCE, model), MockServer(AT_ONCE, model)
    on.count, off.count = 1_000 * seed, 1 << 20
    clock = iter(range(10**9))

    @asynccontextmanager
    async def at_depth(length: int) -> AsyncIterator[Asker]:
        fields = {"speculation": {"num_speculative_tokens": length}}
        yield Asker(InProcess(on), "mock", extra_body=fields)

    async def main() -> Findings:
        plan = replace(QUICK, prompts=16, only=(), depths=(3, 5), minutes=0.1)
        arm, plain = (Asker(InProcess(server), "mock") for server in (on, off))
        hooks = Hooks(clock=lambda: float(next(clock)))
        return await audit(arm, plain, TEXTS, plan, at_depth=at_depth, hooks=hooks)

    return asyncio.run(main())
