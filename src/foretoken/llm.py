"""The offline face: `LLM(model).generate(prompts, SamplingParams(...))`, as in vLLM.

Turns prompts into requests, drives the engine until they end, and collects their outputs.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import count
from types import TracebackType
from typing import Any, Self

from foretoken.config import EngineConfig
from foretoken.engine.driver import SharedEngine
from foretoken.engine.engine import Engine
from foretoken.engine.logs import show_logs
from foretoken.engine.outputs import GrowingOutput, collect
from foretoken.engine.wiring import build_engine
from foretoken.errors import PromptError, named_as
from foretoken.proposers.base import Proposer
from foretoken.text.conversation import conversation_of
from foretoken.text.tokenizer import Tokenizer
from foretoken.types import Output, Request, RequestOutput, SamplingParams
from foretoken.types.llm_inputs import (
    Messages,
    Prompt,
    list_conversations,
    list_params,
    list_priorities,
    list_prompts,
    read_prompt,
    text_of,
)
from foretoken.v1.metrics.reader import Metric

PATIENCE_S = 2.0
"""Calls that take less show no progress bar."""


class LLM:
    """A model ready to generate. Use it in a `with` block or call `close()`.

    Two of them can live in one process. Threads may share one: one at a time runs a step, of all
    their requests together. Ctrl-C ends the call that it comes in, after the step under way.
    """

    def __init__(self, model: str, *, proposer: Proposer | None = None, **settings: Any) -> None:
        """Load `model`; `settings` are the fields of `foretoken.config.EngineConfig`.

        Args:
            model: packaged name, local folder or Hugging Face id.
            proposer: a drafter of your own, instead of what speculative_config names.
            settings: as keyword arguments.

        Raises:
            ConfigError: an unknown setting, or one out of its range.
            ModelError: the model is not there, not supported, or broken on disk.
        """
        self.config = EngineConfig.from_kwargs(model=model, **settings)
        show_logs(wanted=not self.config.disable_log_stats)
        self._shared = SharedEngine(build_engine(self.config, proposer))
        self._ids = count()

    def __enter__(self) -> Self:
        """The LLM itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Free weights and caches; further calls raise. Closing twice is fine."""
        if hasattr(self, "_shared"):
            self._shared.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt; results in the order of the prompts.

        An output that fails while it grows does not disturb the others: it comes back with finish
        reason `error`, the tokens and text it had got, and `RequestOutput.error` says why.

        Args:
            prompts: a text, `{"prompt": text}`, `{"prompt_token_ids": ids}`, or a list of those;
                a dictionary may carry `cache_salt` and `resume`. A text without any token is an
                error: an empty one, unless the tokenizer puts a token at the beginning.
                `resume` has one `{"output_ids": ids}` for each of the n outputs: what another
                engine has written of it. It counts as output in every way, and only what comes
                after it is returned. Greedy and seeded outputs go on with the tokens that they
                would have had; others with a new key of randomness, in the same distribution. An
                output with `"ended": True` is left out.
            sampling_params: one for all or one each; default `SamplingParams()`.
            use_tqdm: on a terminal, show a progress bar once the call has taken two seconds.
            priority: one number each; lower runs first.

        Raises:
            RequestError: a prompt or parameter is wrong; nothing has been started then.
        """
        listed = list_prompts(prompts)
        params = list_params(sampling_params, len(listed))
        ranks = list_priorities(priority, len(listed))
        requests = [
            self._requests(prompt, p, rank)
            for prompt, p, rank in zip(listed, params, ranks, strict=True)
        ]
        return self._run(listed, requests, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template.

        Raises:
            PromptError: the model has no tokenizer or no chat template, or it rejects them.
            RequestError: as in `generate`.
        """
        tokenizer = self.get_tokenizer()
        conversations = list_conversations(messages)
        with named_as(dict.fromkeys(("text", "prompt", "prompt_token_ids"), "messages")):
            prompts = [
                {
                    "prompt_token_ids": tokenizer.apply_chat_template(
                        conversation_of(conversation), add_generation_prompt=add_generation_prompt
                    )
                }
                for conversation in conversations
            ]
            return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[Output]:
        """Continue one prompt (n = 1), step by step; the last output has a finish reason.

        The request starts with the first `next`. Several streams, and calls of `generate` while
        they are open, share the engine's steps: what belongs to a stream waits until it is read.
        Leaving the iteration early aborts the request. If the output fails, the last one has finish
        reason `error` and says why in `error`.

        Raises:
            RequestError: the prompt or a parameter is wrong.
        """
        [params] = list_params(sampling_params, 1)
        if params.n != 1:
            raise PromptError("n", params.n, "1 when streaming")
        with closing(self._shared.reader()) as outputs:
            outputs.add(self._requests(prompt, params, 0))
            yield from outputs

    def get_metrics(self) -> list[Metric]:
        """Counters, gauges and vectors since the start; names as in vLLM."""
        return self._engine.metrics.read()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises PromptError: it has none."""
        tokenizer = self._engine.parts.tokenizer
        if tokenizer is None:
            raise PromptError("prompt", "text", "token ids: the model has no tokenizer")
        return tokenizer

    @property
    def block_drafters(self) -> frozenset[str]:
        """Names, as in `Output.drafters`, of drafters that fill in a whole block by one pass."""
        return self._engine.parts.block_drafters

    def describe(self) -> str:
        """What was decided at the start: types, memory, concurrency."""
        return self._engine.parts.config.describe()

    @property
    def _engine(self) -> Engine:
        return self._shared.engine

    def _requests(self, prompt: Prompt, params: SamplingParams, rank: int) -> list[Request]:
        given, salt, resume = read_prompt(prompt)
        with named_as({"text": "prompt"}):
            ids = self.get_tokenizer().encode(given) if isinstance(given, str) else list(given)
        return self._engine.make_requests(
            str(next(self._ids)), ids, params, priority=rank, cache_salt=salt, resume=resume
        )

    def _run(
        self, prompts: list[Prompt], requests: list[list[Request]], use_tqdm: bool
    ) -> list[RequestOutput]:
        growing = {r.request_id: GrowingOutput(r) for group in requests for r in group}
        progress = _progress(len(growing), use_tqdm)
        try:
            with closing(self._shared.reader()) as outputs:
                outputs.add(one.request for one in growing.values())
                for output in outputs:
                    growing[output.request_id].add(output)
                    if output.finish_reason is not None:
                        progress.update(1)
        finally:
            progress.close()
        return [
            collect(text_of(prompt), [growing[r.request_id] for r in group])
            for prompt, group in zip(prompts, requests, strict=True)
        ]


def _progress(total: int, shown: bool) -> Any:
    from tqdm import tqdm

    return tqdm(
        total=total,
        desc="Processed prompts",
        delay=PATIENCE_S,
        disable=None if shown else True,  # None: unless stderr is a terminal
        dynamic_ncols=True,
    )
