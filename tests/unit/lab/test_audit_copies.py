"""Copies: the prompt is the truth, and what a model cannot copy by itself is no fault."""

import asyncio

import pytest

from foretoken.lab.audit.asking import Asker, Reply
from foretoken.lab.audit.copies import altered, copy_prompt, identifiers
from foretoken.lab.audit.judging import CheckResult
from foretoken.lab.audit.run import AuditPlan, audit
from tests.marks import slow_but
from tests.mock_server.faults import MockFaults
from tests.mock_server.generator import MockLaw, MockModel
from tests.mock_server.server import MockServer
from tests.unit.lab.in_process import InProcess

TEXTS = [f"prompt {i}: write about what number {i} is good for" for i in range(60)]
COPIES = ("copies", "drawn-copies")


def run(
    faults: MockFaults | None = None,
    *,
    model: MockModel | None = None,
    compared: bool = False,
    prompts: int = 8,
) -> dict[str, CheckResult]:
    """The checks of copies of a mock, without a baseline unless it is `compared`."""
    model = model or MockModel(rounding=0.004)

    async def main() -> tuple[CheckResult, ...]:
        law = MockLaw(step_s=0.0, prefill_s=0.0, k=3)
        on, off = MockServer(law, model, faults), MockServer(law, model)
        off.count = 1 << 20
        plain = Asker(InProcess(off), "mock") if compared else None
        plan = AuditPlan(prompts=prompts, only=COPIES)
        return (await audit(Asker(InProcess(on), "mock"), plain, TEXTS, plan)).checks

    return {result.name: result for result in asyncio.run(main())}


def test_identifiers_are_of_many_kinds_and_never_come_again() -> None:
    words = [word for number in range(40) for word in identifiers(number)]
    assert len(set(words)) == len(words)
    assert not all(word.isascii() for word in words), "several scripts"
    one, other = identifiers(0)[:2]
    assert len(one) == len(other) and sum(x != y for x, y in zip(one, other, strict=True)) == 1


def test_what_came_altered_is_found_line_by_line() -> None:
    words = ("kimi-k3", "a/b.py", "12.5")
    assert copy_prompt(words).endswith(
        "List A\n01 = kimi-k3\n02 = a/b.py\n03 = 12.5\n\nList B\n01 ="
    )
    reply = Reply(body={}, text=" kimi-kw\n02 = a/b.py\n03 = 12", finish_reasons=("length",))
    [found], judged = altered(words, reply)
    assert (found.said, judged) == ("'kimi-k3' came as 'kimi-kw'", 2)
    assert reply.text[found.parts] == "w"
    ended = Reply(body={}, text=" kimi-k3\nThat is all.", finish_reasons=("stop",))
    assert altered(words, ended) == ([], 1), "what is no line of the list is the model's to say"


@pytest.mark.parametrize("compared", [False, True])
@pytest.mark.parametrize("share", slow_but([1.0, 0.3], 0.3))
def test_an_altered_copy_is_caught(share: float, compared: bool) -> None:
    found = run(MockFaults(alter_copy=share), compared=compared, prompts=16)
    copies = found["copies"]
    assert copies.status == "fault" and 0 < copies.altered <= 20 < copies.identifiers, copies
    assert "which the server writes right without drafts" in copies.why
    assert found["drawn-copies"].status == "fault", found["drawn-copies"]


@pytest.mark.parametrize("compared", [False, True])
def test_a_model_that_is_too_small_to_copy_is_not_accused(compared: bool) -> None:
    found = run(model=MockModel(rounding=0.02, weak=0.05), compared=compared)
    assert {one.status for one in found.values()} == {"ok"}, found
    assert found["copies"].altered > 10, "it does alter them, by itself"


def test_a_server_without_log_probabilities_is_judged_by_its_texts() -> None:
    mute = MockFaults(refuse=("logprobs",), alter_copy=1.0)
    alone = run(mute)
    assert alone["copies"].status == "open" and alone["copies"].differs >= 6
    assert alone["drawn-copies"].status == "unasked"
    compared = run(mute, compared=True, prompts=32)
    assert compared["copies"].status == "fault", compared["copies"]
