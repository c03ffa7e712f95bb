"""Collects the outputs of steps into finished results in vLLM's shape. Knows no engine."""

from foretoken.runtime.faults import say_failure
from foretoken.types import (
    CompletionOutput,
    FinishReason,
    Logprob,
    Output,
    Request,
    RequestOutput,
    TokenSource,
)


class GrowingOutput:
    """One output while it grows."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.sources: list[TokenSource] = []
        self.drafters: list[str | None] = []
        self.logprobs: list[dict[int, Logprob]] = []
        self.last: Output | None = None
        self.valid = True
        self.prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
        self.error: str | None = None
        """Why it ended, if that was an error."""

    def add(self, output: Output) -> None:
        """Take the tokens of one step."""
        self.error = self.error or output.error
        self.text.append(output.text)
        self.token_ids.extend(output.new_token_ids)
        self.sources.extend(output.sources)
        self.drafters.extend(output.drafters)
        self.logprobs.extend(output.logprobs or ())
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.valid = self.valid and output.valid
        self.last = output

    def freeze(self) -> CompletionOutput:
        """The output so far, in vLLM's shape; if that fails, one without text that says so."""
        try:
            return self._frozen()
        except Exception as error:  # noqa: BLE001 - said in the output
            self.error = self.error or say_failure(self.request.request_id, error)
        return CompletionOutput(
            index=self.request.sample_index,
            text="",
            token_ids=tuple(self.token_ids),
            finish_reason=FinishReason.ERROR,
            valid=self.valid,
        )

    def _frozen(self) -> CompletionOutput:
        assert self.last is not None, "an output without a step"
        cumulative, logprobs = None, None
        if self.request.params.logprobs is not None:
            logprobs = tuple(self.logprobs)
            pairs = zip(self.token_ids, logprobs, strict=True)
            cumulative = sum(row[token].logprob for token, row in pairs)
        return CompletionOutput(
            index=self.request.sample_index,
            text="".join(self.text),
            token_ids=tuple(self.token_ids),
            cumulative_logprob=cumulative,
            logprobs=logprobs,
            finish_reason=self.last.finish_reason,
            stop_reason=self.last.stop_reason,
            sources=tuple(self.sources),
            drafters=tuple(self.drafters),
            metrics=self.last.metrics,
            valid=self.valid,
        )


def collect(text: str | None, group: list[GrowingOutput]) -> RequestOutput:
    """The outputs of one prompt (n of them); `text` is the prompt if it was given as text."""
    first = group[0]
    outputs = tuple(one.freeze() for one in group)
    return RequestOutput(
        request_id=first.request.request_id.split("-")[0],
        prompt=text,
        prompt_token_ids=first.request.prompt_token_ids,
        outputs=outputs,
        prompt_logprobs=first.prompt_logprobs,
        error=next((one.error for one in group if one.error is not None), None),
        valid=all(one.valid for one in group),
    )
