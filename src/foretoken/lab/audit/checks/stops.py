"""Stop strings that come up in the middle of a step.

The stop string is cut out of the greedy answer, from the end of one token and the beginning of the
next, where it first occurs. Asked again with it, the answer ends just before.
"""

from foretoken.lab.audit.asking import TOPS, Case
from foretoken.lab.audit.check import FINE, AuditCheck, Look, Sides, unanswered
from foretoken.lab.audit.parting import same_or_near
from foretoken.lab.audit.replies import Reply


async def _look(sides: Sides, case: Case) -> Look:
    whole = await sides.arm.greedy(case)
    missing = unanswered(whole)
    if missing is not None:
        return missing
    stop = stop_within(whole)
    if stop is None:
        return Look(sort="unasked", why="the answers only repeat themselves")
    body = {
        "prompt": case.prompt,
        "max_tokens": case.max_tokens,
        "temperature": 0.0,
        "logprobs": TOPS,
        "stop": [stop],
    }
    given = await sides.arm.ask(body)
    missing = unanswered(given)
    if missing is not None:
        return missing
    if stop in given.text:
        return Look(sort="wrong", why=f"the text goes on past the stop string {stop!r}")
    if given.text == whole.text[: whole.text.find(stop)]:
        ended = given.finish_reason == "stop"
        said = Look(sort="wrong", why=f"finish_reason {given.finish_reason!r} after a stop string")
        return FINE if ended else said
    plain = None if sides.plain is None else await sides.plain.greedy(case)
    if same_or_near(whole, given, plain, sides.tie).sort == "fine":
        return Look(sort="fine", why="near-tie")
    return Look(sort="differs", why=f"another text than before with the stop string {stop!r}")


def stop_within(whole: Reply) -> str | None:
    """The last string of two tokens' ends that the answer does not have before."""
    if whole.tokens is None or "".join(whole.tokens) != whole.text:
        middle = len(whole.text) // 2
        found = whole.text[middle : middle + 5]
        return found if len(found) == 5 and whole.text.find(found) == middle else None
    place = len(whole.text)
    for before, after in zip(whole.tokens[-2::-1], whole.tokens[:0:-1], strict=True):
        place -= len(after)
        end = before[-2:]
        stop = end + after[:3]
        if len(stop) >= 3 and stop.strip() and whole.text.find(stop) == place - len(end):
            return stop
    return None


STOPS = AuditCheck(
    name="stops",
    sentence="an answer ends just before its stop string",
    look=_look,
    each=0.6,
    reads_greedy=True,
)
