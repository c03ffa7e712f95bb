"""The growing texts of all live requests: one detokenizer each, shared by scheduler and engine.

The scheduler asks for stop strings while it commits; the engine then collects what has become
final. Knows nothing about steps.
"""

from dataclasses import replace

from foretoken.text.tokenizer import Detokenizer, StopMatch, TextOptions, Tokenizer
from foretoken.types import FinishReason, Output, Request, SamplingParams


def detokenizer_of(tokenizer: Tokenizer | None, params: SamplingParams) -> Detokenizer | None:
    """The text of one output with these parameters; None if it wants none and needs none."""
    if tokenizer is None or not (params.detokenize or params.stop):
        return None
    options = TextOptions(
        skip_special_tokens=params.skip_special_tokens,
        stop=tuple(params.stop or ()),
        include_stop_str=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
    )
    return tokenizer.stream(options)


class TextStreams:
    """Text by request id; requests that want no text have none."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Without a tokenizer every request is without text."""
        self._tokenizer = tokenizer
        self._streams: dict[str, Detokenizer] = {}

    def open(self, request: Request) -> None:
        """Start the text of a request that wants text or has stop strings; what it resumes has been
        given out elsewhere."""
        params = request.params
        detokenizer = detokenizer_of(self._tokenizer, params)
        if detokenizer is None:
            return
        if request.resumed_ids:
            match = detokenizer.feed(request.resumed_ids)
            assert match is None, f"{request.request_id} resumes an output that ended with {match}"
            detokenizer.skip(len(request.resumed_text))
        self._streams[request.request_id] = detokenizer

    def find_stop_string(self, request_id: str, new_ids: tuple[int, ...]) -> StopMatch | None:
        """Add new tokens to a request's text; the first stop string in it, if any."""
        stream = self._streams.get(request_id)
        return None if stream is None else stream.feed(new_ids)

    def advance(self, output: Output) -> Output:
        """The same output with the text that has become final; closes an ended request."""
        stream = self._streams.get(output.request_id)
        if stream is None:
            return output
        if output.finish_reason is not None:
            if stream.options.include_stop_str and _ended_by_id(output):
                stream.feed(output.new_token_ids[-1:])
            stream.finish()
            del self._streams[output.request_id]
        pieces = stream.take_pieces(len(output.new_token_ids))
        return replace(output, text="".join(pieces), text_pieces=pieces)

    def drop(self, request_id: str) -> None:
        """Forget a request's text; unknown ids are fine."""
        self._streams.pop(request_id, None)


def _ended_by_id(output: Output) -> bool:
    """Whether the last new token is a stop id, which the scheduler never gives as text."""
    by_string = isinstance(output.stop_reason, str)
    return output.finish_reason is FinishReason.STOP and not by_string
