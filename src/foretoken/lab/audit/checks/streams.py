"""The same greedy request streamed and whole.

A step with several tokens is several tokens of the stream: nothing is lost, nothing comes twice,
and nothing comes after the end.
"""

from foretoken.lab.audit.asking import Case
from foretoken.lab.audit.check import AuditCheck, Look, Sides, unanswered
from foretoken.lab.audit.parting import same_or_near
from foretoken.lab.audit.replies import Reply


async def _look(sides: Sides, case: Case) -> Look:
    whole = await sides.arm.greedy(case)
    streamed = await sides.arm.greedy(case, stream=True)
    missing = unanswered(whole, streamed)
    if missing is not None:
        return missing
    if len(streamed.finish_reasons) != 1:
        return Look(sort="wrong", why=f"{len(streamed.finish_reasons)} finish reasons in a stream")
    if streamed.text_after_end:
        return Look(sort="wrong", why="text after the finish reason")
    found = misses(whole, streamed)
    if found is not None:
        return found
    plain = None if sides.plain is None else await sides.plain.greedy(case)
    return same_or_near(whole, streamed, plain, sides.tie)


def misses(whole: Reply, streamed: Reply) -> Look | None:
    """What of a stream did not come, if both answers are as long as was asked for: rounding may
    change their tokens and not their number. None: nothing is missing."""
    long, came = whole.num_tokens, streamed.num_tokens
    if not whole.finish_reason == streamed.finish_reason == "length":
        return None
    if long is None or came is None or long == came:
        return None
    if whole.text == streamed.text:
        why = f"the text is whole, but the stream tells {came} of {long} tokens"
        return Look(sort="wrong", why=why)
    return Look(sort="wrong", why=f"{came} tokens in the stream, {long} in the whole answer")


STREAMS = AuditCheck(
    name="streams",
    sentence="a stream's text is the whole answer's, with one end",
    look=_look,
    reads_greedy=True,
)
