"""Whether an output that another engine began can go on here.

Asks whoever would have ended it here: `find_ending` for stop ids, stop strings and lengths, the
grammar for what it forbids. Everything else about the ids is believed: which tokens were likely, or
allowed by other parameters, is the other engine's affair.
"""

from dataclasses import replace

from foretoken.errors import ParameterError
from foretoken.runtime.grammar import Grammars
from foretoken.runtime.scheduling.commit import find_ending
from foretoken.runtime.sequence import Sequence
from foretoken.text.streams import detokenizer_of
from foretoken.text.tokenizer import StopMatch, Tokenizer
from foretoken.types import Request

_FIELD = "resume.output_ids"


def with_resumed_text(
    request: Request, tokenizer: Tokenizer | None, grammars: Grammars, max_len: int
) -> Request:
    """The request with `resumed_text`; the same one if it resumes nothing.

    Args:
        request: with its grammar, if it has one.
        tokenizer: of the model; None: there is no text.
        grammars: whose it is.
        max_len: most tokens of a sequence.

    Raises:
        ParameterError: the output ended within the ids, or the grammar forbids one of them.
    """
    ids = request.resumed_ids
    if not ids:
        return request
    detokenizer = detokenizer_of(tokenizer, request.params)

    def find_stop_string(request_id: str, new_ids: tuple[int, ...]) -> StopMatch | None:
        return None if detokenizer is None else detokenizer.feed(new_ids)

    # As if a single step had given all of them.
    fresh = Sequence.of(replace(request, resumed_ids=()))
    ending = find_ending(fresh, ids, max_len, find_stop_string)
    if ending.finish_reason is not None:
        because = "" if ending.stop_reason is None else f" at {ending.stop_reason!r}"
        given = f"{len(ids)} ids, ended by number {ending.num_keep}: {ending.finish_reason}"
        allowed = "an output that goes on; of one that came to its end, say ended"
        raise ParameterError(_FIELD, given + because, allowed)
    grammars.check(request)
    if detokenizer is None:
        return request
    text = detokenizer.text[: detokenizer.stable_length()]
    return replace(request, resumed_text=text)
