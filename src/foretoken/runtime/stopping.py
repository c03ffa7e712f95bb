"""When a sequence ends: stop ids, stop strings, max_tokens, the context limit.

Looks at the new tokens of one step only. A stop beats a length limit at the same token, and a
stop string beats a stop id that comes after it. Text is the business of the passed function.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from foretoken.runtime.sequence import Sequence
from foretoken.text.tokenizer import StopMatch
from foretoken.types import FinishReason

StopFinder: TypeAlias = Callable[[str, tuple[int, ...]], StopMatch | None]
"""(request id, new ids) -> the first match. Called once per step and request with the new ids
that make text: those kept so far, without a final stop id; never with none. It is its affair
that stop strings count only after min_tokens."""


class Ending(NamedTuple):
    """How many of the new tokens stay, and whether and why the sequence ends with them."""

    num_keep: int
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


def never_stops(request_id: str, new_ids: tuple[int, ...]) -> StopMatch | None:
    """A `StopFinder` for requests without stop strings."""
    return None


def _first_stop_id(sequence: Sequence, new_ids: tuple[int, ...]) -> int | None:
    """Index of the first new token that is a stop id and not before min_tokens."""
    stop_ids = sequence.request.stop_ids
    if not stop_ids:
        return None
    # The token at this index is number `num_output + index + 1` of the output.
    earliest = sequence.request.params.min_tokens - sequence.num_output - 1
    for index, token in enumerate(new_ids):
        if token in stop_ids and index >= earliest:
            return index
    return None


def find_ending(
    sequence: Sequence, new_ids: tuple[int, ...], max_len: int, find_stop_string: StopFinder
) -> Ending:
    """Decide how many of `new_ids` the sequence keeps. `sequence` is not changed.

    `stop_reason` is the stop string, or the id if it is one of stop_token_ids, or None for EOS.
    """
    request = sequence.request
    room = min(request.max_tokens - sequence.num_output, max_len - sequence.num_tokens)
    assert room > 0, f"{request.request_id} has room for {room} tokens"
    ending = Ending(len(new_ids))
    if len(new_ids) >= room:
        ending = Ending(room, FinishReason.LENGTH)
    textual = new_ids[: ending.num_keep]
    index = _first_stop_id(sequence, textual)
    if index is not None:
        token, textual = new_ids[index], new_ids[:index]
        named = token in (request.params.stop_token_ids or ())
        ending = Ending(index + 1, FinishReason.STOP, token if named else None)
    match = find_stop_string(request.request_id, textual) if textual else None
    if match is not None:
        assert 1 <= match.num_keep <= len(textual), (match.num_keep, len(textual))
        ending = Ending(match.num_keep, FinishReason.STOP, match.stop)
    return ending
